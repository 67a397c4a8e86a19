"""The built modules keep the promises of setup.py, and sanitized builds those of their own."""

import functools
import importlib
import os
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

import kvnative

SANITIZERS = {"address": "__asan_", "undefined": "__ubsan_", "thread": "__tsan_"}
MODULES = sorted(Path(kvnative.__file__).parent.glob("*.so"))
# Functions of glibc 2.28 that later versions moved or renamed.
RENAMED_SINCE_GLIBC_2_28 = {
    *("pthread_sigmask", "fstat", "fstatat", "stat", "__isoc23_sscanf", "__isoc23_strtoull"),
    *("dladdr", "dlclose", "dlerror", "dlopen", "dlsym", "pthread_attr_setstacksize"),
    *("pthread_condattr_setclock", "pthread_create", "pthread_detach", "pthread_getcpuclockid"),
    "pthread_join",
    *("pthread_mutex_trylock", "pthread_mutexattr_destroy", "pthread_mutexattr_init"),
    *("pthread_mutexattr_settype", "pthread_once"),
    *("pthread_setaffinity_np", "pthread_setname_np"),
}
CORE = Path(kvnative.__file__).with_name("lib") / "libkvn.so"


@functools.cache
def shown(option: str) -> dict[str, str]:
    """Return objdump's output for each library: with a sanitizer, a process for each is slow."""
    command = ["objdump", option, *MODULES, CORE]
    environment = os.environ | {"LD_PRELOAD": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    parts = re.split(r"^(/.+): +file format .*$", done.stdout, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def symbols(library: Path, option: str) -> str:
    return shown(option)[str(library)]


def test_the_built_modules_are_found() -> None:
    assert {library.name.split(".")[0] for library in MODULES} >= {"_lower", "_executor", "_host"}


@pytest.mark.parametrize("library", MODULES, ids=lambda path: path.name)
def test_a_module_shows_nothing_but_its_init_function(library: Path) -> None:
    name = library.name.split(".")[0]
    shown = [
        line.split()[-1]
        for line in symbols(library, "-T").splitlines()
        if " g " in line and "*UND*" not in line
    ]
    # The sanitizer adds its own globals; only symbols of kvplan must not leak.
    assert [symbol for symbol in shown if "asan" not in symbol] == [f"PyInit_{name}"]


def test_the_core_library_shows_only_its_own_names() -> None:
    lines = [line.split() for line in symbols(CORE, "-T").splitlines() if " g " in line]
    shown = {line[-1] for line in lines if "*UND*" not in line and "asan" not in line[-1]}
    assert "kvn_lower" in shown
    assert {name for name in shown if not name.startswith("kvn_")} == set()


@pytest.mark.parametrize("library", MODULES, ids=lambda path: path.name)
def test_a_module_finds_the_core_library_from_its_own_place(library: Path) -> None:
    lines = [line.split() for line in symbols(library, "-p").splitlines()]
    (folders,) = [line[1].split(":") for line in lines if line[:1] == ["RUNPATH"]]
    assert "$ORIGIN/lib" in folders  # beside the folders that the interpreter was linked with


@pytest.mark.parametrize("library", [*MODULES, CORE], ids=lambda path: path.name)
def test_no_library_needs_a_function_that_glibc_2_28_lacks(library: Path) -> None:
    """`make wheels` builds for glibc 2.28, whose functions may have newer names."""
    found = re.findall(r"GLIBC_(\d+)\.(\d+)[^)]*\)?\s+(\w+)$", symbols(library, "-T"), re.MULTILINE)
    newer = {name for major, minor, name in found if (int(major), int(minor)) > (2, 28)}
    assert newer - RENAMED_SINCE_GLIBC_2_28 == set()


def test_one_core_library_is_loaded() -> None:
    """The library has state of the process, which a second copy would duplicate."""
    for library in MODULES:
        importlib.import_module(f"kvnative.{library.name.split('.')[0]}")
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert {line.split()[-1] for line in maps if "libkvn" in line} == {str(CORE)}


def test_no_struct_is_defined_by_two_headers() -> None:
    """A source could confuse two structs of one name.

    Only `kvn_request` is defined by each backend.
    """
    root = Path(kvnative.__file__).parents[1]
    headers = [*root.glob("kvnative/src/**/*.h"), *root.glob("include/kvnative/*.h")]
    definition = re.compile(r"^(?:typedef )?(?:struct|union|enum) (\w+)\s*\{", re.MULTILINE)
    found = Counter(name for header in headers for name in definition.findall(header.read_text()))
    assert len(found) > 50
    assert {name for name, count in found.items() if count > 1} == {"kvn_request"}


@pytest.mark.parametrize("library", [*MODULES, CORE], ids=lambda path: path.name)
def test_the_modules_under_test_are_of_the_build_asked_for(library: Path) -> None:
    if library != CORE:
        module = importlib.import_module(f"kvnative.{library.name.split('.')[0]}")
        assert Path(str(module.__file__)) == library
    imported = symbols(library, "-T")
    checks = {name for name, mark in SANITIZERS.items() if mark in imported}
    assert checks == set(filter(None, os.environ.get("KVPLAN_SANITIZE", "").split(",")))

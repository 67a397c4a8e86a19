"""Builds by setup.py of a small project: what is compiled again, and what lies in place after."""

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import zygote

ROOT = Path(__file__).parents[2]

MODULE = '''
cdef extern from *:
    """
    int kvn_one(void);
    """
    int kvn_one()


def one():
    return kvn_one()
'''


FACTS = """
import json
import setuptools
from distutils.core import run_setup

made = run_setup("setup.py", ["-q"], stop_after="init")
command = made.get_command_obj("build_ext")
command.inplace = INPLACE
command.ensure_finalized()
includes = {it.name: it.include_dirs for it in command.extensions}
print(json.dumps({"outputs": command.get_outputs(), "includes": includes}))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A module over a library of two sources, built in place."""
    folder = tmp_path_factory.mktemp("built")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in ("include/kvnative", "kvnative/src/core", "kvplan"):
        (folder / name).mkdir(parents=True)
    for name in ("kvnative", "kvplan"):
        (folder / name / "__init__.py").touch()
    (folder / "kvnative/_one.pyx").write_text(MODULE)
    for name, number in (("one", 1), ("two", 2)):
        source = folder / f"kvnative/src/core/{name}.c"
        source.write_text(f"int kvn_{name}(void) {{ return {number}; }}\n")
    build(folder)
    return folder


@pytest.fixture
def project(built: Path, tmp_path: Path) -> Path:
    """A copy of the built project, with the times of its files."""
    return shutil.copytree(built, tmp_path / "project")


def build(project: Path, *command: str, **switches: str) -> None:
    bare = {name: text for name, text in os.environ.items() if not name.startswith("KVPLAN_")}
    done = zygote.run(
        "tests.project.test_setup",
        *(str(project), "-q", *(command or ("build_ext", "--inplace"))),
        imported=("setuptools", "Cython.Build", "Cython.Compiler.ParseTreeTransforms"),
        environment=bare | switches,
    )
    assert done.returncode == 0, done.stderr


def main(project: str, *arguments: str) -> None:
    """Run `setup.py ARGUMENTS` in a fork, as an import of Cython takes longer than most builds."""
    os.chdir(project)
    sys.argv = ["setup.py", *arguments]
    runpy.run_path("setup.py", run_name="__main__")


def core(folder: Path) -> bytes:
    return (folder / "kvnative/lib/libkvn.so").read_bytes()


def test_symbols_of_a_removed_source_leave_the_library(project: Path) -> None:
    assert b"kvn_two" in core(project)
    (project / "kvnative/src/core/two.c").unlink()
    build(project)
    assert b"kvn_one" in core(project)
    assert b"kvn_two" not in core(project)


def test_the_build_in_place_has_the_flavour_of_the_last_build(project: Path) -> None:
    (release,) = project.glob("build/release-*/lib.*")
    build(project, KVPLAN_DEBUG="1")
    (debug,) = project.glob("build/debug-*/lib.*")
    assert core(project) == core(debug) != core(release)
    build(project)  # compiles nothing, although the files in place are newer
    assert core(project) == core(release)
    for module in release.glob("kvnative/*.so"):
        assert module.read_bytes() == (project / "kvnative" / module.name).read_bytes()


def test_a_build_of_another_folder_is_not_compiled_again(project: Path, tmp_path: Path) -> None:
    commands, compiler = tmp_path / "commands", tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {commands}\nexec gcc "$@"\n')
    compiler.chmod(0o755)

    def compiled(name: str, changed: str = "", **switches: str) -> list[str]:
        """Build a copy with one changed file, and return the compiled sources."""
        copy = shutil.copytree(project, tmp_path / name, ignore=shutil.ignore_patterns("build"))
        if changed:
            with (copy / changed).open("a") as file:
                file.write("/* changed */\n")
        commands.write_text("")
        cache = str(tmp_path / "cache")
        build(copy, CC=str(compiler), KVPLAN_BUILD_CACHE=cache, **switches)
        assert core(copy) == core(project)
        lines = [line.split() for line in commands.read_text().splitlines()]
        return sorted(Path(line[line.index("-c") + 1]).name for line in lines if "-c" in line)

    (project / "include/kvnative/one.h").touch()
    assert compiled("first") == ["_one.c", "one.c", "two.c"]
    assert compiled("again") == []
    assert compiled("source", "kvnative/src/core/one.c") == ["one.c"]
    assert compiled("header", "include/kvnative/one.h") == ["_one.c", "one.c", "two.c"]
    assert compiled("strict", KVPLAN_WERROR="1") == ["one.c", "two.c"]


def test_a_wheel_has_no_file_of_earlier_builds(project: Path) -> None:
    """`pip install .` builds in a folder in which `make test` has built before."""
    (project / "tests/support").mkdir(parents=True)
    (project / "tests/support/more.pyx").write_text("def more():\n    return 1\n")
    removed = project / "kvplan/gone.py"
    removed.touch()
    build(project)
    build(project, "build")
    (library,) = project.glob("build/release-*/lib.*")
    assert (library / "kvplan/gone.py").exists()
    removed.unlink()
    build(project)  # in place again, with the module of the tests
    assert [*library.glob("tests/support/more.*.so")]
    build(project, "build")
    files = {str(path.relative_to(library)) for path in library.rglob("*") if path.is_file()}
    assert {name.split(".")[0] for name in files} == {
        "kvnative/__init__",
        "kvnative/_one",
        "kvnative/lib/libkvn",
        "kvplan/__init__",
    }


@pytest.mark.parametrize("inplace", [True, False])
def test_each_file_that_is_built_is_listed_once(project: Path, inplace: bool) -> None:
    outputs = [Path(fact) for fact in facts(project, inplace)["outputs"]]
    assert sorted(output.name.split(".")[0] for output in outputs) == ["_one", "libkvn"]


def test_headers_of_the_tests_are_found_by_their_module_alone(project: Path) -> None:
    (project / "tests/support").mkdir(parents=True)
    (project / "tests/support/more.pyx").write_text("def more():\n    return 1\n")
    includes = facts(project, inplace=True)["includes"]
    assert includes.keys() == {"kvnative._one", "tests.support.more"}
    finding = [name for name, folders in includes.items() if "tests/support/native" in folders]
    assert finding == ["tests.support.more"]


def test_without_a_compiler_one_line_names_the_missing_tool(project: Path, tmp_path: Path) -> None:
    shutil.rmtree(project / "build")
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=project,
        env={"PATH": str(tmp_path / "nothing")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    (message,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert "needs a C compiler (gcc is not on PATH; Debian: apt install gcc)" in message
    assert done.stderr.splitlines()[-1] == message
    assert not (project / "build").exists()  # neither Cython nor the metadata step has run


def facts(project: Path, inplace: bool) -> dict[str, Any]:
    """Return the outputs and include folders that setup.py plans."""
    printed = subprocess.run(
        [sys.executable, "-c", FACTS.replace("INPLACE", str(inplace))],
        cwd=project,
        env={name: text for name, text in os.environ.items() if not name.startswith("KVPLAN_")},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return json.loads(printed.splitlines()[-1])  # type: ignore[no-any-return]


if __name__ == "__main__":
    main(*sys.argv[1:])

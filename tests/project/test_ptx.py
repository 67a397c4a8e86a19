"""The PTX of the copy kernel: made from its sources; NVRTC, if it is installed, makes it again."""

import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def ptx() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ptx", ROOT / "tools/ptx.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_ptx_is_made_from_the_sources(ptx: ModuleType) -> None:
    written = re.search(r"sha256 of its sources: (\w+)", ptx.RESULT.read_text())
    assert written is not None
    assert written[1] == ptx.fingerprint(), "run `make ptx`"


def test_the_compiler_is_pinned(ptx: ModuleType) -> None:
    pinned = (ROOT / "requirements/ptx.txt").read_text().splitlines()
    assert pinned[-1] == f"{ptx.PACKAGE}=={ptx.COMPILER}"


def test_the_ptx_is_for_old_drivers_and_gpus(ptx: ModuleType) -> None:
    text = ptx.RESULT.read_text()
    assert f"\n.version {ptx.VERSION}\n" in text
    assert f"\n.target sm_{ptx.ARCHITECTURE}\n" in text
    entries = re.findall(r"\.entry (\w+)\(", text)
    assert sorted(entries) == ["kvn_copy_few_kernel", "kvn_copy_many_kernel"]
    assert ".local" not in text, "the kernel keeps all in registers"


def test_the_library_contains_the_whole_ptx(ptx: ModuleType) -> None:
    assert ptx.RESULT.read_bytes() + b"\0" in (ROOT / "kvnative/lib/libkvn.so").read_bytes()


def test_nvrtc_makes_the_same_ptx(ptx: ModuleType) -> None:
    try:
        found = importlib.metadata.version(ptx.PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{ptx.PACKAGE} is not installed (make ptx)")
    if found != ptx.COMPILER or not sys.platform.startswith("linux"):
        pytest.skip(f"{ptx.PACKAGE} is {found}")
    assert ptx.compile_ptx() == ptx.RESULT.read_text()

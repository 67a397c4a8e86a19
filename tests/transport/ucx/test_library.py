"""Search for the UCX library; none is opened."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvplan import LLMException, LLMStatusCode
from kvplan.transport.ucx import library
from kvplan.transport.ucx.library import NAME, OVERRIDE, Found, find
from tests.support.refusals import refused


@pytest.fixture(autouse=True)
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without UCX, even if this one has it."""
    monkeypatch.delenv(OVERRIDE)
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    monkeypatch.setattr(library, "_WHEEL", "no_such_package")
    monkeypatch.setattr(library, "_LOADER_CACHE", tmp_path / "cache")
    monkeypatch.setattr(library, "_LOADER_FOLDERS", (str(tmp_path / "lib"),))


def put(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / NAME).touch()
    return str(folder / NAME)


def test_each_place_comes_before_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The places are added from the last to the first, so each one wins over the one before."""
    path = put(tmp_path / "lib")
    assert find() == Found(path, "the system")
    path = put(tmp_path / "of cache")
    (tmp_path / "cache").write_bytes(b"glibc-ld.so.cache1.1\0\1\2\0libucp.so.0\0" + path.encode())
    assert find().path != path, "a name that was cut off"
    with (tmp_path / "cache").open("ab") as cache:
        cache.write(b"\0libuct.so.0\0")
    assert find() == Found(path, "the system")
    assert Found(put(tmp_path / "prefix/lib"), "this Python's environment") == find()
    monkeypatch.setenv("LD_LIBRARY_PATH", f":/nowhere:{tmp_path / 'of loader'}")
    assert Found(put(tmp_path / "of loader"), "$LD_LIBRARY_PATH") == find()
    (tmp_path / "packages/fake_libucx").mkdir(parents=True)
    (tmp_path / "packages/fake_libucx/__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.setattr(library, "_WHEEL", "fake_libucx")
    assert find().source == "$LD_LIBRARY_PATH", "a package without the library"
    path = put(tmp_path / "packages/fake_libucx/lib")
    assert find() == Found(path, "package fake_libucx")
    monkeypatch.setenv(OVERRIDE, put(tmp_path / "override"))
    assert find() == Found(str(tmp_path / "override" / NAME), f"${OVERRIDE}")


@pytest.mark.parametrize("below", ["", "lib", "lib64"])
def test_the_override_may_be_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: str
) -> None:
    path = put(tmp_path / "ucx" / below)
    monkeypatch.setenv(OVERRIDE, str(tmp_path / "ucx"))
    assert find().path == path


def test_a_folder_that_cannot_be_searched_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder may belong to another user; a name of 300 characters fails even for root."""
    unreadable, path = f"/{'x' * 300}", put(tmp_path / "lib")
    monkeypatch.setenv("LD_LIBRARY_PATH", unreadable)
    (tmp_path / "cache").write_bytes(f"\0{unreadable}/{NAME}\0".encode())
    assert find() == Found(path, "the system")
    monkeypatch.setenv(OVERRIDE, unreadable)
    with refused(LLMStatusCode.LLM_FEATURE_NOT_ENABLED, f"{OVERRIDE} .{unreadable}"):
        find()


@pytest.mark.parametrize("named", ["", "/no/where", "/no/where/libucp.so"])
def test_the_override_is_the_only_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    put(tmp_path / "lib")
    monkeypatch.setenv(OVERRIDE, named)
    with pytest.raises(LLMException) as raised:
        find()
    assert f"was found in ${OVERRIDE} ({named or 'empty'})." in str(raised.value)


def test_without_ucx_the_error_says_what_to_install(tmp_path: Path) -> None:
    with refused(LLMStatusCode.LLM_FEATURE_NOT_ENABLED) as raised:
        find()
    message = str(raised.value)
    assert (
        "was found in package no_such_package (not installed), this Python's environment ("
        in message
    )
    assert f"the system ({tmp_path / 'lib'})" in message
    assert "KVPLAN_UCX_LIBRARY" in message
    assert OVERRIDE in message

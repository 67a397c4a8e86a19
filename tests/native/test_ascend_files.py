"""The search for libraries of the Ascend toolkit, without opening one."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvnative.ascend_files import HOME_VARIABLES, HOMES, candidates, homes, toolkit_version

NAMES = ("libacl_rt.so", "libascendcl.so")


@pytest.fixture
def toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed toolkit that the environment does not name."""
    for variable in HOME_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "lib64").mkdir()
    for name in NAMES:
        (tmp_path / "lib64" / name).touch()
    return tmp_path


def test_the_environment_comes_before_the_installers_places(
    toolkit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert homes() == [Path(home) for home in HOMES]
    monkeypatch.setenv("ASCEND_HOME", str(toolkit))
    monkeypatch.setenv("ASCEND_HOME_PATH", "/nowhere")
    assert homes() == [Path("/nowhere"), toolkit, *(Path(home) for home in HOMES)]
    assert candidates(NAMES)[0] == [str(toolkit / "lib64" / name) for name in NAMES]
    assert candidates(NAMES)[-1] == list(NAMES)  # the loader's own search


def test_a_path_is_the_only_place(toolkit: Path) -> None:
    both = [str(toolkit / "lib64" / name) for name in NAMES]
    assert candidates(NAMES, str(toolkit)) == [both]
    assert candidates(NAMES, str(toolkit / "lib64")) == [both]
    assert candidates(NAMES, both[1]) == [[both[1], both[0]]]
    (toolkit / "lib64" / NAMES[0]).unlink()
    assert candidates(NAMES, both[1]) == [[both[1]]]
    assert candidates(NAMES, "/opt/other.so") == [["/opt/other.so"]]
    assert candidates(NAMES, "libascendcl.so") == [["libascendcl.so", "libacl_rt.so"]]
    assert candidates(NAMES, str(toolkit.parent)) == []


def test_a_folder_that_cannot_be_searched_is_passed_over(
    toolkit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder may belong to another user; a name of 300 characters fails even for root."""
    unreadable = f"/{'x' * 300}"
    monkeypatch.setenv("ASCEND_HOME_PATH", unreadable)
    monkeypatch.setenv("ASCEND_HOME", str(toolkit))
    assert candidates(NAMES)[0] == [str(toolkit / "lib64" / name) for name in NAMES]
    assert candidates(NAMES, f"{unreadable}/{NAMES[0]}") == [[f"{unreadable}/{NAMES[0]}"]]


@pytest.mark.parametrize(
    ("file", "text", "version"),
    [
        ("version.info", "Version=8.5.0\n", "8.5.0"),
        ("runtime/version.info", "Version=7.6.0.1\nversion_dir=8.1.RC1\n", "8.1.RC1"),
        ("ascend_toolkit_install.info", "package_name=toolkit\nversion=8.2.RC1\n", "8.2.RC1"),
        ("version.info", "nothing of the kind\n", None),
    ],
)
def test_the_version_of_a_toolkit_is_read(
    toolkit: Path, file: str, text: str, version: str | None
) -> None:
    (toolkit / file).parent.mkdir(exist_ok=True)
    (toolkit / file).write_text(text)
    assert toolkit_version(str(toolkit / "lib64" / NAMES[0])) == version

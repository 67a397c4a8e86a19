"""`--as nixl`: `import nixl` of a program is kvplan's, even if another one is installed."""

from __future__ import annotations

import importlib.metadata
import logging
import sys

import pytest

from kvplan.run import aliases
from kvplan.run.__main__ import Misuse, parse
from tests.run.programs import ROOT, Folder

PROGRAM = (
    "import importlib.util, nixl, nixl._api, nixl_cu12._bindings, nixl_rocm, kvplan.nixl\n"
    "print(nixl is nixl_rocm is kvplan.nixl, importlib.util.find_spec('nixl') is not None,\n"
    "      nixl._api.nixl_agent is nixl.nixl_agent, nixl_cu12._bindings.DRAM_SEG)"
)
OURS = "True True True nixl_mem_t.DRAM_SEG\n"


def test_nixl_is_kvplans_on_request(folder: Folder) -> None:
    done = folder.launch("--as", "nixl", "-c", PROGRAM)
    assert (done.stdout, done.stderr, done.code) == (OURS, "", 0)
    assert "No module named 'nixl'" in folder.launch("-c", PROGRAM).stderr


def test_nixl_is_kvplans_in_child_processes(folder: Folder) -> None:
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {PROGRAM!r}])"
    assert folder.launch("--as", "nixl", "-c", program).stdout == OURS


def test_an_installed_nixl_is_named_and_not_used(folder: Folder) -> None:
    official = folder.write("site/nixl/__init__.py", "raise SystemError")
    done = folder.launch("--as", "nixl", "-c", PROGRAM, path=[official.parents[1]])
    assert done.stdout == OURS
    assert done.stderr == f"kvplan.run: nixl is kvplan's; {official} is not used\n"


def test_a_nixl_beside_the_program_is_named_and_not_used(folder: Folder) -> None:
    """The folder of the program is searched, and not that in which the launcher is started."""
    beside = folder.write("app/nixl.py", "raise SystemError")
    folder.write("nixl.py", "raise SystemError")
    program = folder.write("app/program.py", PROGRAM)
    done = folder.launch("--as", "nixl", str(program))
    assert done.stdout == OURS
    assert done.stderr == f"kvplan.run: nixl is kvplan's; {beside} is not used\n"


def test_an_installed_nixl_is_used_without_the_option(folder: Folder) -> None:
    official = folder.write("site/nixl.py", "print('official')")
    done = folder.launch("-c", "import nixl", path=[official.parent])
    assert (done.stdout, done.stderr) == ("official\n", "")


def test_another_name_is_refused() -> None:
    with pytest.raises(Misuse, match="--as 'ucx' must be one of nixl"):
        parse(["--as", "ucx", "program.py"])
    with pytest.raises(Misuse, match="--as '' must be one of nixl"):
        parse(["--as"])
    with pytest.raises(ValueError, match="'ucx' must be one of"):
        aliases.asked("nixl, ucx")


@pytest.mark.parametrize("group", ["vllm.general_plugins", "sglang.srt.plugins"])
def test_a_plugin_does_nothing_without_the_variable(
    group: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert f'[project.entry-points."{group}"]\nkvplan = "kvplan.run.aliases:plugin"' in text
    plugin = importlib.metadata.EntryPoint("x", "kvplan.run.aliases:plugin", group).load()
    before = list(sys.meta_path)
    for name in (aliases.AS, aliases.OBSERVE):
        monkeypatch.delenv(name, raising=False)
    plugin()
    aliases.install()
    assert sys.meta_path == before
    monkeypatch.setenv(aliases.AS, "nixl")
    monkeypatch.setattr(sys, "meta_path", list(before))
    monkeypatch.setitem(sys.modules, "nixl_cu13", logging)  # imported before
    for _ in range(2):
        plugin()
        assert sys.meta_path == [aliases.finder, *before]
    assert "comes too late" in caplog.text

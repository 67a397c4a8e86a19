"""The `kvplan` command, as a shell runs it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import kvplan
from kvnative._tuning import Tuning
from kvplan.cli import COMMANDS
from kvplan.control.auth import ClusterKey
from tests.cli.running import command


def test_keygen_makes_a_key_that_engines_accept(tmp_path: Path) -> None:
    path = tmp_path / "cluster.key"
    made = command("keygen", str(path))
    assert (made.returncode, made.stderr) == (0, "")
    assert str(path) in made.stdout
    key = ClusterKey.load(path)
    assert key.secret.hex() not in made.stdout


def test_keygen_never_overwrites(tmp_path: Path) -> None:
    path = tmp_path / "cluster.key"
    path.write_text("mine")
    refused = command("keygen", str(path))
    assert refused.returncode == 2
    assert refused.stderr.startswith("kvplan: ")
    assert f"{path} exists and was not changed" in refused.stderr
    assert "Give another path" in refused.stderr
    assert path.read_text() == "mine"


def test_keygen_reports_the_error_of_the_system(tmp_path: Path) -> None:
    refused = command("keygen", str(tmp_path / "missing" / "key"))
    assert refused.returncode == 2
    assert refused.stderr == f"kvplan: {tmp_path}/missing/key: No such file or directory\n"


def test_tune_measures_and_stores_nothing_in_a_dry_run(tmp_path: Path) -> None:
    done = command("tune", "--only", "host", "--dry-run", "--json", XDG_CACHE_HOME=str(tmp_path))
    found = json.loads(done.stdout)
    assert found["cuda"] is None
    assert found["host"]["tuning"].keys() == Tuning.__annotations__.keys()
    assert found["host"]["reasons"]
    assert done.returncode == (0 if found["host"]["sure"] else 2)
    assert not [*tmp_path.iterdir()]


def test_tune_without_a_gpu_or_a_folder_says_so(tmp_path: Path) -> None:
    none = {"KVPLAN_CUDA_LIBRARY": "", "XDG_CACHE_HOME": str(tmp_path)}
    asked = command("tune", "--only", "cuda", **none)
    assert asked.returncode == 2
    assert "KVPLAN_CUDA_LIBRARY" in asked.stdout
    (tmp_path / "file").write_text("")
    refused = command("tune", XDG_CACHE_HOME=str(tmp_path / "file"))
    assert refused.returncode == 2
    assert str(tmp_path / "file") in refused.stderr


def test_version_and_help() -> None:
    assert command("--version").stdout == f"kvplan {kvplan.__version__}\n"
    assert "keygen" in command("--help").stdout
    assert "0600" in command("keygen", "--help").stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_no_help_breaks_a_word(name: str) -> None:
    lines = command(name, "--help").stdout.splitlines()
    assert len(lines) > 5
    assert [line for line in lines if re.search(r"\w-$", line)] == []


def test_an_invalid_command_line_exits_with_2() -> None:
    for arguments in ((), ("keygen",), ("nonsense",), ("keygen", "a", "b")):
        misused = command(*arguments)
        assert misused.returncode == 2
        assert "Usage: kvplan" in misused.stderr
        assert "Traceback" not in misused.stderr


@pytest.mark.parametrize(
    ("option", "arguments"),
    [
        ("--timeout", ["ping", "127.0.0.1:1"]),
        ("--interval", ["top", "--once"]),
        ("--timeout", ["info"]),
        ("--atol", ["replay"]),
    ],
)
def test_a_number_that_is_not_a_number_is_refused(option: str, arguments: list[str]) -> None:
    name, *rest = arguments
    done = command(name, option, "nan", *rest)
    assert done.returncode == 2
    assert f"Invalid value for '{option}': nan is not a number" in done.stderr

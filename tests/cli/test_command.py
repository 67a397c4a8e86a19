"""The `kvplan` command, as a shell runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import kvplan
from kvplan.control.auth import ClusterKey

ROOT = Path(__file__).parents[2]


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvplan", *arguments], cwd=ROOT, capture_output=True, text=True
    )


def test_keygen_makes_a_key_that_engines_take(tmp_path: Path) -> None:
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
    assert f"{path} exists, and is left as it is" in refused.stderr
    assert "Give another path" in refused.stderr
    assert path.read_text() == "mine"


def test_keygen_says_what_the_system_says(tmp_path: Path) -> None:
    refused = command("keygen", str(tmp_path / "missing" / "key"))
    assert refused.returncode == 2
    assert "No such file or directory" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_version_and_help() -> None:
    assert command("--version").stdout == f"kvplan {kvplan.__version__}\n"
    assert "keygen" in command("--help").stdout
    assert "0600" in command("keygen", "--help").stdout


def test_a_line_that_is_not_understood_exits_with_2() -> None:
    for arguments in ((), ("keygen",), ("nonsense",), ("keygen", "a", "b")):
        misused = command(*arguments)
        assert misused.returncode == 2
        assert "Usage: kvplan" in misused.stderr
        assert "Traceback" not in misused.stderr

"""Tests of tools/try_ascend.py, the first test of hardware, on simulated devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import pytest

from tests.ascend.simulator import is_staging
from tests.ascend_sim.build import build

ROOT = Path(__file__).parents[2]
FEW = ("--layers", "2", "--blocks", "16", "--block-kib", "4", "--rounds", "1")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-W", "error", str(ROOT / "tools/try_ascend.py"), *arguments, *FEW]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    clean = {name: text for name, text in os.environ.items() if name != "KVPLAN_ASCEND_LIBRARY"}
    sim = {"ASCEND_HOME_PATH": str(build()), "KVSIM_DIR": str(tmp_path), "KVSIM_DEVICES": "2"}
    return clean | sim | {"PYTHONPATH": str(ROOT)}


def outcome(environment: dict[str, str], *arguments: str) -> tuple[int, str, str]:
    done = subprocess.run(
        command(*arguments), env=environment, capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout, done.stderr


@contextmanager
def serving(environment: dict[str, str]) -> Iterator[str]:
    peer = subprocess.Popen(
        command("serve", "127.0.0.1:0"),
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with peer:
        try:
            assert peer.stdout is not None
            yield peer.stdout.readline().split()[-1]
            peer.communicate(timeout=60)  # ends its input
            assert peer.returncode == 0
        finally:
            peer.kill()


def test_copies_inside_one_process(environment: dict[str, str]) -> None:
    code, output, errors = outcome(environment, "copies")
    assert (code, errors) == (0, "")
    assert "pinned host -> device" in output
    assert "as they must be" in output


A2, A950 = "Ascend910B1", "Ascend950"
LOCAL = ("DEVICE", "HOST")
# As docs/how-to/ascend.md and kvplan info say: (local, remote) -> refused and staged cases.
COMBINATIONS = {
    (A2, "hccl"): ({(item, "HOST") for item in LOCAL}, {("HOST", "DEVICE")}),  # HCCS: one host
    (A950, "hccl"): ({(item, "HOST") for item in LOCAL}, {("HOST", "DEVICE")}),
    (A2, "local"): ({(item, "DEVICE") for item in LOCAL}, set()),
}


@pytest.mark.parametrize(("soc", "transport"), COMBINATIONS)
def test_every_placement_is_tried_between_two_processes(
    environment: dict[str, str], tmp_path: Path, soc: str, transport: str
) -> None:
    log = tmp_path / "log"
    environment |= {"KVSIM_SOC": soc, "KVSIM_LOG": str(log)}
    with serving(environment) as address:
        arguments = ("--device-id", "1", "--transport", transport)
        code, output, errors = outcome(environment, "reach", address, *arguments)
    assert (code, errors) == (0, "")
    assert output.splitlines()[0].split() == ["linked", "over", transport]
    refused, staged = COMBINATIONS[soc, transport]
    for both in product(LOCAL, LOCAL):
        name = "local {}, remote {}".format(*both)
        assert (f"{name}, the bytes" in output) is (both not in refused)
    assert "WRONG" not in output
    if staged:
        assert any(is_staging(json.loads(line)) for line in log.read_text().splitlines())


def test_a_copy_that_fails_is_reported(environment: dict[str, str]) -> None:
    environment["KVSIM_FAULTS"] = "aclrtMemcpyBatchAsync:1=sync:507013"
    code, _, errors = outcome(environment, "copies")
    assert code == 1
    assert "507013" in errors


def test_more_than_hccl_registers_is_refused_at_once(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """The amount that docs/how-to/ascend.md once named: 61 GiB of each kind."""
    (tmp_path / "version.info").write_text("Version=25.2.0\n")
    environment["KVPLAN_ASCEND_DRIVER"] = str(tmp_path)
    much = ("--layers", "61", "--blocks", "4096", "--block-kib", "128")
    less = ("--layers", "48", "--blocks", "8192", "--block-kib", "32")
    for given, kind, most in ((much, "device", 50), (less, "host", 20)):
        done = subprocess.run(
            [*command("serve", "127.0.0.1:0"), *given],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.returncode, done.stdout) == (2, "")
        assert f"GiB of {kind} memory; with HDK 25.2.0 HCCL registers {most} GiB" in done.stderr

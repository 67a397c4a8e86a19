"""tools/try_cuda.py, with which a GPU is tried first: it works on the stand-in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cuda_sim.simulator import CudaControls

ROOT = Path(__file__).parents[2]


@pytest.fixture
def environment(cuda_simulator: CudaControls) -> dict[str, str]:
    """The processes of the tool find the stand-in, and none of them breaks CUDA's rules."""
    # One thread for NumPy: each of them would start as many as there are cores.
    return dict(os.environ) | {"OPENBLAS_NUM_THREADS": "1"}


def outcome(environment: dict[str, str], *arguments: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "tools/try_cuda.py"), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    return done.returncode, done.stdout, done.stderr


def only(*names: str) -> list[str]:
    return [it for name in names for it in ("--only", name)]


def results_of(path: Path) -> dict[str, Any]:
    return {it["name"]: it for it in json.loads(path.read_text())["tries"]}


def test_tries_inside_one_process(environment: dict[str, str], tmp_path: Path) -> None:
    names = ("device", "copies", "offloading", "registering", "streams")
    report = tmp_path / "report.json"
    code, said, errors = outcome(environment, "--quick", "--json", str(report), *only(*names))
    assert (code, errors) == (0, ""), said
    assert "This is the stand-in of the tests, and no GPU" in said
    results = results_of(report)
    assert {it["failed"] for it in results.values()} == {False}
    steps = {it["step"] for result in results.values() for it in result["steps"]}
    assert {
        "device to device: kernel",
        "host to device: batch pinned",
        "and in again",
        "as arrays",
        "read behind a transfer",
        "its capture goes on",
    } <= steps
    assert not json.loads(report.read_text())["counts"]


def test_tries_between_two_processes(environment: dict[str, str], tmp_path: Path) -> None:
    names = ("transports", "freed", "killed", "leases")
    report = tmp_path / "report.json"
    code, said, errors = outcome(environment, "--quick", "--json", str(report), *only(*names))
    assert (code, errors) == (0, ""), said
    steps = [it for result in results_of(report).values() for it in result["steps"]]
    outcomes = {it["step"]: it["outcome"] for it in steps}
    assert outcomes["local: local DEVICE, remote DEVICE: pulled"] == "ok"
    assert outcomes["tcp: local HOST, remote DEVICE, registered: pushed"] == "ok"
    assert outcomes["the device goes on"] == "ok"


def test_figures_are_measured_and_do_not_count(environment: dict[str, str]) -> None:
    names = ("gpu_32KiB_ratio", "gpu_peer_32KiB_ratio", "gpu_layerwise_visible_fraction")
    code, said, errors = outcome(environment, "--quick", *only(*names))
    assert (code, errors) == (0, ""), said
    for it in names:
        assert f"\n{it} " in said
    assert "no bar counts" in said


def test_what_fails_ends_nothing_else(environment: dict[str, str]) -> None:
    environment["KVSIM_FAULTS"] = "cuMemHostAlloc:1=2"
    code, said, _ = outcome(environment, "--quick", *only("copies", "registering"))
    assert code == 1, said
    assert "failed: copies" in said
    assert "[2/2] registering" in said
    assert "skipped" not in said


def test_without_a_gpu_it_says_so(environment: dict[str, str]) -> None:
    environment["KVPLAN_CUDA_LIBRARY"] = ""
    code, said, errors = outcome(environment)
    assert (code, said) == (2, "")
    assert "no GPU to try: no driver library of CUDA" in errors


def test_what_there_is(environment: dict[str, str]) -> None:
    code, said, errors = outcome(environment, "--list")
    assert (code, errors) == (0, "")
    assert "expandable_segments" in said
    assert "gpu_one_block_us" in said

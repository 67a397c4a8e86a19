"""Tests of tools/try_cuda.py, the first test of a GPU, on the stand-in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu import TENSORS, Scattered, check_scattered, words
from tests.cuda_sim.simulator import CudaControls

ROOT = Path(__file__).parents[2]


@pytest.fixture
def environment(cuda_simulator: CudaControls) -> dict[str, str]:
    """An environment in which the tool finds the stand-in, and must not violate CUDA's rules."""
    # One thread for NumPy: each process would start as many threads as cores.
    return dict(os.environ) | {"OPENBLAS_NUM_THREADS": "1"}


def outcome(
    environment: dict[str, str], *arguments: str, flags: tuple[str, ...] = ("-W", "error")
) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, *flags, str(ROOT / "tools/try_cuda.py"), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    return done.returncode, done.stdout, done.stderr


def only(*names: str) -> list[str]:
    return [item for name in names for item in ("--only", name)]


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def outcomes_of(path: Path) -> dict[str, str]:
    return {item["step"]: item["outcome"] for item in lines_of(path) if "step" in item}


def test_all_tries_inside_one_process_pass(environment: dict[str, str], tmp_path: Path) -> None:
    names = ("device", "copies", "tuning", "events", "offloading", "registering", "streams")
    report = tmp_path / "report.json"
    code, output, errors = outcome(environment, "--quick", "--json", str(report), *only(*names))
    assert (code, errors) == (0, ""), output
    assert "This is the stand-in of the tests, and no GPU" in output
    outcomes = outcomes_of(report)
    assert outcomes.pop("the kernel that computes") == "skipped"  # the stand-in lacks this kernel
    assert set(outcomes.values()) == {"ok", "says"}
    steps = (
        "device to device: kernel",
        "host to device: batch pinned",
        "and in again",
        "read behind a transfer",
        "its capture goes on",
    )
    assert {outcomes[step] for step in (*steps, "as arrays", "a child maps exported memory")} == {
        "ok"
    }
    *lines, last = lines_of(report)
    details = {line["step"]: line["detail"] for line in lines if "step" in line}
    assert details["cuMemHostAlloc"].startswith(
        "type 1, context True, device 0, managed 0, number "
    )
    assert "bytes 2097152" in details["cuMemCreate, to be exported"]
    assert last["end"]["failed"] == last["end"]["not run"] == []
    assert not last["counts"]


def test_all_tries_between_two_processes_pass(environment: dict[str, str], tmp_path: Path) -> None:
    names = ("transports", "freed", "killed", "leases")
    report = tmp_path / "report.json"
    code, output, errors = outcome(environment, "--quick", "--json", str(report), *only(*names))
    assert (code, errors) == (0, ""), output
    outcomes = outcomes_of(report)
    assert outcomes["local: local DEVICE, remote DEVICE: pulled"] == "ok"
    assert outcomes["tcp: local HOST, remote DEVICE, registered: pushed"] == "ok"
    assert outcomes["the device goes on"] == "ok"


def test_figures_do_not_affect_the_result(environment: dict[str, str]) -> None:
    names = ("gpu_32KiB_ratio", "gpu_peer_32KiB_ratio", "gpu_layerwise_visible_fraction")
    code, output, errors = outcome(environment, "--quick", *only(*names))
    assert (code, errors) == (0, ""), output
    for name in names:
        assert f"\n{name} " in output
    assert "no bar counts" in output


def test_a_failing_step_does_not_end_the_others(environment: dict[str, str]) -> None:
    environment["KVSIM_FAULTS"] = "cuMemHostAlloc:1=2"
    code, output, _ = outcome(environment, "--quick", *only("copies", "registering"))
    assert code == 1, output
    assert "failed: copies" in output
    assert "[2/2] registering" in output
    assert "skipped" not in output


def test_a_wrong_result_is_reported(environment: dict[str, str], tmp_path: Path) -> None:
    environment["KVSIM_FAULTS"] = "cuMemHostAlloc:22=2;cuMemcpyBatchAsync_v2:1=1"
    # The first failures are of memory that launches read, which is made with the kernel.
    report = tmp_path / "report"
    code, output, _ = outcome(environment, "--quick", "--json", str(report), *only("copies"))
    assert code == 1, output
    outcomes = outcomes_of(report)
    assert outcomes["host to device: batch pinned"] == "FAILED"
    assert outcomes["device to device: single"] == "ok"
    assert "cuMemHostAlloc: 2 (CUDA_ERROR_OUT_OF_MEMORY)" in output
    assert "code 1: cuMemcpyBatchAsync_v2: 1" in output


def test_bytes_of_another_place_are_detected() -> None:
    case = Scattered(blocks=2, pool=4, block=64)
    there, here = case.tables()
    tensors = [np.zeros((case.pool, case.block), np.uint8) for _ in range(TENSORS)]
    for number, tensor in enumerate(tensors):
        tensor[here] = words(tensor.nbytes, 1, number * tensor.nbytes).reshape(tensor.shape)[there]
    check_scattered(case, 1, tensors)
    tensors[5][here] = tensors[5][here[::-1]]
    with pytest.raises(AssertionError, match=r"tensor 5 of 64, .* of 256 bytes are wrong, from "):
        check_scattered(case, 1, tensors)


def test_a_missing_gpu_is_reported(environment: dict[str, str]) -> None:
    environment["KVPLAN_CUDA_LIBRARY"] = ""
    code, output, errors = outcome(environment)
    assert (code, errors) == (
        2,
        "no GPU to try: KVPLAN_CUDA_LIBRARY is empty: no library is used\n",
    )
    assert "  compiler " in output


def test_a_hang_is_ended_and_located(environment: dict[str, str], tmp_path: Path) -> None:
    environment["KVSIM_FAULTS"] = "cuMemcpyAsync:1=hang"
    report = tmp_path / "report"
    arguments = ("--quick", "--limit", "2", "--json", str(report), *only("registering"))
    code, output, _ = outcome(environment, *arguments)
    assert code == 1, output
    assert "it said nothing for 2 s" in output
    outputs = {line["try"]: line["output"] for line in lines_of(report) if "output" in line}
    assert "in try_registering" in outputs["registering"]


def test_steps_after_the_time_limit_are_not_run(environment: dict[str, str]) -> None:
    code, output, errors = outcome(environment, "--minutes", "0.07", *only("device", "copies"))
    assert (code, errors) == (4, ""), output
    assert "not run: device, copies" in output


def test_tries_run_under_a_sanitizer(environment: dict[str, str], tmp_path: Path) -> None:
    sanitizer = tmp_path / "compute-sanitizer"
    sanitizer.write_text('#!/bin/sh\necho "$2" >> "$0.ran"; shift 8; exec "$@"\n')
    sanitizer.chmod(0o755)
    environment["PATH"] = f"{tmp_path}:{environment['PATH']}"
    code, output, errors = outcome(environment, "--quick", "--sanitize", *only("offloading"))
    assert (code, errors) == (0, ""), output
    ran = (tmp_path / "compute-sanitizer.ran").read_text().split()
    assert ran == ["memcheck", "racecheck", "synccheck"]
    assert "memcheck: offloading" in output


def test_missing_requirements_are_named(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "broken-1.0-py3-none-any.whl").write_bytes(b"no wheel")
    arguments = ("--wheels", str(tmp_path), *only("device"))
    # As if no packages were installed.
    code, output, errors = outcome(environment, *arguments, flags=("-S",))
    assert code == 2, output
    assert "wheel broken" in output
    assert "msgspec>=0.19, numpy>=1.26, pyzmq>=26, rich>=13 must be there" in errors


def test_the_machine_is_described(environment: dict[str, str]) -> None:
    code, output, errors = outcome(environment, "--list")
    assert (code, errors) == (0, "")
    assert "expandable_segments" in output
    assert "gpu_one_block_us" in output

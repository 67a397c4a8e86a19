"""Choice of the way of copies: the built-in table, a measured one, and a stored one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvnative._cuda import (
    CopyTuning,
    builtin_copy_tuning,
    copy_tuning,
    copy_way,
    far_copy_tuning,
    tune_copies,
)
from kvnative._device import Device as NativeDevice
from kvplan import LLMException
from kvplan.cli import main
from kvplan.cli.tune.cuda import SIZES, Way, calibrate, time_copies
from kvplan.device import cuda_copies
from kvplan.device.cuda import CudaDevice
from kvplan.device.cuda_copies import NO_LIMIT
from kvplan.device.device import CopyDirection
from tests.ascend.acl_cases import DIRECTIONS
from tests.ascend.simulator import Log
from tests.cuda_sim.simulator import CudaControls

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder without stored tuning."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "kvplan"


@pytest.fixture
def opened(cuda_simulator: CudaControls) -> Iterator[CudaDevice]:
    device = CudaDevice(2)
    yield device
    device.close()


def test_the_built_in_way_by_size(device: NativeDevice) -> None:
    def ways(direction: CopyDirection, count: int = 2) -> list[str]:
        return [copy_way(device, direction, nbytes, count) for nbytes in (4 * KIB, MIB, 16 * MIB)]

    assert ways("device_to_device") == ["kernel", "kernel", "single"]
    assert ways("host_to_device") == ways("device_to_host") == ["kernel", "batch", "single"]
    assert ways("host_to_device", 1) == ["kernel", "single", "single"]


def test_copies_between_two_gpus_ignore_the_tuning(device: NativeDevice) -> None:
    tune_copies(device, "device_to_device", CopyTuning(0, 0, 1))
    sizes = (64 * KIB, MIB, 16 * MIB)
    found = [copy_way(device, "device_to_device", size, 2, is_far=True) for size in sizes]
    assert found == ["kernel", "batch", "single"]
    assert far_copy_tuning().blocks == 64


def test_a_device_copies_by_its_tuning(device: NativeDevice) -> None:
    for direction in DIRECTIONS:
        given = CopyTuning(10, 20, 3)
        tune_copies(device, direction, given)
        assert copy_tuning(device, direction) == given
        assert builtin_copy_tuning(direction) != given
        assert [copy_way(device, direction, number, 2) for number in (9, 10, 20)] == [
            "kernel",
            "batch",
            "single",
        ]


def test_impossible_tunings_are_refused(device: NativeDevice) -> None:
    with pytest.raises(ValueError, match="blocks is -1; it must be 0 to"):
        tune_copies(device, "device_to_device", CopyTuning(0, 0, -1))
    with pytest.raises(ValueError, match="kernel_below"):
        tune_copies(device, "device_to_device", CopyTuning(-1, 0, 0))
    with pytest.raises(ValueError, match="direction is 'up'; it must be one of 'host_to_device'"):
        copy_tuning(device, "up")  # type: ignore[arg-type]


def test_the_measured_limit_is_where_the_kernel_becomes_slower() -> None:
    """Copies cost 2 us each, and the kernel has three quarters of the bandwidth."""

    def timer(direction: CopyDirection, way: Way, nbytes: int) -> float:
        each = {"kernel": 0.0, "batch": 1e-6, "single": 2e-6}[way]
        bandwidth = 40e9 if way == "kernel" else 55e9
        return 5e-6 + 4 * (each + nbytes / bandwidth)

    found = calibrate(timer)
    for direction in DIRECTIONS:
        kernel_below, batch_below, blocks = found.tunings[direction]
        assert kernel_below == 256 * KIB  # 31.2 us, and 28.1 us in a batch
        assert batch_below == NO_LIMIT
        assert blocks == builtin_copy_tuning(direction).blocks


def test_a_kernel_that_is_never_faster_is_not_used() -> None:
    found = calibrate(
        lambda direction, way, nbytes: {"kernel": 3.0, "batch": 2.0, "single": 1.0}[way]
    )
    assert {tuning[:2] for tuning in found.tunings.values()} == {(SIZES[0], SIZES[0])}


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_each_way_is_measured_alone(
    opened: CudaDevice, sim_log: Log, direction: CopyDirection
) -> None:
    before = copy_tuning(opened.native, direction)
    calls = ("cuLaunchKernel", "cuMemcpyBatchAsync_v2", "cuMemcpyAsync")
    counted = []
    for way in ("kernel", "batch", "single"):
        sim_log.restart()
        assert time_copies(opened, direction, way, 4 * KIB, span_nbytes=64 * KIB) > 0
        counted.append(tuple(sim_log.counts(*calls).values()))
    assert counted == [(5, 0, 0), (0, 5, 0), (0, 0, 5 * 16)]
    assert copy_tuning(opened.native, direction) == before


def test_a_failed_trial_leaves_the_tuning_as_it_was(
    opened: CudaDevice, cuda_simulator: CudaControls
) -> None:
    before = copy_tuning(opened.native, "device_to_device")
    cuda_simulator.add_fault("cuMemcpyAsync:2=701")
    with pytest.raises(LLMException, match="701"):
        time_copies(opened, "device_to_device", "single", 4 * KIB, span_nbytes=64 * KIB)
    assert copy_tuning(opened.native, "device_to_device") == before


@pytest.mark.parametrize(("call", "code"), [("cuMemCreate", 2), ("cuMemcpyAsync", 701)])
def test_a_gpu_that_fails_is_named(
    cuda_simulator: CudaControls,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    call: str,
    code: int,
) -> None:
    cuda_simulator.add_fault(f"{call}:1={code}")
    assert main(["tune", "--only", "cuda"]) == 2
    device = CudaDevice(0)
    device.close()
    found = " ".join(capsys.readouterr().out.split())
    assert found.startswith(f"{device.name}: ")
    assert f"{call}: {code}" in found
    assert not (folder / "cuda.json").exists()


def test_devices_copy_by_the_stored_tuning(opened: CudaDevice, folder: Path) -> None:
    assert cuda_copies.load(opened) is None
    tunings = {direction: CopyTuning(64 * KIB, NO_LIMIT, 7) for direction in DIRECTIONS}
    cuda_copies.save(opened, tunings)
    assert cuda_copies.load(opened) == tunings
    other = CudaDevice(4)
    try:
        assert copy_tuning(other.native, "host_to_device") == tunings["host_to_device"]
        assert other.describe()["copies"] == {
            **dict.fromkeys(DIRECTIONS, "one launch below 64 KiB, then a batch call"),
            "between_gpus": "one launch below 1 MiB, then a batch call below 8 MiB, "
            "then a copy each",
        }
    finally:
        other.close()
    assert [*json.loads((folder / "cuda.json").read_text())["machines"]] == [
        f"{opened.native.name}, CUDA {opened.native.library.version}"
    ]


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("kernel_below", "64", "kernel_below"),
        ("batch_below", -1, "batch_below=-1 must be 0 to"),
        ("blocks", 2**31, "blocks=2147483648 must be 0 to 2147483647"),
    ],
)
def test_a_file_that_was_changed_is_not_used(
    opened: CudaDevice, folder: Path, field: str, value: Any, reason: str
) -> None:
    cuda_copies.save(opened, {direction: CopyTuning(1, 2, 3) for direction in DIRECTIONS})
    path = folder / "cuda.json"
    document = json.loads(path.read_text())
    (machine,) = document["machines"].values()
    machine["tunings"]["device_to_host"][field] = value
    path.write_text(json.dumps(document))
    with pytest.raises(Exception, match=reason):
        cuda_copies.load(opened)
    other = CudaDevice(5)
    try:
        assert copy_tuning(other.native, "device_to_host") == builtin_copy_tuning("device_to_host")
    finally:
        other.close()

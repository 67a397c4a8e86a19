"""Copies on a CUDA device: by the kernel, in batches or one by one, and their cancellation.

The stand-in for the driver runs the kernel's source on the host and checks each access.
"""

from __future__ import annotations

import gc
from mmap import PAGESIZE

import numpy as np
import pytest

from kvnative._backend import KVN_CANCELLED, KVN_OK, KVN_REVOKED, KVN_UNMAPPED
from kvnative._cuda import CopyTuning, CudaLibrary, builtin_copy_tuning, limit_copies, tune_copies
from kvnative._cuda_share import export, import_pieces
from kvnative._device import Device
from kvnative._executor import Executor
from kvnative._lower import Descriptors
from kvnative._report import Report
from kvnative._task import Revocable, revoke
from tests.ascend.acl_cases import DIRECTIONS, UNTOUCHED, Case, between, mixed_sizes
from tests.ascend.simulator import Log
from tests.cuda.conftest import PAGES
from tests.cuda_sim.simulator import VARIANT, CudaControls
from tests.support.spare import assert_same, copy_of

LAUNCH, SINGLE = "cuLaunchKernel", "cuMemcpyAsync"
HAS_BATCH = VARIANT != "12.4"
BATCH = "cuMemcpyBatchAsync" if VARIANT == "12.8" else "cuMemcpyBatchAsync_v2"
MODULE = "cuModuleLoadDataEx"
HOST = [direction for direction in DIRECTIONS if direction != "device_to_device"]
MIB = 1 << 20
CHANNELS = 2  # between host and device


def counts(log: Log) -> tuple[int, int, int]:
    """Count launches, batches and single copies.

    A launch of many descriptors needs one copy for them.
    """
    found = log.counts(LAUNCH, BATCH, SINGLE)
    return found[LAUNCH], found[BATCH], found[SINGLE]


def run(executor: Executor, case: Case) -> None:
    report = executor.run(case.descriptors)
    assert (report.status, report.message, report.bytes_done) == (KVN_OK, "", case.total)
    case.assert_moved()


def cancel_queued(simulator: CudaControls, executor: Executor, case: Case) -> Report:
    """Return the report of a transfer that is cancelled while its launch waits on a stream."""
    simulator.add_fault(f"{LAUNCH}:1=hang")
    task = executor.submit(case.descriptors)
    while simulator.faults_left():
        task.wait(1, give_up=False)
    return task.cancel()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_single_launch_moves_a_batch(
    device: Device, cuda_simulator: CudaControls, sim_log: Log, direction: str
) -> None:
    executor = Executor(device.backend(direction))
    few = between(device, cuda_simulator, direction, mixed_sizes(128, 3000))
    run(executor, few)
    assert counts(sim_log) == (1, 0, 0)
    sim_log.restart()
    many = between(device, cuda_simulator, direction, mixed_sizes(500, 3000))
    run(executor, many)
    assert counts(sim_log) == (1, 0, 1), "and one copy of the descriptors"
    assert device.fallback_reason == ""


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_memory_of_kvplan_needs_no_queries_to_the_driver(
    device: Device, cuda_simulator: CudaControls, sim_log: Log, direction: str
) -> None:
    """Only one launch of a block is made, and queries whether the stream is done."""
    executor = Executor(device.backend(direction))
    case = between(device, cuda_simulator, direction, [4096])
    run(executor, case)
    sim_log.restart()
    assert executor.run(case.descriptors).status == KVN_OK
    assert set(sim_log.counts()) == {LAUNCH, "cuStreamQuery"}


@pytest.mark.parametrize("how", ["revoked", "closed"])
def test_transfers_that_are_cancelled_in_the_queue_never_begin(
    device: Device, cuda_simulator: CudaControls, sim_log: Log, how: str
) -> None:
    """If each began after its predecessor, the wait for each would take 10 ms."""
    executor, memory = Executor(device.backend("host_to_device")), Revocable()
    cases = [between(device, cuda_simulator, "host_to_device", [100] * 4) for _ in range(12)]
    cuda_simulator.add_fault(*(f"{LAUNCH}:{number}=hang" for number in range(1, 13)))
    tasks = [executor.submit(case.descriptors, (memory,)) for case in cases]
    while not sim_log.calls(LAUNCH):
        tasks[0].wait(1, give_up=False)
    if how == "revoked":
        revoke(memory, "it goes")
    else:
        executor.close(cancel=True)
    assert {task.report.status for task in tasks} == {
        KVN_REVOKED if how == "revoked" else KVN_CANCELLED
    }
    assert len(sim_log.calls(LAUNCH)) <= CHANNELS
    cuda_simulator.clear_faults()
    cuda_simulator.end_hangs()


def test_a_launch_takes_8192_descriptors(
    device: Device, cuda_simulator: CudaControls, sim_log: Log
) -> None:
    case = between(device, cuda_simulator, "device_to_device", [16] * 9000)
    run(Executor(device.backend("device_to_device")), case)
    assert counts(sim_log) == (2, 0, 2)
    uploads = [call.fields["bytes"] for call in sim_log.calls(SINGLE)]
    assert uploads == [8192 * 16, 808 * 16], "all are alike: two columns"


@pytest.mark.parametrize("count", [20, 300], ids=["few", "many"])
@pytest.mark.parametrize("position", [0, 10, -1])
def test_one_descriptor_may_differ_from_the_others_in_size(
    device: Device, cuda_simulator: CudaControls, count: int, position: int
) -> None:
    sizes = [64] * count
    sizes[position] = 4096
    case = between(device, cuda_simulator, "device_to_device", sizes)
    run(Executor(device.backend("device_to_device")), case)


@pytest.mark.parametrize("direction", HOST)
def test_pageable_memory_is_copied_by_the_driver(
    device: Device, cuda_simulator: CudaControls, sim_log: Log, direction: str
) -> None:
    case = between(device, cuda_simulator, direction, [100] * 20, pinned=False)
    run(Executor(device.backend(direction)), case)
    assert counts(sim_log) == (0, 0, 20)


def test_copies_that_cannot_be_stopped_are_cut_into_slices(
    device: Device, cuda_simulator: CudaControls, sim_log: Log
) -> None:
    """A large descriptor between host and device is cut, and so is a batch of the driver."""
    run(
        Executor(device.backend("host_to_device")),
        between(device, cuda_simulator, "host_to_device", [MIB, 65 * MIB, *[3 * MIB] * 22]),
    )
    # Of the batch 21 fit; the other one is left alone.
    assert counts(sim_log) == ((0, 1, 4) if HAS_BATCH else (0, 0, 25))


def test_large_descriptors_use_the_copies_of_the_driver(
    device: Device, cuda_simulator: CudaControls, sim_log: Log
) -> None:
    run(
        Executor(device.backend("host_to_device")),
        between(device, cuda_simulator, "host_to_device", [MIB] * 4),
    )
    assert counts(sim_log) == ((0, 1, 0) if HAS_BATCH else (0, 0, 4))
    sim_log.restart()
    run(
        Executor(device.backend("device_to_device")),
        between(device, cuda_simulator, "device_to_device", [9 * MIB]),
    )
    assert counts(sim_log) == (0, 0, 1)


@pytest.mark.parametrize("code", [218, 221, 222, 223, 209, 801])
def test_a_driver_that_refuses_the_kernel_copies_in_batches(
    device: Device, cuda_simulator: CudaControls, sim_log: Log, code: int
) -> None:
    cuda_simulator.add_fault(f"{MODULE}:1={code}")
    executor = Executor(device.backend("device_to_device"))
    for _ in range(2):
        case = between(device, cuda_simulator, "device_to_device", [100] * 20)
        run(executor, case)
    assert counts(sim_log) == ((0, 2, 0) if HAS_BATCH else (0, 0, 40))
    assert sim_log.counts(MODULE)[MODULE] == 1, "it is asked once"
    assert device.fallback_reason.startswith("the driver does not take the copy kernel: ")
    assert f"{MODULE}: {code} (" in device.fallback_reason


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_gpu_that_registers_no_host_memory_gets_no_kernel(
    device: Device, cuda_simulator: CudaControls, sim_log: Log, direction: str
) -> None:
    """Confidential computing has this limit: launches could not read the host's memory."""
    case = between(device, cuda_simulator, direction, [100] * 20)
    cuda_simulator.set("cuda_host_register", 0)
    try:
        run(Executor(device.backend(direction)), case)
    finally:
        cuda_simulator.set("cuda_host_register", 1)
    assert sim_log.counts(MODULE)[MODULE] == 0
    assert sim_log.counts(LAUNCH)[LAUNCH] == 0
    assert "confidential computing" in device.fallback_reason


def test_a_driver_without_the_attribute_of_such_a_gpu_gets_the_kernel(
    device: Device, cuda_simulator: CudaControls, sim_log: Log
) -> None:
    case = between(device, cuda_simulator, "host_to_device", [100] * 20)
    cuda_simulator.add_fault("cuDeviceGetAttribute:1=1")
    run(Executor(device.backend("host_to_device")), case)
    assert cuda_simulator.faults_left() == 0
    assert sim_log.counts(LAUNCH)[LAUNCH] == 1
    assert device.fallback_reason == ""


@pytest.mark.skipif(not HAS_BATCH, reason="that driver has no batch copies")
def test_a_driver_that_refuses_batches_copies_one_by_one(
    device: Device, cuda_simulator: CudaControls, sim_log: Log
) -> None:
    cuda_simulator.add_fault(f"{MODULE}:1=218", f"{BATCH}:1=801")
    executor = Executor(device.backend("host_to_device"))
    for _ in range(2):
        run(executor, between(device, cuda_simulator, "host_to_device", [100] * 20))
    assert counts(sim_log) == (0, 1, 40)
    assert device.fallback_reason.startswith(f"{BATCH}: 801 (")


@pytest.mark.skipif(not HAS_BATCH, reason="that driver has no batch copies")
@pytest.mark.parametrize(
    ("sizes", "batches", "singles"),
    [
        ([100] * 2050, 3, 0),
        ([16 * MIB] * 6, 2, 0),
        ([100] * 1024, 1, 0),
        ([65 * MIB] * 2, 1, 1),  # a single copy needs no batch
    ],
)
def test_batches_have_a_maximal_size(
    device: Device,
    cuda_simulator: CudaControls,
    sim_log: Log,
    sizes: list[int],
    batches: int,
    singles: int,
) -> None:
    """A batch has at most 1,024 descriptors and 64 MiB.

    The stand-in reports larger ones as violations.
    """
    cuda_simulator.add_fault(f"{MODULE}:1=218")  # otherwise the kernel would be faster
    tune_copies(device, "device_to_device", CopyTuning(0, 1 << 30, 0))
    executor = Executor(device.backend("device_to_device"))
    run(executor, between(device, cuda_simulator, "device_to_device", sizes))
    assert counts(sim_log) == (0, batches, singles)


@pytest.mark.parametrize("kernel", [True, False])
def test_disabled_batch_calls_are_never_made(
    device: Device, cuda_simulator: CudaControls, sim_log: Log, kernel: bool
) -> None:
    limit_copies(device, batch_calls=False)
    if not kernel:
        cuda_simulator.add_fault(f"{MODULE}:1=218")
    executor = Executor(device.backend("host_to_device"))
    run(executor, between(device, cuda_simulator, "host_to_device", [100] * 20))
    run(executor, between(device, cuda_simulator, "host_to_device", [MIB] * 4))
    assert counts(sim_log) == ((1, 0, 4) if kernel else (0, 0, 24))


def test_the_kernel_uses_a_limited_number_of_blocks(
    device: Device, cuda_simulator: CudaControls, sim_log: Log
) -> None:
    """The kernel uses 64 blocks within a GPU, and 32 between GPU and host.

    An option changes the limit.
    """

    def blocks() -> list[int]:
        sim_log.restart()
        for direction in ("device_to_device", "host_to_device"):
            case = between(device, cuda_simulator, direction, [100 << 10] * 20)
            run(Executor(device.backend(direction)), case)
        return [call.fields["blocks"] for call in sim_log.calls(LAUNCH)]

    assert [builtin_copy_tuning(item).blocks for item in ("device_to_device", *HOST)] == [
        64,
        32,
        32,
    ]
    assert blocks() == [32, 32], "8 multiprocessors of the stand-in run 4 each"
    limit_copies(device, max_blocks=5)
    assert blocks() == [5, 5]
    limit_copies(device, max_blocks=1 << 20)
    assert blocks() == [32, 32]


@pytest.mark.parametrize("side", ["dst", "src"])
def test_an_address_without_memory_is_never_launched(
    device: Device, cuda_simulator: CudaControls, sim_log: Log, side: str
) -> None:
    """An illegal access would lose the context and everything in it."""
    executor = Executor(device.backend("device_to_device"))
    case = between(device, cuda_simulator, "device_to_device", [64] * 10)
    columns = {
        "dst": case.dst_offsets + np.uint64(case.sides[1].address),
        "src": case.src_offsets + np.uint64(case.sides[0].address),
    }
    columns[side][7] += np.uint64(1 << 40)
    bad = int(columns[side][7])
    report = executor.run(Descriptors.from_columns(columns["dst"], columns["src"], case.nbytes))
    assert (report.status, report.failed) == (KVN_UNMAPPED, 7)
    assert report.message == (
        f"descriptor 7: 64 bytes at {bad:#x} are not, or not all, memory of the device"
    )
    run(executor, case)


def test_a_range_that_leaves_its_allocation_is_never_launched(
    device: Device, cuda_simulator: CudaControls
) -> None:
    case = between(device, cuda_simulator, "device_to_device", [64])
    target, source = (np.array([case.sides[number].address], np.uint64) for number in (1, 0))
    report = Executor(device.backend("device_to_device")).run(
        Descriptors.from_columns(target, source, np.array([4 * MIB], np.uint64))
    )
    assert (report.status, report.failed) == (KVN_UNMAPPED, 0)


def test_mapped_memory_of_another_gpu_is_copied_by_the_kernel(
    device: Device, cuda_simulator: CudaControls, sim_log: Log
) -> None:
    case = between(device, cuda_simulator, "device_to_device", [100] * 20)
    owner = device.library.device(4)
    theirs = owner.allocate(case.source.nbytes)
    owner.write(theirs.address, case.source)
    executor = Executor(device.backend("device_to_device"))

    def pull(source: int) -> Report:
        descriptors = Descriptors.from_columns(
            case.dst_offsets + np.uint64(case.sides[1].address),
            case.src_offsets + np.uint64(source),
            case.nbytes,
        )
        return executor.run(descriptors)

    report = pull(theirs.address)
    assert (report.status, report.failed) == (KVN_UNMAPPED, 0)
    exported = export(owner, theirs.address, case.source.nbytes)
    mapped = import_pieces(device, exported.nbytes, [[(exported.fd, exported.nbytes)]], is_far=True)
    sim_log.restart()
    assert pull(mapped.address).status == KVN_OK
    case.assert_moved()
    assert counts(sim_log) == (1, 0, 0)
    address = mapped.address
    del mapped
    report = pull(address)
    assert (report.status, report.failed) == (KVN_UNMAPPED, 0)
    assert counts(sim_log) == (1, 0, 0)


@pytest.mark.parametrize("far", ["source", "target"])
def test_large_blocks_of_another_gpu_are_copied_by_the_driver(
    device: Device, cuda_simulator: CudaControls, sim_log: Log, far: str
) -> None:
    """Within one GPU, the kernel copies larger blocks."""
    nbytes = 2 * MIB
    here = [device.allocate(2 * nbytes) for _ in range(2)]
    owner = device.library.device(4)
    theirs = owner.allocate(2 * nbytes)
    exported = export(owner, theirs.address, 2 * nbytes)
    mapped = import_pieces(device, exported.nbytes, [[(exported.fd, exported.nbytes)]], is_far=True)
    sides = {"source": here[0].address, "target": here[1].address}
    executor = Executor(device.backend("device_to_device"))

    def counted() -> tuple[int, int, int]:
        blocks = np.array([0, nbytes], np.uint64)
        descriptors = Descriptors.from_columns(
            blocks[::-1] + np.uint64(sides["target"]),
            blocks + np.uint64(sides["source"]),
            np.full(2, nbytes, np.uint64),
        )
        sim_log.restart()
        assert executor.run(descriptors).status == KVN_OK
        return counts(sim_log)

    assert counted() == (1, 0, 0)
    sides[far] = mapped.address
    assert counted() == ((0, 1, 0) if HAS_BATCH else (0, 0, 2))


def test_a_refused_launch_fails_only_its_transfer(
    device: Device, cuda_simulator: CudaControls
) -> None:
    executor = Executor(device.backend("device_to_device"))
    case = between(device, cuda_simulator, "device_to_device", [100] * 300)
    cuda_simulator.add_fault(f"{LAUNCH}:1=701")
    report = executor.run(case.descriptors)
    assert report.status != KVN_OK
    assert report.message.startswith(f"{LAUNCH}: 701 (")
    assert device.fallback_reason == ""
    run(executor, case)


@pytest.mark.parametrize("fails_at", range(1, PAGES + 4))
def test_memory_of_launches_is_freed_with_the_device(
    cuda_simulator: CudaControls, fails_at: int
) -> None:
    """Memory that was allocated before its host part failed is freed, too: a page, and columns."""
    device = CudaLibrary.load().device(5)
    executor = Executor(device.backend("device_to_device"))
    cuda_simulator.add_fault(f"cuMemHostAlloc:{fails_at}=2")
    run(executor, between(device, cuda_simulator, "device_to_device", [8] * 300))
    assert not cuda_simulator.faults_left()
    case = between(device, cuda_simulator, "device_to_device", [8] * 300)
    assert cancel_queued(cuda_simulator, executor, case).status == KVN_CANCELLED
    cuda_simulator.end_hangs()
    del executor, device, case
    gc.collect()
    assert cuda_simulator.left() == {}


# ---- stopping ----


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("count", [20, 300], ids=["few", "many"])
def test_a_launch_that_never_begins_is_cancelled_at_once(
    device: Device, cuda_simulator: CudaControls, direction: str, count: int
) -> None:
    """The launch waits for an event that never comes; when it begins, it touches no memory."""
    executor = Executor(device.backend(direction))
    run(executor, between(device, cuda_simulator, direction, [8] * count))
    case = between(device, cuda_simulator, direction, [100] * count)
    report = cancel_queued(cuda_simulator, executor, case)
    assert (report.status, report.bytes_done) == (KVN_CANCELLED, 0)
    other = between(device, cuda_simulator, direction, [50] * count)
    run(executor, other)  # on another stream
    cuda_simulator.end_hangs()
    for _ in range(3):
        run(executor, between(device, cuda_simulator, direction, [8] * count))
    assert (case.target == UNTOUCHED).all()


def test_a_running_launch_is_stopped_and_waited_for(
    device: Device, cuda_simulator: CudaControls
) -> None:
    executor = Executor(device.backend("device_to_device"))
    case = between(device, cuda_simulator, "device_to_device", [MIB] * 64)
    task = executor.submit(case.descriptors)
    while not (case.target[::PAGESIZE] != UNTOUCHED).any():
        task.wait(1, give_up=False)
    report = task.cancel()
    assert report.status in (KVN_CANCELLED, KVN_OK)
    before = copy_of(case.target)
    run(executor, between(device, cuda_simulator, "device_to_device", [8] * 10))
    assert_same(case.target, before)
    if report.status == KVN_OK:  # the launch was faster
        case.assert_moved()


def test_copies_that_cannot_be_stopped_are_waited_for(
    device: Device, cuda_simulator: CudaControls, sim_log: Log
) -> None:
    executor = Executor(device.backend("device_to_device"))
    case = between(device, cuda_simulator, "device_to_device", [9 * MIB])
    cuda_simulator.set("latency_us", 100_000)
    task = executor.submit(case.descriptors)
    while not sim_log.calls(SINGLE):
        task.wait(1, give_up=False)
    report = task.cancel()
    cuda_simulator.set("latency_us", 0)
    assert report.status in (KVN_OK, KVN_CANCELLED)
    case.assert_moved()

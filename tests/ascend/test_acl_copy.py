"""Copies between a device and the host, and within the device: bytes, calls, failures."""

from __future__ import annotations

import numpy as np
import pytest

from kvnative._backend import (
    KVN_DEVICE_MEMORY,
    KVN_FAILED,
    KVN_INVALID,
    KVN_NO_DEVICE_MEMORY,
    KVN_OK,
    KVN_SUSPECT_REMOTE,
    KVN_TIMEOUT,
)
from kvnative._device import Device
from kvnative._executor import Executor
from kvnative._lower import Descriptors
from tests.ascend.acl_cases import (
    BATCH,
    BATCH_ASYNC,
    DIRECTIONS,
    HAS_BATCH,
    UNTOUCHED,
    VARIANT,
    between,
    mixed_sizes,
    on_device,
    on_host,
)
from tests.ascend.simulator import Controls, Log
from tests.native.scatter import indices
from tests.support.spare import assert_same

SINGLE = "aclrtMemcpyAsync"
COPIES = (BATCH, BATCH_ASYNC, SINGLE)
WAIT, LOOK_UP = "aclrtSynchronizeStreamWithTimeout", "aclrtPointerGetAttributes"
# The call that fails for batches of a descriptor, or for single copies without batch calls.
FAST = BATCH_ASYNC if HAS_BATCH else SINGLE


def waits(log: Log) -> int:
    """Return the number of waits for work; a wait checks for a stop every 10 ms."""
    return sum(call.code == 0 for call in log.calls(WAIT))


batches = pytest.mark.skipif(not HAS_BATCH, reason=f"{VARIANT} has no batch copies that work")


@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "pageable"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_byte_arrives_and_no_other_is_touched(
    device: Device, simulator: Controls, direction: str, pinned: bool
) -> None:
    case = between(device, simulator, direction, mixed_sizes(500, 3000), pinned=pinned)
    report = Executor(device.backend(direction)).run(case.descriptors)
    assert (report.status, report.message, report.bytes_done) == (KVN_OK, "", case.total)
    case.assert_moved()


@batches
@pytest.mark.parametrize("direction", ["host_to_device", "device_to_host"])
def test_pinned_memory_goes_in_batches_with_one_wait(
    device: Device, simulator: Controls, sim_log: Log, direction: str
) -> None:
    case = between(device, simulator, direction, [16] * 9000)
    sim_log.restart()
    assert Executor(device.backend(direction)).run(case.descriptors).status == KVN_OK
    calls = sim_log.calls(*COPIES)
    # Two channels, each half: 4096 and 404.
    assert sorted(call.fields["count"] for call in calls) == [404, 404, 4096, 4096]
    assert {(call.name, call.fields["attributes"]) for call in calls} == {(BATCH_ASYNC, 1)}
    assert len({call.fields["stream"] for call in calls}) == 2
    assert (waits(sim_log), sim_log.counts(LOOK_UP)) == (2, {LOOK_UP: 0})
    case.assert_moved()


@batches
def test_pageable_memory_is_looked_up_by_region_and_copied_synchronously(
    device: Device, simulator: Controls, sim_log: Log
) -> None:
    case = between(device, simulator, "host_to_device", [2000] * 60, pinned=False)
    sim_log.restart()
    assert Executor(device.backend("host_to_device")).run(case.descriptors).status == KVN_OK
    counts = sim_log.counts(*COPIES, LOOK_UP)
    assert counts[LOOK_UP] in (1, 2)  # 120 kB lie in one region of 2 MiB, or in two
    assert (counts[BATCH], counts[BATCH_ASYNC], waits(sim_log)) == (1, 0, 0)
    case.assert_moved()


@batches
def test_memory_that_the_program_has_pinned_is_recognized(
    device: Device, simulator: Controls, sim_log: Log
) -> None:
    """A framework may pin memory without kvplan's knowledge."""
    owner = device.library.device(4)
    case = between(owner, simulator, "host_to_device", [64] * 10)
    target = on_device(device, simulator, case.target)
    descriptors = Descriptors.from_columns(
        case.dst_offsets + np.uint64(target.address),
        case.src_offsets + np.uint64(case.sides[0].address),
        case.nbytes,
    )
    sim_log.restart()
    assert Executor(device.backend("host_to_device")).run(descriptors).status == KVN_OK
    counts = sim_log.counts(*COPIES, LOOK_UP)
    assert (counts[BATCH_ASYNC], counts[BATCH]) == (1, 0)
    assert counts[LOOK_UP] in (1, 2)
    assert_same(target.seen, case.expected())


@batches
def test_pinned_and_pageable_memory_in_one_transfer(
    device: Device, simulator: Controls, sim_log: Log
) -> None:
    data = np.arange(40, dtype=np.uint8)
    pinned, pageable = on_host(device, data, True), on_host(device, data, False)
    target = on_device(device, simulator, np.full(80, UNTOUCHED, np.uint8))
    starts = np.arange(0, 40, 10, dtype=np.uint64)
    descriptors = Descriptors.from_columns(
        np.concatenate([starts, starts + np.uint64(40)]) + np.uint64(target.address),
        np.concatenate([starts + np.uint64(item.address) for item in (pinned, pageable)]),
        np.full(8, 10, np.uint64),
    )
    sim_log.restart()
    assert Executor(device.backend("host_to_device")).run(descriptors).status == KVN_OK
    assert sim_log.counts(*COPIES) == {BATCH: 1, BATCH_ASYNC: 1, SINGLE: 0}
    assert_same(target.seen, np.concatenate([data, data]))


def test_a_large_descriptor_of_pageable_memory_is_copied_in_slices(
    device: Device, simulator: Controls, sim_log: Log
) -> None:
    most = 64 << 20
    data = np.resize(np.arange(251, dtype=np.uint8), most + 7)
    source, target = on_host(device, data, False), device.allocate(data.nbytes)
    columns = (
        np.array([item], np.uint64) for item in (target.address, source.address, data.nbytes)
    )
    sim_log.restart()
    executor = Executor(device.backend("host_to_device"))
    assert executor.run(Descriptors.from_columns(*columns)).status == KVN_OK
    assert [call.fields["bytes"] for call in sim_log.calls(*COPIES) if not call.code] == [most, 7]
    back = np.empty_like(data)
    device.read(target.address, back)
    assert np.array_equal(back, data)


def test_copies_within_the_device_use_all_streams(
    device: Device, simulator: Controls, sim_log: Log
) -> None:
    case = between(device, simulator, "device_to_device", [100] * 3904)
    sim_log.restart()
    assert Executor(device.backend("device_to_device")).run(case.descriptors).status == KVN_OK
    calls = sim_log.calls(*COPIES)
    assert {call.name for call in calls} == {SINGLE}
    streams = [call.fields["stream"] for call in calls]
    assert {streams.count(stream) for stream in set(streams)} == {976}
    assert len(set(streams)) == 4
    assert waits(sim_log) == 4
    case.assert_moved()


@pytest.mark.skipif(HAS_BATCH, reason="the batch copies of this variant work")
def test_without_batch_copies_each_descriptor_is_a_call(
    device: Device, simulator: Controls, sim_log: Log
) -> None:
    executor = Executor(device.backend("host_to_device"))
    case = between(device, simulator, "host_to_device", [100] * 300)
    sim_log.restart()
    assert executor.run(case.descriptors).status == KVN_OK
    refused = [call for call in sim_log.calls(BATCH_ASYNC) if call.code]
    if VARIANT == "8.1":
        assert device.fallback_reason == "this version of the runtime has no aclrtMemcpyBatch"
        assert refused == []
    else:
        text = "aclrtMemcpyBatchAsync: 207000 (feature not supported): "
        assert device.fallback_reason.startswith(text)
        assert len(refused) in (1, 2)  # of two channels
    assert (sim_log.counts(SINGLE), waits(sim_log)) == ({SINGLE: 300}, 2)
    case.assert_moved()
    sim_log.restart()
    assert executor.run(case.descriptors).status == KVN_OK
    assert sim_log.counts(*COPIES) == {BATCH: 0, BATCH_ASYNC: 0, SINGLE: 300}


@batches
def test_a_complete_library_has_no_reason_to_fall_back(device: Device) -> None:
    device.backend("host_to_device")
    assert device.fallback_reason == ""


@pytest.mark.parametrize("bad", [0, 4099, 8999])
@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "pageable"])
def test_the_failed_descriptor_is_named(
    device: Device, simulator: Controls, pinned: bool, bad: int
) -> None:
    """The failed descriptor may be in any call of 4096 or part; confirmed ones have arrived.

    The second version of batch calls does not name it, so its whole call is unconfirmed.
    """
    case = between(device, simulator, "host_to_device", [16] * 9000, pinned=pinned)
    targets = case.dst_offsets + np.uint64(case.sides[1].address)
    targets[bad] = 4096  # an unmapped address
    descriptors = Descriptors.from_columns(
        targets, case.src_offsets + np.uint64(case.sides[0].address), case.nbytes
    )
    backend = device.backend("host_to_device")
    report = Executor(backend).run(descriptors)
    named = None if VARIANT == "batch-v2" else bad
    assert (report.status, report.failed) == (KVN_INVALID, named)
    begin = "" if named is None else f"descriptor {bad}: "
    assert report.message.startswith(f"{begin}aclrtMemcpy")
    assert report.code in (107000, 107017, 100000)
    unconfirmed = indices(report.unconfirmed)
    assert bad in unconfirmed
    assert all(case.arrived(index) for index in set(range(9000)) - unconfirmed)
    assert report.bytes_done == 16 * (9000 - len(unconfirmed))
    if VARIANT != "8.1" and bad > 4096:
        assert len(unconfirmed) <= 9000 - 4096


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (507053, KVN_DEVICE_MEMORY),
        (507057, KVN_SUSPECT_REMOTE),
        (207018, KVN_NO_DEVICE_MEMORY),
        (107020, KVN_TIMEOUT),
        (507899, KVN_FAILED),
        (123456, KVN_FAILED),
    ],
)
@pytest.mark.parametrize("when", ["", "sync:"], ids=["at-the-call", "at-the-wait"])
def test_errors_keep_code_and_text_and_the_channel_still_works(
    device: Device, simulator: Controls, sim_log: Log, when: str, code: int, status: int
) -> None:
    backend = device.backend("host_to_device")
    case = between(device, simulator, "host_to_device", [100] * 20)
    executor = Executor(backend)
    if not HAS_BATCH:
        executor.run(case.descriptors)  # so that the device falls back first
    simulator.add_fault(f"{FAST}:1={when}{code}")
    report = executor.run(case.descriptors)
    assert (report.status, report.code) == (status, code)
    call = WAIT if when else FAST
    assert f"{call}: {code}" in report.message
    assert report.message == report.message.strip()
    if when:
        assert (report.failed, report.unconfirmed) == (None, ((0, 20),))
    case.target[:] = UNTOUCHED
    assert executor.run(case.descriptors).status == KVN_OK
    case.assert_moved()


def test_a_failure_is_not_explained_by_waits_that_took_long(
    device: Device, simulator: Controls, sim_log: Log
) -> None:
    """The runtime keeps a text for each wait that timed out until the text is read."""
    case = between(device, simulator, "host_to_device", [100] * 20, pinned=True)
    executor = Executor(device.backend("host_to_device"))
    simulator.set("latency_us", 50_000)
    while 507046 not in {call.code for call in sim_log.calls(WAIT)}:
        assert executor.run(case.descriptors).status == KVN_OK
    simulator.set("latency_us", 0)
    simulator.add_fault(f"{FAST}:1=507899")
    report = executor.run(case.descriptors)
    assert (report.status, report.code) == (KVN_FAILED, 507899)
    assert "are not done" not in report.message


@batches
def test_the_rest_of_a_partial_batch_is_not_confirmed(device: Device, simulator: Controls) -> None:
    case = between(device, simulator, "host_to_device", [100] * 20)
    simulator.add_fault(f"{BATCH_ASYNC}:1=partial:507052")
    report = Executor(device.backend("host_to_device")).run(case.descriptors)
    assert (report.status, report.code, report.failed) == (KVN_FAILED, 507052, None)
    assert report.unconfirmed == ((0, 20),)
    assert report.bytes_done == 0


def test_a_wrong_direction_is_refused(device: Device) -> None:
    with pytest.raises(ValueError, match="direction is 'up'; it must be one of 'host_to_device'"):
        device.backend("up")  # type: ignore[arg-type]

"""Transfers of the HCCL transport between two devices of this process, on the simulator."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import kvplan
from kvplan import LLMException, LLMStatusCode, Rows, Transfer
from kvplan.execution import HostMemory
from kvplan.transport.protocol import DeviceRange
from tests.ascend.hccl_side import (
    BLOCK,
    BLOCKS,
    DEADLINE_S,
    DESC,
    PULL,
    PUSH,
    TENSOR,
    TENSORS,
    Side,
    link_both,
    moved,
)
from tests.ascend.hccl_sides import MakeSide
from tests.ascend.simulator import Controls, Log
from tests.support.refusals import refused


def test_pull_and_push_between_devices(one: Side, two: Side) -> None:
    ours, theirs = one.fill(1), two.fill(2)
    link, _ = link_both(one, two)
    kvplan.execute(PULL, two.peer_memory(link), one.memory)
    np.testing.assert_array_equal(one.seen, moved(theirs, ours))
    ours = one.seen.copy()
    kvplan.execute(PUSH, one.memory, two.peer_memory(link, writable=True))
    np.testing.assert_array_equal(two.seen, moved(ours, theirs))


def test_both_ends_transfer_at_once(one: Side, two: Side) -> None:
    one.fill(1)
    two.fill(2)
    links = link_both(one, two)
    halves = list(range(20)), list(range(20, 40))
    lower = kvplan.plan(Transfer(Rows(DESC, halves[0]), Rows(DESC, halves[0])), local="dst")
    upper = kvplan.plan(Transfer(Rows(DESC, halves[1]), Rows(DESC, halves[1])), local="dst")
    with ThreadPoolExecutor(2) as threads:
        calls = [
            threads.submit(kvplan.execute, lower, two.peer_memory(links[0]), one.memory),
            threads.submit(kvplan.execute, upper, one.peer_memory(links[1]), two.memory),
        ]
        for call in calls:
            call.result(DEADLINE_S)
    np.testing.assert_array_equal(one.seen, two.seen)


@pytest.mark.parametrize("is_pinned", [True, False], ids=["pinned", "pageable"])
def test_host_memory_that_is_not_registered_goes_through_the_staging_memory(
    one: Side, two: Side, is_pinned: bool
) -> None:
    theirs = two.fill(2)
    link, _ = link_both(one, two)
    arena = one.transport.allocate(TENSORS * TENSOR)
    local = np.frombuffer(arena, np.uint8).reshape(TENSORS, BLOCKS, BLOCK)
    held = one.device.pin(arena.address, arena.nbytes) if is_pinned else None
    kvplan.execute(PULL, two.peer_memory(link), list(local))
    np.testing.assert_array_equal(local, moved(theirs, np.zeros_like(local)))
    kvplan.execute(PUSH, list(local), two.peer_memory(link, writable=True))
    np.testing.assert_array_equal(two.seen, moved(local, theirs))
    if held is not None:
        held.close()


@pytest.fixture
def over_rdma(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Links over RDMA. HCCL uses RDMA within a host, too, if devices have addresses."""
    lines = [f"address_{number}=10.1.0.{number + 1}\n" for number in range(8)]
    (tmp_path / "hccn.conf").write_text("".join(lines))
    monkeypatch.setenv("KVPLAN_HCCN_CONF", str(tmp_path / "hccn.conf"))
    monkeypatch.setenv("HCCL_INTRA_ROCE_ENABLE", "1")


def test_host_memory_of_the_peer_is_not_reached_over_hccs(one: Side, two: Side) -> None:
    arenas = [end.transport.allocate(TENSOR) for end in (one, two)]
    for side, arena in zip((one, two), arenas, strict=True):
        side.transport.register(arena)
    link, _ = link_both(one, two)
    with refused(LLMStatusCode.LLM_FEATURE_NOT_ENABLED) as error:
        link.memory([arenas[1].address], TENSOR)
    assert "HCCL does not reach over HCCS" in str(error.value)
    for end in (one, two):  # host memory is not bound, either: HCCL would map it for nothing
        regions = [
            element for element in end.transport._hccl.regions.all() if not element.on_device
        ]
        bound = end.transport._hccl._open
        assert regions
        assert all(region.native not in each.regions for region in regions for each in bound)


def test_device_memory_is_registered_by_whole_pages(make_side: MakeSide, one: Side) -> None:
    two = make_side(1, registers=False)
    theirs = two.fill(2)
    ours = one.fill(1)
    for tensor in range(TENSORS):  # no tensor begins with a page
        two.transport.register(DeviceRange(two.buffer.address + tensor * TENSOR, TENSOR))
    (region,) = two.transport._hccl.regions.all()
    assert (region.ref.address, region.ref.nbytes) == (two.buffer.address, 2 << 20)
    link, _ = link_both(one, two)
    kvplan.execute(PULL, two.peer_memory(link), one.memory)
    np.testing.assert_array_equal(one.seen, moved(theirs, ours))


@pytest.mark.usefixtures("over_rdma")
@pytest.mark.parametrize("kind", ["device", "host"])
def test_parts_of_a_known_allocation_are_in_one_region(make_side: MakeSide, kind: str) -> None:
    """No later part renews a connection, and a tensor may lie in two parts."""
    side, page = make_side(0, registers=False), 2 << 20
    places, parts = [page, 3 * page, 2 * page], list[DeviceRange | memoryview]()
    if kind == "device":
        buffer = side.device.allocate(4 * page)
        address = buffer.address
        parts += [DeviceRange(address + place, page, buffer) for place in places]
    else:
        arena = side.transport.allocate(4 * page)
        address = arena.address
        parts += [memoryview(arena)[place : place + page] for place in places]
    ranges = [side.transport.register(part).range for part in parts]
    (region,) = {region for each in ranges for region in each.regions}
    assert (region.address, region.nbytes) == (address, 4 * page)


@pytest.mark.usefixtures("over_rdma")
def test_registered_host_memory_is_used_directly_at_both_ends(
    make_side: MakeSide, sim_log: Log
) -> None:
    one, two = make_side(0), make_side(1)
    arenas = [end.transport.allocate(TENSORS * TENSOR) for end in (one, two)]
    shape = (TENSORS, BLOCKS, BLOCK)
    ours, theirs = (np.frombuffer(arena, np.uint8).reshape(shape) for arena in arenas)
    theirs[:] = np.random.default_rng(3).integers(0, 256, shape, np.uint8)
    for side, arena in zip((one, two), arenas, strict=True):
        side.transport.register(arena)
    link, _ = link_both(one, two)
    sim_log.restart()
    base = arenas[1].address
    remote = link.memory([base + i * TENSOR for i in range(TENSORS)], TENSOR)
    assert not remote.on_device
    kvplan.execute(PULL, remote, HostMemory.from_arrays(list(ours)))
    np.testing.assert_array_equal(ours, moved(theirs, np.zeros_like(ours)))
    staged = [count for count in sim_log.counts() if "Memcpy" in count and "HOST" in count]
    assert staged == []


def test_device_memory_that_is_not_registered_goes_through_the_staging_memory(
    make_side: MakeSide, two: Side
) -> None:
    one = make_side(0, registers=False)
    ours, theirs = one.fill(1), two.fill(2)
    link, _ = link_both(one, two)
    kvplan.execute(PULL, two.peer_memory(link), one.memory)
    np.testing.assert_array_equal(one.seen, moved(theirs, ours))


def test_the_error_without_staging_memory_names_the_remedy(make_side: MakeSide, two: Side) -> None:
    one = make_side(0, registers=False, staging_nbytes=0)
    link, _ = link_both(one, two)
    with refused(LLMStatusCode.LLM_FEATURE_NOT_ENABLED) as error:
        kvplan.execute(PULL, two.peer_memory(link), one.memory)
    assert "device memory that is not registered with HCCL" in str(error.value)
    assert "kvplan.staging_nbytes=0" in str(error.value)


def test_a_signal_handler_that_reads_tickets_amid_a_read_gets_none(
    one: Side, two: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two reads at a time would use the same space on the device."""
    link_both(one, two)
    (connections,) = one.transport._links
    device, found = one.transport._hccl.device, list[object]()
    read = device.read

    def interrupted(address: int, words: bytearray) -> None:
        monkeypatch.undo()
        found.append(connections.tickets(7))
        read(address, words)

    monkeypatch.setattr(device, "read", interrupted)
    assert connections.tickets(7) is not None
    assert found == [None]


@pytest.mark.parametrize("nbytes", [1, 2**14 - 1, 2**32 + 1])
def test_too_little_staging_memory_is_refused(make_side: MakeSide, nbytes: int) -> None:
    with refused(
        LLMStatusCode.LLM_PARAM_INVALID,
        rf"staging_nbytes={nbytes} must be 0 or in \[16384, 4294967296\]",
    ):
        make_side(0, registers=False, staging_nbytes=nbytes)


@pytest.mark.parametrize("wrong", [-1, 256])
@pytest.mark.parametrize("name", ["traffic_class", "service_level"])
def test_a_class_or_level_out_of_range_is_refused(
    make_side: MakeSide, name: str, wrong: int
) -> None:
    with refused(LLMStatusCode.LLM_PARAM_INVALID, f"{name}={wrong} is out of range"):
        make_side(0, **{name: wrong})


@pytest.mark.parametrize("nbytes", [2**14, 2**14 + 5])
def test_the_least_staging_memory_moves_all_bytes(
    make_side: MakeSide, two: Side, nbytes: int
) -> None:
    one = make_side(0, registers=False, staging_nbytes=nbytes)
    ours, theirs = one.fill(1), two.fill(2)
    link, _ = link_both(one, two)
    kvplan.execute(PULL, two.peer_memory(link), one.memory)
    np.testing.assert_array_equal(one.seen, moved(theirs, ours))


class TestClosing:
    def test_a_closed_link_reports_its_reason(self, one: Side, two: Side) -> None:
        link, _ = link_both(one, two)
        remote = two.peer_memory(link)
        link.close(LLMException("gone", status_code=LLMStatusCode.LLM_LINK_FAILED))
        link.close()
        for call in (
            link.check,
            remote.check,
            lambda: two.peer_memory(link),
            lambda: kvplan.execute(PULL, remote, one.memory),
        ):
            with refused(LLMStatusCode.LLM_LINK_FAILED) as error:
                call()
            assert error.value.args[0] == "gone"

    def test_a_transfer_in_flight_ends_with_the_links_reason(
        self, one: Side, two: Side, simulator: Controls
    ) -> None:
        link, _ = link_both(one, two)
        simulator.add_fault("HcclBatchGet:1=hang")
        task = kvplan.submit(PULL, two.peer_memory(link), one.memory)
        link.close(LLMException("gone", status_code=LLMStatusCode.LLM_LINK_FAILED))
        with refused(LLMStatusCode.LLM_LINK_FAILED) as error:
            task.wait(DEADLINE_S * 1000)
        assert "gone" in str(error.value)
        assert error.value.unconfirmed == ((0, PULL.num_descriptors),)

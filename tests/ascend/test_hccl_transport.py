"""The HCCL transport between two devices of this process, on the simulated libraries."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvplan
from kvplan import LLMException, LLMStatusCode
from kvplan.execution import HostMemory
from kvplan.transport.protocol import DeviceRange
from tests.ascend.hccl_side import (
    BLOCK,
    BLOCKS,
    DEADLINE_S,
    DESC,
    DST,
    SRC,
    TENSOR,
    TENSORS,
    Side,
    link_both,
)
from tests.ascend.simulator import Controls, Log

MakeSide = Callable[..., Side]
PULL = kvplan.plan_pull_blocks(DESC, DESC, SRC, DST)
PUSH = kvplan.plan_push_blocks(DESC, DESC, SRC, DST)


@pytest.fixture
def make_side(simulator: Controls) -> Iterator[MakeSide]:
    """Make sides, each on a device of its own; after the test nothing of them is left."""
    gc.collect()
    before = simulator.left()  # of a test that failed
    with ExitStack() as sides:

        def make(device_id: int, **options: Any) -> Side:
            side = Side(device_id, **options)
            sides.callback(side.close)
            return side

        yield make
    gc.collect()
    left = simulator.left()
    assert {kind: left[kind] for kind in left if left[kind] > before.get(kind, 0)} == {}


@pytest.fixture
def one(make_side: MakeSide) -> Side:
    return make_side(0)


@pytest.fixture
def two(make_side: MakeSide) -> Side:
    return make_side(1)


def moved(src: Any, dst: Any) -> Any:
    """What SRC -> DST leaves, by NumPy alone."""
    left = dst.copy()
    left[:, DST] = src[:, SRC]
    return left


def refusal(call: Callable[..., object], *arguments: Any, **named: Any) -> LLMException:
    with pytest.raises(LLMException) as refused:
        call(*arguments, **named)
    return refused.value


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
    lower = kvplan.plan_pull_blocks(DESC, DESC, halves[0], halves[0])
    upper = kvplan.plan_pull_blocks(DESC, DESC, halves[1], halves[1])
    with ThreadPoolExecutor(2) as threads:
        calls = [
            threads.submit(kvplan.execute, lower, two.peer_memory(links[0]), one.memory),
            threads.submit(kvplan.execute, upper, one.peer_memory(links[1]), two.memory),
        ]
        for it in calls:
            it.result(DEADLINE_S)
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
    """HCCL takes RDMA inside the host, too, for which devices have addresses."""
    lines = [f"address_{number}=10.1.0.{number + 1}\n" for number in range(8)]
    (tmp_path / "hccn.conf").write_text("".join(lines))
    monkeypatch.setenv("KVPLAN_HCCN_CONF", str(tmp_path / "hccn.conf"))
    monkeypatch.setenv("HCCL_INTRA_ROCE_ENABLE", "1")


def test_host_memory_of_the_peer_is_not_reached_over_hccs(one: Side, two: Side) -> None:
    arenas = [it.transport.allocate(TENSOR) for it in (one, two)]
    for side, arena in zip((one, two), arenas, strict=True):
        side.transport.register(arena)
    link, _ = link_both(one, two)
    error = refusal(link.memory, [arenas[1].address], TENSOR)
    assert error.status_code == LLMStatusCode.LLM_FEATURE_NOT_ENABLED
    assert "HCCL does not reach over HCCS" in str(error)
    for end in (one, two):  # nor is it bound: HCCL would map it for nothing
        regions = [it for it in end.transport._end.regions.all() if not it.on_device]
        bound = end.transport._end._open
        assert regions
        assert all(it.native not in each.regions for it in regions for each in bound)


def test_device_memory_is_registered_by_whole_pages(make_side: MakeSide, one: Side) -> None:
    two = make_side(1, registers=False)
    theirs = two.fill(2)
    ours = one.fill(1)
    for tensor in range(TENSORS):  # none begins with a page
        two.transport.register(DeviceRange(two.buffer.address + tensor * TENSOR, TENSOR))
    (region,) = two.transport._end.regions.all()
    assert (region.ref.address, region.ref.nbytes) == (two.buffer.address, 2 << 20)
    link, _ = link_both(one, two)
    kvplan.execute(PULL, two.peer_memory(link), one.memory)
    np.testing.assert_array_equal(one.seen, moved(theirs, ours))


@pytest.mark.usefixtures("over_rdma")
def test_registered_host_memory_is_used_directly_at_both_ends(
    make_side: MakeSide, sim_log: Log
) -> None:
    one, two = make_side(0), make_side(1)
    arenas = [it.transport.allocate(TENSORS * TENSOR) for it in (one, two)]
    shape = (TENSORS, BLOCKS, BLOCK)
    ours, theirs = (np.frombuffer(it, np.uint8).reshape(shape) for it in arenas)
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
    staged = [it for it in sim_log.counts() if "Memcpy" in it and "HOST" in it]
    assert staged == []


def test_device_memory_that_is_not_registered_goes_through_the_staging_memory(
    make_side: MakeSide, two: Side
) -> None:
    one = make_side(0, registers=False)
    ours, theirs = one.fill(1), two.fill(2)
    link, _ = link_both(one, two)
    kvplan.execute(PULL, two.peer_memory(link), one.memory)
    np.testing.assert_array_equal(one.seen, moved(theirs, ours))


def test_without_staging_memory_it_says_what_to_do(make_side: MakeSide, two: Side) -> None:
    one = make_side(0, registers=False, staging_nbytes=0)
    link, _ = link_both(one, two)
    error = refusal(kvplan.execute, PULL, two.peer_memory(link), one.memory)
    assert error.status_code == LLMStatusCode.LLM_FEATURE_NOT_ENABLED
    assert "device memory that is not registered with HCCL" in str(error)
    assert "kvplan.staging_nbytes=0" in str(error)


def test_what_the_owner_deregisters_is_never_a_success(one: Side, two: Side) -> None:
    one.fill(1)
    two.fill(2)
    link, _ = link_both(one, two)
    remote = two.peer_memory(link, writable=True)
    two.transport.deregister(two.registration)
    for plan, src, dst in ((PULL, remote, one.memory), (PUSH, one.memory, remote)):
        error = refusal(kvplan.execute, plan, src, dst)
        assert error.status_code != LLMStatusCode.LLM_SUCCESS
        assert error.unconfirmed == ((0, plan.num_descriptors),)


def test_an_ended_registration_inside_a_pool_is_no_cache_any_more(
    make_side: MakeSide, one: Side
) -> None:
    two = make_side(1, registers=False)
    two.transport.expect(DeviceRange(two.buffer.address, two.buffer.nbytes, two.buffer))
    part = two.register()
    link, _ = link_both(one, two)
    remote = two.peer_memory(link)
    kvplan.execute(PULL, remote, one.memory)
    two.transport.deregister(part)
    error = refusal(kvplan.execute, PULL, remote, one.memory)
    assert error.status_code == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    # The same slot and address, but another registration.
    again = two.register()
    assert again.range.slot == part.range.slot
    assert refusal(kvplan.execute, PULL, remote, one.memory).status_code == error.status_code
    kvplan.execute(
        PULL, two.peer_memory(link, metadata=two.transport.metadata([again])), one.memory
    )


class TestRenewal:
    def test_memory_of_the_peer_that_came_later(self, make_side: MakeSide, one: Side) -> None:
        two = make_side(1, registers=False)
        ours, theirs = one.fill(1), two.fill(2)
        link, back = link_both(one, two)
        two.register()
        remote = two.peer_memory(link, metadata=two.transport.metadata())
        kvplan.execute(PULL, remote, one.memory)
        np.testing.assert_array_equal(one.seen, moved(theirs, ours))
        assert link.connection().generation == back.connection().generation == 1

    def test_memory_of_this_end_that_came_later(self, make_side: MakeSide, two: Side) -> None:
        one = make_side(0, registers=False)
        ours, theirs = one.fill(1), two.fill(2)
        link, _ = link_both(one, two)
        one.register()
        kvplan.execute(PULL, two.peer_memory(link), one.memory)
        np.testing.assert_array_equal(one.seen, moved(theirs, ours))
        assert link.connection().generation == 1

    def test_a_pool_needs_none(self, make_side: MakeSide) -> None:
        sides = [make_side(i, registers=False) for i in (0, 1)]
        for it in sides:
            it.transport.expect(DeviceRange(it.buffer.address, it.buffer.nbytes, it.buffer))
        one, two = sides
        link, _ = link_both(one, two)
        two.register()
        kvplan.execute(PULL, two.peer_memory(link, metadata=two.transport.metadata()), one.memory)
        assert link.connection().generation == 0

    def test_one_that_fails_leaves_the_connection_as_it_was(
        self, make_side: MakeSide, one: Side, simulator: Controls
    ) -> None:
        two = make_side(1, registers=False)
        link, back = link_both(one, two)
        two.register()
        later = two.peer_memory(link, metadata=two.transport.metadata())
        simulator.add_fault("HcclCommInitClusterInfoMemConfig:1=4")
        error = refusal(kvplan.execute, PULL, later, one.memory)
        assert error.status_code == LLMStatusCode.LLM_LINK_FAILED
        assert "HcclCommInitClusterInfoMemConfig" in str(error)
        assert link.connection().generation == back.connection().generation == 0
        kvplan.execute(PULL, later, one.memory)
        assert link.connection().generation == 2

    def test_the_old_connection_goes_when_neither_end_uses_it(
        self, make_side: MakeSide, one: Side, sim_log: Log
    ) -> None:
        two = make_side(1, registers=False)
        link, back = link_both(one, two)
        held = back.connection()
        two.register()
        kvplan.execute(PULL, two.peer_memory(link, metadata=two.transport.metadata()), one.memory)
        sim_log.restart()
        for it in (one, two):
            assert it.transport._aside.wait(DEADLINE_S)
        assert sim_log.counts("HcclCommDestroy") == {"HcclCommDestroy": 0}
        assert held.communicator.state == "ready"
        del held
        for it in (one, two, one, two):
            assert it.transport._aside.wait(DEADLINE_S)
        assert sim_log.counts("HcclCommDestroy") == {"HcclCommDestroy": 2}

    def test_without_anybody_who_renews_it_says_so(self, make_side: MakeSide, one: Side) -> None:
        two = make_side(1, registers=False)
        link, _ = link_both(one, two)
        link.renewable.ask = None
        two.register()
        later = two.peer_memory(link, metadata=two.transport.metadata())
        error = refusal(kvplan.execute, PULL, later, one.memory)
        assert error.status_code == LLMStatusCode.LLM_FEATURE_NOT_ENABLED
        assert "nobody renews" in str(error)


class TestConnecting:
    def test_a_peer_that_does_not_come(self, one: Side, two: Side, sim_log: Log) -> None:
        sim_log.restart()
        error = refusal(one.transport.connect, two.transport.metadata(), timeout_ms=100)
        assert error.status_code == LLMStatusCode.LLM_LINK_FAILED
        assert "HcclCommPrepare: 9" in str(error)
        counts = sim_log.counts("HcclCommBindMem", "HcclCommUnbindMem", "HcclCommDestroy")
        assert counts["HcclCommBindMem"] == counts["HcclCommUnbindMem"] > 0
        assert counts["HcclCommDestroy"] == 1

    def test_sessions_do_not_meet(self, one: Side, two: Side) -> None:
        with ThreadPoolExecutor(2) as threads:
            calls = [
                threads.submit(
                    refusal, it.transport.connect, other, timeout_ms=100, session=session
                )
                for it, other, session in (
                    (one, two.transport.metadata(), b"1"),
                    (two, one.transport.metadata(), b"2"),
                )
            ]
            for it in calls:
                assert it.result(DEADLINE_S).status_code == LLMStatusCode.LLM_LINK_FAILED
        link_both(one, two, session=b"1")

    def test_one_end_fails_and_the_other_is_told_in_time(
        self, one: Side, two: Side, simulator: Controls
    ) -> None:
        simulator.add_fault("HcclCommBindMem:2=4")
        with ThreadPoolExecutor(2) as threads:
            calls = [
                threads.submit(refusal, it.transport.connect, other, timeout_ms=100)
                for it, other in (
                    (one, two.transport.metadata()),
                    (two, one.transport.metadata()),
                )
            ]
            errors = [it.result(DEADLINE_S) for it in calls]
        assert {it.status_code for it in errors} == {LLMStatusCode.LLM_LINK_FAILED}
        assert any("HcclCommBindMem: 4" in str(it) for it in errors)
        link_both(one, two)

    def test_the_transport_is_closed_while_it_connects(self, one: Side, two: Side) -> None:
        metadata = two.transport.metadata()
        with ThreadPoolExecutor(1) as threads:
            call = threads.submit(refusal, one.transport.connect, metadata, timeout_ms=1000)
            while not one.transport._end._open:
                pass
            one.transport.close()
            error = call.result(DEADLINE_S)
        assert error.status_code == LLMStatusCode.LLM_LINK_FAILED

    def test_one_device_cannot_be_both_ends(self, one: Side, make_side: MakeSide) -> None:
        other = make_side(0)
        reason = one.transport.refusal(other.transport.metadata())
        assert reason is not None
        assert "a DeviceId of its own" in reason

    def test_other_products_are_refused(self, one: Side, two: Side) -> None:
        told = two.transport.metadata().replace(b'"product":"A2"', b'"product":"950"')
        assert "of product 950, this one of A2" in (one.transport.refusal(told) or "")
        error = refusal(one.transport.connect, told, timeout_ms=1)
        assert error.status_code == LLMStatusCode.LLM_LINK_FAILED

    def test_bad_metadata_is_a_refusal(self, one: Side) -> None:
        assert "no JSON" in (one.transport.refusal(b"{") or "")
        error = refusal(one.transport.connect, b"{", timeout_ms=1)
        assert error.status_code == LLMStatusCode.LLM_PARAM_INVALID


class TestClosing:
    def test_a_closed_link_says_why(self, one: Side, two: Side) -> None:
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
            error = refusal(call)
            assert (str(error.args[0]), error.status_code) == (
                "gone",
                LLMStatusCode.LLM_LINK_FAILED,
            )

    def test_a_transfer_in_flight_ends_with_the_links_reason(
        self, one: Side, two: Side, simulator: Controls
    ) -> None:
        link, _ = link_both(one, two)
        simulator.add_fault("HcclBatchGet:1=hang")
        task = kvplan.submit(PULL, two.peer_memory(link), one.memory)
        link.close(LLMException("gone", status_code=LLMStatusCode.LLM_LINK_FAILED))
        error = refusal(task.wait, DEADLINE_S * 1000)
        assert "gone" in str(error)
        assert error.status_code == LLMStatusCode.LLM_LINK_FAILED
        assert error.unconfirmed == ((0, PULL.num_descriptors),)


class TestRegistering:
    def test_what_is_registered_in_parts_is_reached_in_parts(
        self, make_side: MakeSide, one: Side
    ) -> None:
        two = make_side(1, registers=False)
        page = 2 << 20
        buffer = two.device.allocate(2 * page)
        two.transport.register(DeviceRange(buffer.address + page, page))
        two.transport.register(DeviceRange(buffer.address, 2 * page))
        link, _ = link_both(one, two)
        link.memory([buffer.address, buffer.address + page], page)
        error = refusal(link.memory, [buffer.address + page // 2], page)
        assert error.status_code == LLMStatusCode.LLM_FEATURE_NOT_ENABLED
        assert "register the whole first" in str(error)

    def test_one_range_twice_ends_twice(self, one: Side, two: Side) -> None:
        second = two.register()
        link, _ = link_both(one, two)
        two.transport.deregister(two.registration)
        kvplan.execute(
            PULL,
            two.peer_memory(link, metadata=two.transport.metadata([second])),
            one.memory,
        )
        two.transport.deregister(second)
        two.transport.deregister(second)
        assert two.transport._end.regions.all() == []

    def test_another_devices_memory_is_refused(self, one: Side, two: Side) -> None:
        error = refusal(one.transport.register, DeviceRange(two.buffer.address, 100))
        assert error.status_code == LLMStatusCode.LLM_PARAM_INVALID

    def test_read_only_memory_is_not_written(self, make_side: MakeSide, one: Side) -> None:
        two = make_side(1, registers=False)
        two.transport.register(
            DeviceRange(two.buffer.address, two.buffer.nbytes, two.buffer), writable=False
        )
        link, _ = link_both(one, two)
        error = refusal(two.peer_memory, link, writable=True)
        assert error.status_code == LLMStatusCode.LLM_PARAM_INVALID

    def test_all_slots_of_the_board(self, make_side: MakeSide) -> None:
        side = make_side(0, max_registrations=2)
        side.register()
        error = refusal(side.register)
        assert error.status_code == LLMStatusCode.LLM_OUT_OF_MEMORY
        side.transport.deregister(side.registration)
        side.register()

    def test_another_transports_metadata_is_refused(self, one: Side, two: Side) -> None:
        link, _ = link_both(one, two)
        error = refusal(two.peer_memory, link, metadata=one.transport.metadata())
        assert error.status_code == LLMStatusCode.LLM_PARAM_INVALID
        assert "another" in str(error)

    def test_an_address_that_is_not_registered(self, one: Side, two: Side) -> None:
        link, _ = link_both(one, two)
        error = refusal(link.memory, [two.buffer.address - 1], 10)
        assert error.status_code == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST

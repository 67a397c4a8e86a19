"""Connections are renewed for newer memory, and closed after their last use."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast
from weakref import ref

import numpy as np
import pytest

import kvplan
from kvplan import LLMException, LLMStatusCode
from kvplan.transport.hccl.addresses import table_of
from kvplan.transport.hccl.connections import Connections
from kvplan.transport.hccl.device import BackgroundWorker
from kvplan.transport.hccl.metadata import Metadata
from kvplan.transport.protocol import DeviceRange
from tests.ascend.hccl_side import DEADLINE_S, PULL, Side, link_both, moved
from tests.ascend.hccl_sides import MakeSide
from tests.ascend.simulator import Controls, Log
from tests.support import lone_user
from tests.support.refusals import refused


def test_later_memory_of_the_peer_renews_the_connection(make_side: MakeSide, one: Side) -> None:
    two = make_side(1, registers=False)
    ours, theirs = one.fill(1), two.fill(2)
    link, back = link_both(one, two)
    two.register()
    remote = two.peer_memory(link, metadata=two.transport.metadata())
    kvplan.execute(PULL, remote, one.memory)
    np.testing.assert_array_equal(one.seen, moved(theirs, ours))
    assert link.connection().generation == back.connection().generation == 1


def test_later_local_memory_renews_the_connection(make_side: MakeSide, two: Side) -> None:
    one = make_side(0, registers=False)
    ours, theirs = one.fill(1), two.fill(2)
    link, _ = link_both(one, two)
    one.register()
    kvplan.execute(PULL, two.peer_memory(link), one.memory)
    np.testing.assert_array_equal(one.seen, moved(theirs, ours))
    assert link.connection().generation == 1


def test_a_connection_publishes_only_the_regions_that_it_binds(one: Side, two: Side) -> None:
    ours, numbers, kept = one.transport, [], []

    def own_metadata() -> Metadata:
        kept.append(one.device.allocate(4096))
        ours.register(DeviceRange(kept[-1].address, 4096, kept[-1]))
        numbers.append(ours._hccl.regions.newest)
        return ours._metadata()

    peer = Metadata.from_bytes(two.transport.metadata())
    table = table_of(ours._address, peer.device)
    connections = Connections(ours._hccl, peer, table, b"session", own_metadata, is_hccs=False)
    published = Metadata.from_bytes(connections.open(0))
    connections.close(LLMException("enough"))
    before, after = numbers  # the first two: for the name, and when all was bound
    assert published.newest == before < after


def test_memory_in_a_pool_needs_no_renewal(make_side: MakeSide) -> None:
    sides = [make_side(i, registers=False) for i in (0, 1)]
    for side in sides:
        side.transport.preregister_pool(
            DeviceRange(side.buffer.address, side.buffer.nbytes, side.buffer)
        )
    one, two = sides
    link, _ = link_both(one, two)
    two.register()
    kvplan.execute(PULL, two.peer_memory(link, metadata=two.transport.metadata()), one.memory)
    assert link.connection().generation == 0


def test_a_failed_renewal_leaves_the_connection_as_it_was(
    make_side: MakeSide, one: Side, simulator: Controls
) -> None:
    two = make_side(1, registers=False)
    link, back = link_both(one, two)
    two.register()
    later = two.peer_memory(link, metadata=two.transport.metadata())
    simulator.add_fault("HcclCommInitClusterInfoMemConfig:1=2")
    with refused(LLMStatusCode.LLM_LINK_FAILED) as error:
        kvplan.execute(PULL, later, one.memory)
    assert "HcclCommInitClusterInfoMemConfig" in str(error.value)
    assert link.connection().generation == back.connection().generation == 0
    kvplan.execute(PULL, later, one.memory)
    assert link.connection().generation == 2


def test_a_renewal_that_was_abandoned_before_its_start_leaves_nothing(
    one: Side, two: Side, simulator: Controls
) -> None:
    """A failed peer may be faster than this engine."""
    link, back = link_both(one, two)
    before = simulator.left()
    link.renewable.abandon(1)
    with refused(LLMStatusCode.LLM_LINK_FAILED):
        link.renewable.open(1)
    gc.collect()  # the caught error references the frame in which it was raised
    assert simulator.left() == before
    assert link.connection().generation == back.connection().generation == 0


@pytest.mark.parametrize("is_made", [False, True], ids=["opened", "made"])
def test_a_renewal_that_was_abandoned_after_its_start_leaves_nothing(
    is_made: bool, one: Side, two: Side, simulator: Controls
) -> None:
    """The peer has abandoned the renewal as well, so no message of it will arrive."""
    ends, left = link_both(one, two), []
    for end in ends:
        end.renewable.notify_unused = lambda _generation: None
    for generation in (1, 2):  # the first takes cached streams
        for end in ends:
            end.renewable.open(generation)
        if is_made:
            with ThreadPoolExecutor(2) as threads:
                renewals = [
                    threads.submit(end.renewable.renew, generation, timeout_ms=5000) for end in ends
                ]
            assert [each.result() for each in renewals] == [None, None]
        for end in ends:
            end.renewable.abandon(generation)
        for side in (one, two, one, two):
            assert side.transport._background.wait(DEADLINE_S)
        left.append(simulator.left())
    assert left[0] == left[1]


def test_the_old_connection_is_closed_when_neither_end_uses_it(
    make_side: MakeSide, one: Side, sim_log: Log
) -> None:
    two = make_side(1, registers=False)
    link, back = link_both(one, two)
    held = back.connection()
    two.register()
    kvplan.execute(PULL, two.peer_memory(link, metadata=two.transport.metadata()), one.memory)
    sim_log.restart()
    for end in (one, two):
        assert end.transport._background.wait(DEADLINE_S)
    assert sim_log.counts("HcclCommDestroy") == {"HcclCommDestroy": 0}
    assert held.communicator.state == "ready"
    del held
    for end in (one, two, one, two):
        assert end.transport._background.wait(DEADLINE_S)
    assert sim_log.counts("HcclCommDestroy") == {"HcclCommDestroy": 2}


def test_a_transport_that_is_closed_during_a_connect_makes_no_connection(
    one: Side, two: Side, monkeypatch: pytest.MonkeyPatch, sim_log: Log
) -> None:
    way_to = one.transport._way_to

    def closed_meanwhile(peer: Metadata) -> object:
        one.transport.close()
        return way_to(peer)

    monkeypatch.setattr(one.transport, "_way_to", closed_meanwhile)
    sim_log.restart()
    with refused(LLMStatusCode.LLM_FAILED, "the transport is closed"):
        one.transport.connect(two.transport.metadata(), timeout_ms=1000)
    assert sim_log.counts("HcclCommInit") == {"HcclCommInit": 0}


def test_a_pool_that_is_found_while_the_transport_is_closed_is_released(
    make_side: MakeSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = make_side(0, registers=False)
    registrations = side.transport._registrations
    cover = registrations._cover

    def closed_meanwhile(*given: Any) -> Any:
        covered = cover(*given)
        side.transport.close()
        return covered

    monkeypatch.setattr(registrations, "_cover", closed_meanwhile)
    buffer = side.buffer
    side.transport.preregister_pool(DeviceRange(buffer.address, buffer.nbytes, buffer))
    assert side.transport._hccl.regions.all() == []


def test_a_closed_worker_keeps_no_job() -> None:
    """A finalizer may hand over a job, and with it a connection, after the end of the thread."""

    def job() -> None: ...

    kept, worker = ref(job), BackgroundWorker("test")
    worker.close()
    worker.do(job)
    del job
    assert kept() is None


def test_the_error_mentions_disabled_renewals(make_side: MakeSide, one: Side) -> None:
    two = make_side(1, registers=False)
    link, _ = link_both(one, two)
    link.renewable.request_renewal = None
    two.register()
    later = two.peer_memory(link, metadata=two.transport.metadata())
    with refused(LLMStatusCode.LLM_FEATURE_NOT_ENABLED) as error:
        kvplan.execute(PULL, later, one.memory)
    assert "a connection cannot be renewed" in str(error.value)


def test_the_writes_of_a_closed_link_are_unknown_until_no_connection_is_left() -> None:
    """The peer may still write over a connection that HCCL has not closed."""
    none = cast(Any, None)
    connections = Connections(none, none, none, b"", none, is_hccs=False)
    assert connections.tickets(7) == frozenset()
    connections.close(LLMException("unlinked"))
    for states, expected in (
        (["closed", "ready"], None),
        (["ready", "closed"], None),
        (["closed", "closed"], frozenset()),
    ):
        connections._opened_ever = {cast(Any, Opened(state)) for state in states}
        assert connections.tickets(7) == expected


class Opened:
    """A connection in a state of HCCL."""

    def __init__(self, state: str) -> None:
        self.state = state


def test_a_connection_that_could_not_be_made_is_closed_once() -> None:
    calls: list[str] = []

    class Interrupted:
        def prepare(self, timeout_ms: float) -> None:
            raise KeyboardInterrupt

        def cancel(self, why: str) -> None:
            calls.append("cancel")

    hccl: Any = SimpleNamespace(
        close=lambda _: calls.append("close"), background=SimpleNamespace(do=lambda job: job())
    )
    none = cast(Any, None)
    connections = Connections(hccl, none, none, b"", none, is_hccs=False)
    connections._communicators[3], connections._opened[3] = cast(Any, Interrupted()), 1
    with pytest.raises(KeyboardInterrupt):
        connections.renew(3, timeout_ms=1000)
    connections.close(LLMException("unlinked"))
    assert calls == ["close"]


def test_a_renewal_that_finds_no_thread_is_tried_again() -> None:
    """Meanwhile, tickets over a disturbed connection are unknown."""
    program = """
        from queue import SimpleQueue
        from types import SimpleNamespace
        from kvplan.transport.hccl.connections import Connection, Connections
        from tests.support.lone_user import allow_threads, become

        become()
        hccl = SimpleNamespace(read_tickets=lambda *_: None)
        peer = SimpleNamespace(generations=SimpleNamespace(tickets=4096))
        connections = Connections(hccl, peer, None, b"", None, is_hccs=False)
        disturbed = SimpleNamespace(disturbed=True, state="ready")
        connections._current = Connection(1, disturbed, newest=1)
        renewed = SimpleQueue()
        connections.request_renewal = lambda timeout_ms: renewed.put(True)
        for room in (1, None):
            allow_threads(room)
            assert connections.tickets(7) is None
        assert renewed.get(timeout=20)
    """
    lone_user.run(program)

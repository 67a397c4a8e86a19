"""A connection is renewed where memory is newer than it is, and goes when nobody uses it."""

from __future__ import annotations

import numpy as np

import kvplan
from kvplan import LLMStatusCode
from kvplan.transport.protocol import DeviceRange
from tests.ascend.hccl_side import DEADLINE_S, PULL, Side, link_both, moved
from tests.ascend.hccl_sides import MakeSide, refusal
from tests.ascend.simulator import Controls, Log


def test_memory_of_the_peer_that_came_later(make_side: MakeSide, one: Side) -> None:
    two = make_side(1, registers=False)
    ours, theirs = one.fill(1), two.fill(2)
    link, back = link_both(one, two)
    two.register()
    remote = two.peer_memory(link, metadata=two.transport.metadata())
    kvplan.execute(PULL, remote, one.memory)
    np.testing.assert_array_equal(one.seen, moved(theirs, ours))
    assert link.connection().generation == back.connection().generation == 1


def test_memory_of_this_end_that_came_later(make_side: MakeSide, two: Side) -> None:
    one = make_side(0, registers=False)
    ours, theirs = one.fill(1), two.fill(2)
    link, _ = link_both(one, two)
    one.register()
    kvplan.execute(PULL, two.peer_memory(link), one.memory)
    np.testing.assert_array_equal(one.seen, moved(theirs, ours))
    assert link.connection().generation == 1


def test_a_pool_needs_none(make_side: MakeSide) -> None:
    sides = [make_side(i, registers=False) for i in (0, 1)]
    for it in sides:
        it.transport.expect(DeviceRange(it.buffer.address, it.buffer.nbytes, it.buffer))
    one, two = sides
    link, _ = link_both(one, two)
    two.register()
    kvplan.execute(PULL, two.peer_memory(link, metadata=two.transport.metadata()), one.memory)
    assert link.connection().generation == 0


def test_one_that_fails_leaves_the_connection_as_it_was(
    make_side: MakeSide, one: Side, simulator: Controls
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
    make_side: MakeSide, one: Side, sim_log: Log
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


def test_without_anybody_who_renews_it_says_so(make_side: MakeSide, one: Side) -> None:
    two = make_side(1, registers=False)
    link, _ = link_both(one, two)
    link.renewable.ask = None
    two.register()
    later = two.peer_memory(link, metadata=two.transport.metadata())
    error = refusal(kvplan.execute, PULL, later, one.memory)
    assert error.status_code == LLMStatusCode.LLM_FEATURE_NOT_ENABLED
    assert "nobody renews" in str(error)

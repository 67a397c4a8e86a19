"""The cable is cut or removed in the middle of a transfer, and restored.

Transfers use one connection; with KVPLAN_TEST_ACROSS=all (`make across`), three as well.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from tests.across import network
from tests.across.conftest import MakeEngine
from tests.across.engine import NBYTES, PATIENT, QUICK
from tools.namespaces import Namespace

RATE = "100mbit"  # the transfer takes 0.7 s
SOME = NBYTES // 8
CONNECTIONS = [1, 3] if os.environ.get("KVPLAN_TEST_ACROSS") == "all" else [1]


def directions(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test for pulls and for pushes."""
    ways = [(direction, count) for direction in ("pull", "push") for count in CONNECTIONS]
    return pytest.mark.parametrize(("direction", "connections"), ways)(test)


class Link:
    """Two linked engines on two hosts. Bytes in the direction of the transfer are slow."""

    def __init__(
        self, hosts: list[Namespace], make_engine: MakeEngine, direction: str, **options: int
    ) -> None:
        self.direction = direction
        self.peer, self.user = (
            make_engine(host, number, **options) for number, host in enumerate(hosts, 1)
        )
        self.source, self.target = self.peer, self.user
        if direction == "push":
            self.source, self.target = self.target, self.source
        self.source.hold(seed=1)
        self.target.hold(seed=None)
        self.user.link(self.peer)
        network.limit(self.source.host, RATE)

    def begin(self, timeout_ms: int) -> None:
        """Begin a transfer, and return in the middle."""
        self.user.begin_move(self.direction, self.peer, timeout_ms)
        network.wait_for_bytes(self.target.host, SOME)

    def works_again(self) -> None:
        """Check as `works` does, after an abandoned push: its rest may have broken the link."""
        network.mend(self.source.host)
        self.target.clear()
        status = self.user.move(self.direction, self.peer).status
        if self.direction == "push" and status == "LLM_LINK_FAILED":
            self.user.wait_for_state(self.peer, "BROKEN")
            self.peer.wait_for_state(self.user, "BROKEN")
            self.user.link(self.peer)
            self.works()
        else:
            assert status == "LLM_SUCCESS"
            self.target.check(seed=1)

    def works(self) -> None:
        """Check that a transfer of everything succeeds again."""
        network.mend(self.source.host)
        self.target.clear()
        assert self.user.move(self.direction, self.peer).status == "LLM_SUCCESS"
        self.target.check(seed=1)


@directions
def test_a_transfer_survives_a_short_cut(
    hosts: list[Namespace], make_engine: MakeEngine, direction: str, connections: int
) -> None:
    link = Link(hosts, make_engine, direction, tcp_connections=connections, **PATIENT)
    link.begin(timeout_ms=30_000)
    hosts[0].cut()
    hosts[0].restore()
    outcome = link.user.moved()
    assert outcome.status == "LLM_SUCCESS", outcome
    link.target.check(seed=1)


@directions
def test_a_cut_until_the_deadline_times_out(
    hosts: list[Namespace], make_engine: MakeEngine, direction: str, connections: int
) -> None:
    link = Link(hosts, make_engine, direction, tcp_connections=connections, **PATIENT)
    link.begin(timeout_ms=600)
    hosts[0].cut()
    outcome = link.user.moved()
    assert outcome.status == "LLM_TIMEOUT", outcome
    assert 0.6 < outcome.seconds < 10, outcome
    assert outcome.unconfirmed
    link.target.check(1, outcome)
    hosts[0].restore()
    link.works_again()


@directions
def test_a_long_cut_breaks_the_link(
    hosts: list[Namespace], make_engine: MakeEngine, direction: str, connections: int
) -> None:
    link = Link(hosts, make_engine, direction, tcp_connections=connections, **QUICK)
    link.begin(timeout_ms=30_000)
    hosts[0].cut()
    outcome = link.user.moved()
    assert outcome.status == "LLM_LINK_FAILED", outcome
    assert outcome.seconds < 10, outcome
    link.target.check(1, outcome)
    assert "nothing heard for" in link.user.wait_for_state(link.peer, "BROKEN")
    link.peer.wait_for_state(link.user, "BROKEN")
    hosts[0].restore()
    link.user.link(link.peer)
    link.works()


def test_a_removed_cable_breaks_the_link(hosts: list[Namespace], make_engine: MakeEngine) -> None:
    """The same engines link again over the new cable."""
    link = Link(hosts, make_engine, "pull", **QUICK)
    link.begin(timeout_ms=30_000)
    network.unplug(hosts[0])
    outcome = link.user.moved()
    assert outcome.status == "LLM_LINK_FAILED", outcome
    link.target.check(1, outcome)
    network.plug(*hosts)
    link.peer.wait_for_state(link.user, "BROKEN")
    link.user.wait_for_state(link.peer, "BROKEN")
    link.user.link(link.peer)
    link.works()


@directions
def test_a_killed_peer_ends_the_transfer(
    hosts: list[Namespace], make_engine: MakeEngine, direction: str, connections: int
) -> None:
    link = Link(hosts, make_engine, direction, tcp_connections=connections, **PATIENT)
    link.begin(timeout_ms=30_000)
    link.peer.kill()
    outcome = link.user.moved()
    assert outcome.status == "LLM_LINK_FAILED", outcome
    assert outcome.seconds < 10, outcome
    if direction == "pull":
        link.target.check(1, outcome)
    network.mend(*hosts)
    revived = make_engine(hosts[0], 1, tcp_connections=connections, **PATIENT)
    revived.hold(1 if direction == "pull" else None)
    link.user.wait_for_state(link.peer, "BROKEN")
    link.user.link(revived)
    target = link.user if direction == "pull" else revived
    target.clear()
    assert link.user.move(direction, revived).status == "LLM_SUCCESS"
    target.check(seed=1)


@directions
def test_a_stopped_peer_times_out(
    hosts: list[Namespace], make_engine: MakeEngine, direction: str, connections: int
) -> None:
    link = Link(hosts, make_engine, direction, tcp_connections=connections, **PATIENT)
    link.begin(timeout_ms=600)
    link.peer.stop()
    outcome = link.user.moved()
    assert outcome.status == "LLM_TIMEOUT", outcome
    assert 0.6 < outcome.seconds < 10, outcome
    link.peer.resume()
    link.target.check(1, outcome)
    link.works_again()


@directions
@pytest.mark.parametrize("memory", ["allocated", "registered"])
def test_resources_at_the_other_end_of_a_cut_cable_are_released(
    hosts: list[Namespace], make_engine: MakeEngine, direction: str, connections: int, memory: str
) -> None:
    """A transfer must not read memory after its release, nor write to it."""
    link = Link(hosts, make_engine, direction, tcp_connections=connections, **PATIENT)
    link.peer.hold(1 if direction == "pull" else None, memory)
    link.begin(timeout_ms=30_000)
    ends = "deallocate_cache" if memory == "allocated" else "unregister_cache"
    argument = "holder.cache" if memory == "allocated" else "holder.cache.cache_id"
    link.peer.run(f"holder.datadist.{ends}({argument})")
    if memory == "registered":  # registered memory belongs to the program, which reuses it
        link.peer.run("for array in holder.arrays: array[:] = 77")
    outcome = link.user.moved()
    assert outcome.status == "LLM_KV_CACHE_NOT_EXIST", outcome
    if direction == "pull":
        link.user.check(1, outcome)
    elif memory == "registered":
        assert link.peer.run("result = all((array == 77).all() for array in holder.arrays)")
    assert link.user.state(link.peer) == "LINKED"

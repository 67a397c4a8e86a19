"""The cable is cut in the middle of a transfer, or pulled out, and comes back.

By one connection; KVPLAN_TEST_ACROSS=all (`make across`) does it by three as well.
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
    """Two linked engines on two hosts, whose bytes go one way, slowly."""

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
        """Return in the middle of it."""
        self.user.begin_move(self.direction, self.peer, timeout_ms)
        network.wait_for_bytes(self.target.host, SOME)

    def works_again(self) -> None:
        """As `works`, where a push was given up: what it had sent may have cost the link."""
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
        """Move everything, as if nothing had been."""
        network.mend(self.source.host)
        self.target.clear()
        assert self.user.move(self.direction, self.peer).status == "LLM_SUCCESS"
        self.target.check(seed=1)


@directions
def test_cut_and_restored_in_time(
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
def test_cut_until_the_deadline(
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
def test_cut_until_the_peer_is_given_up(
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


def test_pulled_out_and_another_put_in(hosts: list[Namespace], make_engine: MakeEngine) -> None:
    """The same engines link again, over the new one."""
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
def test_the_peer_is_killed(
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
    again = make_engine(hosts[0], 1, tcp_connections=connections, **PATIENT)
    again.hold(1 if direction == "pull" else None)
    link.user.wait_for_state(link.peer, "BROKEN")
    link.user.link(again)
    target = link.user if direction == "pull" else again
    target.clear()
    assert link.user.move(direction, again).status == "LLM_SUCCESS"
    target.check(seed=1)


@directions
def test_the_peer_stops_until_the_deadline(
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
    """Never bytes of what is there after it, nor into it."""
    link = Link(hosts, make_engine, direction, tcp_connections=connections, **PATIENT)
    link.peer.hold(1 if direction == "pull" else None, memory)
    link.begin(timeout_ms=30_000)
    ends = "deallocate_cache" if memory == "allocated" else "unregister_cache"
    argument = "it.cache" if memory == "allocated" else "it.cache.cache_id"
    link.peer.run(f"it.datadist.{ends}({argument})")
    if memory == "registered":  # it is the program's own, which goes on using it
        link.peer.run("for array in it.arrays: array[:] = 77")
    outcome = link.user.moved()
    assert outcome.status == "LLM_KV_CACHE_NOT_EXIST", outcome
    if direction == "pull":
        link.user.check(1, outcome)
    elif memory == "registered":
        assert link.peer.run("result = all((it == 77).all() for it in it.arrays)")
    assert link.user.state(link.peer) == "LINKED"

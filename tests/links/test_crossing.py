"""Concurrent calls: from both ends, from two threads, link and unlink. None waits for ever."""

from __future__ import annotations

import asyncio
import queue
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest

from kvplan import LLMException, LLMStatusCode
from kvplan.links import ClusterInfo, LinkResults, LinkState
from kvplan.links.peer_link import PeerLink
from kvplan.transport.link import TransportLink
from kvplan.transport.local import LocalTransport
from kvplan.transport.tcp.transport import TcpTransport
from tests.links.end import DEADLINE_S, DESC, End
from tests.support.refusals import refused

MakeEnd = Callable[..., End]
OK = LLMStatusCode.LLM_SUCCESS


def at_once(*calls: Callable[[], LinkResults]) -> list[LLMStatusCode]:
    """Make all calls at the same moment, each in a thread, and return their statuses."""
    start = threading.Barrier(len(calls))

    def run(call: Callable[[], LinkResults]) -> LLMStatusCode:
        start.wait()
        return call().status

    with ThreadPoolExecutor(len(calls)) as threads:
        return [item.result(DEADLINE_S) for item in [threads.submit(run, call) for call in calls]]


@pytest.mark.parametrize("round_", range(20))
def test_both_ends_link_at_once(make_end: MakeEnd, round_: int) -> None:
    one, two = make_end(1), make_end(2)
    statuses = at_once(
        lambda: one.links.link([two.cluster], 30_000),
        lambda: two.links.link([one.cluster], 30_000),
    )
    # A call that comes after the other has ended finds the link.
    assert set(statuses) <= {OK, LLMStatusCode.LLM_ALREADY_LINK}
    assert OK in statuses
    one.wait_until(2, LinkState.LINKED)  # a call that finds a link does not wait
    two.wait_until(1, LinkState.LINKED)
    assert (one.links.live(), two.links.live()) == (1, 1)
    for end in (one, two):  # the link works from either end
        end.links.get(3 - end.cluster_id).begin(end)
        end.links.get(3 - end.cluster_id).end(end)
    one.links.unlink([2], 5000).raise_for_status()
    assert (one.state(2), two.state(1)) == (None, None)


class _Slow(LocalTransport):
    """A transport whose `connect` lasts until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.connecting = threading.Event()
        self.go_on = threading.Event()

    def refusal(self, metadata: bytes) -> None:
        return None

    def connect(self, metadata: bytes, **kwargs: Any) -> Any:
        self.connecting.set()
        assert self.go_on.wait(DEADLINE_S)
        return super().connect(metadata, **kwargs)


@pytest.mark.parametrize("caller", [1, 2])
def test_the_second_call_joins_the_first(make_end: MakeEnd, caller: int) -> None:
    slow = _Slow()
    ends = {1: make_end(1, transports=[slow]), 2: make_end(2, transports=[slow])}
    first, second = ends[caller], ends[3 - caller]
    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(first.links.link, [second.cluster], 10000)]
        assert slow.connecting.wait(DEADLINE_S)
        calls.append(threads.submit(second.links.link, [first.cluster], 10000))
        second_busy = second.links.link([first.cluster], 1)
        slow.go_on.set()
        assert [call.result(DEADLINE_S).status for call in calls] == [OK, OK]
    assert second_busy.status is not OK
    assert first.links.live() == second.links.live() == 1
    first.transports = second.transports = ()
    slow.close()


def test_a_delayed_handshake_ends_with_that_of_the_peer(make_end: MakeEnd) -> None:
    """The address of the peer leads to a silent listener."""
    one, two = make_end(1), make_end(2)
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor(1) as threads:
        nowhere = f"127.0.0.1:{silent.getsockname()[1]}"
        call = threads.submit(two.links.link, [ClusterInfo(1, nowhere)], 3_600_000)
        held, _ = silent.accept()
        with held:
            one.link(two.cluster)
            assert call.result(DEADLINE_S).status is OK
        assert one.links.live() == two.links.live() == 1
        one.links.unlink([2], 5000).raise_for_status()
        with refused("LLM_NOT_YET_LINK", r"cluster 1 is not linked(?!; the last attempt)"):
            two.links.get(1)


def test_an_attempt_has_only_the_time_that_earlier_ones_have_left(make_end: MakeEnd) -> None:
    slow = _Slow()
    one, two = make_end(1, transports=[slow]), make_end(2)
    links, endpoint = one.links, two.cluster.endpoint()

    async def ends() -> bool:
        link = PeerLink(2, str(endpoint), "", links._control, wait_ms=1000)
        deadline = asyncio.get_running_loop().time() + 0.5
        attempt = links._initiator._attempt(link, endpoint, links._handler, deadline, 3600.0)
        ended, _ = await asyncio.wait((asyncio.create_task(attempt),), timeout=DEADLINE_S)
        return bool(ended)

    try:
        assert links._control.run(ends())
    finally:
        slow.go_on.set()


def test_the_transports_of_a_link_share_the_time_of_the_call(make_end: MakeEnd) -> None:
    class Near(LocalTransport):
        limits: list[float]  # of both transports of an end

        def shortfall(self, metadata: bytes) -> str:
            return "too little"

        def connect(self, metadata: bytes, *, timeout_ms: float, **kwargs: Any) -> Any:
            self.limits.append(timeout_ms)
            return super().connect(metadata, timeout_ms=timeout_ms, **kwargs)

    class Far(TcpTransport):
        limits: list[float]

        def connect(self, metadata: bytes, *, timeout_ms: float, **kwargs: Any) -> Any:
            self.limits.append(timeout_ms)
            return super().connect(metadata, timeout_ms=timeout_ms, **kwargs)

    pairs = (Near(), Far()), (Near(), Far())
    for near, far in pairs:
        near.limits = far.limits = []
    one, two = (make_end(number, transports=[*pair]) for number, pair in enumerate(pairs, 1))
    one.links.link([two.cluster], 30_000).raise_for_status()
    assert one.status(2).transport == "local+tcp"
    for near, _ in pairs:
        first, second = near.limits
        assert second < first < 30_000


def test_two_threads_link_one_cluster(make_end: MakeEnd) -> None:
    slow = _Slow()
    one, two = make_end(1, transports=[slow]), make_end(2)
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(one.links.link, [two.cluster], 10000)
        assert slow.connecting.wait(DEADLINE_S)
        (result,) = one.links.link([two.cluster], 1000)
        assert result.status is LLMStatusCode.LLM_PROCESSING_LINK
        assert one.state(2) is LinkState.LINKING
        slow.go_on.set()
        assert call.result(DEADLINE_S).status is OK


def test_a_call_must_not_name_a_cluster_twice(make_end: MakeEnd) -> None:
    one, two = make_end(1), make_end(2)
    results = one.links.link([two.cluster, two.cluster], 5000)
    assert [result.status for result in results] == [OK, LLMStatusCode.LLM_PROCESSING_LINK]


def test_unlink_while_linking(make_end: MakeEnd) -> None:
    slow = _Slow()
    one, two = make_end(1, transports=[slow]), make_end(2)
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(one.links.link, [two.cluster], 10000)
        assert slow.connecting.wait(DEADLINE_S)
        (result,) = one.links.unlink([2], 1000)
        assert result.status is LLMStatusCode.LLM_PROCESSING_LINK
        one.links.unlink([2], 1000, force=True).raise_for_status()
        assert call.result(DEADLINE_S).status is LLMStatusCode.LLM_LINK_FAILED
        slow.go_on.set()
    two.wait_for(1, "UNLINKED")
    assert one.links.live() == two.links.live() == 0
    one.link(two.cluster)


class _Kept(_Slow):
    """A slow transport whose connections the test can look at."""

    def __init__(self) -> None:
        super().__init__()
        self.made: queue.SimpleQueue[TransportLink] = queue.SimpleQueue()

    def connect(self, metadata: bytes, **kwargs: Any) -> Any:
        made = super().connect(metadata, **kwargs)
        self.made.put(made)
        return made


def test_a_connection_that_is_made_after_the_end_of_its_handshake_is_closed(
    make_end: MakeEnd,
) -> None:
    slow = _Kept()
    one, two = make_end(1, transports=[slow]), make_end(2)
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(one.links.link, [two.cluster], 10000)
        assert slow.connecting.wait(DEADLINE_S)
        one.links.unlink([2], 1000, force=True).raise_for_status()
        assert call.result(DEADLINE_S).status is LLMStatusCode.LLM_LINK_FAILED
        slow.go_on.set()
    made, deadline = slow.made.get(timeout=DEADLINE_S), time.monotonic() + DEADLINE_S
    with refused(LLMStatusCode.LLM_NOT_YET_LINK, "cluster 1 has unlinked by force"):
        while time.monotonic() < deadline:
            made.check()


def test_a_transport_that_cannot_connect_closes_the_connections_of_others(
    make_end: MakeEnd,
) -> None:
    class Near(_Kept):
        def shortfall(self, metadata: bytes) -> str:
            return "too little"

    class Broken(TcpTransport):
        def connect(self, metadata: bytes, **kwargs: Any) -> Any:
            raise LLMException("no route", status_code=LLMStatusCode.LLM_LINK_FAILED)

    near, other = Near(), Near()
    near.go_on.set()
    other.go_on.set()
    one = make_end(1, transports=[near, Broken()])
    two = make_end(2, transports=[other, TcpTransport()])
    one.check_link_fails(two.cluster, LLMStatusCode.LLM_LINK_FAILED, "transport: tcp: no route")
    with refused(LLMStatusCode.LLM_LINK_FAILED, "no route"):
        near.made.get(timeout=DEADLINE_S).check()


def test_changes_during_a_handshake_reach_the_peer(make_end: MakeEnd) -> None:
    slow = _Slow()
    one, two = make_end(1), make_end(2, transports=[slow])

    def wait_until(reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not reached():
            assert time.monotonic() < deadline

    one.registry.allocate(DESC, paged=False)
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(one.link, two.cluster, timeout_ms=60_000)
        try:
            wait_until(lambda: [link.caches for link in two.links.status()] == [1])
            one.registry.allocate(DESC, paged=False)
            wait_until(lambda: not one.links._is_publish_pending)
        finally:
            slow.go_on.set()
        call.result(DEADLINE_S)
    wait_until(lambda: two.status(1).caches == 2)


@pytest.mark.parametrize("round_", range(10))
def test_both_ends_unlink_at_once(make_end: MakeEnd, round_: int) -> None:
    one, two = make_end(1), make_end(2)
    one.link(two.cluster)
    statuses = at_once(lambda: one.links.unlink([2], 5000), lambda: two.links.unlink([1], 5000))
    assert set(statuses) <= {OK, LLMStatusCode.LLM_NOT_YET_LINK}
    assert OK in statuses
    assert one.links.live() == two.links.live() == 0


def test_linking_while_the_other_end_unlinks(make_end: MakeEnd) -> None:
    one, two = make_end(1), make_end(2)
    one.link(two.cluster)
    link = two.links.get(1)
    link.begin(link)
    with ThreadPoolExecutor(1) as threads:
        # After half of that time the busy end refuses, and both ends are linked as before.
        unlinking = threads.submit(one.links.unlink, [2], 600_000)
        try:
            two.wait_until(1, LinkState.UNLINKING)
            for end, other in ((one, two), (two, one)):
                (result,) = end.links.link([other.cluster], 1000)
                assert result.status is LLMStatusCode.LLM_LINK_BUSY
        finally:
            link.end(link)
        assert unlinking.result(DEADLINE_S).status is OK
    two.link(one.cluster)


def test_all_engines_link_and_unlink_all_others_at_once(make_end: MakeEnd) -> None:
    ends = [make_end(i) for i in range(1, 5)]

    def work(end: End) -> None:
        others = [side.cluster for side in ends if side is not end]
        for _ in range(15):
            end.links.link(others, 5000)
            end.links.unlink([other.remote_cluster_id for other in others], 5000)

    with ThreadPoolExecutor(4) as threads:
        for item in [threads.submit(work, end) for end in ends]:
            item.result(60)
    # A handshake that lost may be known at its other end until the timeout of the call.
    for end in ends:
        for other in ends:
            end.wait_until(other.cluster.remote_cluster_id, None)
    assert [end.links.live() for end in ends] == [0] * 4


def test_all_peers_confirm_changes_at_the_same_time(make_end: MakeEnd) -> None:
    """Several stopped peers delay a call by one timeout, not by one for each."""
    one, asked = make_end(1), asyncio.Barrier(2)
    for number in (2, 3):
        one.link(make_end(number).cluster)

    class Confirming:
        """The publisher of a peer that answers once both peers are asked."""

        async def publish_and_confirm(self, timeout_s: float) -> None:
            async with asyncio.timeout(DEADLINE_S):
                await asked.wait()

    links = [one.links.get(number) for number in (2, 3)]
    real = [link.publisher for link in links]
    for link in links:
        link.publisher = cast(Any, Confirming())
    try:
        one.links.publish_and_confirm(5.0)
    finally:
        for link, publisher in zip(links, real, strict=True):
            link.publisher = publisher
    assert asked.n_waiting == 0

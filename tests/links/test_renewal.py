"""Renewals of the connection behind a link: requests of either end, failures, ends of links."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from kvplan import LLMException, LLMStatusCode
from kvplan.control.messages import Body, Renew, Renewed, Sync, Unused
from kvplan.links import LinkState
from kvplan.transport.local import LocalTransport
from tests.links.end import DEADLINE_S, End
from tests.links.renewing import Connection, Meeting, RenewingTransport
from tests.support.held import ended_tasks

MakeEnd = Callable[..., End]
REFUSAL = LLMException("HcclCommPrepare: 4", status_code=LLMStatusCode.LLM_LINK_FAILED)


class Pair:
    """Two linked ends in this process, with their connections."""

    def __init__(self, make_end: MakeEnd, wait_ms: int = 15000) -> None:
        meeting = Meeting()
        transports = [RenewingTransport(meeting), RenewingTransport(meeting)]
        self.one = make_end(1, transports=[transports[0]], sync_kv_cache_wait_time=wait_ms)
        self.two = make_end(2, transports=[transports[1]], sync_kv_cache_wait_time=wait_ms)
        self.one.link(self.two.cluster)
        self.connections = [transport.connections[0] for transport in transports]

    def wait_until_both_use(self, generation: int) -> None:
        for connection in self.connections:
            connection.wait_until(lambda value=connection: value.current == generation)


@pytest.fixture
def pair(make_end: MakeEnd) -> Pair:
    return Pair(make_end)


def ask(connection: Connection, timeout_ms: float | None = None) -> None:
    assert connection.request_renewal is not None
    connection.request_renewal(timeout_ms)


def refusal_of(connection: Connection, timeout_ms: float | None = None) -> LLMException:
    with pytest.raises(LLMException) as refused:
        ask(connection, timeout_ms)
    return refused.value


@contextmanager
def suppress_link_failed() -> Iterator[None]:
    try:
        yield
    except LLMException as error:
        if error.status_code is not LLMStatusCode.LLM_LINK_FAILED:
            raise


@pytest.mark.parametrize("asker", [0, 1])
def test_one_end_asks_and_both_use_the_next_generation(pair: Pair, asker: int) -> None:
    ask(pair.connections[asker])
    assert pair.connections[asker].current == 1
    pair.wait_until_both_use(1)
    ask(pair.connections[1 - asker])
    pair.wait_until_both_use(2)
    assert [connection.abandoned for connection in pair.connections] == [[], []]


def test_renewals_leave_no_tasks_in_their_link(pair: Pair) -> None:
    before = ended_tasks()
    for generation in range(1, 26):
        ask(pair.connections[generation % 2])
        pair.wait_until_both_use(generation)
    assert ended_tasks() < before + 25


def test_both_ends_ask_at_once_and_again_and_again(pair: Pair) -> None:
    def ask_often(connection: Connection) -> None:
        for _ in range(25):
            ask(connection)

    with ThreadPoolExecutor(4) as threads:
        for item in [threads.submit(ask_often, connection) for connection in pair.connections * 2]:
            item.result(DEADLINE_S)
    newest = max(connection.current for connection in pair.connections)
    pair.wait_until_both_use(newest)
    assert 1 <= newest <= 100
    assert pair.connections[0].made == pair.connections[1].made
    assert [connection.abandoned for connection in pair.connections] == [[], []]


@pytest.mark.parametrize("asker", [0, 1])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_at_one_end_leaves_both_ends_as_they_were(
    pair: Pair, asker: int, failing: int
) -> None:
    pair.connections[failing].refusal = REFUSAL
    error = refusal_of(pair.connections[asker])
    assert error.status_code == LLMStatusCode.LLM_LINK_FAILED
    assert "HcclCommPrepare: 4" in str(error)
    for connection in pair.connections:
        connection.wait_until(lambda value=connection: bool(value.abandoned))
        assert connection.current == 0
    assert pair.one.state(2) is pair.two.state(1) is LinkState.LINKED
    pair.connections[failing].refusal = None
    ask(pair.connections[asker])
    pair.wait_until_both_use(2)


@pytest.mark.parametrize("asker", [0, 1])
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("error", [REFUSAL, MemoryError("HcclCommPrepare: 4")])
def test_no_end_waits_for_a_generation_that_one_cannot_open(
    pair: Pair, asker: int, failing: int, error: Exception
) -> None:
    """An endless wait would keep bound memory from being freed."""
    pair.connections[failing].open_refusal = error
    refused = refusal_of(pair.connections[asker])
    assert refused.status_code == LLMStatusCode.LLM_LINK_FAILED
    assert "HcclCommPrepare: 4" in str(refused)
    pair.connections[asker].wait_until(lambda: bool(pair.connections[asker].abandoned))
    assert not pair.connections[0]._meeting.there
    pair.connections[failing].open_refusal = None
    # An end may begin before it hears of the failure, but it never waits for a failed generation.
    with suppress_link_failed():
        ask(pair.connections[1 - asker])
    ask(pair.connections[1 - asker])
    pair.wait_until_both_use(max(connection.current for connection in pair.connections))


def test_a_renewal_that_was_given_up_is_not_begun_again_by_a_late_peer(pair: Pair) -> None:
    one, two = pair.connections
    two.begins.clear()
    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(refusal_of, two)
        two.wait_until(lambda: two.opened == [1])
        one.open_refusal = REFUSAL
        refusal_of(one)
        assert "HcclCommPrepare: 4" in str(asking.result(DEADLINE_S))
    one.open_refusal = None
    two.begins.set()  # now it announces the old one, and then begins the next
    ask(two)
    pair.wait_until_both_use(2)
    assert (one.opened, one.abandoned) == ([1, 2], [1])


def test_a_connection_that_is_made_after_its_renewal_has_failed_is_given_up(pair: Pair) -> None:
    one, two = pair.connections
    one.holds.clear()
    two.holds.clear()
    two.refusal = REFUSAL
    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(refusal_of, one)
        one.wait_until(lambda: one.making == [1])
        two.holds.set()
        assert "HcclCommPrepare: 4" in str(asking.result(DEADLINE_S))
    assert (one.made, one.abandoned) == ([], [1])
    one._meeting.there[one.key(1)] = 1  # the other end came, and then failed
    one.holds.set()
    one.wait_until(lambda: one.abandoned == [1, 1])
    assert one.made == [1]


def test_a_peer_begins_only_a_few_renewals_at_a_time(pair: Pair) -> None:
    one = pair.connections[0]
    one.begins.clear()
    link = pair.one.links.get(2)
    assert link.renewals is not None
    renewals = link.renewals

    async def begin() -> list[int]:
        for generation in (*range(1, 8), 3):
            renewals.on_notice(Renew(generation, b"newest"))
        return [*renewals._attempts]

    begun = renewals._control.run(begin())
    one.begins.set()
    assert begun == [1, 2, 3, 4]


@pytest.mark.parametrize("notice", [Renew(1, b""), Renewed("", 1), Unused(1), Sync()])
def test_notices_that_do_not_apply_to_a_link_are_ignored(make_end: MakeEnd, notice: Body) -> None:
    """The connections of this link cannot be renewed, and Sync is a request."""
    one, two = make_end(1), make_end(2)
    one.link(two.cluster)
    link = one.links.get(2)
    assert link.channel is not None
    one.links._run(link.channel.notify(notice))
    link.sync()  # the peer has handled the notice
    assert (one.state(2), two.state(1)) == (LinkState.LINKED, LinkState.LINKED)


@pytest.mark.parametrize("asker", [0, 1])
def test_facts_about_memory_of_the_old_connection_are_dropped(pair: Pair, asker: int) -> None:
    links = pair.one.links.get(2), pair.two.links.get(1)
    before = [link.pairs for link in links]
    ask(pair.connections[asker])
    assert links[asker].pairs is not before[asker]
    pair.wait_until_both_use(1)
    other = links[1 - asker].renewals
    assert other is not None
    other._control.run(asyncio.sleep(0))  # after the step of the loop that has adopted it
    assert links[1 - asker].pairs is not before[1 - asker]


def test_no_end_waits_for_a_peer_that_does_not_answer(make_end: MakeEnd) -> None:
    pair = Pair(make_end, wait_ms=100)
    one, two = pair.connections
    two.begins.clear()
    assert refusal_of(one).status_code == LLMStatusCode.LLM_TIMEOUT
    assert not one._meeting.there
    two.begins.set()
    pair.wait_until_both_use(1)


@pytest.mark.parametrize(("wait_ms", "timeout_ms"), [(1, None), (3_600_000, 1.0), (1, 0.0)])
def test_a_call_that_times_out_leaves_the_renewal_running(
    make_end: MakeEnd, wait_ms: int, timeout_ms: float | None
) -> None:
    pair = Pair(make_end, wait_ms=wait_ms)
    one, two = pair.connections
    two.holds.clear()
    error = refusal_of(one, timeout_ms)
    assert error.status_code == LLMStatusCode.LLM_TIMEOUT
    assert "was not renewed in time" in str(error)
    assert "the renewal continues" in str(error)
    two.holds.set()
    pair.wait_until_both_use(1)


def test_the_end_of_the_link_ends_a_renewal(pair: Pair) -> None:
    one, two = pair.connections
    two.holds.clear()
    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(refusal_of, one)
        one.wait_until(lambda: any(count for count in one._meeting.there.values()))
        pair.two.links.unlink([1], 5000, force=True).raise_for_status()
        error = asking.result(DEADLINE_S)
        two.holds.set()
    assert error.status_code == LLMStatusCode.LLM_LINK_FAILED
    assert "has unlinked by force" in str(error)
    assert refusal_of(one).status_code == LLMStatusCode.LLM_LINK_FAILED
    assert refusal_of(two).status_code == LLMStatusCode.LLM_NOT_YET_LINK


def test_a_renewal_that_has_failed_waits_for_no_peer(pair: Pair) -> None:
    """A wait keeps the link in memory."""
    one, two = pair.connections
    two.begins.clear()
    renewals = pair.one.links.get(2).renewals
    assert renewals is not None

    async def ended() -> None:
        async with asyncio.timeout(5):
            await asyncio.gather(*renewals._background)

    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(refusal_of, one)
        two.wait_until(lambda: two.opened == [1])
        pair.one.links.unlink([2], 5000, force=True).raise_for_status()
        asking.result(DEADLINE_S)
        renewals._control.run(ended())
        two.begins.set()


def test_finalize_while_a_renewal_waits_for_the_peer(pair: Pair) -> None:
    one, two = pair.connections
    two.holds.clear()
    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(refusal_of, one)
        one.wait_until(lambda: any(count for count in one._meeting.there.values()))
        pair.one.links.close()
        assert asking.result(DEADLINE_S).status_code in {
            LLMStatusCode.LLM_NOT_YET_LINK,
            LLMStatusCode.LLM_ENGINE_FINALIZED,
        }
        two.holds.set()


def test_unused_connections_are_published(pair: Pair) -> None:
    one, two = pair.connections
    one.notify_unused(0)
    two.wait_until(lambda: two.unused_there == [0])
    assert one.unused_there == []


def test_all_links_of_an_end_can_wait_for_their_peers_at_once(make_end: MakeEnd) -> None:
    """With fewer threads than links, ends that wait for each other crosswise would deadlock."""
    num_ends = 12
    all_there = threading.Barrier(num_ends * (num_ends - 1))

    class Blocking(LocalTransport):
        def refusal(self, metadata: bytes) -> None:
            return None

        def connect(self, metadata: bytes, **given: Any) -> Any:
            all_there.wait(DEADLINE_S)
            return super().connect(metadata, **given)

    ends = [make_end(i, transports=[Blocking()]) for i in range(1, num_ends + 1)]

    def link_with_later(end: End) -> None:
        later = [side.cluster for side in ends if side.cluster_id > end.cluster_id]
        if later:
            end.link(*later, timeout_ms=15000)

    with ThreadPoolExecutor(num_ends) as threads:
        for item in [threads.submit(link_with_later, end) for end in ends]:
            item.result(DEADLINE_S)
    assert all(end.links.live() == num_ends - 1 for end in ends)

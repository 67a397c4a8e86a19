"""Links whose coroutines are cancelled, or whose peer ends, at every await of either end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvplan import CacheKey, LLMException, LLMStatusCode
from kvplan.control.messages import Claim
from kvplan.links import Links, LinkState, RegisterMemStatus
from kvplan.transport.local import LocalTransport
from kvplan.transport.tcp.transport import TcpTransport
from kvplan.transport.transport import Transport
from tests.links.end import DEADLINE_S, DESC, End
from tests.support.suspensions import Suspensions

MakeEnd = Callable[..., End]


class Call:
    """A coroutine in a loop of this thread, which another thread can cancel."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._task: asyncio.Task[object] | None = None
        self._loop = asyncio.new_event_loop()

    def run(self, coroutine: Coroutine[Any, Any, object]) -> object:
        """Return its result, or None if it was cancelled."""
        self._task = self._loop.create_task(coroutine)
        self._task.add_done_callback(lambda _: self._ended.set())
        try:
            return self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            return None
        finally:
            self._loop.close()

    def cancel(self) -> None:
        """Cancel it, and wait until its cancellation is scheduled where it runs."""
        assert self._task is not None
        self._loop.call_soon_threadsafe(self._task.cancel)
        assert self._ended.wait(DEADLINE_S)


def tasks(end: End) -> set[str]:
    """Return the names of the coroutines that run at an end, without this one."""

    async def running() -> set[str]:
        ours = asyncio.current_task()
        coroutines = [task.get_coro() for task in asyncio.all_tasks() if task is not ours]
        return {getattr(coro, "__qualname__", "") for coro in coroutines}

    return end.links._control.run(running())


def wait_until(reached: Callable[[], bool], *what: object) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not reached():
        assert time.monotonic() < deadline, what


def is_done(call: Callable[[], object]) -> bool:
    """Return True if a call succeeds, and False if the engine refuses it."""
    try:
        call()
    except LLMException:
        return False
    return True


def states(one: End, two: End) -> tuple[LinkState | None, LinkState | None]:
    return one.state(two.cluster_id), two.state(one.cluster_id)


OWN_OR_PEERS = pytest.mark.parametrize("which", [0, 1], ids=["own await", "the peer's await"])
TRANSPORTS = pytest.mark.parametrize("transport", [LocalTransport, TcpTransport])
KEY = CacheKey(2, 70)


class Pair:
    """Two ends, and calls of the first that are cancelled at a chosen await of one of them."""

    def __init__(self, make_end: MakeEnd, transport: type[Transport], which: int = 0) -> None:
        self.ends = make_end(1, transports=[transport()]), make_end(2, transports=[transport()])
        self.here, self.there = self.ends
        self._which = which
        self._idle = [tasks(end) for end in self.ends]

    def cancelled(self, number: int, coroutine: Callable[[], Coroutine[Any, Any, object]]) -> bool:
        """Return True if the coroutine was cancelled at that await, and False if it has fewer."""
        call = Call()
        control = self.ends[self._which].links._control
        with Suspensions(control, number, call.cancel) as suspensions:
            call.run(self.here.links._control.run_for(coroutine()))
        return suspensions.is_over

    def relink(self) -> None:
        """Link if the ends are not linked, at the first try."""
        if self.here.state(2) is not LinkState.LINKED:
            self.here.link(self.there.cluster)
        self.here.links.get(2).sync()
        assert states(*self.ends) == (LinkState.LINKED, LinkState.LINKED)

    def unlink(self) -> None:
        """Unlink, and see nothing left of the link and of its coroutines."""
        self.here.links.unlink([2], 5000).raise_for_status()
        for end, names in zip(self.ends, self._idle, strict=True):
            assert end.links.status() == []
            wait_until(lambda end=end, names=names: tasks(end) == names, end.cluster_id, names)


@TRANSPORTS
@OWN_OR_PEERS
def test_a_link_that_is_cancelled_is_made_by_the_next_call(
    make_end: MakeEnd, transport: type[Transport], which: int
) -> None:
    pair = Pair(make_end, transport, which)
    number, clusters = 1, [pair.there.cluster]
    while pair.cancelled(number, lambda: pair.here.links._linking(clusters, 5000)):
        pair.relink()
        pair.unlink()
        number += 1
    assert number > 1


@TRANSPORTS
def test_an_unlink_that_is_cancelled_leaves_ends_that_link_again(
    make_end: MakeEnd, transport: type[Transport]
) -> None:
    pair = Pair(make_end, transport)
    unlinker = pair.here.links._unlinker
    pair.relink()
    link = pair.here.links.get(2)
    link.begin(link)  # an operation, for which the unlink waits first
    assert pair.cancelled(1, lambda: unlinker.unlink(2, 5.0, force=False))
    wait_until(lambda: pair.here.state(2) is LinkState.LINKED)
    link.end(link)
    number = 1
    while pair.cancelled(number, lambda: unlinker.unlink(2, 5.0, force=False)):
        wait_until(lambda: is_done(pair.relink), number)  # the peer may still be asked to unlink
        number += 1
    pair.relink()
    pair.unlink()
    assert number > 1


def test_a_claim_that_is_cancelled_is_released(make_end: MakeEnd) -> None:
    """Another engine claims the same key after the release that is on its way."""
    pair, other = Pair(make_end, LocalTransport), make_end(3)
    pair.relink()
    other.link(pair.there.cluster)
    link = pair.here.links.get(2)
    pair.there.registry.allocate(DESC, paged=False, keys=[KEY])
    claim = Claim(KEY.req_id, KEY.prefix_id, KEY.model_id)
    assert link.channel is not None
    number = 1
    while pair.cancelled(number, lambda: link._claims.claim(link.channel, claim, 5.0)):
        wait_until(lambda: is_done(lambda: other.links.get(2).claim(KEY).release(None)), number)
        number += 1
    assert number > 1


@TRANSPORTS
@OWN_OR_PEERS
def test_a_peer_that_is_finalized_fails_the_link_before_its_deadline(
    make_end: MakeEnd, transport: type[Transport], which: int
) -> None:
    here = make_end(1, transports=[transport()])
    idle, number, is_over = tasks(here), 1, True
    while is_over:
        there = End(2, transports=[transport()])
        ending = partial(
            there.links._control._loop.call_soon_threadsafe,
            there.links._control._begin_end,
            there.links._close,
        )
        observed = (here, there)[which].links._control
        with Suspensions(observed, number, ending) as suspensions:
            (result,) = here.links.link([there.cluster], 60_000)
        there.close()
        is_over = suspensions.is_over
        wait_until(lambda: here.state(2) is not LinkState.LINKED, number)
        assert result.status in {LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_LINK_FAILED}, number
        here.links.unlink([2], 5000, force=True).raise_for_status()
        wait_until(lambda: tasks(here) == idle, number, tasks(here))
        number += 1
    assert number > 1


def status(links: Links, comm_id: int) -> RegisterMemStatus | None:
    """Return the status of a communicator, or None after its end."""
    try:
        return links.comm_status(comm_id)
    except LLMException:
        return None


@pytest.mark.parametrize("which", [0, 1], ids=["the listening member", "the connecting member"])
def test_a_communicator_that_is_unlinked_while_it_is_prepared_is_linked_again(
    make_end: MakeEnd, tmp_path: Path, which: int
) -> None:
    ends = [make_end(i, listen="", comm_dir=str(tmp_path / "comm")) for i in (1, 2)]
    one, other = ends[which].links, ends[1 - which].links
    idle = [tasks(end) for end in ends]
    number, is_over = 1, True

    def link(links: Links) -> int:
        return links.comm_link("name", {1: 0, 2: 1})

    def wait_for(comm_id: int, *expected: RegisterMemStatus | None) -> None:
        wait_until(lambda: status(one, comm_id) in expected, number)

    def unlink() -> None:
        one._control._loop.create_task(one._rendezvous.unlink(one._rendezvous._last_id))

    while is_over:
        others = link(other)
        with Suspensions(one._control, number, unlink) as suspensions:
            comm_id = link(one)
            wait_for(comm_id, RegisterMemStatus.OK, None)
        if is_over := suspensions.is_over:
            wait_for(comm_id, None)
            other.comm_unlink(others)
            others, comm_id = link(other), link(one)
            wait_for(comm_id, RegisterMemStatus.OK)
        one.comm_unlink(comm_id)
        other.comm_unlink(others)
        for end, names in zip(ends, idle, strict=True):
            assert end.links.status() == []
            wait_until(lambda end=end, names=names: tasks(end) == names, end.cluster_id, names)
        assert list((tmp_path / "comm").iterdir()) == []
        number += 1
    assert number > 2

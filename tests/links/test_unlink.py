"""The end of a link that is in use."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Event

import pytest

from kvplan import CacheIndex, CacheKey, LLMException, LLMStatusCode
from kvplan.control.messages import Unlink, Unlinked
from kvplan.links import LinkState
from kvplan.links.lifecycle import LinkLifecycle
from tests.links.end import DEADLINE_S, DESC, End
from tests.links.peer import Peer
from tests.support.peer import PATIENCE_MS, PeerDiedError
from tests.support.refusals import refused

MakeEnd = Callable[..., End]
KEY = CacheKey(2, 70)
BEGIN = "link = end.links.get(1); link.begin(link)"


def test_local_operations_are_waited_for(end: End, peer: Peer) -> None:
    end.link(peer.cluster)
    link = end.links.get(2)
    link.begin(link)
    (result,) = end.links.unlink([2], 50)
    assert result.status is LLMStatusCode.LLM_LINK_BUSY
    assert "cluster 1 has 1 operation in flight with cluster 2" in str(result.error)
    assert (end.state(2), peer.state(1)) == (LinkState.LINKED, "LINKED")
    with ThreadPoolExecutor(1) as threads:
        unlinking = threads.submit(end.links.unlink, [2], 10000)
        end.wait_until(2, LinkState.UNLINKING)
        with refused(LLMStatusCode.LLM_NOT_YET_LINK, "is being unlinked"):
            link.begin(link)
        link.end(link, 10, 20)
        unlinking.result(DEADLINE_S).raise_for_status()
    assert (end.state(2), peer.state(1)) == (None, None)


def test_operations_of_the_peer_are_waited_for(end: End, peer: Peer) -> None:
    end.link(peer.cluster)
    peer.run(BEGIN)
    (result,) = end.links.unlink([2], 1000)
    assert result.status is LLMStatusCode.LLM_LINK_BUSY
    assert "cluster 2 has 1 operation in flight with cluster 1" in str(result.error)
    assert (end.state(2), peer.state(1)) == (LinkState.LINKED, "LINKED")
    peer.run("link.end(link)")
    end.links.unlink([2], 5000).raise_for_status()
    assert (end.state(2), peer.state(1)) == (None, None)


def test_a_long_unlink_waits_for_operations_of_the_peer(end: End, peer: Peer) -> None:
    """The peer waits for its own operations as long as the caller allows, and then agrees."""
    end.link(peer.cluster)
    peer.run(BEGIN)
    with ThreadPoolExecutor(1) as threads:
        unlinking = threads.submit(end.links.unlink, [2], 20_000)
        while peer.state(1) != "UNLINKING":
            assert not unlinking.done(), unlinking.result()
        # Longer than a peer waits that mistakes milliseconds for seconds.
        busy = peer.run("(it,) = end.links.unlink([1], 100); result = it.status.name")
        assert (busy, peer.state(1)) == ("LLM_LINK_BUSY", "UNLINKING")
        peer.run("link.end(link)")
        unlinking.result(DEADLINE_S).raise_for_status()
    assert (end.state(2), peer.state(1)) == (None, None)


def test_operations_of_the_peer_are_served_until_they_end(make_end: MakeEnd) -> None:
    one, two = make_end(1), make_end(2)
    two.registry.allocate(DESC, paged=False, keys=[KEY])
    one.link(two.cluster)
    link, far_link = one.links.get(2), two.links.get(1)
    claim = link.claim(KEY)
    far_link.begin(far_link)
    with ThreadPoolExecutor(1) as threads:
        unlinking = threads.submit(two.links.unlink, [1], 600_000)
        try:
            two.wait_until(1, LinkState.UNLINKING)
            link.sync()
            claim.release(range(2))  # consumes the key
            with refused(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, "req_id=70"):
                link.find(KEY)
        finally:
            far_link.end(far_link)
        unlinking.result(DEADLINE_S).raise_for_status()
    assert (one.state(2), two.state(1)) == (None, None)


def test_the_peer_has_only_a_part_of_the_time_that_is_left(
    make_end: MakeEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait for operations of this end has used the rest."""
    one, two = make_end(1), make_end(2)
    one.link(two.cluster)
    channel = one.links.get(2).channel
    assert channel is not None
    request, limits = channel.typed_request, []

    async def observed(body: Unlink, expected: type[Unlinked], timeout_s: float) -> Unlinked:
        limits.append((body.timeout_ms, timeout_s))
        return await request(body, expected, timeout_s)

    monkeypatch.setattr(channel, "typed_request", observed)
    one.links.unlink([2], 3_600_000).raise_for_status()
    ((peers_ms, own_s),) = limits
    assert 0 < peers_ms <= 1000 * own_s / 2 < 1_800_000


def test_an_operation_that_is_dropped_does_not_keep_the_link_busy() -> None:
    """An interrupt may drop an operation before its `end`, which then wakes no waiting call."""

    async def is_idle() -> bool:
        link, operation = LinkLifecycle(2), Event()
        link.change_state(LinkState.LINKED)
        link.begin(operation)
        waiting = asyncio.create_task(link.wait_idle(0.05))
        await asyncio.sleep(0)  # until the call waits
        del operation
        return await waiting

    assert asyncio.run(is_idle())


def test_the_last_release_wakes_waiting_calls() -> None:
    """Operations and releases end in every order. The last one wakes all waiting calls."""

    async def are_idle() -> list[bool]:
        link, operation = LinkLifecycle(2), Event()
        link.change_state(LinkState.LINKED)
        link.begin(operation)
        for claim_id in (1, 2):
            link.add_pending_release(claim_id)
        waiting = [asyncio.create_task(link.wait_idle(3600)) for _ in range(2)]
        await asyncio.sleep(0)  # until all calls wait
        for step in (
            partial(link.remove_pending_release, 1),
            partial(link.end, operation),
            partial(link.remove_pending_release, 2),
        ):
            await asyncio.sleep(0)
            assert not any(task.done() for task in waiting)
            step()
        async with asyncio.timeout(DEADLINE_S):
            return await asyncio.gather(*waiting)

    assert asyncio.run(are_idle()) == [True, True]


def test_force_ends_the_link_at_once_and_the_peer_learns_of_it(end: End, peer: Peer) -> None:
    peer.run("end.registry.allocate(DESC, paged=False)")
    end.link(peer.cluster)
    link = end.links.get(2)
    link.begin(link)
    memory = link.memory(link.cache(CacheIndex(2, 1, 0)), writable=False)
    peer.run(BEGIN)
    end.links.unlink([2], 1000, force=True).raise_for_status()
    assert end.state(2) is None
    with pytest.raises(LLMException):
        memory.check()
    assert "cluster 1 has unlinked by force" in peer.wait_for(1, "CLOSED")
    peer.run("link.end(link)")
    link.end(link)
    end.link(peer.cluster)
    assert peer.state(1) == "LINKED"


def test_unlinking_a_silent_peer_fails_and_ends_this_side(end: End, peer: Peer) -> None:
    end.link(peer.cluster)
    peer.stop()
    (result,) = end.links.unlink([2], 100)
    assert result.status is LLMStatusCode.LLM_UNLINK_FAILED
    refusal = "cluster 2 has not confirmed within 100 ms; this side of the link is torn down"
    assert refusal in str(result.error)
    assert end.state(2) is None
    peer.resume()
    end.link(peer.cluster)
    assert peer.state(1) == "LINKED"


def test_a_dead_peer_is_unlinked_at_once(end: End, peer: Peer) -> None:
    end.link(peer.cluster)
    peer.kill()
    end.links.unlink([2], 5000).raise_for_status()
    assert end.state(2) is None


@pytest.mark.parametrize("state", ["BROKEN", "CLOSED"])
def test_a_lost_link_is_unlinked_though_operations_go_on(end: End, peer: Peer, state: str) -> None:
    end.link(peer.cluster)
    end.links.get(2).begin(end)
    if state == "BROKEN":
        peer.kill()
    else:
        peer.run("end.close()")
    end.wait_for(2, state)
    end.links.unlink([2], 50).raise_for_status()
    assert end.links.status() == []


def test_a_peer_that_dies_during_an_unlink_is_noticed(end: End, peer: Peer) -> None:
    end.link(peer.cluster)
    link = end.links.get(2)
    link.begin(link)
    with ThreadPoolExecutor(1) as threads:
        unlinking = threads.submit(end.links.unlink, [2], 600_000)
        try:
            end.wait_until(2, LinkState.UNLINKING)
            peer.kill()
            end.wait_for(2, "BROKEN")
        finally:
            link.end(link)
        unlinking.result(DEADLINE_S).raise_for_status()
    assert end.links.status() == []


def test_closing_disconnects_the_peers(end: End, peer: Peer) -> None:
    end.link(peer.cluster)
    end.close()
    assert "cluster 1 is finalized" in peer.wait_for(1, "CLOSED")
    with refused(LLMStatusCode.LLM_ENGINE_FINALIZED, "finalized"):
        end.links.link([peer.cluster], 1000)


def test_no_link_is_found_once_the_close_has_begun(make_end: MakeEnd) -> None:
    """Otherwise an operation could begin on a link that is about to end."""
    end, found = make_end(1), []
    for number in (2, 3):
        end.link(make_end(number).cluster)
    end.links.observe(lambda link: found.append((link.cluster_id, dict(end.links.peers))))
    assert [*end.links.peers] == [2, 3]
    end.close()
    assert sorted(found) == [(2, {}), (3, {})]


def test_closing_disconnects_the_peers_of_an_engine_that_does_not_listen(
    make_end: MakeEnd, peer: Peer
) -> None:
    end = make_end(1, listen="")
    end.link(peer.cluster)
    end.close()
    assert "cluster 1 is finalized" in peer.wait_for(1, "CLOSED")


def test_a_peer_that_finalizes_and_exits_causes_no_warning(end: End, peer: Peer) -> None:
    end.link(peer.cluster)
    with pytest.raises(PeerDiedError):
        peer.run("import os", "end.close()", "os._exit(0)")
    assert end.wait_for(2, "CLOSED").startswith("INFO ")
    assert end.status(2).last_error == "cluster 2 is finalized"
    with refused(LLMStatusCode.LLM_LINK_FAILED, "was ended by the peer: cluster 2 is fin"):
        end.links.get(2).begin(end)
    assert end.links.live() == 0
    end.links.unlink([2], 1000).raise_for_status()
    assert end.links.status() == []


def test_a_disconnect_counts_though_the_death_is_seen_first(make_peer: Callable[..., Peer]) -> None:
    """An engine that was stopped meanwhile finds the message and the death at once."""
    watcher, peer = make_peer(2), make_peer(3)
    watcher.link(peer.cluster)
    watcher.stop()
    with pytest.raises(PeerDiedError):
        peer.run("import os", "end.close()", "os._exit(0)")
    peer.process.wait(DEADLINE_S)
    watcher.resume()
    line = watcher.run(
        "end.log.wait_for_line('peer=3 state=LINKED ')",
        "result = end.log.wait_for_line('peer=3 state=')",
    )
    assert "cluster 3 is finalized" in line
    assert line.startswith("INFO ")
    assert watcher.state(3) == "CLOSED"


def test_a_link_that_was_closed_is_made_again(end: End, make_peer: Callable[..., Peer]) -> None:
    peer = make_peer(2)
    end.link(peer.cluster)
    peer.run("end.close()")
    end.wait_for(2, "CLOSED")
    again = make_peer(2)
    end.link(again.cluster)
    assert (end.state(2), again.state(1)) == (LinkState.LINKED, "LINKED")


def test_closing_does_not_wait_for_stopped_or_dead_peers(
    end: End, make_peer: Callable[..., Peer]
) -> None:
    stopped, dead = make_peer(2), make_peer(3)
    end.link(stopped.cluster, dead.cluster)
    end.links.get(2).begin(end)
    stopped.stop()
    dead.kill()
    began = time.monotonic()
    end.close()
    assert time.monotonic() - began < PATIENCE_MS / 2000  # half of an operation's timeout
    stopped.resume()
    assert "finalized" in stopped.wait_for(1, "CLOSED")


def test_moved_bytes_are_counted(make_end: MakeEnd) -> None:
    one, two = make_end(1), make_end(2)
    one.link(two.cluster)
    link = one.links.get(2)
    for pulled, pushed, error in ((10, 0, None), (0, 7, None), (0, 0, LLMException("no luck"))):
        link.begin(link)
        assert link.status().in_flight == 1
        link.end(link, pulled, pushed, error)
    status = link.status()
    assert (status.bytes_pulled, status.bytes_pushed, status.operations) == (10, 7, 3)
    assert (status.in_flight, status.last_error) == (0, "no luck (LLM_FAILED)")
    assert two.status(1).operations == 0


def test_a_cache_that_is_waited_for_stays_while_it_is_used(make_end: MakeEnd) -> None:
    one, two = make_end(1), make_end(2)
    entry = two.registry.allocate(DESC, paged=False)
    one.link(two.cluster)
    link = one.links.get(2)
    cache = link.cache(CacheIndex(2, entry.cache.cache_id, 0))
    assert link.memory(cache, writable=True) is link.memory(cache, writable=True)
    one.links.unlink([2], 5000).raise_for_status()
    with refused(LLMStatusCode.LLM_NOT_YET_LINK, "has ended: unlinked"):
        link.begin(link)


def test_a_peer_that_has_ended_the_link_agrees_to_unlink(make_end: MakeEnd) -> None:
    """The peer's request arrives after `finalize` has begun and before the channel closes."""
    one, two = make_end(1), make_end(2)
    one.link(two.cluster)
    link = two.links.get(1)

    async def request_that_arrives_late() -> object:
        channel = link.channel
        assert channel is not None
        two.links._unlinker.drop(1, "cluster 2 is finalized")
        return await two.links._unlinker.agree(channel, Unlink(1000))

    assert two.links._control.run(request_that_arrives_late()) == Unlinked()
    assert two.state(1) is None


class _UnlinkingInbox:
    """An inbox that ends the sender's link between the arrival of a notification and the answer."""

    def __init__(self) -> None:
        self.arrived: list[bytes] = []
        self.unlink: Callable[[], object] = lambda: None

    def deliver(self, cluster_id: int, data: bytes, direct: socket.socket | None) -> int:
        self.arrived.append(data)
        self.unlink()
        return 0

    def attach(self, cluster_id: int, direct: socket.socket) -> None:
        raise OSError

    def detach(self, direct: socket.socket) -> None:
        direct.close()


def test_not_yet_link_means_that_the_notification_was_not_sent(make_end: MakeEnd) -> None:
    inbox = _UnlinkingInbox()
    one, two = make_end(1), make_end(2, inbox=inbox)
    one.link(two.cluster)
    link = one.links.get(2)
    inbox.unlink = lambda: one.links.unlink([2], 5000, force=True).raise_for_status()
    with refused(LLMStatusCode.LLM_LINK_FAILED, "unlinked by force; .* may have been delivered"):
        link.notify(b"once")
    with refused(LLMStatusCode.LLM_NOT_YET_LINK, "unlinked by force"):
        link.notify(b"never")
    assert inbox.arrived == [b"once"]

"""Peers that die, stop or restart: noticed in time, reported with the reason, linked again."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvplan import CacheIndex, LLMStatusCode
from kvplan.links import ClusterInfo, LinkState
from tests.links.end import DEADLINE_S, DESC, End
from tests.links.peer import Peer
from tests.support.held import ended_tasks
from tests.support.peer import EXECUTE_ANOTHER_PROGRAM, PeerDiedError
from tests.support.refusals import refused

MakeEnd = Callable[..., End]
MakePeer = Callable[..., Peer]
QUICK = {"heartbeat_interval_ms": 50, "heartbeat_timeout_ms": 1000}


def test_a_killed_peer_breaks_the_link_at_once(make_end: MakeEnd, peer: Peer) -> None:
    end = make_end(1, heartbeat_interval_ms=20_000, heartbeat_timeout_ms=60_000)
    end.link(peer.cluster)
    peer.kill()
    assert end.wait_for(2, "BROKEN").startswith("WARNING ")
    with refused(LLMStatusCode.LLM_LINK_FAILED, "the link to cluster 2 is broken: "):
        end.links.get(2).begin(end)
    assert end.links.live() == 0
    assert end.status(2).last_error
    end.links.unlink([2], 1000).raise_for_status()
    assert end.links.status() == []


def test_the_oldest_of_too_many_lost_links_is_forgotten(make_end: MakeEnd) -> None:
    end = make_end(1, max_links=1)
    for cluster_id in (2, 3):
        peer = make_end(cluster_id)
        end.link(peer.cluster)
        peer.links.close()
        end.wait_for(cluster_id, "CLOSED")
    assert " peer=2 " in end.log.wait_for_line("reason='forgotten'")
    assert [state.cluster_id for state in end.links.status()] == [3]


def test_a_peer_restarts_on_the_same_port(end: End, make_peer: MakePeer) -> None:
    peer = make_peer(2)
    end.link(peer.cluster)
    was = end.status(2).instance
    peer.kill()
    again = make_peer(2, listen=peer.address)
    end.wait_for(2, "BROKEN")
    end.link(again.cluster)
    assert again.state(1) == "LINKED"
    assert end.status(2).instance != was


def test_a_restarted_peer_links_before_its_death_was_noticed(end: End, make_peer: MakePeer) -> None:
    peer = make_peer(2)
    peer.link(end.cluster)
    assert end.state(2) is LinkState.LINKED
    peer.kill()
    make_peer(2).link(end.cluster)
    assert end.state(2) is LinkState.LINKED


def test_another_living_process_of_the_same_cluster_id(end: End, make_peer: MakePeer) -> None:
    peer, impostor = make_peer(2), make_peer(2)
    peer.link(end.cluster)
    status = impostor.run(
        f"(it,) = end.links.link([{end.cluster!r}], 5000); result = (it.status.name, str(it.error))"
    )
    assert status[0] == "LLM_ALREADY_LINK"
    assert "cluster 1 is linked with another process of cluster 2, which is alive" in status[1]
    assert (end.state(2), peer.state(1)) == (LinkState.LINKED, "LINKED")


def test_a_peer_that_dies_in_the_handshake_it_answers(end: End, make_peer: MakePeer) -> None:
    peer = make_peer(2)
    address = peer.run(DIES_IN_CONNECT)
    cluster = ClusterInfo(2, address)
    end.check_link_fails(cluster, LLMStatusCode.LLM_LINK_FAILED, f"cluster 2 at {address}: ")
    assert end.links.live() == 0


def test_a_peer_that_dies_in_the_handshake_it_began(end: End, make_peer: MakePeer) -> None:
    peer = make_peer(2)
    peer.run(DIES_IN_CONNECT)
    with pytest.raises(PeerDiedError):
        peer.run(f"dying.link({end.cluster!r})")
    end.wait_for(2, "UNLINKED")
    assert end.links.live() == 0
    make_peer(2).link(end.cluster)


DIES_IN_CONNECT = """
    import os, signal
    class Dying(LocalTransport):
        def connect(self, metadata, **kwargs):
            os.kill(os.getpid(), signal.SIGKILL)
    dying = End(2, transports=[Dying()])
    result = dying.address
"""


def test_a_stopped_peer_is_noticed_and_learns_of_it_when_it_continues(
    make_end: MakeEnd, peer: Peer
) -> None:
    end = make_end(1, **QUICK)
    end.link(peer.cluster)
    peer.stop()
    began = time.monotonic()
    assert "nothing heard for" in end.wait_for(2, "BROKEN")
    assert time.monotonic() - began < 15
    peer.resume()
    peer.wait_for(1, "BROKEN")
    end.link(peer.cluster)
    assert (end.state(2), peer.state(1)) == (LinkState.LINKED, "LINKED")


def test_an_engine_that_was_stopped_itself_does_not_blame_its_peer(
    make_end: MakeEnd, make_peer: MakePeer
) -> None:
    end, peer = make_end(1, sync_kv_cache_wait_time=1500), make_peer(2, **QUICK)
    end.link(peer.cluster)
    peer.stop()
    # Calls that wait for an answer here take longer than the deadline of the peer.
    with refused(LLMStatusCode.LLM_TIMEOUT, "cluster 2 has not answered within 1500 ms"):
        end.links.get(2).cache(CacheIndex(2, 1, 0))
    peer.resume()
    peer.run("pass")
    assert (end.state(2), peer.state(1)) == (LinkState.LINKED, "LINKED")


def test_a_peer_that_executes_another_program(end: End, peer: Peer) -> None:
    end.link(peer.cluster)
    peer.run(EXECUTE_ANOTHER_PROGRAM)
    end.wait_for(2, "BROKEN")


def test_nothing_stays_open_over_many_links(make_end: MakeEnd) -> None:
    one, two = make_end(1), make_end(2)
    entry = two.registry.allocate(DESC, paged=False)

    def round_() -> None:
        one.link(two.cluster)
        link = one.links.get(2)
        link.memory(link.cache(CacheIndex(2, entry.cache.cache_id, 0)), writable=False)
        one.links.unlink([2], 5000).raise_for_status()

    for _ in range(5):
        round_()
    before, ended = _open_files(), ended_tasks()
    for _ in range(50):
        round_()
    assert ended_tasks() < ended + 50
    deadline = time.monotonic() + DEADLINE_S
    while _open_files() > before + 4:  # some descriptors close a moment later
        assert time.monotonic() < deadline, f"{_open_files()} files are open, {before} were"


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))

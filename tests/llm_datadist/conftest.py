from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from kvplan.llm_datadist import LLMConfig, LLMDataDist, LLMRole
from tests.llm_datadist.peer import REMOTE, REQUEST, Peer, link

MakeDataDist = Callable[..., LLMDataDist]
MakePeer = Callable[..., Peer]
Environment = frozenset[tuple[str, str]]
IdlePeers = dict[Environment, list[Peer]]


def options(**more: str) -> dict[str, str]:
    """Return the options of a client with cache manager and both pools."""
    config = LLMConfig()
    config.enable_cache_manager = True
    config.mem_pool_cfg = config.host_mem_pool_cfg = '{"memory_size": 8388608}'
    return config.generate_options() | more


@pytest.fixture
def make_datadist() -> Iterator[MakeDataDist]:
    """A function that initializes the LLMDataDist of this process; the fixture finalizes it."""
    with ExitStack() as held:

        def make(cluster_id: int = 2, **more: str) -> LLMDataDist:
            datadist = LLMDataDist(LLMRole.DECODER, cluster_id)
            datadist.init(options(**more))
            held.callback(datadist.finalize)
            return datadist

        yield make


@pytest.fixture(scope="session")
def idle_peers() -> Iterator[IdlePeers]:
    """Processes without a client, because starting one takes longer than most tests.

    They differ by the environment that they were started in.
    """
    peers: IdlePeers = {}
    yield peers
    for peer in (item for them in peers.values() for item in them):
        peer.close()


@pytest.fixture
def make_peer(idle_peers: IdlePeers) -> Iterator[MakePeer]:
    """A function that makes peers, each in a process of its own; the fixture ends them."""

    def give_back(started_in: Environment, peer: Peer) -> None:
        if peer.dead:
            peer.close()
            return
        try:
            peer.forget()
        except BaseException:
            peer.close()
            raise
        idle_peers.setdefault(started_in, []).append(peer)

    with ExitStack() as held:

        def make(cluster_id: int = 1, role: str = "PROMPT", **more: str) -> Peer:
            now = frozenset(item for item in os.environ.items() if item[0] != "PYTEST_CURRENT_TEST")
            if ready := idle_peers.get(now):
                peer = ready.pop()
                held.callback(give_back, now, peer)
                peer.start(cluster_id, role, **more)
            else:
                peer = Peer(cluster_id, role, **more)
                held.callback(give_back, now, peer)
            return peer

        yield make


@pytest.fixture
def datadist(make_datadist: MakeDataDist) -> LLMDataDist:
    """The client of cluster 2, in remote mode, without a link."""
    return make_datadist(**REMOTE)


@pytest.fixture
def request_pair(make_peer: MakePeer, make_datadist: MakeDataDist) -> tuple[Peer, LLMDataDist]:
    """Peer 1 and cluster 2 of this process, linked, in request mode."""
    return linked(make_peer(**REQUEST), make_datadist(**REQUEST))


@pytest.fixture
def remote_pair(make_peer: MakePeer, make_datadist: MakeDataDist) -> tuple[Peer, LLMDataDist]:
    """Peer 1 and cluster 2 of this process, linked, in remote mode."""
    return linked(make_peer(**REMOTE), make_datadist(**REMOTE))


def linked(peer: Peer, datadist: LLMDataDist) -> tuple[Peer, LLMDataDist]:
    link(datadist, peer)
    return peer, datadist

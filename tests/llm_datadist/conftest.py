from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from kvplan.llm_datadist import LLMConfig, LLMDataDist, LLMRole
from tests.llm_datadist.peer import REMOTE, REQUEST, Peer, link

MakeDataDist = Callable[..., LLMDataDist]
MakePeer = Callable[..., Peer]


def options(**more: str) -> dict[str, str]:
    """Of a client with cache manager and both pools."""
    config = LLMConfig()
    config.enable_cache_manager = True
    config.mem_pool_cfg = config.host_mem_pool_cfg = '{"memory_size": 8388608}'
    return config.generate_options() | more


@pytest.fixture
def make_datadist() -> Iterator[MakeDataDist]:
    """Makes the initialized LLMDataDist of this process, and finalizes it."""
    with ExitStack() as held:

        def make(cluster_id: int = 2, **more: str) -> LLMDataDist:
            datadist = LLMDataDist(LLMRole.DECODER, cluster_id)
            datadist.init(options(**more))
            held.callback(datadist.finalize)
            return datadist

        yield make


@pytest.fixture
def make_peer() -> Iterator[MakePeer]:
    """Starts peers, each in a process of its own, and ends them."""
    with ExitStack() as held:

        def make(cluster_id: int = 1, role: str = "PROMPT", **more: str) -> Peer:
            peer = Peer(cluster_id, role, **more)
            held.callback(peer.close)
            return peer

        yield make


@pytest.fixture
def datadist(make_datadist: MakeDataDist) -> LLMDataDist:
    """Of cluster 2, in remote mode, linked with nobody."""
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

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from kvplan import ClusterInfo, LlmDataDist, LlmRole, Transfers
from tests.datadist.peer import Peer

MakeEngine = Callable[..., LlmDataDist]


@pytest.fixture
def make_engine() -> Iterator[MakeEngine]:
    """Makes initialized engines, and finalizes them."""
    with ExitStack() as held:

        def make(
            cluster_id: int,
            *,
            listen: bool = False,
            transfers: Transfers | None = None,
            **options: str,
        ) -> LlmDataDist:
            engine = held.enter_context(LlmDataDist(cluster_id, LlmRole.MIX, transfers=transfers))
            address = {"ListenIpInfo": "127.0.0.1:0"} if listen else {}
            engine.initialize({**address, **options})
            return engine

        yield make


@pytest.fixture
def engine(make_engine: MakeEngine) -> LlmDataDist:
    """Of cluster 2, linked with nobody."""
    return make_engine(2)


@pytest.fixture
def pair(make_engine: MakeEngine) -> tuple[LlmDataDist, LlmDataDist]:
    """Engines of clusters 1 and 2 in this process; the second has linked with the first."""
    owner, user = make_engine(1, listen=True), make_engine(2)
    link(user, owner)
    return owner, user


def link(user: LlmDataDist, owner: LlmDataDist) -> None:
    assert owner.listen_address is not None
    user.link_clusters([ClusterInfo(owner.cluster_id, owner.listen_address)]).raise_for_status()


@pytest.fixture
def peer() -> Iterator[Peer]:
    """An engine of cluster 1 in another process."""
    peer = Peer()
    yield peer
    peer.close()


@pytest.fixture
def user(make_engine: MakeEngine, peer: Peer) -> LlmDataDist:
    """An engine of cluster 2 in this process, linked with the peer."""
    user = make_engine(2)
    user.link_clusters([ClusterInfo(1, peer.address)], timeout_ms=5000).raise_for_status()
    return user

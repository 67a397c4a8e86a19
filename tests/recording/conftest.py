from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvplan import ClusterInfo, LlmDataDist, LlmRole
from tests.datadist.peer import Peer
from tests.support.held import Held


@pytest.fixture
def peer() -> Iterator[Peer]:
    """An engine of cluster 1 in another process."""
    made = Peer()
    yield made
    made.close()


@pytest.fixture
def user(peer: Peer) -> Iterator[LlmDataDist]:
    """An engine of cluster 2 in this process, linked with the peer."""
    with LlmDataDist(2, LlmRole.DECODER) as engine:
        engine.initialize()
        engine.link_clusters([ClusterInfo(1, peer.address)], timeout_ms=5000).raise_for_status()
        yield engine


@pytest.fixture
def engine() -> Iterator[LlmDataDist]:
    """An engine of cluster 3, without links."""
    with LlmDataDist(3, LlmRole.MIX) as engine:
        engine.initialize()
        yield engine


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    """A check that the test has closed all files of its recordings at the end."""
    before = Held.now()
    yield
    before.check_nothing_new()

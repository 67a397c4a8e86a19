from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.serving.peer import Peer
from tests.serving.worker import Worker


@pytest.fixture
def make_worker() -> Iterator[Callable[..., Worker]]:
    """Make workers in this process, by cluster id; they are closed after the test."""
    with ExitStack() as held:

        def make(cluster_id: int = 2, **options: Any) -> Worker:
            worker = Worker(cluster_id, **options)
            held.callback(worker.close)
            return worker

        yield make


@pytest.fixture
def make_peer() -> Iterator[Callable[..., Peer]]:
    """Make workers in processes of their own; they are ended after the test."""
    with ExitStack() as held:

        def make(cluster_id: int = 1, **options: Any) -> Peer:
            peer = Peer(cluster_id, **options)
            held.callback(peer.close)
            return peer

        yield make

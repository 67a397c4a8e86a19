from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.serving.peer import Peer
from tests.serving.worker import Worker


@pytest.fixture
def make_worker() -> Iterator[Callable[..., Worker]]:
    """A function that makes workers in this process, by cluster id; the fixture closes them."""
    with ExitStack() as held:

        def make(cluster_id: int = 2, **options: Any) -> Worker:
            worker = Worker(cluster_id, **options)
            held.callback(worker.close)
            return worker

        yield make


@pytest.fixture(scope="session")
def idle() -> Iterator[list[Peer]]:
    """Processes without a worker, because starting one takes longer than most tests."""
    peers: list[Peer] = []
    yield peers
    for peer in peers:
        peer.close()


@pytest.fixture
def make_peer(idle: list[Peer]) -> Iterator[Callable[..., Peer]]:
    """A function that makes workers in processes of their own; the fixture ends them."""
    made = []

    def make(cluster_id: int = 1, **options: Any) -> Peer:
        if idle:
            made.append(idle.pop())
            made[-1].begin(cluster_id, **options)
        else:
            made.append(Peer(cluster_id, **options))
        return made[-1]

    yield make
    idle.extend(peer for peer in made if peer.retire("worker.close()"))

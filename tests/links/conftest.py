from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.control.conversation import check_callbacks
from tests.links.end import End
from tests.links.peer import Peer


@pytest.fixture(autouse=True)
def _log_every_step(caplog: pytest.LogCaptureFixture) -> None:
    """Log everything, because ends wait for lines of the log."""
    caplog.set_level(logging.INFO, "kvplan")


@pytest.fixture(autouse=True)
def _no_callback_failed(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Check that no callback of a loop in this process raised: asyncio only logs that."""
    yield
    check_callbacks(caplog)


@pytest.fixture
def make_end() -> Iterator[Callable[..., End]]:
    """A function that makes ends in this process, which are closed after the test."""
    with ExitStack() as ends:
        yield lambda cluster_id, **options: ends.enter_context(End(cluster_id, **options))


@pytest.fixture
def make_peer() -> Iterator[Callable[..., Peer]]:
    """A function that makes peers in other processes, which end after the test."""
    with ExitStack() as peers:

        def make(cluster_id: int, **options: Any) -> Peer:
            peer = Peer(cluster_id, **options)
            peers.callback(peer.close)
            return peer

        yield make


@pytest.fixture
def end(make_end: Callable[..., End]) -> End:
    """The end of cluster 1, in this process."""
    return make_end(1)


@pytest.fixture
def peer(make_peer: Callable[..., Peer]) -> Peer:
    """A process with the end of cluster 2."""
    return make_peer(2)


@pytest.fixture
def comm_dir(tmp_path: Path) -> str:
    """The directory where members of a communicator meet."""
    return str(tmp_path / "comm")

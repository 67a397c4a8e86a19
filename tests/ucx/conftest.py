"""A worker in this process, and a peer in another one, all of whose memory is reachable."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvnative._ucx import UcxEndpoint, UcxError, UcxWorker
from tests.support.ucx_library import found
from tests.ucx.peer import NBYTES, TIMEOUT_MS, Bytes, Range, UcxPeer, open_worker


@pytest.fixture(scope="module")
def worker() -> Iterator[UcxWorker]:
    with found():
        worker = open_worker()
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UcxPeer]:
    """A peer for tests that leave it unchanged."""
    with found():
        peer = UcxPeer(tmp_path_factory.mktemp("peer") / "memory")
    yield peer
    peer.close()


@pytest.fixture
def mortal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UcxPeer]:
    """A peer for tests that end it."""
    with found():
        peer = UcxPeer(tmp_path_factory.mktemp("peer") / "memory")
    yield peer
    peer.close()


@pytest.fixture(scope="module", autouse=True)
def needs_process_vm_readv(worker: UcxWorker, peer: UcxPeer) -> None:
    """The transport that UCX has between two processes of one host, or a skipped test."""
    endpoint = peer.endpoint(worker)
    try:
        endpoint.connect(TIMEOUT_MS)
    except UcxError as error:
        pytest.skip(f"process_vm_readv is not allowed here: {error}")


@pytest.fixture(scope="module")
def endpoint(worker: UcxWorker, peer: UcxPeer) -> UcxEndpoint:
    return peer.connect(worker)


@pytest.fixture(scope="module")
def whole(peer: UcxPeer) -> Range:
    """A range with all of the peer's memory."""
    return 0, NBYTES, peer.take()


@pytest.fixture
def local() -> Bytes:
    return np.full(NBYTES, 0xA5, dtype=np.uint8)

"""A service in this process, and a peer in another one, whose memory is registered in slot 0."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvnative._tcp import TcpNativeLink, TcpService
from tests.tcp.peer import NBYTES, SECRET, Bytes, TcpPeer


@pytest.fixture(scope="module")
def service() -> Iterator[TcpService]:
    service = TcpService(threads=1, max_ranges=256)
    yield service
    service.close()


@pytest.fixture(scope="module")
def nbytes(request: pytest.FixtureRequest) -> int:
    """The size of all memory, which these tests mostly fill and compare."""
    return getattr(request.module, "MEMORY_NBYTES", NBYTES)


@pytest.fixture(scope="module")
def steady_peer(tmp_path_factory: pytest.TempPathFactory, nbytes: int) -> Iterator[TcpPeer]:
    """A peer for tests that leave it unchanged."""
    peer = TcpPeer(tmp_path_factory.mktemp("peer") / "memory", nbytes)
    peer.add_range(0, 0, nbytes)
    yield peer
    peer.close()


@pytest.fixture(scope="module", params=[None, SECRET], ids=["plain", "encrypted"])
def secret(request: pytest.FixtureRequest) -> bytes | None:
    """The secret of links, which are encrypted with one."""
    found: bytes | None = request.param
    return found


@pytest.fixture(scope="module")
def steady_link(service: TcpService, steady_peer: TcpPeer, secret: bytes | None) -> TcpNativeLink:
    return steady_peer.link(service, secret=secret)


@pytest.fixture
def peer(tmp_path_factory: pytest.TempPathFactory, nbytes: int) -> Iterator[TcpPeer]:
    """A peer for tests that stop, kill or change it."""
    peer = TcpPeer(tmp_path_factory.mktemp("peer") / "memory", nbytes)
    peer.add_range(0, 0, nbytes)
    yield peer
    peer.close()


@pytest.fixture(scope="module")
def memory_here(nbytes: int) -> Bytes:
    """Memory of this process, shared because new pages would cost more than a test."""
    return np.empty(nbytes, dtype=np.uint8)


@pytest.fixture
def local(memory_here: Bytes) -> Bytes:
    memory_here.fill(0xA5)
    return memory_here

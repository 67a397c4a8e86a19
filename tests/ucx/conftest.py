"""An end in this process, and a peer in another whose memory is registered in slot 0."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvnative._ucx import UcxEnd, UcxNativeLink
from tests.ucx.peer import NBYTES, Bytes, UcxPeer, open_end
from tests.ucx_library import found


@pytest.fixture(scope="module")
def end() -> Iterator[UcxEnd]:
    with found():
        end = open_end()
    yield end
    end.close()


@pytest.fixture(scope="module")
def steady_peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UcxPeer]:
    """For tests that leave it as it was."""
    with found():
        peer = UcxPeer(tmp_path_factory.mktemp("peer") / "memory")
    peer.add_range(0, 0, NBYTES)
    yield peer
    peer.close()


@pytest.fixture(scope="module")
def steady_link(end: UcxEnd, steady_peer: UcxPeer) -> UcxNativeLink:
    return steady_peer.link(end)


@pytest.fixture
def peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UcxPeer]:
    """For tests that stop, kill or change it."""
    with found():
        peer = UcxPeer(tmp_path_factory.mktemp("peer") / "memory")
    peer.add_range(0, 0, NBYTES)
    yield peer
    peer.close()


@pytest.fixture
def local() -> Bytes:
    return np.full(NBYTES, 0xA5, dtype=np.uint8)

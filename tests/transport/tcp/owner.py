"""A process whose array is moved over TCP, and transfers of it."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from numpy.typing import NDArray

from kvnative._backend import KVN_OK, ThreadPool
from kvnative._executor import Executor
from kvnative._lower import Descriptors
from kvplan.execution.memory import HostMemory
from kvplan.transport.tcp.link import TcpLink, TcpPeerMemory
from tests.transport.tcp.peer import TIMEOUT_MS, TcpPeer

CONNECTIONS = 3
BLOCK, NUM_BLOCKS = 32 << 10, 512
NBYTES = BLOCK * NUM_BLOCKS
DIRECTIONS = ["get", "put"]
BOTH = pytest.mark.parametrize("direction", DIRECTIONS)
Bytes = NDArray[np.uint8]


class Owner(TcpPeer):
    """A process with a registered array, and with more connections than this process."""

    def __init__(self) -> None:
        super().__init__(CONNECTIONS + 1)
        self.base: int = self.run(
            f"""
            memory = pattern(1, {NBYTES})
            registration = transport.register(memory)
            result = memory.ctypes.data
            """
        )

    def digest(self) -> str:
        return str(self.run("import hashlib; result = hashlib.sha256(memory).hexdigest()"))


def whole(link: TcpLink, owner: Owner) -> TcpPeerMemory:
    """Return the whole array by the metadata of the handshake: the peer need not answer."""
    return link.memory([owner.base], NBYTES, writable=True)


def executor(remote: TcpPeerMemory, local: Bytes, direction: str) -> Executor:
    memory = HostMemory.from_arrays([local])
    return Executor(
        remote.backend(ThreadPool(1), "get" if direction == "get" else "put", memory, None)
    )


def descriptors(
    base: int, local: Bytes, direction: str, order: NDArray[np.int64], times: int = 1
) -> Descriptors:
    """Return descriptors between block `order[i]` of the peer and local block `i`."""
    offsets = np.arange(len(order), dtype=np.uint64) * np.uint64(BLOCK)
    here = np.tile(np.uint64(local.ctypes.data) + offsets, times)
    there = np.tile(np.uint64(base) + order.astype(np.uint64) * np.uint64(BLOCK), times)
    dst, src = (here, there) if direction == "get" else (there, here)
    return Descriptors.from_columns(dst, src, np.full(len(here), BLOCK, np.uint64))


def check_that_blocks_arrive(link: TcpLink, owner: Owner) -> None:
    local = np.zeros(NBYTES, np.uint8)
    with executor(whole(link, owner), local, "get") as moving:
        work = descriptors(owner.base, local, "get", np.arange(NUM_BLOCKS))
        report = moving.run(work, TIMEOUT_MS)
    assert report.status == KVN_OK, report.message
    assert hashlib.sha256(local).hexdigest() == owner.digest()

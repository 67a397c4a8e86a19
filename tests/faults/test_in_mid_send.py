"""Memory that goes, or is replaced at its addresses, while it is being sent to a peer.

The peer is stopped after it has received more than sockets hold. So the rest is in mid-send until
it goes on, and a call that waits for the send gives up.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

import numpy as np
import pytest

from kvplan import Cache, CacheDesc, DataType, LlmDataDist
from tests.faults.conftest import MakeEngine, MakePeer
from tests.faults.peer import Peer
from tests.faults.transfers import link

DESC = CacheDesc(2, (1, 8 << 20), DataType.DT_INT32)
OLD, NEW = 5, 8
OPTIONS = {"heartbeat_interval_ms": 20_000, "heartbeat_timeout_ms": 60_000}
MAP_FIXED = 0x10


class Pages:
    """Memory for a cache of DESC, whose pages can be replaced by others."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        where = ctypes.c_void_p, ctypes.c_size_t
        self._libc.mmap.argtypes = (*where, *[ctypes.c_int] * 3, ctypes.c_long)
        self._libc.munmap.argtypes = where
        self.address = self._map(None, 0)
        self.replace(OLD)

    @property
    def tensors(self) -> list[int]:
        return [self.address + i * DESC.tensor_nbytes for i in range(DESC.num_tensors)]

    def replace(self, number: int) -> None:
        """Map other pages at the addresses, full of a number."""
        self._map(self.address, MAP_FIXED)
        there = (ctypes.c_int32 * (DESC.nbytes // 4)).from_address(self.address)
        np.frombuffer(there, np.int32)[:] = number

    def unmap(self) -> None:
        assert self._libc.munmap(self.address, DESC.nbytes) == 0

    def _map(self, address: int | None, flags: int) -> int:
        access = mmap.PROT_READ | mmap.PROT_WRITE
        flags |= mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        found = self._libc.mmap(address, DESC.nbytes, access, flags, -1, 0)
        assert found not in (None, 2**64 - 1), os.strerror(ctypes.get_errno())
        return int(found)


@pytest.fixture
def pages() -> Iterator[Pages]:
    pages = Pages()
    yield pages
    pages.unmap()


def unregister(owner: LlmDataDist, cache: Cache, pages: Pages, peer: Peer) -> None:
    owner.unregister_cache(cache.cache_id)
    pages.replace(NEW)
    peer.resume()


def unregister_twice(owner: LlmDataDist, cache: Cache, pages: Pages, peer: Peer) -> None:
    """Check that the memory is unused as soon as the first of two calls returns."""
    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(owner.unregister_cache, cache.cache_id) for _ in range(2)]
        wait(calls, return_when=FIRST_COMPLETED)
        pages.replace(NEW)
        peer.resume()
        assert [call.exception() for call in calls] == [None, None]


def remap(owner: LlmDataDist, cache: Cache, pages: Pages, peer: Peer) -> None:
    pages.replace(NEW)
    owner.remap_registered_memory([(pages.address, DESC.nbytes)])
    peer.resume()


PULL_AND_STOP = """
import os, signal, threading

def pull():
    global error
    try:
        datadist.pull_cache(remote, mine, timeout_ms=30_000)
        error = None
    except LLMException as raised:
        error = raised

for array in arrays:
    array[:] = 0
pulling = threading.Thread(target=pull)
pulling.start()
while pulling.is_alive() and not any(it[0, ::1024].any() for it in arrays):
    os.sched_yield()  # and let others have the interpreter
os.kill(os.getpid(), signal.SIGSTOP)
pulling.join()
came = sorted({int(it) for array in arrays for it in np.unique(array)})
result = error and error.status_code.name, came
"""


def pull_meanwhile(peer: Peer, act: Callable[[], object]) -> tuple[str | None, list[int]]:
    """Act while the peer is stopped in mid-pull, and then let it go on.

    Returns:
        The status of the pull's error, and the numbers that have arrived.
    """
    peer.send(PULL_AND_STOP)
    peer.wait_until_stopped()
    try:
        act()
    finally:
        peer.resume()
        status, came = peer.answer()
    return status, came


@pytest.mark.over_tcp(only=True)
@pytest.mark.parametrize("change", [unregister, unregister_twice, remap])
def test_new_memory_at_the_addresses_is_not_sent(
    pages: Pages,
    make_engine: MakeEngine,
    make_peer: MakePeer,
    change: Callable[[LlmDataDist, Cache, Pages, Peer], None],
) -> None:
    owner, peer = make_engine(2, **OPTIONS), make_peer(1, **OPTIONS)
    cache = owner.register_cache(DESC, pages.tensors)
    link(owner, peer)
    peer.run(
        """
        from kvplan import DataType
        mine = datadist.allocate_cache(CacheDesc(count, shape, DataType.DT_INT32))
        arrays = datadist.arrays(mine)
        remote = CacheIndex(2, cache_id)
        """,
        count=DESC.num_tensors,
        shape=DESC.shape,
        cache_id=cache.cache_id,
    )
    status, came = pull_meanwhile(peer, lambda: change(owner, cache, pages, peer))
    if change is remap:  # sent before the engine was notified of the new pages
        came = [item for item in came if item != NEW]
    assert came == [0, OLD]
    assert status == "LLM_KV_CACHE_NOT_EXIST"
    # The link works, and reads the new memory only.
    if change is not remap:
        cache = owner.register_cache(DESC, pages.tensors)
    numbers = peer.run(
        """
        datadist.pull_cache(CacheIndex(2, cache_id), mine, size=4096, timeout_ms=30_000)
        result = sorted({int(it) for array in arrays for it in np.unique(array[0, :1024])})
        """,
        cache_id=cache.cache_id,
    )
    assert numbers == [NEW]

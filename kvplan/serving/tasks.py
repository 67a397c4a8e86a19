"""Coroutines and threads of an exchange: each peer has its own share, which no other can use up."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeVar, TypeVarTuple
from weakref import WeakValueDictionary

from kvplan.serving.messages import peer_log

_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")

MAX_OF_PEER: Final = 8192
"""Coroutines that one peer's messages have begun: two for each ask that may wait (`MAX_WAITING`).

A consumer that keeps to the rules stays below this also in a burst; what is dropped of it would
leave blocks leased, or a request without an answer, until their time is over.
"""
_MAX_THREADS: Final = 4096  # started as they are needed: some for each peer that is stopped

OWN: Final = -1
"""In place of a cluster id: the share of the program itself."""


class Tasks:
    """Coroutines in a loop; all methods are called there."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._running: set[asyncio.Task[None]] = set()
        self._of_peers: Counter[int] = Counter()  # by cluster id

    def spawn(self, coroutine: Coroutine[Any, Any, None], cluster_id: int = OWN) -> None:
        """Run a coroutine, or drop it if MAX_OF_PEER of that cluster run."""
        if cluster_id != OWN:
            if self._of_peers[cluster_id] >= MAX_OF_PEER:
                coroutine.close()
                text = "cluster %d: a message is dropped: %d of its are being answered"
                peer_log.warning(text, cluster_id, MAX_OF_PEER)
                return
            self._of_peers[cluster_id] += 1
        task = self._loop.create_task(coroutine)
        self._running.add(task)
        task.add_done_callback(partial(self._ended, cluster_id))

    async def cancel(self) -> None:
        """Cancel all, and wait until they have ended."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _ended(self, cluster_id: int, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if cluster_id != OWN:
            self._of_peers[cluster_id] -= 1
            if not self._of_peers[cluster_id]:
                del self._of_peers[cluster_id]
        if not task.cancelled() and (error := task.exception()) is not None:
            peer_log.warning("the exchange goes on after an error", exc_info=error)


class PeerThreads:
    """Threads for calls that may wait for a peer: a stopped peer delays only its own calls."""

    def __init__(self, name: str, max_of_peer: int) -> None:
        self._pool = ThreadPoolExecutor(_MAX_THREADS, name)
        self._max_of_peer = max_of_peer
        self._slots: WeakValueDictionary[int, asyncio.Semaphore] = WeakValueDictionary()

    async def run(self, cluster_id: int, function: Callable[[*_Args], _T], *args: *_Args) -> _T:
        """Call a function in a thread of a peer; waits while `max_of_peer` are in use."""
        slots = self._slots.get(cluster_id)
        if slots is None:
            slots = self._slots[cluster_id] = asyncio.Semaphore(self._max_of_peer)
        async with slots:
            return await asyncio.get_running_loop().run_in_executor(self._pool, function, *args)

    def close(self) -> None:
        """Wait for all calls, and end the threads."""
        self._pool.shutdown()

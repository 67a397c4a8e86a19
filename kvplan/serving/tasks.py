"""The coroutines of an exchange: bounded for each peer whose messages begin them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from functools import partial
from typing import Any, Final

from kvplan.serving.messages import peer_log

MAX_OF_PEER: Final = 8192
"""Coroutines that one peer's messages have begun: two for each ask that may wait (`MAX_WAITING`).

A consumer that keeps to the rules stays below this also in a burst; what is dropped of it would
leave blocks leased, or a request without an answer, until their time is over.
"""
_MAX_IN_THREADS: Final = 8  # functions at once, each of which may wait for a stopped peer


class Tasks:
    """Runs coroutines in a loop; all methods are called there."""

    def __init__(self, loop: asyncio.AbstractEventLoop, threads: Executor) -> None:
        self._loop = loop
        self._threads = threads
        self._in_threads = asyncio.Semaphore(_MAX_IN_THREADS)
        self._running: set[asyncio.Task[None]] = set()
        self._of_peers: Counter[int] = Counter()  # by cluster id

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine; an exception of it is logged."""
        task = self._loop.create_task(coroutine)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def spawn_for(self, cluster_id: int, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine that a peer's message begins, or drop it if MAX_OF_PEER of its run."""
        if self._of_peers[cluster_id] >= MAX_OF_PEER:
            coroutine.close()
            peer_log.warning(
                "cluster %d: a message is dropped: %d of its are being answered",
                cluster_id,
                MAX_OF_PEER,
            )
            return
        self._of_peers[cluster_id] += 1
        self.spawn(coroutine).add_done_callback(partial(self._ended_of, cluster_id))

    async def in_thread(self, function: Callable[..., object], *args: object) -> None:
        """Run a function that may block for a moment in a thread."""
        async with self._in_threads:
            await self._loop.run_in_executor(self._threads, function, *args)

    async def cancel(self) -> None:
        """Cancel all, and wait until they have ended."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _ended_of(self, cluster_id: int, _: asyncio.Task[None]) -> None:
        self._of_peers[cluster_id] -= 1
        if not self._of_peers[cluster_id]:
            del self._of_peers[cluster_id]

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            peer_log.warning("the exchange goes on after an error", exc_info=error)

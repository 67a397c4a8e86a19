"""Time limits of an exchange, and its coroutines and threads, limited in number for each peer."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any, Final, TypeVar, TypeVarTuple
from weakref import WeakValueDictionary

from kvplan.engine.option_kinds import described, option, positive, rows_of
from kvplan.serving.messages import peer_log

_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")

MAX_OF_PEER: Final = 8192
"""Maximum number of coroutines for one peer's messages: two for each waiting ask (`MAX_WAITING`).

A dropped message leaves blocks leased, or a request unanswered, until a time limit.
"""
_MAX_THREADS: Final = 4096  # started on demand: some for each stopped peer

OWN: Final = -1
"""The program itself, in place of a cluster id."""

_LIMIT: Final = positive(float, int)
_NUMBER: Final = positive(int)


@described
@dataclass(frozen=True)
class ExchangeOptions:
    """Time limits in milliseconds, and the number of simultaneous transfers.

    Raises:
        TypeError: a value of another type.
        LLMException: LLM_PARAM_INVALID: a value is not > 0.
    """

    # fmt: off
    lease_ttl_ms: float = option(
        30_000, _LIMIT, "Lifetime of a finished request that no consumer renews.", unit="ms")
    renew_interval_ms: float = option(
        5_000, _LIMIT,
        "Interval at which a consumer renews requests that it waits for.", unit="ms")
    link_timeout_ms: int = option(
        5_000, _NUMBER, "Timeout for linking with a producer.", unit="ms")
    pull_timeout_ms: float = option(
        30_000, _LIMIT, "Timeout for an answer of a producer, and for a transfer.", unit="ms")
    prefill_timeout_ms: float = option(
        120_000, _LIMIT, "Timeout for a request that its producer is still computing.", unit="ms")
    enter_timeout_ms: float = option(
        5_000, _LIMIT, "Timeout for `enter` after a consumer has asked.", unit="ms")
    max_pulls: int = option(
        16, _NUMBER,
        "Maximum number of simultaneous transfers from one producer; more wait. A stopped peer "
        "delays neither other peers nor messages and renewals.")
    # fmt: on

    def __post_init__(self) -> None:
        for row in rows_of(type(self)):
            row.check(getattr(self, row.field))


class Tasks:
    """The coroutines of an exchange. All methods run in its loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._running: set[asyncio.Task[None]] = set()
        self._of_peers: Counter[int] = Counter()  # by cluster id

    def spawn(self, coroutine: Coroutine[Any, Any, None], cluster_id: int = OWN) -> None:
        """Run a coroutine; drop it if MAX_OF_PEER of its cluster are running."""
        if cluster_id != OWN:
            if self._of_peers[cluster_id] >= MAX_OF_PEER:
                coroutine.close()
                text = "cluster %d: dropped a message: %d others are being answered"
                peer_log.warning(text, cluster_id, MAX_OF_PEER)
                return
            self._of_peers[cluster_id] += 1
        task = self._loop.create_task(coroutine)
        self._running.add(task)
        task.add_done_callback(partial(self._ended, cluster_id))

    async def cancel(self) -> None:
        """Cancel all coroutines, and wait for their end."""
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
            peer_log.warning("the exchange continues after an error", exc_info=error)


class PeerThreads:
    """Threads for calls that may wait for a peer: a stopped peer delays only its own calls."""

    def __init__(self, name: str, max_of_peer: int) -> None:
        self._pool = ThreadPoolExecutor(_MAX_THREADS, name)
        self._max_of_peer = max_of_peer
        self._slots: WeakValueDictionary[int, asyncio.Semaphore] = WeakValueDictionary()

    async def run(self, cluster_id: int, function: Callable[[*_Args], _T], *args: *_Args) -> _T:
        """Call in a thread of a peer, at most `max_of_peer` at a time; here if none can start."""
        slots = self._slots.get(cluster_id)
        if slots is None:
            slots = self._slots[cluster_id] = asyncio.Semaphore(self._max_of_peer)
        gate = Lock()
        running: asyncio.Future[_T] | None = None

        def call() -> _T:
            with gate:
                if running is None:
                    raise RuntimeError("called elsewhere")
            return function(*args)

        async with slots:
            with gate, suppress(RuntimeError):  # no thread, but `call` stays in the pool's queue
                running = asyncio.get_running_loop().run_in_executor(self._pool, call)
            return function(*args) if running is None else await running

    def close(self) -> None:
        """Wait for all calls, and stop the threads."""
        self._pool.shutdown()

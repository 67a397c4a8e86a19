"""A serving engine's side of the exchange of caches: producer, consumer, or both."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from threading import Condition, Thread
from typing import TYPE_CHECKING, Any

from kvplan.logs import Log
from kvplan.serving.book import LeaseBook, NotYetError
from kvplan.serving.messages import (
    Ask,
    Done,
    Hello,
    Message,
    Refusal,
    Renew,
    decode,
    grants,
)
from kvplan.serving.puller import Pull, Puller, PullResult, Target
from kvplan.serving.ranks import read_from, readers_of
from kvplan.serving.reference import Compatibility, Reference
from kvplan.status import LLMException, invalid
from kvplan.validation import check_type, shown

if TYPE_CHECKING:
    from kvplan.engine.datadist import LlmDataDist
    from kvplan.types import Cache

logger = Log("kvplan.serving")


@dataclass(frozen=True)
class ExchangeOptions:
    """Time limits, in milliseconds, and how much at once.

    Attributes:
        lease_ttl_ms: how long a finished request is kept if no consumer renews it.
        renew_interval_ms: how often a consumer renews what it waits for.
        link_timeout_ms: for a link with a producer.
        pull_timeout_ms: for an answer of a producer, and for a transfer.
        enter_timeout_ms: how long a consumer that asks first is kept waiting for `enter`.
        max_pulls: transfers at once; more wait.

    Raises:
        TypeError: a value that is no number.
        LLMException: LLM_PARAM_INVALID: one that is not > 0.
    """

    lease_ttl_ms: float = 30_000
    renew_interval_ms: float = 5_000
    link_timeout_ms: int = 5_000
    pull_timeout_ms: float = 30_000
    enter_timeout_ms: float = 5_000
    max_pulls: int = 16

    def __post_init__(self) -> None:
        for name, kind in self.__annotations__.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{name}={shown(value)} must be a number")
            if kind == "int":
                check_type(name, value, int)
            if not value > 0:
                raise invalid(f"{name}={value} must be > 0")


class Exchange:
    """Gives finished requests to consumers, and fetches those of producers.

    One for each worker of a serving engine, with a kvplan engine and the paged cache that the
    worker computes in. It reads that engine's notifications. A thread of its own does all that
    waits; the methods may be called from any thread, and only `close` blocks for longer than a
    moment.

    Args:
        engine: initialized; a producer's listens.
        cache: paged, and with a layout (`kv_tensor_format`).
        compatibility: what both sides have to agree on.
        instance: 16 bytes or less that name the serving engine's process: all its workers have the
            same, and a restarted one has others.
        rank, ranks: of this worker under tensor parallelism.
        num_heads: KV heads of the model.
        token_unit: how many tokens the engine packs together, such that no part of them can be
            moved: the axis `token` of the cache's layout counts these units. 1: tokens.
        options: time limits.
    """

    def __init__(
        self,
        engine: LlmDataDist,
        cache: Cache,
        compatibility: Compatibility,
        instance: bytes,
        *,
        rank: int = 0,
        ranks: int = 1,
        num_heads: int = 1,
        token_unit: int = 1,
        options: ExchangeOptions | None = None,
    ) -> None:
        self._options = options = options or ExchangeOptions()
        self._engine = engine
        self._compatibility = compatibility
        self._instance = check_type("instance", instance, bytes)
        self._rank, self._ranks, self._num_heads = rank, ranks, num_heads
        self._workers = ThreadPoolExecutor(options.max_pulls, "kvplan-serving")
        self._results: deque[PullResult] = deque()
        self._waiting: dict[int, list[tuple[int, Ask]]] = {}  # for `enter`, by sequence
        self._running: set[asyncio.Task[None]] = set()
        self._news = Condition()
        self._closed = False
        self._main_task: asyncio.Task[None] | None = None
        self.book = LeaseBook(engine, cache, options.lease_ttl_ms, on_freed=self._wake)
        self._puller = Puller(
            engine,
            cache,
            compatibility,
            token_unit=token_unit,
            rank=rank,
            link_timeout_ms=options.link_timeout_ms,
            pull_timeout_ms=options.pull_timeout_ms,
            workers=self._workers,
            report=self._report,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._run, name="kvplan-serving", daemon=True)
        self._thread.start()

    # The producer's side.

    def enter(self, sequence: int, request: str, blocks: Sequence[int], digest: bytes) -> None:
        """Offer the blocks of a request that has finished: see `LeaseBook.enter`.

        They are the consumers' until `take_freed` returns the request.
        """
        self.book.enter(sequence, request, blocks, digest)
        self._call(self._answer_waiting)

    def abort(self, request: str) -> None:
        """Offer a request no more, whoever reads it."""
        self._call(self._in_thread, self.book.abort, request)

    def take_freed(self) -> set[str]:
        """Return the requests whose blocks have become free since the last call."""
        return self.book.take_freed()

    # The consumer's side.

    def expect(self, request: str, reference: Reference) -> None:
        """Prepare to fetch a request: link with its producer, ask for it, and keep it alive there.

        A second time: nothing.
        """
        self._call(self._expect, request, reference)

    def fetch(self, request: str, reference: Reference, target: Target) -> None:
        """Fetch a request into blocks of the cache; `take_results` says how it ended, once.

        It fails, at the latest when its time is over, rather than to bring other tokens' content.
        """
        self._call(self._fetch, request, reference, target)

    def drop(self, request: str, reference: Reference) -> None:
        """Fetch nothing of a request: its producer may free it. No result follows."""
        self._call(self._fetch, request, reference, None)

    def wait(self, timeout_ms: float) -> bool:
        """Wait until there is something to take, of either side; returns whether there is."""
        with self._news:
            return self._news.wait_for(self._has_news, timeout_ms / 1000)

    @property
    def is_fetching(self) -> bool:
        """Whether there are requests of which no result is known yet."""
        return bool(self._puller.pulls)

    def take_results(self) -> list[PullResult]:
        """Return how requests ended since the last call."""
        found = []
        with suppress(IndexError):
            while True:
                found.append(self._results.popleft())
        return found

    def close(self) -> None:
        """End the thread; the engine is still to be finalized. Idempotent.

        Transfers in flight are waited for, up to `pull_timeout_ms`.
        """
        if self._closed:
            return
        self._closed = True
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stop)
        self._thread.join()
        self._workers.shutdown()

    # In the thread.

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        with suppress(asyncio.CancelledError):
            self._main_task = self._loop.create_task(self._main())
            self._loop.run_until_complete(self._main_task)
        self._loop.close()

    async def _main(self) -> None:
        self._spawn(self._renew())
        self._spawn(self._expire())
        try:
            async for it in self._engine.notifications():
                self._receive(it.cluster_id, it.data)
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)

    def _stop(self) -> None:
        if self._main_task is not None:
            self._main_task.cancel()

    def _report(self, result: PullResult) -> None:
        self._results.append(result)
        self._wake()

    def _wake(self) -> None:
        with self._news:
            self._news.notify_all()

    def _has_news(self) -> bool:
        return bool(self._results) or self.book.has_freed

    def _call(self, function: Callable[..., object], *args: object) -> None:
        if not self._closed:
            self._loop.call_soon_threadsafe(function, *args)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._running.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the exchange goes on after an error", exc_info=error)

    def _in_thread(self, function: Callable[..., object], *args: object) -> None:
        """Let a worker do what may block; what it raises is logged."""

        async def done() -> None:
            await self._loop.run_in_executor(self._workers, function, *args)

        self._spawn(done())

    def _receive(self, cluster_id: int, data: bytes) -> None:
        try:
            message = decode(data)
        except LLMException as error:
            logger.warning("cluster %d: %s", cluster_id, error)
            return
        match message:
            case Hello(answer=False):
                if difference := self._compatibility.difference(message.fields):
                    logger.warning("cluster %d does not fit: %s", cluster_id, difference)
                self._say(cluster_id, Hello(dict(self._compatibility.fields), answer=True))
            case Ask():
                self._answer(cluster_id, message, may_wait=True)
            case Done() if message.instance == self._instance:
                self._in_thread(
                    self.book.finish, message.sequence, message.digest, cluster_id, message.readers
                )
            case Renew() if message.instance == self._instance:
                self.book.renew(message.sequences)
            case _:
                self._puller.receive(cluster_id, message)

    def _answer(self, cluster_id: int, ask: Ask, *, may_wait: bool) -> None:
        """Give a consumer the lease that it asks for, say why not, or let it wait for it."""
        if ask.instance != self._instance:
            self._refuse(cluster_id, ask, "the request is of another process: it has restarted")
            return
        try:
            lease = self.book.lease_of(ask.sequence, ask.digest)
        except NotYetError:
            if may_wait:
                self._waiting.setdefault(ask.sequence, []).append((cluster_id, ask))
                self._loop.call_later(self._options.enter_timeout_ms / 1000, self._give_up, ask)
            else:
                self._refuse(cluster_id, ask, f"request {ask.sequence} has not finished here")
        except LLMException as error:
            self._refuse(cluster_id, ask, str(error.args[0]))
        else:
            self._say(cluster_id, *grants(ask.number, lease.to_bytes()))

    def _refuse(self, cluster_id: int, ask: Ask, reason: str) -> None:
        self._say(cluster_id, Refusal(ask.number, reason[:1000]))

    def _answer_waiting(self) -> None:
        for sequence in sorted(self._waiting):
            for cluster_id, ask in self._waiting.pop(sequence):
                self._answer(cluster_id, ask, may_wait=True)

    def _give_up(self, ask: Ask) -> None:
        for cluster_id, it in self._waiting.pop(ask.sequence, ()):
            self._answer(cluster_id, it, may_wait=it is not ask)

    def _say(self, cluster_id: int, *messages: Message) -> None:
        async def say() -> None:
            try:
                for it in messages:  # in this order
                    await self._puller.notify(cluster_id, it)
            except LLMException as error:  # it finds out by itself
                logger.debug("cluster %d: %s", cluster_id, error)

        self._spawn(say())

    def _expect(self, request: str, reference: Reference) -> Pull:
        if (pull := self._puller.pulls.get(request)) is not None:
            return pull
        owners = len(reference.sources)
        mine = read_from(self._rank, self._ranks, owners, self._num_heads)
        counts = readers_of(self._ranks, owners, self._num_heads)
        if self._rank == 0:  # copies that nobody reads are to be freed, too
            spare = [it for it in range(owners) if not counts[it]]
        else:
            spare = []
        pull = Pull(
            request,
            reference,
            tuple(reference.sources[it] for it in mine),
            {it.cluster_id: max(1, n) for it, n in zip(reference.sources, counts, strict=True)},
            self._loop.create_future(),
            spare=tuple(reference.sources[it] for it in spare),
        )
        self._puller.pulls[request] = pull
        self._spawn(self._puller.run(pull))
        return pull

    def _fetch(self, request: str, reference: Reference, target: Target | None) -> None:
        try:
            pull = self._expect(request, reference)
        except LLMException as error:  # numbers of workers that do not fit
            logger.warning("%s: not fetched: %s", request, error)
            if target is not None:
                self._report(PullResult(request, error, tuple(target.blocks), target.first_token))
            return
        if pull.target.done():
            logger.error("request %s is fetched twice: %s", request, shown(target))
            return
        pull.target.set_result(target)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._options.renew_interval_ms / 1000)
            await self._puller.renew()

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self._options.lease_ttl_ms / 4000))
            if len(self.book):
                await self._loop.run_in_executor(self._workers, self.book.expire)

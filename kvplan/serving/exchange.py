"""The exchange of a serving engine: it offers finished requests, fetches others, or does both."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from threading import TIMEOUT_MAX
from typing import Final

from kvnative._signals import Condition, Mutex
from kvplan.engine.datadist import LlmDataDist
from kvplan.engine.notifications import Notifications
from kvplan.serving.asks import Asks
from kvplan.serving.book import LeaseBook
from kvplan.serving.messages import (
    MAX_INSTANCE,
    Ask,
    Compatibility,
    Done,
    Grant,
    Handle,
    Hello,
    Message,
    Reference,
    Refusal,
    Renew,
    decode,
    peer_log,
)
from kvplan.serving.producers import Producers
from kvplan.serving.puller import Pull, Puller, PullResult, Target, closed
from kvplan.serving.pusher import Chunk, Pusher
from kvplan.serving.tables import Blocks, CacheGroup, Held, Place, groups_of, share_of
from kvplan.serving.tasks import OWN, ExchangeOptions, PeerThreads, Tasks
from kvplan.status import LLMException, invalid
from kvplan.system.limits import start_thread, system_error
from kvplan.system.logs import Log
from kvplan.types import Cache
from kvplan.validation import as_int, check_timeout, check_type, shown

logger = Log("kvplan.serving")

_HELPERS_OF_PEER: Final = 4  # threads, besides those that wait for its transfers


class Exchange:
    """The offers of finished requests to consumers, and the fetches of requests from producers.

    Each worker has one exchange, for its paged cache and its kvplan engine, whose notifications the
    exchange reads. Any thread may call the methods, but only one thread `begin_step`, `layer_ready`
    and `end_step`. Only `wait`, `close`, and `begin_step` with `moved`, block.

    Args:
        engine: an initialized engine; that of a producer listens.
        cache: a paged cache with a layout (`kv_tensor_format`); for a model with several caches,
            their groups.
        compatibility: properties in which both sides must agree.
        instance: 1 to 32 bytes that name the process of the serving engine. All its workers use the
            same bytes; a restart changes them.
        place: place of this worker; the shard of the cache has its heads and layers.
        push: True: push requests during their computation to consumers that ask for pushes, and ask
            for pushes as a consumer. Needs one cache, one stage and workers that have all tokens.
        options: time limits.

    Raises:
        TypeError: an argument of another type.
        LLMException: LLM_PARAM_INVALID: invalid groups or `push`, or not 1 to 32 bytes.
            LLM_OUT_OF_MEMORY: no thread or descriptor is free.
    """

    def __init__(
        self,
        engine: LlmDataDist,
        cache: Cache | Sequence[CacheGroup],
        compatibility: Compatibility,
        instance: bytes,
        *,
        place: Place | None = None,
        push: bool = False,
        options: ExchangeOptions | None = None,
    ) -> None:
        options = ExchangeOptions() if options is None else options
        self._options = check_type("options", options, ExchangeOptions)
        place = check_type("place", Place() if place is None else place, Place)
        groups = groups_of(cache)
        if check_type("push", push, bool) and len(groups) * len(place.stages) > 1:
            raise invalid(
                f"push=True needs one cache and one stage, not {len(groups)} groups and "
                f"{len(place.stages)} stages"
            )
        if push and (place.context or place.copies > 1):
            raise invalid(
                "push=True does not support context parallelism, which shares out the tokens of "
                "prompts: use push=False"
            )
        self._engine = check_type("engine", engine, LlmDataDist)
        self._compatibility = check_type("compatibility", compatibility, Compatibility)
        self._instance = check_type("instance", instance, bytes)
        if not 1 <= len(instance) <= MAX_INSTANCE:
            raise invalid(f"instance={shown(instance)} must have 1 to {MAX_INSTANCE} bytes")
        # The group with the most heads is split among the most workers.
        shards = [group.cache.cache_desc.shard for group in groups]
        num_heads = max((shard and shard.num_heads) or 1 for shard in shards)
        self._share_of = partial(share_of, place, num_heads)
        self._movers = PeerThreads("kvplan-serving", options.max_pulls)
        # Separate threads, because leases would expire while all transfers wait.
        self._helpers = PeerThreads("kvplan-serving-helper", _HELPERS_OF_PEER)
        self._results: deque[PullResult] = deque()
        self._fetching: set[str] = set()  # requests without a result
        self._news = Condition()
        self._calling = Mutex()
        self._closed = False
        self._stopped = asyncio.Event()
        self._pusher = Pusher(engine, groups[0], options=options, stop=self._stop_push)
        self.book: LeaseBook = LeaseBook(
            engine,
            groups,
            options.lease_ttl_ms,
            on_freed=self._wake,
            on_ending=self._pusher.end,
        )
        try:
            self._loop = asyncio.new_event_loop()
        except OSError as error:
            raise system_error("the exchange cannot start", error) from error
        self._tasks = Tasks(self._loop)
        self._asks = Asks(
            self._instance,
            self.book,
            self._pusher,
            push=push,
            options=options,
            tasks=self._tasks,
            threads=self._helpers,
            send=self._send,
        )
        self._producers = Producers(
            engine,
            Hello(dict(compatibility.fields), instance, answer=False),
            compatibility,
            options=options,
            threads=self._helpers,
            is_asking=lambda cluster_id: cluster_id in self._asks.clusters(),
        )
        self._puller = Puller(
            engine,
            groups,
            self._producers,
            rank=place.rank,
            push=push,
            options=options,
            movers=self._movers,
            helpers=self._helpers,
            report=self._report,
        )
        try:
            self._thread = start_thread("kvplan-serving", self._run)
        except LLMException:
            self._loop.close()
            raise

    # The producer's side.

    def enter(
        self,
        request: str,
        blocks: Blocks,
        digest: bytes,
        transfer: str = "",
        *,
        handle: Handle | None = None,
    ) -> Handle:
        """Offer the blocks of a request that has finished: see `LeaseBook.enter`.

        Do not reuse the blocks until `take_freed` returns the handle.
        """
        handle = self.book.enter(request, blocks, digest, transfer, handle=handle)
        self._call(self._asks.answer_waiting, handle, *([transfer] if transfer else []))
        return handle

    def begin_step(self, chunks: Sequence[Chunk], moved: Iterable[str] = ()) -> None:
        """Announce the next step of the model, for pushes to consumers that wait.

        Args:
            chunks: the part of each request that has a transfer.
            moved: transfers that have lost their blocks by preemption or abort. On return these
                blocks are not read; a stopped consumer delays that.
        """
        self._pusher.cancel(moved)
        self._pusher.begin(chunks)

    def layer_ready(self, layer: int) -> None:
        """Push a computed layer of the step."""
        self._pusher.layer_ready(layer)

    def end_step(self) -> None:
        """Push all layers of the step, which has ended."""
        self._pusher.computed()

    def refuse(self, transfer: str, reason: str) -> None:
        """Tell consumers of a transfer that it will not be computed; see also `begin_step`."""
        self._pusher.end(transfer)
        self.book.end_transfer(transfer, reason)
        self._call(self._asks.answer_waiting, transfer)

    def abort(self, handle: Handle) -> None:
        """Withdraw a request, even if consumers still read it."""
        self._call(self._in_thread, OWN, self.book.abort, handle)

    def take_freed(self) -> set[Handle]:
        """Return the requests whose blocks have become free since the last call."""
        return self.book.take_freed()

    # The consumer's side.

    def expect(self, request: str, reference: Reference) -> None:
        """Prepare to fetch a request: link with its producer, and renew the request. Idempotent.

        A request that has finished is asked for now, another one by `fetch`.

        Raises:
            TypeError: an argument of the wrong type.
            LLMException: LLM_PARAM_INVALID: the request is being fetched.
        """
        with self._calling:
            self._check_idle(request, reference)
            self._call(self._prepare, request, reference)

    def fetch(self, request: str, reference: Reference, target: Target) -> None:
        """Fetch a request into blocks of the cache; `take_results` returns its result once.

        A request whose content is gone fails, at the latest after the timeouts.

        Raises:
            TypeError: an argument of the wrong type.
            LLMException: LLM_PARAM_INVALID: the name is in use, or `target.first_token` is < 0.
        """
        if type(target) is not Target:
            check_type("target", target, Target)
        if as_int("target.first_token", target.first_token) < 0:
            raise invalid(f"target.first_token={target.first_token} must be >= 0")
        with self._calling:
            self._check_idle(request, reference)
            if self._call(self._fetch, request, reference, target):
                self._fetching.add(request)
                return
        self._report(PullResult(request, closed(), target.blocks, target.first_token))

    def cancel(self, request: str) -> None:
        """Cancel a fetch; its result follows, usually an error."""
        self._call(self._puller.cancel, request)

    def drop(self, request: str, reference: Reference) -> None:
        """Let the producer free a request instead of fetching it. No result follows.

        Raises:
            TypeError: an argument of the wrong type.
            LLMException: LLM_PARAM_INVALID: the request is being fetched; `cancel` ends that.
        """
        with self._calling:
            self._check_idle(request, reference)
            self._call(self._fetch, request, reference, None)

    def wait(self, timeout_ms: float | None) -> bool:
        """Wait for a result or a freed request; return False after the timeout (None: no limit).

        Raises:
            TypeError, ValueError: timeout_ms is not a number, < 0 or NaN.
        """
        check_timeout(timeout_ms)
        limit = None if timeout_ms is None else min(timeout_ms / 1000, TIMEOUT_MAX)
        with self._news:
            return self._news.wait_for(self._has_news, limit)

    @property
    def is_fetching(self) -> bool:
        """True while an expected or fetched request has no result yet."""
        return bool(self._puller.pulls)

    def take_results(self) -> list[PullResult]:
        """Return the results since the last call."""
        results = []
        with suppress(IndexError):
            while True:
                results.append(self._results.popleft())
        return results

    def close(self) -> None:
        """End the thread; idempotent. Finalize the engine afterwards.

        Waits for transfers in flight, up to `pull_timeout_ms`. Requests without a result fail, and
        their blocks are not written any more. A request that a stopped producer was writing gets
        its result later, when the write has ended or the engine is finalized.
        """
        self._call(self._stopped.set)
        self._thread.join()

    # In the thread of the exchange.

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._main())
        except Exception:
            logger.exception("the exchange has ended")
        with self._calling:
            self._closed = True
        self._pusher.close()
        self._loop.run_until_complete(self._tasks.cancel())  # after calls that `_call` has queued
        self._movers.close()
        self._helpers.close()
        self._puller.close()
        self._loop.close()

    async def _main(self) -> None:
        """Receive messages until `close`, or until the engine is finalized."""
        notifications = self._engine.notifications()
        self._loop.add_reader(notifications.fileno(), self._take, notifications)
        self._tasks.spawn(self._renew())
        self._tasks.spawn(self._expire())
        self._tasks.spawn(self._producers.look())
        await self._stopped.wait()
        self._loop.remove_reader(notifications.fileno())

    def _take(self, notifications: Notifications) -> None:
        """Receive only one message, so that a flooding peer does not block the loop."""
        notification = next(iter(notifications), None)
        if notification is None:
            if notifications.closed:
                self._stopped.set()
            return
        cluster_id, data = notification
        try:
            self._receive(cluster_id, data)
        except Exception:  # one message must not stop later ones
            peer_log.warning("cluster %d: dropped a message", cluster_id, exc_info=True)

    def _check_idle(self, request: str, reference: Reference) -> None:
        if type(reference) is not Reference:  # without the cost of a call
            check_type("reference", reference, Reference)
        if check_type("request", request, str) in self._fetching:
            raise invalid(
                f"request={shown(request)} is being fetched; wait for its result, or give another "
                "name"
            )

    def _report(self, result: PullResult) -> None:
        with self._calling:
            self._fetching.discard(result.request)
        self._results.append(result)
        self._wake()

    def _wake(self) -> None:
        with self._news:
            self._news.notify_all()

    def _has_news(self) -> bool:
        return bool(self._results) or self.book.has_freed

    def _call(self, function: Callable[..., object], *args: object) -> bool:
        """Call a function in the thread; return False if the exchange is closed."""
        with self._calling:
            if not self._closed:
                self._loop.call_soon_threadsafe(function, *args)
            return not self._closed

    def _in_thread(self, cluster_id: int, function: Callable[..., None], *args: object) -> None:
        self._tasks.spawn(self._helpers.run(cluster_id, function, *args))

    def _stop_push(self, cluster_id: int, transfer: str) -> None:
        def stop() -> None:
            self._pusher.remove(cluster_id, transfer)
            self.book.end_again(transfer)

        self._call(self._in_thread, cluster_id, stop)

    def _receive(self, cluster_id: int, data: bytes) -> None:
        try:
            message = decode(data)
        except LLMException as error:
            peer_log.warning("cluster %d: %s", cluster_id, error)
            return
        match message:
            case Hello(answer=True):
                self._producers.answered(cluster_id, message)
            case Hello():
                if difference := self._compatibility.difference(message.fields):
                    peer_log.warning("cluster %d does not fit: %s", cluster_id, difference)
                fields = dict(self._compatibility.fields)
                hello = Hello(fields, self._instance, answer=True)
                self._tasks.spawn(self._send(cluster_id, [hello]), cluster_id)
            case Ask():
                self._asks.take(cluster_id, message)
            case Done() if message.instance == self._instance:
                finish = self._helpers.run(cluster_id, self._finish, cluster_id, message)
                self._tasks.spawn(finish, cluster_id)
            case Renew() if message.instance == self._instance:
                self.book.renew(map(Handle, message.handles))
            case Grant() | Refusal():
                self._puller.receive(cluster_id, message)

    def _finish(self, cluster_id: int, done: Done) -> None:
        """End a reader's use of a request; with a transfer, its asks and pushes end, too."""
        if done.transfer:
            self._pusher.remove(cluster_id, done.transfer)
            self._call(self._asks.end_waiting, cluster_id, done.transfer)
        handle = Handle.of(done.handle)
        self.book.finish(handle, done.digest, cluster_id, done.readers, done.transfer)

    async def _send(self, cluster_id: int, messages: Sequence[Message]) -> None:
        """Send messages in this order."""
        try:
            for message in messages:
                await self._producers.notify(cluster_id, message)
        except LLMException as error:  # the peer notices by itself
            logger.debug("cluster %d: %s", cluster_id, error)

    def _expect(self, request: str, reference: Reference) -> Pull:
        if (pull := self._puller.pulls.get(request)) is not None:
            if pull.reference == reference:
                return pull
            self._drop(pull)  # now another request has the name
        sources = reference.sources
        share = self._share_of(tuple([Held(each.layers, each.context) for each in sources]))
        pull = Pull(
            request,
            reference,
            tuple(map(sources.__getitem__, share.mine)),
            tuple(map(sources.__getitem__, share.spare)),
            share.readers,
            self._loop.create_future(),
        )
        self._puller.pulls[request] = pull
        self._tasks.spawn(self._puller.run(pull))
        return pull

    def _prepare(self, request: str, reference: Reference) -> None:
        with suppress(LLMException):  # numbers of workers that do not match: `fetch` reports that
            self._expect(request, reference)

    def _fetch(self, request: str, reference: Reference, target: Target | None) -> None:
        try:
            pull = self._expect(request, reference)
        except LLMException as error:
            logger.warning("%s: not fetched: %s", request, error)
            if target is not None:
                self._report(PullResult(request, error, target.blocks, target.first_token))
            return
        if target is None:
            self._drop(pull)
        else:
            pull.target.set_result(target)

    def _drop(self, pull: Pull) -> None:
        """Drop a request. Its name is free at once, because no result follows."""
        del self._puller.pulls[pull.request]
        pull.target.set_result(None)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._options.renew_interval_ms / 1000)
            self._tasks.spawn(self._puller.renew())  # a stopped producer delays only its own

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self._options.lease_ttl_ms / 4000))
            if len(self.book):
                await self._helpers.run(OWN, self.book.expire)
            self._forget_unlinked()

    def _forget_unlinked(self) -> None:
        """Forget asks, pushes and other state of peers that are not linked any more."""
        transfers = self._pusher.transfers()
        if not (transfers or self._asks.clusters() or self.book.has_early or len(self._producers)):
            return
        linked = self._producers.linked()
        self._asks.keep(linked)
        self._producers.keep(linked)
        self.book.forget_readers(linked)
        for cluster_id, name in transfers:
            if cluster_id not in linked:
                self._in_thread(cluster_id, self._pusher.remove, cluster_id, name)

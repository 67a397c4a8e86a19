"""Requests of a consumer: ask for each, move it, and report its result."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from kvplan.engine.datadist import LlmDataDist
from kvplan.lease import BlockLease, LeaseEnd, tag_of
from kvplan.serving.messages import (
    MAX_HANDLES,
    Ask,
    Done,
    Grant,
    Handle,
    Reference,
    Refusal,
    Renew,
    Source,
    encode,
    pieces,
)
from kvplan.serving.producers import Producers
from kvplan.serving.pusher import Goal
from kvplan.serving.tables import (
    Blocks,
    CacheGroup,
    GroupLease,
    decode_leases,
    missing_of,
    tables_of,
)
from kvplan.serving.tasks import ExchangeOptions, PeerThreads
from kvplan.status import LLMException, LLMStatusCode, invalid, not_exist
from kvplan.system.logs import Log

logger = Log("kvplan.serving")

_RELEASE_S: Final = 1.0  # until the next attempt to release a lease that a stopped peer uses


@dataclass(frozen=True)
class Target:
    """The destination of a request.

    Args:
        blocks: local blocks of all tokens of the request in their order; for several groups, a
            table for each.
        first_token: the first missing token, >= 0; tokens before it are not touched.
    """

    blocks: Blocks
    first_token: int = 0


@dataclass(frozen=True)
class PullResult:
    """The result of a request.

    Attributes:
        request: name of the request.
        error: reason for the failure; None: every byte has arrived.
        blocks, first_token: from the target. After an error its content is invalid from token
            first_token + pushed on.
        tokens, nbytes: the missing tokens and their bytes, which have arrived unless `error`.
        wait_ms: time from the first call for the request to its transfer, or its failure.
        move_ms: duration of the transfer, without pushes.
        pushed: number of missing tokens, from the first on, that were pushed before the producer
            had finished; valid after an error, too.
    """

    request: str
    error: Exception | None
    blocks: Blocks
    first_token: int
    tokens: int = 0
    nbytes: int = 0
    wait_ms: float = 0.0
    move_ms: float = 0.0
    pushed: int = 0


@dataclass
class Pull:
    """A request that is fetched, from `expect` to its result."""

    request: str
    reference: Reference
    sources: tuple[Source, ...]  # those of the reference that this worker reads
    spare: tuple[Source, ...]  # those without a reader, which this worker tells to free the blocks
    readers: Sequence[int]  # number of readers, for each source in the reference
    target: asyncio.Future[Target | None]  # None: the request was dropped
    started: float = field(default_factory=time.perf_counter)
    pushed: int = 0  # tokens that were pushed before the request had finished
    nbytes: int = 0
    move_ms: float = 0.0  # duration of the transfer
    done_sent: bool = False  # True once the sources were told to free the blocks
    has_ended: bool = False  # True once the result is reported
    cancelled: LLMException | None = None
    asks: set[int] = field(default_factory=set)  # numbers of unanswered asks
    handles: dict[int, Handle] = field(default_factory=dict)  # known handles, by cluster id
    greeted: list[Source] = field(default_factory=list)  # sources whose links the pull uses
    goal: Goal | None = None  # destination of pushes

    def handle_at(self, source: Source) -> bytes:
        """Return the source's handle of the request; empty if it is not known yet."""
        handle = self.handles.get(source.cluster_id)
        if handle is None and not self.reference.transfer:
            handle = self.reference.handle
        return b"" if handle is None else handle.value

    def done(self, source: Source) -> Done:
        """Return the message that frees the blocks at a source, once all readers have sent it."""
        reference = self.reference
        readers = self.readers[reference.sources.index(source)]
        handle = self.handle_at(source)
        return Done(reference.instance, handle, reference.digest, readers, reference.transfer)


@dataclass(frozen=True)
class _Granted:
    """A source's answer: its leases and its handle of the request, and the pushed tokens."""

    leases: tuple[GroupLease, ...]
    handle: Handle
    pushed: int


@dataclass
class _Answer:
    """An unanswered ask, and the parts of its answer."""

    cluster_id: int
    granted: asyncio.Future[_Granted]
    parts: list[bytes] = field(default_factory=list)


class Puller:
    """The fetches of requests."""

    def __init__(
        self,
        engine: LlmDataDist,
        groups: Sequence[CacheGroup],
        producers: Producers,
        *,
        rank: int,
        push: bool,
        options: ExchangeOptions,
        movers: PeerThreads,
        helpers: PeerThreads,
        report: Callable[[PullResult], None],
    ) -> None:
        self._engine = engine
        self._groups = tuple(groups)
        self._producers = producers
        self._rank = rank
        self._push = push
        self._options = options
        self._movers = movers
        self._helpers = helpers
        self._report = report
        # Random: a producer may still answer asks from before a restart of this cluster.
        self._numbers = itertools.count(secrets.randbits(62))
        self._asks: dict[int, _Answer] = {}
        self._renewing: set[tuple[int, bytes]] = set()  # producers whose last renewal still waits
        self.pulls: dict[str, Pull] = {}

    async def run(self, pull: Pull) -> None:
        """Fetch a request, and report its result if it has a target."""
        error: Exception | None = None
        granted: Sequence[_Granted] = ()
        early = not pull.reference.transfer  # the request has finished: ask at once
        try:
            await self._greet_all(pull)
            if early:
                granted = await self._ask_all(pull)
        except Exception as raised:  # of any kind: each request needs a result
            error = raised
        target = await pull.target
        if target is not None and error is None:
            try:
                if not early:
                    pull.goal = self._goal(pull, target)
                    granted = await self._ask_all(pull, pull.goal)
                await self._movers.run(
                    pull.sources[0].cluster_id, self._move, pull, granted, target
                )
            except Exception as raised:
                error = raised
            if pull.goal is not None:
                await self._release(pull, pull.goal)
        if target is None:
            self._forget(pull)
        elif not pull.has_ended:
            self._end(pull, target, error)
        if not pull.done_sent or pull.spare:
            await self._send_done(pull)
        for source in pull.greeted:
            self._producers.leave(source)

    def _forget(self, pull: Pull) -> None:
        if self.pulls.get(pull.request) is pull:
            del self.pulls[pull.request]

    def _end(self, pull: Pull, target: Target, error: Exception | None) -> None:
        """Report the result of a request; may run in the thread of its transfer."""
        pull.has_ended = True
        self._forget(pull)
        took_ms = (time.perf_counter() - pull.started) * 1000
        result = PullResult(
            pull.request,
            error,
            target.blocks,
            target.first_token,
            tokens=max(0, pull.reference.num_tokens - target.first_token),
            nbytes=pull.nbytes,
            wait_ms=took_ms - pull.move_ms,
            move_ms=pull.move_ms,
            pushed=pull.pushed,
        )
        if error is not None:
            logger.warning("%s: not fetched after %.1f ms: %s", pull.request, took_ms, error)
        elif logger.isEnabledFor(logging.INFO):
            logger.info(
                "%s: %d tokens (%d bytes, %d pushed) from %d workers in %.1f ms, after %.1f ms",
                pull.request,
                result.tokens,
                result.nbytes,
                result.pushed,
                len(pull.sources),
                result.move_ms,
                result.wait_ms,
            )
        self._report(result)

    def receive(self, cluster_id: int, message: Grant | Refusal) -> None:
        """Take an answer, or drop an unexpected one."""
        answer = self._asks.get(message.number)
        if answer is None or answer.cluster_id != cluster_id or answer.granted.done():
            return
        if isinstance(message, Refusal):
            why = f"cluster {cluster_id} refuses: {message.reason}"
            answer.granted.set_exception(not_exist(why))
            return
        answer.parts[message.part :] = [message.data]  # after a link broke, parts come again
        if len(answer.parts) < message.parts:
            return
        try:
            leases = decode_leases(b"".join(answer.parts))
            for group_lease in leases:
                if (owner := group_lease.lease.cluster_id) != cluster_id:
                    raise invalid(f"cluster {cluster_id} grants a lease of cluster {owner}")
            answer.granted.set_result(_Granted(leases, Handle(message.handle), message.pushed))
        except LLMException as error:
            answer.granted.set_exception(error)

    def cancel(self, request: str) -> None:
        """Cancel a request, unless its bytes are moving."""
        pull = self.pulls.get(request)
        if pull is None or pull.cancelled is not None:
            return
        pull.cancelled = LLMException("the request was cancelled")
        self._end_asks(pull, pull.cancelled)

    def close(self) -> None:
        """Fail the requests without a result, after the loop and the threads have ended.

        A request whose blocks a stopped producer may still write to fails when the write has ended
        or the engine is finalized.
        """
        for pull in list(self.pulls.values()):
            if pull.goal is None or self._is_released(pull, pull.goal):
                self._fail(pull)

    def _is_released(self, pull: Pull, goal: Goal) -> bool:
        """Release a goal; return False if a producer may write to it, and fail the pull later."""
        remove: Callable[[], None] | None = None

        def released(lease: BlockLease, _: LeaseEnd) -> None:
            if lease.lease_id == goal.lease.lease_id:
                if remove is not None:
                    remove()
                self._fail(pull)

        try:
            remove = self._engine.on_released(released)
            self._engine.release(goal.lease)
        except LLMException as error:
            if error.status_code is not LLMStatusCode.LLM_ENGINE_FINALIZED:
                logger.warning("%s: could not release its blocks: %s", pull.request, error)
                return False
        if remove is not None:
            remove()
        return True

    def _fail(self, pull: Pull) -> None:
        if self.pulls.pop(pull.request, None) is not pull:
            return  # it has a result
        if pull.target.cancel() or pull.target.cancelled():  # `fetch` was not called
            return
        if (target := pull.target.result()) is not None:
            self._report(PullResult(pull.request, closed(), target.blocks, target.first_token))

    async def renew(self) -> None:
        """Renew requests of known handles, except at producers whose last renewal still waits."""
        waited: dict[tuple[int, bytes], list[bytes]] = {}
        for pull in list(self.pulls.values()):  # threads remove requests
            for source in pull.sources:
                if handle := pull.handle_at(source):  # otherwise it is still being computed
                    key = source.cluster_id, pull.reference.instance
                    waited.setdefault(key, []).append(handle)
        due = waited.keys() - self._renewing
        await asyncio.gather(*(self._renew_at(key, waited[key]) for key in due))

    async def _renew_at(self, key: tuple[int, bytes], handles: Sequence[bytes]) -> None:
        cluster_id, instance = key
        self._renewing.add(key)
        try:
            for at in range(0, len(handles), MAX_HANDLES):
                message = Renew(instance, tuple(handles[at : at + MAX_HANDLES]))
                await self._producers.notify(cluster_id, message)
        except LLMException as error:  # the request itself will fail
            logger.debug("cluster %d: %s", cluster_id, error)
        finally:
            self._renewing.discard(key)

    def _end_asks(self, pull: Pull, reason: LLMException) -> None:
        """Fail the unanswered asks of a request."""
        for number in pull.asks:
            if not self._asks[number].granted.done():
                self._asks[number].granted.set_exception(reason)

    async def _greet_all(self, pull: Pull) -> None:
        if len(pull.sources) == 1:  # without the cost of a task
            await self._greet(pull, pull.sources[0])
            return
        greeted = map(partial(self._greet, pull), pull.sources)
        for outcome in await asyncio.gather(*greeted, return_exceptions=True):
            if outcome is not None:
                raise outcome

    async def _greet(self, pull: Pull, source: Source) -> None:
        await self._producers.greet(source, pull.reference.instance)
        pull.greeted.append(source)

    async def _ask_all(self, pull: Pull, goal: Goal | None = None) -> Sequence[_Granted]:
        data = b"" if goal is None else goal.to_bytes()
        if len(pull.sources) == 1:
            return [await self._ask(pull, data, pull.sources[0])]
        try:
            return await asyncio.gather(*map(partial(self._ask, pull, data), pull.sources))
        finally:
            self._end_asks(pull, LLMException("another worker has failed"))

    async def _ask(self, pull: Pull, data: bytes, source: Source) -> _Granted:
        """Ask a source for its leases, and wait until it has finished the request."""
        if pull.cancelled is not None:
            raise pull.cancelled
        number = next(self._numbers)
        answer = _Answer(source.cluster_id, asyncio.get_running_loop().create_future())
        self._asks[number] = answer
        pull.asks.add(number)
        asked, parts = pull.reference, pieces(data)
        timeout_ms, late = self._options.pull_timeout_ms, "did not answer"
        if asked.transfer:  # a producer that is linked answers once the request has finished
            timeout_ms = self._options.prefill_timeout_ms
            late = f"has not finished a request named {asked.name}"
        handle = b"" if asked.transfer else pull.handle_at(source)
        fields = number, asked.instance, handle, asked.digest, asked.transfer
        try:
            asks = [Ask(*fields, part, len(parts), piece) for part, piece in enumerate(parts)]
            await self._producers.ask(source, asked.instance, asks)
            granted = await self._producers.wait_for(source, answer.granted, timeout_ms, late)
            pull.handles[source.cluster_id] = granted.handle
            return granted
        finally:
            pull.asks.discard(number)
            del self._asks[number]

    def _goal(self, pull: Pull, target: Target) -> Goal | None:
        """Lease the blocks that lack tokens to producers, for pushes."""
        if not self._push:
            return None
        (group,), (table,) = self._groups, tables_of(target.blocks, 1)
        block = target.first_token // group.block_tokens
        if block >= len(table.blocks):
            return None
        tag = tag_of(pull.request)
        lease = self._engine.lease_blocks(group.cache, table.blocks[block:], tag=tag)
        return Goal(lease, block * group.block_tokens, target.first_token)

    async def _release(self, pull: Pull, goal: Goal) -> None:
        """Release a goal; then no producer writes to it.

        Retries while a stopped producer delays that, and until the exchange closes while the engine
        is being finalized.
        """
        cluster_id = pull.sources[0].cluster_id
        while True:
            try:
                await self._helpers.run(cluster_id, self._engine.release, goal.lease)
            except LLMException as error:
                logger.warning("%s: could not release its blocks: %s", pull.request, error)
                await asyncio.sleep(_RELEASE_S)
            else:
                return

    def _move(self, pull: Pull, granted: Sequence[_Granted], target: Target) -> None:
        """Pull the missing tokens; after a return or an error no byte is touched."""
        if pull.cancelled is not None:  # while this waited for a thread
            raise pull.cancelled
        started = time.perf_counter()
        total, missing = pull.reference.num_tokens, target.first_token
        try:
            leases, pushed = [], total
            for answer in granted:
                leases.append(answer.leases)
                pushed = min(pushed, answer.pushed)
            wanted = self._groups, leases, target.blocks
            transfers, pull.nbytes = missing_of(*wanted, missing, total, self._rank)
            if pushed > missing:
                pull.pushed = pushed - missing
                transfers, _ = missing_of(*wanted, pushed, total, self._rank)
            done = None
            if transfers and len(leases) == 1:
                done = encode(pull.done(pull.sources[0]))
                pull.done_sent = True  # the transfer sends it in any case
            if transfers:
                self._engine.run(
                    transfers if len(transfers) > 1 else transfers.popitem()[1],
                    timeout_ms=self._options.pull_timeout_ms,
                    notify=done,
                    notify_failure=done,
                    tag=tag_of(pull.request),
                )
        finally:
            pull.move_ms = (time.perf_counter() - started) * 1000
        if pull.goal is None:  # otherwise a producer may still write to the target
            self._end(pull, target, None)

    async def _send_done(self, pull: Pull) -> None:
        """Tell the sources to free the blocks. A stopped one delays no other."""
        sources = (*(() if pull.done_sent else pull.sources), *pull.spare)
        await asyncio.gather(*map(partial(self._send_done_to, pull), sources))

    async def _send_done_to(self, pull: Pull, source: Source) -> None:
        try:
            if source in pull.spare:  # no worker has linked with it
                await self._greet(pull, source)
            await self._producers.notify(source.cluster_id, pull.done(source))
        except LLMException as error:  # its lease will expire
            logger.debug("%s: cluster %d: %s", pull.request, source.cluster_id, error)


def closed() -> LLMException:
    """Return the error of requests after the end of the exchange or its engine."""
    return LLMException("the exchange is closed")

"""The consumer's requests: each is asked for, then moved, and ends as done or failed."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from kvplan.inspection.units import nbytes_text, plural
from kvplan.lease import BlockLease
from kvplan.links import ClusterInfo, LinkState
from kvplan.logs import Log
from kvplan.serving.messages import Ask, Done, Grant, Hello, Message, Refusal, Renew, encode
from kvplan.serving.reference import Compatibility, Reference, Source
from kvplan.status import LLMException, LLMStatusCode, invalid

if TYPE_CHECKING:
    from kvplan.engine.datadist import LlmDataDist
    from kvplan.types import Cache

logger = Log("kvplan.serving")

_T = TypeVar("_T")
_P = ParamSpec("_P")

_LOOK_S = 0.25  # whether a peer that has to answer is still linked
_MOST_RENEWED = 256  # in one message


class PullState(Enum):
    """How far a request is."""

    LINKING = "LINKING"
    ASKED = "ASKED"
    """Its producer was asked for the lease, or has given it, and nobody has said where to."""
    MOVING = "MOVING"
    DONE = "DONE"
    FAILED = "FAILED"


@dataclass(frozen=True)
class Target:
    """Where a request's blocks go.

    Args:
        blocks: of the local cache, of all the request's tokens in their order.
        first_token: the first that is missing here; those before it are not touched.
    """

    blocks: Sequence[int]
    first_token: int = 0


@dataclass(frozen=True)
class PullResult:
    """How a request ended.

    Attributes:
        request: its name.
        error: None: every byte has arrived.
        blocks, first_token: of the target, whose content from there on is not to be used after an
            error.
        tokens, nbytes: that were missing, and have been moved if there is no error.
        wait_ms: from when the request was known until it was moved, or had failed.
        move_ms: how long the transfer took.
    """

    request: str
    error: Exception | None
    blocks: tuple[int, ...]
    first_token: int
    tokens: int = 0
    nbytes: int = 0
    wait_ms: float = 0.0
    move_ms: float = 0.0


@dataclass
class Pull:
    """A request that is fetched, from `expect` to its result.

    Attributes:
        sources: which of the reference's are read.
        readers: how many read each source, by its cluster id.
        target: where it goes; None: nowhere, it is not needed.
        note: what was moved, for the log.
        nbytes, move_ms: of the transfer.
        spare: sources that nobody reads, and that are told so.
        said_done: whether the sources know that they can free the blocks.
    """

    request: str
    reference: Reference
    sources: tuple[Source, ...]
    readers: Mapping[int, int]
    target: asyncio.Future[Target | None]
    state: PullState = PullState.LINKING
    note: str = ""
    nbytes: int = 0
    move_ms: float = 0.0
    said_done: bool = False
    spare: tuple[Source, ...] = ()

    def done(self, source: Source) -> Done:
        """What frees the blocks at a source, once all readers have said it."""
        it, readers = self.reference, self.readers[source.cluster_id]
        return Done(it.instance, it.sequence, it.digest, readers)


@dataclass
class _Peer:
    """A producer's worker, as far as it is known."""

    mutex: asyncio.Lock = field(default_factory=asyncio.Lock)
    greeted: asyncio.Future[str] | None = None  # how it differs; empty: not at all
    failure: tuple[float, Source | None, LLMException | None] = 0.0, None, None  # the last one


class Puller:
    """Fetches requests; all methods run in the loop of the exchange.

    Args:
        engine: moves the bytes.
        cache: where to.
        compatibility: what a producer must agree to.
        token_unit: tokens that the cache's layout counts as one.
        rank: of this worker among those that read the same.
        link_timeout_ms, pull_timeout_ms: milliseconds for a link, and for all of a request from
            when its target is known.
        workers: threads in which transfers are waited for.
        report: called with each result.
    """

    def __init__(
        self,
        engine: LlmDataDist,
        cache: Cache,
        compatibility: Compatibility,
        *,
        token_unit: int,
        rank: int,
        link_timeout_ms: int,
        pull_timeout_ms: float,
        workers: Executor,
        report: Callable[[PullResult], None],
    ) -> None:
        self._engine = engine
        self._cache = cache
        self._compatibility = compatibility
        self._unit = token_unit
        self._rank = rank
        self._link_timeout_ms = link_timeout_ms
        self._pull_timeout_ms = pull_timeout_ms
        desc = cache.cache_desc
        units = desc.batch_size * desc.shape[desc.seq_len_dim_index]
        self._unit_nbytes = desc.nbytes // units
        self._workers = workers
        self._report = report
        self._numbers = itertools.count()
        self._asks: dict[int, tuple[asyncio.Future[BlockLease], list[bytes]]] = {}
        self._peers: dict[int, _Peer] = {}
        self.pulls: dict[str, Pull] = {}

    async def run(self, pull: Pull) -> None:
        """Fetch one request, and report how it ended if it had a target."""
        started = time.perf_counter()
        error: Exception | None = None
        leases: Sequence[BlockLease] = ()
        try:
            leases = await asyncio.gather(*(self._lease(pull, it) for it in pull.sources))
        except Exception as raised:  # of whatever kind: each request has a result
            error = raised
        target = await pull.target
        if target is not None and error is None:
            pull.state = PullState.MOVING
            try:
                await self._in_thread(self._timed_move, pull, leases, target)
            except Exception as raised:
                error = raised
        self.pulls.pop(pull.request, None)
        pull.state = PullState.DONE if error is None else PullState.FAILED
        if target is not None:
            took_ms = (time.perf_counter() - started) * 1000
            wait_ms = took_ms - pull.move_ms
            if error is None:
                text = "%s: %s in %.1f ms, after %.1f ms"
                logger.info(text, pull.request, pull.note, pull.move_ms, wait_ms)
            else:
                logger.warning("%s: not fetched after %.1f ms: %s", pull.request, took_ms, error)
            self._report(
                PullResult(
                    pull.request,
                    error,
                    tuple(target.blocks),
                    target.first_token,
                    pull.reference.num_tokens - target.first_token,
                    pull.nbytes,
                    wait_ms,
                    pull.move_ms,
                )
            )
        await self._say_done(pull)

    def receive(self, cluster_id: int, message: Message) -> None:
        """Take an answer; one that nobody waits for any more is dropped."""
        if isinstance(message, Hello):
            peer = self._peers.get(cluster_id)
            if peer and peer.greeted and not peer.greeted.done():
                peer.greeted.set_result(self._compatibility.difference(message.fields))
            return
        if not isinstance(message, Grant | Refusal) or message.number not in self._asks:
            return
        lease, parts = self._asks[message.number]
        if lease.done():
            return
        if isinstance(message, Refusal):
            lease.set_exception(_gone(f"cluster {cluster_id} refuses: {message.reason}"))
            return
        parts.append(message.data)
        if len(parts) < message.parts:
            return
        try:
            lease.set_result(BlockLease.from_bytes(b"".join(parts)))
        except LLMException as error:
            lease.set_exception(error)

    async def renew(self) -> None:
        """Say to all producers which requests are still waited for."""
        waited: dict[tuple[int, bytes], list[int]] = {}
        for pull in self.pulls.values():
            for it in pull.sources:
                key = it.cluster_id, pull.reference.instance
                waited.setdefault(key, []).append(pull.reference.sequence)
        for (cluster_id, instance), sequences in waited.items():
            for at in range(0, len(sequences), _MOST_RENEWED):
                message = Renew(instance, tuple(sequences[at : at + _MOST_RENEWED]))
                try:
                    await self.notify(cluster_id, message)
                except LLMException as error:  # the request itself finds out
                    logger.debug("cluster %d: %s", cluster_id, error)

    async def notify(self, cluster_id: int, message: Message) -> None:
        """Send a message."""
        data = encode(message)
        await self._in_thread(
            self._engine.notify, cluster_id, data, timeout_ms=self._link_timeout_ms
        )

    async def _lease(self, pull: Pull, source: Source) -> BlockLease:
        await self._greet(source)
        pull.state = PullState.ASKED
        number = next(self._numbers)
        lease: asyncio.Future[BlockLease] = asyncio.get_running_loop().create_future()
        self._asks[number] = lease, []
        reference = pull.reference
        try:
            await self.notify(
                source.cluster_id,
                Ask(number, reference.instance, reference.sequence, reference.digest),
            )
            return await self._answer(source, lease)
        finally:
            del self._asks[number]

    async def _greet(self, source: Source) -> None:
        """Link with a producer, and compare what both are, once."""
        peer = self._peers.setdefault(source.cluster_id, _Peer())
        asked = time.monotonic()
        async with peer.mutex:
            if peer.greeted is not None and self._is_linked(source):
                self._check(source, peer.greeted.result())
                return
            when, what, error = peer.failure
            if error is not None and what == source and when >= asked:
                # It was tried meanwhile. Otherwise all that wait would, one after another.
                raise LLMException(str(error.args[0]), status_code=error.status_code)
            try:
                difference = await self._meet(peer, source)
            except LLMException as error:
                peer.failure = time.monotonic(), source, error
                raise
            self._check(source, difference)

    async def _meet(self, peer: _Peer, source: Source) -> str:
        peer.greeted = None
        cluster = ClusterInfo(source.cluster_id, source.address)
        results = await self._engine.link_clusters_async([cluster], self._link_timeout_ms)
        if results[0].status is not LLMStatusCode.LLM_ALREADY_LINK:
            results.raise_for_status()
        greeted = asyncio.get_running_loop().create_future()
        peer.greeted = greeted
        try:
            fields = dict(self._compatibility.fields)
            await self.notify(source.cluster_id, Hello(fields, answer=False))
            return await self._answer(source, greeted)
        except BaseException:
            peer.greeted = None
            raise

    def _check(self, source: Source, difference: str) -> None:
        if difference:
            raise LLMException(
                f"cluster {source.cluster_id} at {source.address} does not fit: {difference}",
                status_code=LLMStatusCode.LLM_PARAM_INVALID,
            )

    async def _answer(self, source: Source, answer: asyncio.Future[_T]) -> _T:
        """Wait for a peer, as long as it is linked."""
        end = time.monotonic() + self._pull_timeout_ms / 1000
        while not (await asyncio.wait([answer], timeout=_LOOK_S))[0]:
            if not self._is_linked(source):
                raise LLMException(
                    f"the link with cluster {source.cluster_id} at {source.address} broke before "
                    "it answered",
                    status_code=LLMStatusCode.LLM_LINK_FAILED,
                )
            if time.monotonic() > end:
                raise LLMException(
                    f"cluster {source.cluster_id} at {source.address} did not answer in "
                    f"{self._pull_timeout_ms:g} ms",
                    status_code=LLMStatusCode.LLM_TIMEOUT,
                )
        return answer.result()

    def _is_linked(self, source: Source) -> bool:
        return any(
            it.cluster_id == source.cluster_id and it.state is LinkState.LINKED
            for it in self._engine.links()
        )

    def _timed_move(self, pull: Pull, leases: Sequence[BlockLease], target: Target) -> None:
        started = time.perf_counter()
        try:
            self._move(pull, leases, target)
        finally:
            pull.move_ms = (time.perf_counter() - started) * 1000

    def _move(self, pull: Pull, leases: Sequence[BlockLease], target: Target) -> None:
        """Pull what is missing; on return, or error, no byte is touched any more."""
        total, missing = pull.reference.num_tokens, target.first_token
        if missing % self._unit:
            raise invalid(f"first_token={missing} must be a multiple of {self._unit}")
        first, end = missing // self._unit, -(-total // self._unit)
        pull.nbytes = (end - first) * self._unit_nbytes
        pull.note = (
            f"{total - missing} of {total} tokens ({nbytes_text(pull.nbytes)}) from "
            f"{plural(len(leases), 'worker')}"
        )
        if len(leases) > 1:
            self._engine.gather_blocks(
                leases,
                self._cache,
                [None] * len(leases),
                target.blocks,
                num_tokens=end - first,
                src_token=first,
                dst_token=first,
                rank=self._rank,
                timeout_ms=self._pull_timeout_ms,
            )
            return
        done = encode(pull.done(pull.sources[0]))
        pull.said_done = True  # whatever comes of it
        self._engine.pull_blocks(
            leases[0],
            self._cache,
            None,
            target.blocks,
            num_tokens=end - first,
            src_token=first,
            dst_token=first,
            timeout_ms=self._pull_timeout_ms,
            notify=done,
            notify_failure=done,
        )

    async def _say_done(self, pull: Pull) -> None:
        """Let the sources free the blocks, as far as they are linked."""
        for it in (*(() if pull.said_done else pull.sources), *pull.spare):
            try:
                if it in pull.spare:
                    await self._greet(it)
                await self.notify(it.cluster_id, pull.done(it))
            except LLMException as error:  # its lease expires
                logger.debug("%s: cluster %d: %s", pull.request, it.cluster_id, error)

    async def _in_thread(
        self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._workers, partial(function, *args, **kwargs))


def _gone(message: str) -> LLMException:
    return LLMException(message, status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)

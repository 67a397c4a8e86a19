"""What `kvplan ping` does with an engine: links, measures, reads a cache, and unlinks."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from kvplan.engine.datadist import LlmDataDist
from kvplan.inspection.units import nbytes_text, plural
from kvplan.links.values import ClusterInfo, LinkStatus, cluster_here
from kvplan.planning.transfer import Rows, Transfer
from kvplan.status import LLMException
from kvplan.transport.choice import TRANSPORTS
from kvplan.types import CacheKeyByIdAndIndex, KvCacheExtParam, LlmRole, Placement

if TYPE_CHECKING:
    from kvplan.engine.cache_api import PeerCacheStatus
    from kvplan.engine.options import Options
    from kvplan.types import Cache, CacheDesc

_LARGE: Final = 64 << 20
_LARGEST: Final = 1 << 30
"""Bytes that ping takes of its own memory, at most, to read one row of a cache."""

_FIRST: Final = range(1)
_ONE_LAYER: Final = (
    KvCacheExtParam(_FIRST, _FIRST),
    KvCacheExtParam(_FIRST, _FIRST, tensor_num_per_layer=1),
)
_ALL_LAYERS: Final = (KvCacheExtParam(), KvCacheExtParam(tensor_num_per_layer=1))


class Passed(NamedTuple):
    """A transport that is preferred to the chosen one, and why it was not chosen."""

    transport: str
    why_not: str


class Pull(NamedTuple):
    """A size that was pulled.

    Attributes:
        size: "small", "large".
        seconds: of each time.
    """

    size: str
    nbytes: int
    descriptors: int
    seconds: list[float]


@dataclass
class Found:
    """A cache that the peer offers.

    Attributes:
        text: what it is.
        pulls: what was read of it.
        why_not: nothing was read of it; empty: another one was.
        failed: whether that is a failure.
    """

    cache: PeerCacheStatus
    text: str
    pulls: list[Pull] = field(default_factory=list)
    why_not: str = ""
    failed: bool = False


class Report(NamedTuple):
    """All that was found.

    Attributes:
        link_s, unlink_s: seconds that it took.
        status: of the link, after the pulls.
        round_trips: seconds of each control message and its reply.
        passed: the transports that would have been preferred.
        caches: all that the peer offers.
    """

    link_s: float
    unlink_s: float
    status: LinkStatus
    round_trips: list[float]
    passed: list[Passed]
    caches: list[Found]


@dataclass(frozen=True)
class Ping:
    """How to ping.

    Attributes:
        address: where the peer listens.
        options: of the engines that link with it.
        timeout_ms: of each step.
        count: how often each thing is measured.
        cluster_id: this side's: one that no other engine has.
    """

    address: str
    options: Options
    timeout_ms: int
    count: int
    # The upper half of what is possible, where no one counts.
    cluster_id: int = field(default_factory=lambda: secrets.randbits(63) + 2**63)

    def run(self, peer: int | None) -> Report:
        """Link with the cluster `peer` (None: whichever listens there), measure, and unlink.

        Raises:
            LLMException: it cannot be linked, and why; it does not answer.
        """
        with self._engine(self.options) as engine:
            if peer is None:
                peer = self._ask(engine)
            link_s = _timed(lambda: self._link(engine, peer))
            round_trips = [_timed(lambda: engine.caches(peer)) for _ in range(self.count)]
            caches = [self._found(it) for it in engine.caches(peer)]
            self._read(engine, peer, caches)
            (status,) = engine.links()
            unlink_s = _timed(
                lambda: engine.unlink_clusters([peer], self.timeout_ms).raise_for_status()
            )
        return Report(
            link_s, unlink_s, status, round_trips, [*self._passed(peer, status.transport)], caches
        )

    def _engine(self, options: Options) -> LlmDataDist:
        """One that can be used in `with`, which ends it and its link."""
        engine = LlmDataDist(self.cluster_id, LlmRole.DECODER)
        engine.initialize(options)
        return engine

    def _link(self, engine: LlmDataDist, peer: int) -> None:
        engine.link_clusters([ClusterInfo(peer, self.address)], self.timeout_ms).raise_for_status()

    def _ask(self, engine: LlmDataDist) -> int:
        """Which cluster listens there: it says so when another one is wanted."""
        another = self.cluster_id ^ 1
        try:
            self._link(engine, another)
        except LLMException as error:
            if (here := cluster_here(error)) is not None:
                return here
            reason = str(error.args[0]).removeprefix(f"cluster {another} at ")
            raise LLMException(reason, status_code=error.status_code) from None
        return another

    def _found(self, it: PeerCacheStatus) -> Found:
        desc = it.cache_desc
        rows = plural(desc.batch_size, "block" if it.paged else "slot")
        key = "" if it.blocks_key is None else f", model_id {it.blocks_key.model_id}"
        text = (
            f"{plural(desc.num_tensors, 'tensor')} of {rows} x {nbytes_text(_row_nbytes(desc))}, "
            f"{desc.data_type.name}, {desc.placement.name}{key}"
        )
        found = Found(it, text)
        if not it.reachable:
            found.why_not = "this transport does not reach its memory"
        elif it.paged and it.blocks_key is None:
            found.why_not = "it has no blocks key: only who has a lease can read it"
        elif (needed := desc.num_tensors * _row_nbytes(desc)) > _LARGEST:
            found.why_not = f"one {'block' if it.paged else 'slot'} is {nbytes_text(needed)}"
        return found

    def _read(self, engine: LlmDataDist, peer: int, caches: list[Found]) -> None:
        """Pull from the first cache that can be read, a little and much."""
        for found in caches:
            if found.why_not:
                continue
            try:
                found.pulls = self._pulls(engine, peer, found.cache)
            except LLMException as error:
                found.why_not, found.failed = str(error), True
            return

    def _pulls(self, engine: LlmDataDist, peer: int, cache: PeerCacheStatus) -> list[Pull]:
        row = cache.cache_desc.num_tensors * _row_nbytes(cache.cache_desc)
        count = min(cache.cache_desc.batch_size, max(1, _LARGE // row)) if cache.paged else 1
        desc = _with_rows(cache.cache_desc, count)
        here = engine.allocate_blocks_cache(desc) if cache.paged else engine.allocate_cache(desc)
        reading = _Reading(engine, peer, cache, here, self.timeout_ms)
        return [
            reading.pull("small", 1, (*_ONE_LAYER, *_ALL_LAYERS), self.count),
            reading.pull("large", count, _ALL_LAYERS, self.count),
        ]

    def _passed(self, peer: int, chosen: str) -> Iterator[Passed]:
        """The transports before the chosen one: each is tried alone, and says why it fails."""
        if self.options.transport != "auto":
            return
        for name in TRANSPORTS:
            if name == chosen:
                return
            yield Passed(name, self._why_not(peer, name))

    def _why_not(self, peer: int, transport: str) -> str:
        try:
            with self._engine(replace(self.options, transport=transport)) as engine:
                self._link(engine, peer)
                engine.unlink_clusters([peer], self.timeout_ms).raise_for_status()
        except LLMException as error:
            names = "|".join(TRANSPORTS)
            text = str(error.args[0])
            said = re.search(
                rf"(?:^|[:;] ){transport}: (.*?)(?=; (?:{names}): |$)", text, re.DOTALL
            )
            return said[1] if said else text
        return "it works, and was not chosen: was it just restored?"


@dataclass(frozen=True)
class _Reading:
    """A cache of a peer, and one of this side that has room for some of its rows."""

    engine: LlmDataDist
    peer: int
    theirs: PeerCacheStatus
    here: Cache
    timeout_ms: int

    def pull(self, size: str, rows: int, parts: tuple[KvCacheExtParam, ...], count: int) -> Pull:
        """Pull the first rows that often; of the first of `parts` that the cache has."""
        refused: LLMException | None = None
        for part in parts:
            try:
                plan = self.engine.plan(self._transfer(rows, part))
            except LLMException as error:  # its tensors are not cut into layers that way
                refused = refused or error
                continue
            self._move(rows, part)  # the first time touches the pages of this side
            seconds = [_timed(partial(self._move, rows, part)) for _ in range(count)]
            return Pull(size, plan.nbytes, plan.num_descriptors, seconds)
        assert refused is not None
        raise refused

    def _transfer(self, rows: int, part: KvCacheExtParam) -> Transfer:
        if key := self.theirs.blocks_key:
            return Transfer(Rows(key, range(rows)), Rows(self.here, range(rows)), layers=part)
        return Transfer(Rows(self._slot), Rows(self.here), layers=part)

    def _move(self, rows: int, part: KvCacheExtParam) -> None:
        self.engine.run(self._transfer(rows, part), timeout_ms=self.timeout_ms)

    @property
    def _slot(self) -> CacheKeyByIdAndIndex:
        """By its id: no key is claimed, so none can be used up."""
        return CacheKeyByIdAndIndex(self.peer, self.theirs.cache_id, 0)


def _row_nbytes(desc: CacheDesc) -> int:
    """Of one block or slot of a tensor, wherever its parts lie."""
    return desc.tensor_nbytes // desc.batch_size


def _with_rows(desc: CacheDesc, count: int) -> CacheDesc:
    shape = list(desc.shape)
    shape[desc.batch_dim_index] = count
    return replace(desc, shape=tuple(shape), placement=Placement.HOST)


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began

"""A probe of an engine: link, time messages and pulls, and unlink. `kvplan ping` prints it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, NamedTuple

from kvplan.engine.cache_api import PeerCacheStatus
from kvplan.engine.datadist import LlmDataDist
from kvplan.engine.options import Options
from kvplan.links.values import ClusterInfo, LinkStatus, cluster_here
from kvplan.planning.texts import nbytes_text, plural
from kvplan.planning.transfer import Rows, Transfer
from kvplan.status import LLMException, message_of
from kvplan.types import Cache, CacheDesc, CacheKeyByIdAndIndex, KvCacheExtParam, LlmRole, Placement

_LARGE_NBYTES: Final = 64 << 20  # bytes of a large pull
_MAX_ROW_NBYTES: Final = 1 << 30  # bytes of a row in all tensors; larger rows are not read

_FIRST: Final = range(1)
_ONE_LAYER: Final = (
    KvCacheExtParam(_FIRST, _FIRST),
    KvCacheExtParam(_FIRST, _FIRST, tensor_num_per_layer=1),
)
_ALL_LAYERS: Final = (KvCacheExtParam(), KvCacheExtParam(tensor_num_per_layer=1))


class Pull(NamedTuple):
    """Timed pulls of one size."""

    size: str  # "small" or "large"
    nbytes: int  # of one pull
    descriptors: int  # of one pull
    seconds: list[float]  # of each pull


@dataclass
class Found:
    """A cache of the peer."""

    cache: PeerCacheStatus
    text: str  # its description in words
    pulls: list[Pull] = field(default_factory=list)
    why_not: str = ""  # why it cannot be read, or was not read
    failed: bool = False  # True if a pull failed


class Report(NamedTuple):
    """The results of a probe."""

    link_s: float  # seconds for linking
    unlink_s: float  # seconds for unlinking
    status: LinkStatus  # of the link, after the pulls
    round_trips: list[float]  # seconds of each control message and its reply
    caches: list[Found]  # all caches of the peer


@dataclass(frozen=True)
class Probe:
    """A probe of the engine that listens at an address."""

    address: str  # of the peer
    options: Options  # of the engine that links with it
    timeout_ms: int  # of each step
    count: int  # of measurements of each kind
    # The local id, in the upper half of the range: programs that count from 0 stay below.
    cluster_id: int = field(default_factory=lambda: secrets.randbits(63) + 2**63)

    def run(self, peer: int | None) -> Report:
        """Link with cluster `peer` (None: whichever listens at the address), measure, unlink."""
        with LlmDataDist(self.cluster_id, LlmRole.DECODER) as engine:
            engine.initialize(self.options)
            if peer is None:
                peer = self._ask(engine)
            link_s = _timed(lambda: self._link(engine, peer))
            round_trips = [_timed(lambda: engine.caches(peer)) for _ in range(self.count)]
            caches = [self._found(cache) for cache in engine.caches(peer)]
            self._read(engine, peer, caches)
            (status,) = engine.links()
            unlink_s = _timed(
                lambda: engine.unlink_clusters([peer], self.timeout_ms).raise_for_status()
            )
        return Report(link_s, unlink_s, status, round_trips, caches)

    def _link(self, engine: LlmDataDist, peer: int) -> None:
        engine.link_clusters([ClusterInfo(peer, self.address)], self.timeout_ms).raise_for_status()

    def _ask(self, engine: LlmDataDist) -> int:
        """Link with a wrong cluster id; return the right one, which the refusal names."""
        another = self.cluster_id ^ 1
        try:
            self._link(engine, another)
        except LLMException as error:
            if (here := cluster_here(error)) is not None:
                return here
            reason = message_of(error).removeprefix(f"cluster {another} at ")
            raise LLMException(reason, status_code=error.status_code) from None
        return another

    def _found(self, cache: PeerCacheStatus) -> Found:
        desc = cache.cache_desc
        row = "block" if cache.paged else "slot"
        rows = plural(desc.batch_size, row)
        key = "" if cache.blocks_key is None else f", model_id {cache.blocks_key.model_id}"
        text = (
            f"{plural(desc.num_tensors, 'tensor')} of {rows} x {nbytes_text(_row_nbytes(desc))}, "
            f"{desc.data_type.name}, {desc.placement.name}{key}"
        )
        found = Found(cache, text)
        if not cache.reachable:
            found.why_not = "this transport does not reach its memory"
        elif cache.paged and cache.blocks_key is None:
            found.why_not = "it has no blocks key: only owners of a lease can read it"
        elif (needed := desc.num_tensors * _row_nbytes(desc)) > _MAX_ROW_NBYTES:
            found.why_not = f"one {row} is {nbytes_text(needed)}"
        return found

    def _read(self, engine: LlmDataDist, peer: int, caches: list[Found]) -> None:
        """Time small and large pulls from the first cache that can be read."""
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
        count = min(cache.cache_desc.batch_size, max(1, _LARGE_NBYTES // row)) if cache.paged else 1
        desc = _with_rows(cache.cache_desc, count)
        local = engine.allocate_blocks_cache(desc) if cache.paged else engine.allocate_cache(desc)
        reading = _Reading(engine, peer, cache, local, self.timeout_ms)
        return [
            reading.pull("small", 1, (*_ONE_LAYER, *_ALL_LAYERS), self.count),
            reading.pull("large", count, _ALL_LAYERS, self.count),
        ]


@dataclass(frozen=True)
class _Reading:
    """A cache of the peer, and a local cache with room for some of its rows."""

    engine: LlmDataDist
    peer: int
    remote: PeerCacheStatus
    local: Cache
    timeout_ms: int

    def pull(self, size: str, rows: int, parts: tuple[KvCacheExtParam, ...], count: int) -> Pull:
        """Time `count` pulls of the first rows, in the first of `parts` that fits the cache."""
        refused: LLMException | None = None
        for part in parts:
            try:
                plan = self.engine.plan(self._transfer(rows, part))
            except LLMException as error:  # the tensors do not form such layers
                refused = refused or error
                continue
            self._move(rows, part)  # the first pull touches the local pages
            seconds = [_timed(partial(self._move, rows, part)) for _ in range(count)]
            return Pull(size, plan.nbytes, plan.num_descriptors, seconds)
        assert refused is not None
        raise refused

    def _transfer(self, rows: int, part: KvCacheExtParam) -> Transfer:
        if key := self.remote.blocks_key:
            return Transfer(Rows(key, range(rows)), Rows(self.local, range(rows)), layers=part)
        return Transfer(Rows(self._slot), Rows(self.local), layers=part)

    def _move(self, rows: int, part: KvCacheExtParam) -> None:
        self.engine.run(self._transfer(rows, part), timeout_ms=self.timeout_ms)

    @property
    def _slot(self) -> CacheKeyByIdAndIndex:
        """The first slot, by the id of the cache: such a pull consumes no key."""
        return CacheKeyByIdAndIndex(self.peer, self.remote.cache_id, 0)


def _row_nbytes(desc: CacheDesc) -> int:
    """Return the bytes of one block or slot of a tensor."""
    return desc.rows_nbytes // desc.batch_size


def _with_rows(desc: CacheDesc, count: int) -> CacheDesc:
    shape = list(desc.shape)
    shape[desc.batch_dim_index] = count
    return replace(desc, shape=tuple(shape), placement=Placement.HOST)


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began

"""Transfers between caches, named by addresses at both ends."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Unpack
from weakref import ref

import numpy as np

from kvnative._lower import Descriptors
from kvnative._ranges import first_bad, place
from kvplan.engine.memory import joined
from kvplan.engine.operation import Operation, RunOptions, notify_moved, refuse_notices
from kvplan.engine.telemetry import logger
from kvplan.execution.binding import check_order_free
from kvplan.execution.memory import HostMemory
from kvplan.links.values import LinkState
from kvplan.planning.plan import OBSERVERS
from kvplan.planning.ranges import RangePart, RangePlan, Ranges, span_text
from kvplan.planning.side import Side
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.types import CacheDesc
from kvplan.validation import UINT64_MAX, check_width, shown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import ArrayLike, NDArray

    from kvplan.engine.engine import Engine
    from kvplan.execution import TensorMemory
    from kvplan.links import PeerLink
    from kvplan.links.address_index import AddressIndex, Extent
    from kvplan.links.local_engine import CacheEntry
    from kvplan.links.peer_table import PeerCache
    from kvplan.planning.plan import Plan

    Column = NDArray[np.uint64]


_UINT64 = np.dtype(np.uint64)
_LINKED: Final = LinkState.LINKED  # faster than a lookup in the enumeration
_SUCCESS: Final = LLMStatusCode.LLM_SUCCESS


@dataclass(frozen=True, eq=False, slots=True)
class AddressRanges:
    """Ranges of bytes to move, by their addresses here and in a peer.

    Each range must lie in caches at both ends. A range may cross from one tensor into an adjacent
    one. Contiguous arrays of uint64 are not copied: do not change them afterwards.

    Args:
        cluster_id: id of the peer, or of the engine itself for copies inside it.
        local: the address of each range here.
        remote: the address of each range in the peer.
        nbytes: the size of each range.
        direction: "pull" from the peer, or "push" to it.

    Raises:
        TypeError: not integers.
        ValueError: a number outside uint64.
        LLMException: LLM_PARAM_INVALID: no range, columns of unequal length, an empty range, a
            range at address 0, a range that ends after 2**64, or another direction.
    """

    cluster_id: int
    local: Column
    remote: Column
    nbytes: Column
    direction: Literal["pull", "push"] = "pull"
    _placed: _Placed | None = field(init=False, repr=False)  # by the last transfer

    def __init__(
        self, cluster_id: int, local: ArrayLike, remote: ArrayLike, nbytes: ArrayLike,
        direction: Literal["pull", "push"] = "pull",
    ) -> None:  # fmt: skip
        if direction not in ("pull", "push"):
            raise invalid(f"direction={shown(direction)} must be 'pull' or 'push'")
        check_width("cluster_id", cluster_id, 0, UINT64_MAX)
        columns = _column("local", local), _column("remote", remote), _column("nbytes", nbytes)
        if not 0 < len(columns[0]) == len(columns[1]) == len(columns[2]):
            raise invalid(
                f"ranges: local, remote and nbytes have {[*map(len, columns)]} numbers; they must "
                "have equally many, and at least 1"
            )
        if (bad := first_bad(*columns)) >= 0:
            raise _impossible(bad, *columns)
        assign = object.__setattr__
        assign(self, "cluster_id", cluster_id)
        assign(self, "direction", direction)
        assign(self, "local", columns[0])
        assign(self, "remote", columns[1])
        assign(self, "nbytes", columns[2])
        assign(self, "_placed", None)

    def __len__(self) -> int:
        return len(self.nbytes)


class _Placed(NamedTuple):
    """Ranges that were found in caches of both sides. Keeps no memory alive."""

    mine: ref[AddressIndex[CacheEntry]]
    its: ref[AddressIndex[Any]]
    listed: Descriptors  # sorted and merged, with the peer's own addresses
    parts: list[tuple[int, int, int]]  # extent here, extent of the peer, first range
    pairs: Column | None  # the pair of extents of each range; None: all have the same pair
    num_given: int  # ranges before they were merged
    ours: ref[TensorMemory]
    theirs: ref[TensorMemory]
    descriptors: Descriptors  # `listed`, with the addresses that reach the peer's memory


class _Found(NamedTuple):
    """Ranges, and the memory of both sides."""

    placed: _Placed
    ours: TensorMemory
    theirs: TensorMemory


class RangeOperation(Operation):
    """An operation on ranges of addresses."""

    def __init__(
        self, engine: Engine, ranges: AddressRanges, **options: Unpack[RunOptions]
    ) -> None:
        self._ranges, self._is_own = ranges, ranges.cluster_id == engine.cluster_id
        if self._is_own:
            refuse_notices(options)
        super().__init__(engine, f"{ranges.direction}_ranges", **options)

    def prepare(self) -> tuple[Plan, TensorMemory, TensorMemory, Descriptors]:
        """Find the memory of the ranges; sort and lower the ranges."""
        ranges, pulls = self._ranges, self._ranges.direction == "pull"
        link = None if self._is_own else self._linked("ranges", ranges, ranges.cluster_id)
        # Assume that what the peer has published last is valid; if that fails, the peer is asked.
        self.speculated = not self.retried
        try:
            return self._prepare(link, ranges, pulls)
        except LLMException as error:
            if not self.asks_again(error):
                raise
        return self._prepare(link, ranges, pulls)

    def _prepare(
        self, link: PeerLink | None, ranges: AddressRanges, pulls: bool
    ) -> tuple[Plan, TensorMemory, TensorMemory, Descriptors]:
        mine = self.engine.registry.address_index()
        its: AddressIndex[Any] = mine  # of a PeerCache; of a CacheEntry inside one engine
        if link is not None:
            its = link.address_index(writable=not pulls, ask=self.retried, wait_ms=self.left_ms())
        placed, ours, theirs = _find(ranges, link, mine, its, again=self.retried)
        self.cache_id = mine.extents[placed.parts[0][0]].cache.cache.cache_id
        if not (ours if pulls else theirs).writable:
            raise invalid("the ranges to write are in memory that is registered read-only")
        plan = _plan(placed, pulls, link, mine, its)
        src, dst = (theirs, ours) if pulls else (ours, theirs)
        return plan, src, dst, placed.descriptors


def move_ranges_now(
    engine: Engine, ranges: AddressRanges, started: float, options: Mapping[str, Any]
) -> bool:
    """Pull small ranges from a peer on this host; False: an operation moves or refuses them."""
    link = engine.links.peers.get(ranges.cluster_id)
    if (
        link is None
        or link.state is not _LINKED
        or ranges.direction != "pull"
        or not engine.moves_small
        or (engine.recorder is not None and not engine.recorder.ended)
        or OBSERVERS
        or logger.logger.isEnabledFor(logging.INFO)
    ):
        return False
    mine = engine.registry.address_index()
    try:
        found = _find(ranges, link, mine, link.address_index(writable=False))
    except LLMException:
        return False
    ours, descriptors = found.ours, found.placed.descriptors
    nbytes = descriptors.total_nbytes
    reader = getattr(found.theirs, "reader", None)  # of memory that this thread can read
    if nbytes > engine.transfers.small_nbytes or reader is None:
        return False
    if type(ours) is not HostMemory or not ours.held or not ours.writable:
        return False
    peer, words, by_address = reader
    try:
        if peer.copy(descriptors, words, ours, by_address) != "done":
            return False
    except ValueError:  # the link is closed
        return False
    if options.get("notify") is not None:
        notify_moved(engine, link, "pull_ranges", started, options)
    engine.metrics.record("pull_ranges", _SUCCESS, nbytes, perf_counter() - started)
    link.traffic.add(1, nbytes)
    return True


def _find(
    ranges: AddressRanges, link: PeerLink | None, mine: AddressIndex[CacheEntry],
    its: AddressIndex[Any], *, again: bool = False,
) -> _Found:  # fmt: skip
    """Find ranges in caches and lower them; `again`: ignore an earlier result."""
    placed = ranges._placed
    if again or placed is None or placed.mine() is not mine or placed.its() is not its:
        placed = None
    else:
        ours, theirs = placed.ours(), placed.theirs()
        if ours is not None and theirs is not None:
            return _Found(placed, ours, theirs)
    pulls, columns = ranges.direction == "pull", (ranges.local, ranges.remote, ranges.nbytes)
    if placed is None:
        found = place(mine.pieces, its.pieces, *columns, pulls)
        if found is None:
            columns = _cut(mine, its, *columns)
            found = place(mine.pieces, its.pieces, *columns, pulls)
            assert found is not None, "each range now lies in one piece on each side"
        listed, parts, pairs, clash = found
        if clash is not None:
            dst, nbytes = listed.dst, listed.nbytes
            first, second = (span_text(int(dst[at]), int(nbytes[at])) for at in sorted(clash))
            side = "local" if pulls else "remote"
            raise invalid(f"{side} ranges {first} and {second} overlap: both are written")
        count = len(columns[2])
    else:
        listed, parts, pairs, count = placed[2:6]
    ours = joined([mine.extents[number].cache.memory for number, _, _ in parts])
    peer = [its.extents[number] for _, number, _ in parts]
    caches = [extent.cache for extent in peer]
    theirs = (
        joined([cache.memory for cache in caches])
        if link is None
        else link.joined_memory(caches, writable=not pulls, any_holder=True)
    )
    if placed is not None and placed.theirs() is theirs:
        descriptors = placed.descriptors
    else:
        descriptors = listed if link is None else _as_reached(listed, pulls, theirs, peer, parts)
    placed = _Placed(
        ref(mine), ref(its), listed, parts, pairs, count, ref(ours), ref(theirs), descriptors
    )
    if theirs.in_process:
        check_order_free(_plan(placed, pulls, link, mine, its), descriptors, one_space=True)
    object.__setattr__(ranges, "_placed", placed)
    return _Found(placed, ours, theirs)


def _plan(
    placed: _Placed, pulls: bool, link: PeerLink | None, mine: AddressIndex[CacheEntry],
    its: AddressIndex[Any],
) -> RangePlan:  # fmt: skip
    """Return the plan of ranges; its parts are made when they are first read."""
    listed = placed.listed
    own = [mine.extents[number] for number, _, _ in placed.parts]
    peer = [its.extents[number] for _, number, _ in placed.parts]
    made = partial(
        _made_parts,
        pulls,
        [_own_place(extent) for extent in own],
        [_own_place(each) if link is None else _peer_place(each) for each in peer],
        ("", "") if link is None else (f" of {link}", link.side(peer[0].cache).way),
        _bounds(placed.parts, len(listed)),
        placed.num_given,
        placed.pairs,
    )
    ranges = Ranges(listed.src, listed.dst, listed.nbytes, pulls)
    return RangePlan(ranges, len(own), listed.total_nbytes, made)


def _bounds(parts: list[tuple[int, int, int]], count: int) -> list[int]:
    """Return the first range of each part, and the number of ranges."""
    return [*[first for _, _, first in parts], count]


def _cut(
    own: AddressIndex[CacheEntry], peer: AddressIndex[Any],
    local: Column, remote: Column, nbytes: Column,
) -> tuple[Column, Column, Column]:  # fmt: skip
    """Cut ranges at the borders of tensors; refuse bytes outside of caches."""
    here = own.cut("local", local, remote, nbytes)
    if len(here.nbytes) != len(nbytes):  # first, so that errors have the caller's numbers
        peer.cut("remote", remote, local, nbytes)
    there = peer.cut("remote", here.others, here.starts, here.nbytes)
    return there.others, there.starts, there.nbytes


def _as_reached(
    listed: Descriptors, pulls: bool, memory: TensorMemory, peer: Sequence[Extent[PeerCache]],
    parts: list[tuple[int, int, int]],
) -> Descriptors:  # fmt: skip
    """Return descriptors with the addresses at which the backend reaches the peer's memory."""
    shifts, first = [], 0
    for extent in peer:
        shifts.append(int(memory.addresses[first + extent.tensor]) - extent.address)
        first += len(extent.cache.addresses)
    if not any(shifts):
        return listed
    bounds = _bounds(parts, len(listed))
    reached = (listed.src if pulls else listed.dst).copy()
    for i, shift in enumerate(shifts):
        reached[bounds[i] : bounds[i + 1]] += np.uint64(shift % (1 << 64))
    written, read = (listed.dst, reached) if pulls else (reached, listed.src)
    return Descriptors.from_columns(written, read, listed.nbytes)


_Place = tuple[CacheDesc, int, int, int, str]
"""A tensor: description and id of its cache, its number, its address, and the caller's name for
the cache. Keeps no memory alive."""


def _own_place(extent: Extent[CacheEntry]) -> _Place:
    cache = extent.cache.cache
    return cache.cache_desc, cache.cache_id, extent.tensor, extent.address, extent.cache.name


def _peer_place(extent: Extent[PeerCache]) -> _Place:
    cache = extent.cache
    return cache.desc, cache.cache_id, extent.tensor, extent.address, cache.name


def _made_parts(
    pulls: bool,
    own: Sequence[_Place],
    peer: Sequence[_Place],
    link: tuple[str, str],  # the peer's name in texts, and the way of its transport
    bounds: Sequence[int],
    count: int,  # number of ranges before they were merged
    pairs: Column | None,  # the pair of each range; None: all have the same pair
) -> list[RangePart]:
    """Make the parts of a plan."""
    counts = [count] if pairs is None else np.unique(pairs, return_counts=True)[1].tolist()
    parts = []
    for i, (mine, its) in enumerate(zip(own, peer, strict=True)):
        here = _side(*mine[:2], _named(mine))
        there = _side(*its[:2], f"{_named(its)}{link[0]}", link[1])
        (src, dst), (a, b) = ((there, here), (its, mine)) if pulls else ((here, there), (mine, its))
        parts.append(
            RangePart(src, dst, a[2], b[2], a[3], b[3], bounds[i], bounds[i + 1], counts[i])
        )
    return parts


def _named(place: _Place) -> str:
    name = place[-1]
    return f"memory {place[1]} ({name})" if name else f"memory {place[1]}"


def _side(desc: CacheDesc, cache_id: int, name: str, way: str = "") -> Side:
    """Return a cache as a side with one row: the whole of each tensor."""
    return Side(
        desc.num_tensors, 1, desc.tensor_nbytes, False, desc.placement,
        name=name, way=way, cache_id=cache_id,
    )  # fmt: skip


def _column(name: str, values: Any) -> Column:
    given = np.asarray(values)
    if given.dtype == _UINT64 and given.ndim == 1 and given.flags.c_contiguous:
        return given
    if given.ndim != 1:
        raise TypeError(f"{name}={shown(values)} must be a sequence of int")
    return np.array(
        [check_width(f"{name}[{i}]", value, 0, UINT64_MAX) for i, value in enumerate(list(values))],
        dtype=np.uint64,
    )


def _impossible(number: int, local: Column, remote: Column, nbytes: Column) -> LLMException:
    """Return the error of a range that is empty, begins at 0 or passes 2**64."""
    start, size = int(local[number]), int(nbytes[number])
    side = "local"
    if start and 0 < size <= UINT64_MAX + 1 - start:
        side, start = "remote", int(remote[number])
    return invalid(
        f"{side} range {number} has address {start:#x} and {size} bytes; a range has at least 1 "
        "byte, does not begin at 0, and ends by 2**64"
    )

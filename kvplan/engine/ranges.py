"""Transfers between registered memory that addresses name at both ends."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Unpack

import numpy as np

from kvnative._lower import Descriptors
from kvnative._ranges import arrange, first_overlap
from kvplan.engine.memory import joined
from kvplan.engine.operation import Operation, RunOptions
from kvplan.execution.binding import check_order_free
from kvplan.links.address_index import check_ranges
from kvplan.planning.ranges import RangePart, RangePlan, Ranges, span_text
from kvplan.planning.side import Side
from kvplan.status import LLMException, invalid
from kvplan.types import CacheDesc
from kvplan.validation import UINT64_MAX, check_width, shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    from kvplan.engine.engine import Engine
    from kvplan.engine.entry import CacheEntry
    from kvplan.execution import TensorMemory
    from kvplan.links import PeerLink
    from kvplan.links.address_index import AddressIndex, Cut, Extent
    from kvplan.links.peer_table import PeerCache
    from kvplan.planning.plan import Plan

    Column = NDArray[np.uint64]


@dataclass(frozen=True, eq=False, slots=True)
class AddressRanges:
    """Ranges of bytes to move, by their addresses here and in a peer.

    Each range must lie in registered memory at both ends. A range may cross from one registration
    into an adjacent one.

    Args:
        cluster_id: of the peer.
        local: the address of each range here.
        remote: the address of each range in the peer.
        nbytes: the size of each range.
        direction: "pull" from the peer, or "push" to it.

    Raises:
        TypeError: not integers.
        ValueError: a number outside uint64.
        LLMException: LLM_PARAM_INVALID: no range, columns of unequal length, an empty range, a
            range at address 0, or a range that ends after 2**64.
    """

    cluster_id: int
    local: Column
    remote: Column
    nbytes: Column
    direction: Literal["pull", "push"] = "pull"

    def __init__(
        self,
        cluster_id: int,
        local: ArrayLike,
        remote: ArrayLike,
        nbytes: ArrayLike,
        direction: Literal["pull", "push"] = "pull",
    ) -> None:
        if direction not in ("pull", "push"):
            raise invalid(f"direction={shown(direction)} must be 'pull' or 'push'")
        check_width("cluster_id", cluster_id, 0, UINT64_MAX)
        columns = {
            name: _column(name, values)
            for name, values in (("local", local), ("remote", remote), ("nbytes", nbytes))
        }
        lengths = {name: len(column) for name, column in columns.items()}
        if len(set(lengths.values())) > 1 or not lengths["nbytes"]:
            raise invalid(f"ranges: {lengths} must be of one length, of at least 1")
        for name in ("local", "remote"):
            check_ranges(columns[name], columns["nbytes"], name)
        fields = {"cluster_id": cluster_id, "direction": direction, **columns}
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def __len__(self) -> int:
        return len(self.nbytes)


class _Found(NamedTuple):
    """Ranges that were cut: each lies in one tensor here and in one of the peer."""

    own: AddressIndex[CacheEntry]
    peer: AddressIndex[PeerCache]
    own_extents: Column
    peer_extents: Column
    local: Column
    remote: Column
    nbytes: Column


class RangeOperation(Operation):
    """An operation on ranges of addresses."""

    def __init__(
        self, engine: Engine, ranges: AddressRanges, **options: Unpack[RunOptions]
    ) -> None:
        self._ranges = ranges
        super().__init__(engine, f"{ranges.direction}_ranges", **options)

    def prepare(self) -> tuple[Plan, TensorMemory, TensorMemory, Descriptors]:
        """Find the memory of the ranges, sort them and lower them."""
        ranges, pulls = self._ranges, self._ranges.direction == "pull"
        link = self._linked("ranges", ranges, ranges.cluster_id)
        # Assumes that the peer's last published registrations are valid. The transfer fails if they
        # are not, and then the peer is asked.
        self.speculated = not self.retried
        try:
            return self._prepare(link, ranges, pulls)
        except LLMException as error:
            if not self.asks_again(error):
                raise
        return self._prepare(link, ranges, pulls)

    def _prepare(
        self, link: PeerLink, ranges: AddressRanges, pulls: bool
    ) -> tuple[Plan, TensorMemory, TensorMemory, Descriptors]:
        found = self._locate(link, ranges, pulls)
        pairs = _pairs(found)
        source, target = (found.remote, found.local) if pulls else (found.local, found.remote)
        src, dst, nbytes, groups = arrange(source, target, found.nbytes, pairs)
        if (clash := first_overlap(dst, nbytes)) is not None:
            first, second = (
                span_text(int(dst[place]), int(nbytes[place])) for place in sorted(clash)
            )
            side = "local" if pulls else "remote"
            raise invalid(f"{side} ranges {first} and {second} overlap: both are written")
        own, peer, firsts = _parts(found, groups)
        self.cache_id = own[0].cache.cache.cache_id
        ours = joined([extent.cache.memory for extent in own])
        theirs = link.joined_memory(
            [each.cache for each in peer], writable=not pulls, any_holder=True
        )
        if pulls and not ours.writable:
            raise invalid(
                "local ranges are to be written, and their memory is registered read-only"
            )
        bounds = [*firsts, len(nbytes)]
        made = partial(
            _made_parts,
            pulls,
            [
                (each.cache.cache.cache_desc, each.cache.cache.cache_id, each.tensor, each.address)
                for each in own
            ],
            [(each.cache.desc, each.cache.cache_id, each.tensor, each.address) for each in peer],
            (str(link), link.side(peer[0].cache).way),
            bounds,
            len(found.nbytes),
            pairs,
        )
        plan = RangePlan(Ranges(src, dst, nbytes, pulls), len(own), made)
        reached = _as_reached(src if pulls else dst, theirs, peer, bounds)
        read, written = (reached, dst) if pulls else (src, reached)
        descriptors = Descriptors.from_columns(written, read, nbytes)
        if theirs.in_process:
            check_order_free(plan, descriptors, one_space=True)
        return (plan, theirs, ours, descriptors) if pulls else (plan, ours, theirs, descriptors)

    def _locate(self, link: PeerLink, ranges: AddressRanges, pulls: bool) -> _Found:
        own = self.engine.registry.address_index()
        here = own.cut("local", ranges.local, ranges.remote, ranges.nbytes)
        peer = link.address_index(writable=not pulls, ask=self.retried)
        there = _cut_remote(peer, ranges, here)
        if len(there.nbytes) != len(here.nbytes):  # the peer's registrations have cut further
            here = own.cut("local", there.others, there.starts, there.nbytes)
        return _Found(
            own, peer, here.extents, there.extents, there.others, there.starts, there.nbytes
        )


def _cut_remote(peer: AddressIndex[PeerCache], ranges: AddressRanges, here: Cut) -> Cut:
    if len(here.nbytes) != len(ranges.nbytes):  # first, so that errors have the caller's numbers
        peer.cut("remote", ranges.remote, ranges.local, ranges.nbytes)
    return peer.cut("remote", here.others, here.starts, here.nbytes)


def _pairs(found: _Found) -> Column | None:
    """Return a number for the pair of extents of each range; None: all have the same pair."""
    own, peer = found.own_extents, found.peer_extents
    if (own == own[0]).all() and (peer == peer[0]).all():
        return None
    return own * np.uint64(len(found.peer.extents)) + peer


def _parts(
    found: _Found, groups: Column | None
) -> tuple[list[Extent[CacheEntry]], list[Extent[PeerCache]], list[int]]:
    """Return the extents of each pair in order, and the first range of each."""
    if groups is None:
        firsts = [0]
        numbers = [(int(found.own_extents[0]), int(found.peer_extents[0]))]
    else:
        firsts = [0, *(np.flatnonzero(groups[1:] != groups[:-1]) + 1).tolist()]
        numbers = [divmod(int(groups[first]), len(found.peer.extents)) for first in firsts]
    return (
        [found.own.extents[own] for own, _ in numbers],
        [found.peer.extents[peer] for _, peer in numbers],
        firsts,
    )


def _as_reached(
    addresses: Column, memory: TensorMemory, peer: Sequence[Extent[PeerCache]], bounds: list[int]
) -> Column:
    """Return addresses of the peer as the backend sees them, which may be those of a mapping."""
    reached = addresses
    first = 0
    for i, extent in enumerate(peer):
        base = int(memory.addresses[first + extent.tensor])
        if base != extent.address:
            if reached is addresses:
                reached = addresses.copy()
            part = slice(bounds[i], bounds[i + 1])
            reached[part] = addresses[part] - np.uint64(extent.address) + np.uint64(base)
        first += len(extent.cache.addresses)
    return reached


_Place = tuple[CacheDesc, int, int, int]
"""A tensor: description and id of its cache, its number, its address. Keeps no memory."""


def _made_parts(
    pulls: bool,
    own: Sequence[_Place],
    peer: Sequence[_Place],
    link: tuple[str, str],  # name of the peer, and the way of its transport
    bounds: Sequence[int],
    count: int,  # number of ranges before they were merged
    pairs: Column | None,  # the pair of each range; None: all have the same pair
) -> list[RangePart]:
    """Make the parts of a plan, at the first look at them."""
    counts = [count] if pairs is None else np.unique(pairs, return_counts=True)[1].tolist()
    parts = []
    for i, (mine, its) in enumerate(zip(own, peer, strict=True)):
        here = _side(*mine[:2], f"memory {mine[1]}")
        there = _side(*its[:2], f"memory {its[1]} of {link[0]}", link[1])
        (src, dst), (a, b) = ((there, here), (its, mine)) if pulls else ((here, there), (mine, its))
        parts.append(
            RangePart(src, dst, a[2], b[2], a[3], b[3], bounds[i], bounds[i + 1], counts[i])
        )
    return parts


def _side(desc: CacheDesc, cache_id: int, name: str, way: str = "") -> Side:
    """Return a cache as a side with one row, which is all of each tensor."""
    return Side(
        desc.num_tensors, 1, desc.tensor_nbytes, False, desc.placement,
        name=name, way=way, cache_id=cache_id,
    )  # fmt: skip


def _column(name: str, values: Any) -> Column:
    given = np.asarray(values)
    if given.dtype == np.uint64 and given.ndim == 1 and given.flags.c_contiguous:
        return given
    if given.ndim != 1:
        raise TypeError(f"{name}={shown(values)} must be a sequence of int")
    return np.array(
        [check_width(f"{name}[{i}]", value, 0, UINT64_MAX) for i, value in enumerate(list(values))],
        dtype=np.uint64,
    )

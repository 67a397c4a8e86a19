"""Several caches of this process and of one peer in one transfer: one plan and one submission."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, Unpack, cast

import msgspec
import numpy as np

from kvplan.device.memory import DeviceMemory
from kvplan.engine.operation import Prepared, SubmitOptions
from kvplan.engine.pairs import request_tables
from kvplan.engine.planned import fitted
from kvplan.engine.resolve import READ, WRITTEN, TransferOperation
from kvplan.execution.memory import HostMemory
from kvplan.lease import BlockLease
from kvplan.planning.part import Part
from kvplan.planning.plan import Plan
from kvplan.planning.planner import Local, of_part, plan_pair
from kvplan.planning.transfer import Planned, Rows, Transfer
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.types import BlocksCacheKey, Cache, CacheIndex
from kvplan.validation import mismatch, shown

if TYPE_CHECKING:
    from kvplan.engine.engine import Engine
    from kvplan.execution import TensorMemory
    from kvplan.links.peer_table import PeerCache
    from kvplan.planning.side import Side
    from kvplan.planning.transfer import AnyCache


class Pair(NamedTuple):
    """What a transfer of several caches moves between one pair of them.

    Attributes:
        name: the caller's name of the pair; empty: the transfer has only one destination.
        transfer: of that name.
        src, dst: the rows of the pair.
        source: the place of `src` among the sources of a gather; None: the transfer is none.
    """

    name: str
    transfer: Transfer | Planned
    src: Rows
    dst: Rows
    source: int | None

    def argument(self, field: str) -> str:
        """Return what errors call a field: as the caller gave it."""
        place = f"{field}[{self.source}]" if field == "src" and self.source is not None else field
        return f"transfer[{shown(self.name)}].{place}" if self.name else place

    def with_tables(self, transfer: Transfer) -> Transfer:
        """Return the transfer of the pair, with the block tables and tokens that leases say."""
        src, dst = self.src, self.dst
        src_blocks, dst_blocks, num_tokens = request_tables(src, dst, transfer.num_tokens)
        return Transfer(
            Rows(src.cache, src_blocks, src.slot, src.first_token, src.offset),
            Rows(dst.cache, dst_blocks, dst.slot, dst.first_token, dst.offset),
            num_tokens, transfer.nbytes, transfer.layers, transfer.reinterpret, transfer.coalesce,
        )  # fmt: skip


_Found: TypeAlias = "tuple[Side, TensorMemory] | None"
_Own: TypeAlias = "tuple[_Found, _Found]"
"""Source and destination of a pair; None: the peer's."""


class GroupOperation(TransferOperation):
    """An operation between several caches of this process and of one peer, or inside one process.

    Attributes:
        pairs: as given.
        sides: the source and the destination of each pair, when they are found.
    """

    __slots__ = ("_own", "_there", "pairs", "sides")

    def __init__(
        self,
        engine: Engine,
        name: str,
        pairs: Sequence[Pair],
        *,
        by_layer: bool = False,
        speculative: bool = False,
        is_part: bool = False,
        **options: Unpack[SubmitOptions],
    ) -> None:
        super().__init__(
            engine,
            Transfer(pairs[0].src, pairs[0].dst),
            by_layer=by_layer,
            speculative=speculative,
            **options,
        )
        self.name = name
        self.is_part = is_part
        self.pairs = pairs
        self.sides: list[tuple[Side, Side]] = []
        self._own: list[_Own] = []
        self._there: list[PeerCache] = []

    def find_own(self) -> None:
        """Find the caches of this process."""
        self._own = [
            (self._own_rows(pair, "src", pair.src), self._own_rows(pair, "dst", pair.dst))
            for pair in self.pairs
        ]

    def find_peer(self) -> None:
        """Find the caches of the peer, after `find_own`; then `sides` are known."""
        self.sides, self._there = [], []
        for pair, (src, dst) in zip(self.pairs, self._own, strict=True):
            if src is None:
                source = self._peer_cache(pair.argument("src"), pair.src, READ[:1] + READ[2:])
            else:
                source = src[0]
            if dst is None:
                target = self._peer_cache(pair.argument("dst"), pair.dst, WRITTEN[:-1])
            else:
                target = dst[0]
            self.sides.append((source, target))

    def prepare(self) -> Prepared:
        """Find the caches of all pairs, and plan each."""
        self.find_own()
        self.find_peer()
        parts = {}
        for index, pair in enumerate(self.pairs):
            with named(pair.name):
                parts[index] = self.plan_part(index)
        return self.prepared(parts)

    def plan_part(self, index: int) -> Part:
        """Plan the pair at this place by itself, if it was not planned before."""
        pair, (source, target) = self.pairs[index], self.sides[index]
        if isinstance(pair.transfer, Planned):
            part = fitted(pair.transfer, source, target, self._local, by_layer=self.by_layer)
            return part.labelled(pair.name)
        transfer = pair.with_tables(pair.transfer)
        if self.engine.reinterpret and not transfer.reinterpret:
            transfer = msgspec.structs.replace(transfer, reinterpret=True)
        src, dst = cast(Rows, transfer.src), transfer.dst
        if src.blocks is None or dst.blocks is None:
            field = "src_blocks" if src.blocks is None else "dst_blocks"
            raise invalid(f"{field} is None; it must name blocks")
        part = plan_pair(transfer, source, target, self._local, by_layer=self.by_layer)
        return part.labelled(pair.name)

    def prepared(self, parts: dict[int, Part]) -> Prepared:
        """Return the plan of some pairs, by their places, and the memory of both sides."""
        having = sorted(parts)
        plan = Plan.made(*(parts[it] for it in having))
        read = [src[1] for i in having if (src := self._own[i][0]) is not None]
        written = [dst[1] for i in having if (dst := self._own[i][1]) is not None]
        if self._local == "both":
            return plan, joined(read), joined(written), None
        pulls = self._local == "dst"
        keys = [self.peer_key(self.pairs[i]) for i in having]
        leases = [key for key in keys if isinstance(key, BlockLease)]
        self.leases = tuple(lease.lease_id for lease in leases)
        assert self.link is not None
        theirs = self.link.leased_memory(
            [self._there[i] for i in having], leases, writable=not pulls
        )
        if pulls:
            return plan, theirs, joined(written), None
        return plan, joined(read), theirs, None

    def peer_key(self, pair: Pair) -> AnyCache:
        """Return the name of the peer's cache of a pair."""
        return pair.src.cache if self._local == "dst" else pair.dst.cache

    def _own_rows(self, pair: Pair, field: Local, rows: Rows) -> _Found:
        if self._local not in (field, "both"):
            return None
        return self.own(pair.argument(field), cast(Cache, rows.cache), paged=True)

    def _peer_cache(self, argument: str, rows: Rows, kinds: tuple[type, ...]) -> Side:
        """Return the cache of the peer that an argument names."""
        key = rows.cache
        if not isinstance(key, kinds):
            raise TypeError(f"{argument}={shown(key)} must be {mismatch(key, *kinds)}")
        key = cast("CacheIndex | BlocksCacheKey | BlockLease", key)
        writable = self._local == "src"
        link = self._linked(argument, key)
        if self.link is None:  # only planned
            self.link = link
        if link is not self.link:
            raise invalid(
                f"{argument} is of cluster {key.cluster_id}, and the transfer of cluster "
                f"{self.link.cluster_id}"
            )
        if isinstance(key, BlockLease):
            cache = link.leased(key, writable=writable)
        else:
            speculative = self._speculative and isinstance(key, BlocksCacheKey)
            cache = link.cache(key, writable=writable, speculative=speculative)
            self.speculated = self.speculated or speculative
        self._there.append(cache)
        side = link.side(cache)
        if not side.paged:
            self._refuse_kind(argument, str(key), paged=True, table="")
        if isinstance(key, CacheIndex) and key.batch_index:
            raise invalid(f"{argument}={key} names a slot, and a paged cache has none")
        return side


@contextmanager
def named(name: str) -> Iterator[None]:
    """Say of which transfer something is refused; of one without a name nothing."""
    try:
        yield
    except (LLMException, TypeError) as error:
        if not name:
            raise
        raise of_part(name, error) from None


def joined(memories: Sequence[TensorMemory]) -> TensorMemory:
    """The memory of several caches of this process, one after another."""
    if len(memories) == 1:
        return memories[0]
    addresses = np.concatenate([*map(attrgetter("addresses"), memories)])
    nbytes = np.concatenate([*map(attrgetter("nbytes"), memories)])
    writable = all(map(attrgetter("writable"), memories))
    if {*map(type, memories)} == {HostMemory}:
        on_host = cast("tuple[HostMemory, ...]", tuple(memories))
        owner = on_host if all(map(attrgetter("held"), on_host)) else None
        return HostMemory(addresses, nbytes, writable=writable, owner=owner, parts=on_host)
    on_device = tuple(it for it in memories if isinstance(it, DeviceMemory))
    if len(on_device) < len(memories) or len({id(it.device) for it in on_device}) > 1:
        raise LLMException(
            "caches of this process are in host memory and on the device, and one transfer "
            "has one way; move them in two",
            status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
        )
    return DeviceMemory(
        on_device[0].device,
        addresses,
        nbytes,
        writable=writable,
        owner=on_device if all(it.held for it in on_device) else None,
        parts=on_device,
        watches=tuple(watch for it in on_device for watch in it.watches),
    )

"""Operations between caches: each pair of names is resolved to sides and memory, then planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import compress
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn, cast

from msgspec import structs

from kvplan.engine.memory import joined
from kvplan.engine.pairs import PairOperation, prepare_parts
from kvplan.engine.shares import Pair, operation_name
from kvplan.execution.rows import counts_tokens
from kvplan.lease import BlockLease
from kvplan.planning.blocks import is_empty
from kvplan.planning.gather import plan_taken
from kvplan.planning.layers import source_tensors
from kvplan.planning.planned import check_plan, check_slot, fitted
from kvplan.planning.planner import Local, of_part, plan_pair
from kvplan.planning.segments import DEFAULT_COALESCE
from kvplan.planning.side import Side, is_same_cache, side
from kvplan.planning.texts import plural
from kvplan.planning.transfer import PeerTensors, Planned, Transfer
from kvplan.status import LLMException, invalid, not_exist
from kvplan.types import (
    NO_ID,
    BlocksCacheKey,
    Cache,
    CacheKey,
    CacheKeyByIdAndIndex,
    KvCacheExtParam,
)
from kvplan.validation import check_type, mismatch, shown

if TYPE_CHECKING:
    from kvnative._lower import Descriptors
    from kvplan.engine.operation import Prepared
    from kvplan.execution import TensorMemory
    from kvplan.execution.rows import RowPair
    from kvplan.links import PeerLink
    from kvplan.links.peer_table import PeerCache
    from kvplan.planning.blocks import Blocks
    from kvplan.planning.part import Kind, Part
    from kvplan.planning.transfer import AnyCache
    from kvplan.types import AnyCacheKey

_SHARED: Final = (CacheKeyByIdAndIndex, BlocksCacheKey, BlockLease)
"""Types of names that can be read and written, in an operation of any number of pairs."""

_READ: Final = (*_SHARED, CacheKey)
_WRITTEN: Final = (*_SHARED, PeerTensors)

_OTHER_KIND = {
    f"{verb}_{kind}": f"; {verb}_{other} takes a {takes} one"
    for verb in ("pull", "push", "copy")
    for kind, other, takes in (("cache", "blocks", "paged"), ("blocks", "cache", "contiguous"))
}
"""The remedy in errors: the operation that takes the other kind of cache."""


class Found(NamedTuple):
    """A cache that rows name; for a peer's cache, also the name."""

    side: Side
    slot: int | None  # None: no slot is named, or the cache is paged
    memory: TensorMemory | None  # of this process, or at addresses of a peer; None: see `cache`
    cache: PeerCache | None = None  # the peer's
    key: AnyCache | None = None


class TransferOperation(PairOperation):
    """An operation between pairs of caches, whose names are resolved."""

    found: list[tuple[Found, Found]]  # source and destination of each pair

    def resolve(self) -> Prepared:
        """Find the caches of all pairs, and lower or plan each."""
        self.find_own()
        self.find_peer()
        return self.bind()

    def bind(self) -> Prepared:
        """Lower each pair natively, or plan it, after its caches were found."""
        sources, targets = zip(*self.found, strict=True)
        src, dst = self._memory(sources, writable=False), self._memory(targets, writable=True)
        rows: list[RowPair] = []
        parts: list[Part] = []
        each: list[Descriptors] = []
        shares = len(self.found) > 1
        src_tensor = dst_tensor = 0
        for place, (source, target) in enumerate(self.found):
            # Not the joined memory: it is new in each operation, so its pair would never be known.
            lowered = self._lower(
                place,
                source.memory or src,
                target.memory or dst,
                src_tensor if shares and source.memory is None else None,
                dst_tensor if shares and target.memory is None else None,
            )
            src_tensor += source.side.num_tensors
            dst_tensor += target.side.num_tensors
            if lowered is None:
                parts.append(self.plan_part(place))
            else:
                pair, (part, descriptors) = lowered
                rows.append(pair)
                parts.append(part)
                each.append(descriptors)
        if self._requests and len(rows) == len(parts):
            ours, theirs = (dst, src) if self._local == "dst" else (src, dst)
            caches = [
                cast("PeerCache", (read.cache or written.cache)) for read, written in self.found
            ]
            self.keep(rows, parts, ours, theirs, caches)
        return prepare_parts(parts, each, src, dst)

    def plan_parts(self) -> list[Part]:
        """Plan all pairs, after their caches were found."""
        return [*map(self.plan_part, range(len(self.pairs)))]

    def find_own(self) -> None:
        """Find the caches of this process."""
        self.pairs = [*map(partial(Pair.with_tables, links=self.engine.links), self.pairs)]
        self._kinds = [*map(self._kinds_of, self.pairs)]
        self.found = []
        for pair, (from_blocks, to_blocks, table) in zip(self.pairs, self._kinds, strict=True):
            src = dst = cast(Found, None)  # the peer's: `find_peer` follows
            if self._local != "dst":
                src = self._own(pair, "src", paged=from_blocks, table=table)
            if self._local == "both" and is_same_cache(
                cast(Cache, pair.src.cache), cast(Cache, pair.dst.cache)
            ):
                dst = src._replace(slot=pair.dst.slot)
            elif self._local != "src":
                dst = self._own(pair, "dst", paged=to_blocks)
            self.found.append((src, dst))

    def find_peer(self) -> None:
        """Find the caches of the peer, after `find_own`."""
        if self._local == "both":
            return
        for index, pair in enumerate(self.pairs):
            from_blocks, to_blocks, table = self._kinds[index]
            src, dst = self.found[index]
            if self._local == "dst":
                src = self._peer(pair, "src", paged=from_blocks, table=table)
            else:
                if self._is_alone and isinstance(pair.transfer, Transfer):
                    table = "dst.blocks"
                dst = self._peer(pair, "dst", paged=to_blocks, table=table, stride=src.side.stride)
                if isinstance(pair.dst.cache, PeerTensors):
                    _check_addresses(pair.dst.cache, src.side, self._layers_of(pair, src.side))
            self.found[index] = src, dst

    def plan_part(self, place: int) -> Part:
        """Plan the pair at this place, or check a plan that was made earlier."""
        pair, (src, dst) = self.pairs[place], self.found[place]
        try:
            if isinstance(pair.transfer, Planned):
                for field, found in (("src", src), ("dst", dst)):
                    if found.slot is not None and found.key is not None:
                        check_slot(pair.transfer, field, found.slot)
                part = fitted(
                    pair.transfer, src.side, dst.side, self._local, by_layer=self.by_layer
                )
            elif pair.taken is not None:
                part = plan_taken(
                    pair.transfer, pair.source or 0, pair.src, src.side, dst.side, pair.taken,
                    by_layer=self.by_layer,
                )  # fmt: skip
            else:
                part = plan_pair(
                    self._request_of(pair, src, dst), src.side, dst.side, self._local,
                    by_layer=self.by_layer,
                )  # fmt: skip
        except (LLMException, TypeError) as error:
            raise of_part(pair.name, error) from None
        return part if self._is_alone else part.labelled(pair.name, pair.source)

    def drop_unused(self) -> bool:
        """Drop sources of a gather from which nothing is taken; return whether any pair is left."""
        used = [pair.taken is not None or pair.source is None for pair in self.pairs]
        if not all(used):
            self.pairs = [*compress(self.pairs, used)]
            self.found = [*compress(self.found, used)]
        return any(used)

    def peer_key(self) -> AnyCache:
        """Return the name of the first cache of the peer."""
        pair = self.pairs[0]
        return pair.src.cache if self._local == "dst" else pair.dst.cache

    def _request_of(self, pair: Pair, src: Found, dst: Found) -> Transfer:
        """Return the request to the planner: the rows of a pair, with the slots that were found."""
        given, read, written = cast(Transfer, pair.transfer), pair.src, pair.dst
        if not self._is_alone and (read.blocks is None or written.blocks is None):
            field = "src.blocks" if read.blocks is None else "dst.blocks"
            raise invalid(f"{field} is None; it must name blocks")
        reinterpret = given.reinterpret  # which the planner checks
        if reinterpret is False:
            reinterpret = self.engine.reinterpret
        return structs.replace(
            given,
            src=structs.replace(read, cache=src.side, slot=src.slot),
            dst=structs.replace(written, cache=dst.side, slot=dst.slot),
            layers=self._layers_of(pair, src.side),
            reinterpret=reinterpret,
        )

    def _kinds_of(self, pair: Pair) -> tuple[bool | None, bool, str]:
        """Return whether the source and the destination of a pair must be paged.

        None: no block moves, so the source may be either. The third value is the name of the
        source's block table in errors; empty: errors do not name the table.
        """
        if not self._is_alone:
            return True, True, ""
        if isinstance(pair.transfer, Planned):
            part = check_plan(pair.transfer.plan)
            return part.src.paged, part.dst.paged, ""
        read, written = pair.src.blocks, pair.dst.blocks
        if written is None:
            return False, False, "src.blocks" if self.by_layer else ""
        from_blocks = None if is_empty(written) else not (read is None or is_empty(read))
        return from_blocks, True, "src.blocks"

    def _own(self, pair: Pair, field: Local, *, paged: bool | None, table: str = "") -> Found:
        """Return the cache of this process that a side of a pair names."""
        argument, rows = pair.argument(field), pair.src if field == "src" else pair.dst
        if self._local == "both" and not isinstance(rows.cache, Cache):
            kinds = mismatch(rows.cache, Cache, *(_READ if field == "src" else _WRITTEN))
            raise TypeError(f"{argument}={shown(rows.cache)} must be {kinds}")
        entry = self.engine.registry.resolve(cast(Cache, rows.cache), argument)
        if self.cache_id < 0:
            self.cache_id = entry.cache.cache_id
        found = entry.side
        if found is None:  # addresses do not say whether they are paged
            found = side(argument, entry.cache, paged=paged is not False)
        elif paged is not None and found.paged is not paged:
            self._refuse_kind(argument, found.name, paged, table)
        return Found(found, rows.slot, entry.memory)

    def _peer(
        self, pair: Pair, field: Local, *, paged: bool | None, table: str, stride: int = 0
    ) -> Found:
        """Return the peer's cache that a side of a pair names; claim a `CacheKey` before a move."""
        argument, rows = pair.argument(field), pair.src if field == "src" else pair.dst
        key, writable = rows.cache, field == "dst"
        kinds: tuple[type, ...] = _SHARED
        if self._is_alone and (not writable or isinstance(pair.transfer, Transfer)):
            kinds = _WRITTEN if writable else _READ
        if not isinstance(key, kinds):
            raise TypeError(f"{argument}={shown(key)} must be {mismatch(key, *kinds)}")
        link = self.link
        if link is None:
            link = self._linked(argument, key, cast(BlockLease, key).cluster_id)
            self.link = link  # even if the operation only plans
        if isinstance(key, PeerTensors):
            tensors, memory = link.tensors(
                key.addresses,
                key.stride or stride,
                paged=paged is not False,
                wait_ms=self.left_ms(),
            )
            return Found(tensors, None if tensors.paged else rows.slot, memory)
        cache, slot = self._look_up(link, argument, key, writable=writable)
        found = link.side(cache)
        if paged is not None and found.paged is not paged:
            self._refuse_kind(argument, str(key), paged, table)
        if isinstance(key, BlockLease) and not found.paged:
            slot = key.slot(argument)
        if slot >= (1 if found.paged else found.count):
            _refuse_slot(argument, cast("AnyCacheKey", key), found)
        if rows.slot is not None and rows.slot != slot:
            raise invalid(
                f"{argument}.slot={shown(rows.slot)} must be None or {slot}, the slot of {key}"
            )
        return Found(found, None if found.paged else slot, None, cache, key)

    def _look_up(
        self, link: PeerLink, argument: str, key: AnyCache, *, writable: bool
    ) -> tuple[PeerCache, int]:
        """Return the cache and the slot that a key names."""
        left_ms = None if self.timeout_ms is None else self.left_ms()
        if isinstance(key, BlockLease):
            if link.latest(key) is not key:  # mostly in a plan that was made earlier
                raise not_exist(f"{argument}={key} has moved to other blocks: plan again")
            return link.leased(key, writable=writable, wait_ms=left_ms), 0
        if isinstance(key, CacheKeyByIdAndIndex):
            return link.cache(key, writable=writable, wait_ms=left_ms), key.batch_index
        if isinstance(key, BlocksCacheKey):
            guess = self._speculative
            self.speculated = guess
            return link.cache(key, writable=writable, speculative=guess, wait_ms=left_ms), 0
        key = cast(CacheKey, key)
        if (key.req_id == NO_ID) is (key.prefix_id == NO_ID):
            raise invalid(f"{argument}={key} must name either a request (req_id) or a prefix")
        if not self.moves:
            return link.find(key)
        self.claim = link.claim(key, left_ms)
        return self.claim.cache, self.claim.batch_index

    def _memory(self, found: Sequence[Found], *, writable: bool) -> TensorMemory:
        """Return the memory of one side; with a lease, transfers fail after the lease ends."""
        if found[0].cache is None:
            ours = [*map(attrgetter("memory"), found)]
            return ours[0] if len(ours) == 1 else joined(ours)
        caches = [*map(attrgetter("cache"), found)]
        theirs = cast("PeerLink", self.link).joined_memory(caches, writable=writable)
        leases = [each.key for each in found if isinstance(each.key, BlockLease)]
        self.leases = tuple(leases)
        return theirs.leased(leases) if leases else theirs

    def _lower(
        self,
        place: int,
        src: TensorMemory,
        dst: TensorMemory,
        src_tensor: int | None,
        dst_tensor: int | None,
    ) -> tuple[RowPair, tuple[Part, Descriptors]] | None:
        """Lower a usual pair natively; None: the planner must plan the pair."""
        pair, (source, target) = self.pairs[place], self.found[place]
        if not self.moves or not _is_usual(pair):
            return None
        transfer, read, written = cast(Transfer, pair.transfer), pair.src, pair.dst
        if not self._is_alone and (read.blocks is None or written.blocks is None):
            return None
        kind: Kind = "C2C" if written.blocks is None else "B2B" if source.side.paged else "C2B"
        by_tokens = counts_tokens(kind, transfer.num_tokens, read.first_token, written.first_token)
        if by_tokens is None or (pair.taken is not None and pair.taken.tokens is not None):
            return None
        taken = pair.taken
        rows = self.engine.transfers.rows.pair(
            operation_name(self._local, read, written), kind, source.side, target.side, src, dst,
            self._layers_of(pair, source.side) if taken is None else taken.layers,
            by_layer=self.by_layer, by_tokens=by_tokens,
            reinterpret=taken is None and (transfer.reinterpret or self.engine.reinterpret),
            heads=None if taken is None else taken.heads,
            src_tensor=src_tensor, dst_tensor=dst_tensor,
        )  # fmt: skip
        bound = rows and rows.bind(
            cast("Blocks", read.blocks if source.side.paged else (source.slot or 0,)),
            (target.slot or 0,) if written.blocks is None else written.blocks,
            transfer.num_tokens, read.first_token, written.first_token, pair.name, pair.source,
        )  # fmt: skip
        return None if rows is None or bound is None else (rows, bound)

    def _layers_of(self, pair: Pair, source: Side) -> KvCacheExtParam:
        """Return the layers of a pair; by layer, the number of tensors per layer must be known."""
        transfer = cast(Transfer, pair.transfer)
        layers = transfer.layers
        if not self.by_layer or pair.source is not None:
            return layers
        if check_type("layers", layers, KvCacheExtParam).tensor_num_per_layer is not None:
            return layers
        known = source.known_tensors_per_layer("src", None)
        if known is None:
            raise invalid(
                f"tensor_num_per_layer=None, and neither layout nor shard of {source} has it: "
                "layers become ready one by one, so the number of tensors per layer (2: K and V) "
                "is needed"
            )
        # Without `reinterpret` the planner finds the number from both sides.
        if transfer.reinterpret or self.engine.reinterpret:
            return replace(layers, tensor_num_per_layer=known)
        return layers

    def _refuse_kind(self, argument: str, name: str, paged: bool, table: str) -> NoReturn:
        found, needed = ("contiguous", "paged") if paged else ("paged", "contiguous")
        if table and not paged:
            raise invalid(f"{argument}={name} is a paged cache; {table} must name blocks of it")
        message = f"{argument}={name} is a {found} cache; {self.name} needs a {needed} one"
        if table:
            raise invalid(f"{message}, or no {table}: then a slot is moved")
        raise invalid(message + _OTHER_KIND.get(self.name, ""))


def _refuse_slot(argument: str, key: AnyCacheKey, found: Side) -> NoReturn:
    if found.paged:
        raise invalid(f"{argument}={key} names a slot of a paged cache, which has blocks")
    raise not_exist(
        f"{argument}={key} is out of range: that cache has {plural(found.count, 'slot')}"
    )


def _is_usual(pair: Pair) -> bool:
    """Return whether a request may be lowered without a plan; the planner checks all others."""
    transfer, src, dst = pair.transfer, pair.src, pair.dst
    return (
        isinstance(transfer, Transfer)
        and transfer.nbytes is None
        and type(transfer.reinterpret) is bool  # type: ignore[redundant-expr]
        and transfer.coalesce is DEFAULT_COALESCE
        and (transfer.rank is None or pair.taken is not None)
        and type(src.offset) is type(dst.offset) is int
        and src.offset == dst.offset == 0
        and (
            (dst.slot is None and (src.blocks is None or src.slot is None))
            if dst.blocks is not None
            else src.blocks is None
        )
    )


def _check_addresses(dst: PeerTensors, source: Side, layers: KvCacheExtParam) -> None:
    needed = len(source_tensors(source, layers))
    if len(dst.addresses) != needed:
        raise invalid(
            f"addresses has {len(dst.addresses)} elements; {needed} are needed, one for each "
            "tensor of src that is transferred"
        )

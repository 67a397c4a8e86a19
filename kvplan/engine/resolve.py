"""Operations between caches: names become sides and memory, and those the parts of a plan.

Each pair of caches is resolved and planned by itself, in the same way whether the operation has
one pair or several.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import compress
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn, TypeAlias, Unpack, cast

from kvplan.engine.memory import joined
from kvplan.engine.operation import Operation, Prepared, SubmitOptions, TransferOptions
from kvplan.engine.pairs import Request, find_requests, keep_pair, known_pair
from kvplan.engine.shares import Pair, check_plan, check_slot, fitted, local_of
from kvplan.execution.binding import join
from kvplan.execution.rows import counts_tokens
from kvplan.lease import BlockLease
from kvplan.planning.blocks import is_empty
from kvplan.planning.gather import plan_taken
from kvplan.planning.layers import source_tensors
from kvplan.planning.plan import Plan
from kvplan.planning.planner import VERBS, Local, of_part, plan_pair
from kvplan.planning.segments import DEFAULT_COALESCE
from kvplan.planning.side import Side, is_same_cache, side
from kvplan.planning.texts import plural
from kvplan.planning.transfer import PeerTensors, Planned, Rows, Transfer
from kvplan.status import LLMException, LLMStatusCode, invalid
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
    from kvplan.engine.engine import Engine
    from kvplan.execution import TensorMemory
    from kvplan.execution.rows import RowPair
    from kvplan.links import PeerLink
    from kvplan.links.peer_table import PeerCache
    from kvplan.planning.blocks import Blocks
    from kvplan.planning.part import Kind, Part
    from kvplan.planning.part import Operation as PlanOperation
    from kvplan.planning.transfer import AnyCache
    from kvplan.transport.link import PeerMemory
    from kvplan.types import AnyCacheKey

_SHARED: Final = (CacheKeyByIdAndIndex, BlocksCacheKey, BlockLease)
"""Those that can be read and written, in an operation of any number of pairs."""

_READ: Final = (*_SHARED, CacheKey)
_WRITTEN: Final = (*_SHARED, PeerTensors)

_OTHER_KIND = {
    f"{verb}_{kind}": f"; {verb}_{other} takes a {takes} one"
    for verb in ("pull", "push", "copy")
    for kind, other, takes in (("cache", "blocks", "paged"), ("blocks", "cache", "contiguous"))
}
"""The operation that takes the other kind of cache."""


class Found(NamedTuple):
    """A cache that rows name.

    Attributes:
        side: the cache as planning sees it.
        slot: as the rows or their key name it; None: no slot is named, or the cache is paged.
        memory: of this process, or of addresses of a peer; None: that of `cache`.
        cache: the peer's.
        key: the name of the peer's cache.
    """

    side: Side
    slot: int | None
    memory: TensorMemory | None
    cache: PeerCache | None = None
    key: AnyCache | None = None


Lowered: TypeAlias = "tuple[Part, Descriptors | None]"
"""A part, and its descriptors if it was lowered without segments."""


def prepared(lowered: Sequence[Lowered], src: TensorMemory, dst: TensorMemory) -> Prepared:
    """Return the plan of all parts, with one array of descriptors if each has its own."""
    plan = Plan.made(*[part for part, _ in lowered])
    each = [descriptors for _, descriptors in lowered if descriptors is not None]
    descriptors = None
    if len(each) == len(lowered):
        with suppress(LLMException):  # raised again where the plan is bound
            descriptors = join(plan, each, src, dst, one_space=src.in_process and dst.in_process)
    return plan, src, dst, descriptors


class TransferOperation(Operation):
    """An operation between pairs of caches: of this process, or one of each of the same peer.

    Attributes:
        by_layer: as given.
        pairs: as given; with the block tables of their leases once the caches are searched for.
        found: the source and the destination of each pair, once they are found.
    """

    __slots__ = ("_is_alone", "_kinds", "_local", "_requests", "by_layer", "found", "pairs")
    _local: Local

    def __init__(
        self,
        engine: Engine,
        pairs: list[Pair],
        name: str = "",
        request: Request | None = None,
        *,
        by_layer: bool = False,
        speculative: bool = False,
        **options: Unpack[SubmitOptions],
    ) -> None:
        first = pairs[0]
        self._is_alone = not first.name and first.source is None
        self.pairs, self.by_layer = pairs, by_layer
        self._requests = [] if request is None else [request]
        self.found: list[tuple[Found, Found]] = []
        if request is not None and request.pair is not None:
            self._local = "dst" if request.pulls else "src"
            name = request.pair.rows[0].operation
        else:
            self._local = local_of(first.src, first.dst)
            if self._local == "both":
                refuse_notices(options)
        if by_layer:
            name = f"{VERBS[self._local]}_layers"
        name = name or operation_name(self._local, first.src, first.dst)
        super().__init__(engine, name, speculative=speculative, **options)

    def prepare(self) -> Prepared:
        """Find the caches of all pairs, and lower or plan each."""
        if (known := self.known()) is not None:
            return known
        self.find_own()
        self.find_peer()
        return self.bound()

    def known(self) -> Prepared | None:
        """Return what requests of known pairs execute; None: their names are to be resolved."""
        # Only before the link is held. Later changes of the peer are found by checks of the memory.
        if not self.moves or self.link is not None:
            return None
        if not self._is_alone:
            transfers = [pair.transfer for pair in self.pairs]
            self._requests = find_requests(self.engine, transfers, by_layer=self.by_layer)
        requests = self._requests
        if not requests or (known := known_pair(requests)) is None:
            return None
        first = requests[0]
        is_key = False  # a key may name another cache now
        leases, ours, lowered = [], [], []
        for request, rows, pair in zip(requests, known.rows, self.pairs, strict=True):
            one = rows.bind(
                request.src_rows, request.dst_rows, request.num_tokens, request.src_token,
                request.dst_token, pair.name,
            )  # fmt: skip
            if one is None:
                return None
            is_key = is_key or type(request.key) is BlocksCacheKey
            lowered.append(one)
            ours.append(request.entry.memory)
            if request.lease is not None:
                leases.append(request.lease)
        link = first.link
        if first.pairs is not link.pairs or (is_key and not self._speculative):
            return None
        self.hold(link)
        self.speculated, self.cache_id = is_key, first.entry.cache.cache_id
        theirs: TensorMemory = known.theirs
        if leases:
            self.leases = tuple([lease.lease_id for lease in leases])
            theirs = known.theirs.leased(leases)
        own = ours[0] if len(ours) == 1 else joined(ours)
        return prepared(lowered, *((theirs, own) if first.pulls else (own, theirs)))

    def bound(self) -> Prepared:
        """Lower each pair natively, or plan it, after its caches were found."""
        src, dst = self._both_memories()
        lowered: list[Lowered] = []
        rows: list[RowPair] = []
        shares = len(self.found) > 1
        src_tensor = dst_tensor = 0
        for place, (source, target) in enumerate(self.found):
            # A cache of this process is the same memory in every operation, unlike joined ones.
            known = self._rows_of(
                place,
                source.memory or src,
                target.memory or dst,
                src_tensor if shares and source.memory is None else None,
                dst_tensor if shares and target.memory is None else None,
            )
            src_tensor += source.side.num_tensors
            dst_tensor += target.side.num_tensors
            one = None
            if known is not None and (one := self._lower(place, known)) is not None:
                rows.append(known)
            lowered.append(one or (self.plan_part(place), None))
        if self._requests and len(rows) == len(lowered):
            self._keep(src if self._local == "dst" else dst, rows)
        return prepared(lowered, src, dst)

    def planned(self) -> list[Part]:
        """Plan all pairs, after their caches were found."""
        return [*map(self.plan_part, range(len(self.pairs)))]

    def find_own(self) -> None:
        """Find the caches of this process."""
        self.pairs = [*map(Pair.with_tables, self.pairs)]
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
                    table = "dst_blocks"
                dst = self._peer(pair, "dst", paged=to_blocks, table=table, stride=src.side.stride)
                if isinstance(pair.dst.cache, PeerTensors):
                    _check_addresses(pair.dst.cache, src.side, self._layers_of(pair, src.side))
            self.found[index] = src, dst

    def _both_memories(self) -> tuple[TensorMemory, TensorMemory]:
        """Return the memory of all sources, and of all destinations."""
        src, dst = zip(*self.found, strict=True)
        return self._memory(src, writable=False), self._memory(dst, writable=True)

    def plan_part(self, place: int) -> Part:
        """Plan the pair at this place by itself; a plan that was made before is checked."""
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
                    pair.transfer, pair.source or 0, src.side, dst.side, pair.taken,
                    by_layer=self.by_layer,
                )  # fmt: skip
            else:
                part = plan_pair(
                    self._planned(pair, src, dst), src.side, dst.side, self._local,
                    by_layer=self.by_layer,
                )  # fmt: skip
        except (LLMException, TypeError) as error:
            raise of_part(pair.name, error) from None
        return part.labelled(pair.name, pair.source)

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

    def _planned(self, pair: Pair, src: Found, dst: Found) -> Transfer:
        """Return what the planner is asked: the rows of a pair, with the slots that were found."""
        given, read, written = cast(Transfer, pair.transfer), pair.src, pair.dst
        if not self._is_alone and None in (read.blocks, written.blocks):
            field = "src_blocks" if read.blocks is None else "dst_blocks"
            raise invalid(f"{field} is None; it must name blocks")
        return Transfer(
            Rows(src.side, read.blocks, src.slot, read.first_token, read.offset),
            Rows(dst.side, written.blocks, dst.slot, written.first_token, written.offset),
            given.num_tokens, given.nbytes, self._layers_of(pair, src.side),
            given.reinterpret or self.engine.reinterpret, given.coalesce,
            given.rank if self._is_alone else None,
        )  # fmt: skip

    def _kinds_of(self, pair: Pair) -> tuple[bool | None, bool, str]:
        """Return whether the source and the destination of a pair have to be paged.

        None: no block moves, so the source may be either. The third value is what errors call the
        block table of the source, where one may be given.
        """
        if not self._is_alone:
            return True, True, ""
        if isinstance(pair.transfer, Planned):
            part = check_plan(pair.transfer.plan)
            return part.src.paged, part.dst.paged, ""
        read, written = pair.src.blocks, pair.dst.blocks
        if written is None:
            return False, False, "src_blocks" if self.by_layer else ""
        from_blocks = None if is_empty(written) else not (read is None or is_empty(read))
        return from_blocks, True, "src_blocks"

    def _own(self, pair: Pair, field: Local, *, paged: bool | None, table: str = "") -> Found:
        """Return the cache of this process that a side of a pair names."""
        argument, rows = pair.argument(field), pair.src if field == "src" else pair.dst
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
        """Return the cache of the peer that a side of a pair names; a `CacheKey` is claimed."""
        argument, rows = pair.argument(field), pair.src if field == "src" else pair.dst
        key, writable = rows.cache, field == "dst"
        kinds: tuple[type, ...] = _SHARED
        if self._is_alone and (not writable or isinstance(pair.transfer, Transfer)):
            kinds = _WRITTEN if writable else _READ
        if not isinstance(key, kinds):
            raise TypeError(f"{argument}={shown(key)} must be {mismatch(key, *kinds)}")
        link = self.link
        if link is None:
            link = self._linked(argument, cast("AnyCacheKey | BlockLease | PeerTensors", key))
            self.link = link  # also of an operation that is only planned
        if isinstance(key, PeerTensors):
            tensors, memory = link.tensors(
                key.addresses, key.stride or stride, paged=paged is not False
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
                f"{argument} slot={shown(rows.slot)} must be None or {slot}, the slot of {key}"
            )
        return Found(found, None if found.paged else slot, None, cache, key)

    def _look_up(
        self, link: PeerLink, argument: str, key: AnyCache, *, writable: bool
    ) -> tuple[PeerCache, int]:
        """Return the cache and the slot that a key names."""
        if isinstance(key, BlockLease):
            return link.leased(key, writable=writable), 0
        if isinstance(key, CacheKeyByIdAndIndex):
            return link.cache(key, writable=writable), key.batch_index
        if isinstance(key, BlocksCacheKey):
            self.speculated = self._speculative
            return link.cache(key, writable=writable, speculative=self._speculative), 0
        key = cast(CacheKey, key)
        if (key.req_id == NO_ID) is (key.prefix_id == NO_ID):
            raise invalid(f"{argument}={key} must name either a request (req_id) or a prefix")
        if not self.moves:
            return link.find(key)
        self._claim = claim = link.claim(key)
        return claim.cache, claim.batch_index

    def _memory(self, found: Sequence[Found], *, writable: bool) -> TensorMemory:
        """Return the memory of one side; no transfer with a lease's succeeds after its end."""
        if found[0].cache is None:
            return joined([*map(attrgetter("memory"), found)])
        leases = [its.key for its in found if isinstance(its.key, BlockLease)]
        self.leases = tuple(map(attrgetter("lease_id"), leases))
        caches = [*map(attrgetter("cache"), found)]
        return cast("PeerLink", self.link).leased_memory(caches, leases, writable=writable)

    def _rows_of(
        self,
        place: int,
        src: TensorMemory,
        dst: TensorMemory,
        src_tensor: int | None,
        dst_tensor: int | None,
    ) -> RowPair | None:
        """Return the rows that lower a usual pair natively; None: the planner looks at the pair."""
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
        gathers = taken is not None
        return self.engine.transfers.rows.pair(
            operation_name(self._local, read, written), kind, source.side, target.side, src, dst,
            self._layers_of(pair, source.side) if taken is None else taken.layers,
            by_layer=self.by_layer, by_tokens=by_tokens,
            reinterpret=not gathers and (transfer.reinterpret or self.engine.reinterpret),
            heads=None if taken is None else taken.heads,
            src_tensor=src_tensor, dst_tensor=dst_tensor,
        )  # fmt: skip

    def _lower(self, place: int, rows: RowPair) -> Lowered | None:
        """Return the part and the descriptors of a pair; None: the planner decides."""
        pair, (source, target) = self.pairs[place], self.found[place]
        read, written = pair.src, pair.dst
        return rows.bind(
            cast("Blocks", read.blocks if source.side.paged else (source.slot or 0,)),
            (target.slot or 0,) if written.blocks is None else written.blocks,
            cast(Transfer, pair.transfer).num_tokens, read.first_token, written.first_token,
            pair.name, pair.source,
        )  # fmt: skip

    def _keep(self, theirs: TensorMemory, rows: Sequence[RowPair]) -> None:
        """Let later requests find the rows of these caches."""
        link = self._requests[0].link
        kinds = [request.kind for request in self._requests]
        # An empty source table, for example, means a slot.
        if self.link is not link or kinds != [pair.kind for pair in rows]:
            return
        caches = [cast("PeerCache", (src.cache or dst.cache)) for src, dst in self.found]
        try:
            shared = link.joined_memory(caches, writable=self._local == "src")  # without leases
        except LLMException:
            return  # freed meanwhile: the transfer itself will raise
        if shared.addresses is cast("PeerMemory", theirs).addresses:
            keep_pair(self._requests, shared, rows)

    def _layers_of(self, pair: Pair, source: Side) -> KvCacheExtParam:
        """Return the layers of a pair; layer by layer, with how many tensors are one."""
        transfer = cast(Transfer, pair.transfer)
        layers = transfer.layers
        if (
            not (self.by_layer and self._is_alone)
            or check_type("layers", layers, KvCacheExtParam).tensor_num_per_layer is not None
        ):
            return layers
        said = source.known_tensors_per_layer("src", None)
        if said is None:
            raise invalid(
                f"tensor_num_per_layer=None of a cache of which nothing says it, {source}: layers "
                "become ready one by one, so how many tensors are one must be said (2: K and V), "
                "here or by the layout or the shard of the cache"
            )
        # Without `reinterpret` the planner finds the number from both sides.
        if transfer.reinterpret or self.engine.reinterpret:
            return replace(layers, tensor_num_per_layer=said)
        return layers

    def _refuse_kind(self, argument: str, name: str, paged: bool, table: str) -> NoReturn:
        found, needed = ("contiguous", "paged") if paged else ("paged", "contiguous")
        if table and not paged:
            raise invalid(f"{argument}={name} is a paged cache; {table} must name blocks of it")
        message = f"{argument}={name} is a {found} cache; {self.name} needs a {needed} one"
        if table:
            raise invalid(f"{message}, or no {table}: then a slot is moved")
        raise invalid(message + _OTHER_KIND.get(self.name, ""))


def refuse_notices(options: TransferOptions) -> None:
    """Refuse notifications of a transfer that has no peer."""
    for name in ("notify", "notify_failure"):
        if options.get(name) is not None:
            raise invalid(f"{name} must be None: a copy inside this process has no peer")


def operation_name(local: Local, src: Rows, dst: Rows) -> PlanOperation:
    """Return the name of a transfer in logs, metrics and recordings, such as "pull_blocks"."""
    verb, cache = VERBS[local], dst.cache
    if dst.blocks is None and not (type(cache) is BlockLease and cache.paged):
        return cast("PlanOperation", f"{verb}_cache")
    if verb == "copy" and type(src.cache) is Cache and type(cache) is Cache:
        placements = {src.cache.cache_desc.placement, cache.cache_desc.placement}
        if len(placements) > 1:
            verb = "swap"
    return cast("PlanOperation", f"{verb}_blocks")


def _refuse_slot(argument: str, key: AnyCacheKey, found: Side) -> NoReturn:
    if found.paged:
        raise invalid(f"{argument}={key} names a slot, and a paged cache has none")
    raise LLMException(
        f"{argument}={key} is out of range: that cache has {plural(found.count, 'slot')}",
        status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
    )


def _is_usual(pair: Pair) -> bool:
    """Whether a request may be lowered without a plan; the planner looks at every other one."""
    transfer, src, dst = pair.transfer, pair.src, pair.dst
    return (
        isinstance(transfer, Transfer)
        and transfer.nbytes is None
        and transfer.coalesce is DEFAULT_COALESCE
        and transfer.rank is None
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

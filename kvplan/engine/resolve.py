"""Operations between caches: names become sides and memory, and those the parts of a plan.

Each pair of caches is resolved and planned by itself, in the same way whether the operation has
one pair or several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn, Unpack, cast

from kvplan.engine.memory import joined
from kvplan.engine.operation import Operation, Prepared, SubmitOptions, TransferOptions
from kvplan.engine.pairs import Request
from kvplan.engine.shares import Pair, check_plan, check_slot, fitted, local_of
from kvplan.lease import BlockLease
from kvplan.planning.blocks import is_empty
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
    from kvplan.engine.engine import Engine
    from kvplan.engine.pairs import Request
    from kvplan.execution import TensorMemory
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


class TransferOperation(Operation):
    """An operation between pairs of caches: of this process, or one of each of the same peer.

    Attributes:
        by_layer: as given.
        pairs: as given; with the block tables of their leases once the caches are searched for.
        found: the source and the destination of each pair, once they are found.
    """

    __slots__ = ("_is_alone", "_kinds", "_local", "_request", "by_layer", "found", "pairs")
    _local: Local

    def __init__(
        self,
        engine: Engine,
        pairs: Sequence[Pair],
        name: str = "",
        request: Request | None = None,
        *,
        by_layer: bool = False,
        speculative: bool = False,
        **options: Unpack[SubmitOptions],
    ) -> None:
        first = pairs[0]
        self._is_alone = not first.name and first.source is None
        self.pairs, self.by_layer, self._request = pairs, by_layer, request
        self.found: list[tuple[Found, Found]] = []
        if request is not None and request.pair is not None:
            self._local = "dst" if request.pulls else "src"
            name = request.pair.rows.operation
        else:
            self._local = local_of(first.src, first.dst)
            if self._local == "both":
                refuse_notices(options)
        if by_layer:
            name = f"{VERBS[self._local]}_layers"
        name = name or _operation_name(self._local, first.src, first.dst)
        super().__init__(engine, name, speculative=speculative, **options)

    def prepare(self) -> Prepared:
        """Find the caches of all pairs and plan each; a usual request is lowered without a plan."""
        if (request := self._request) is not None and (known := self._known(request)) is not None:
            return known
        self.find_own()
        self.find_peer()
        src, dst = self.memories(self.found)
        if self._is_alone and (lowered := self._lower(src, dst)) is not None:
            return lowered
        return Plan.made(*map(self.plan_part, range(len(self.pairs)))), src, dst, None

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

    def memories(self, found: Sequence[tuple[Found, Found]]) -> tuple[TensorMemory, TensorMemory]:
        """Return the memory of the sources, and of the destinations, of some of `found`."""
        src, dst = zip(*found, strict=True)
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
            else:
                part = plan_pair(
                    self._planned(pair, src, dst), src.side, dst.side, self._local,
                    by_layer=self.by_layer,
                )  # fmt: skip
        except (LLMException, TypeError) as error:
            raise of_part(pair.name, error) from None
        return part.labelled(pair.name)

    def peer_key(self, place: int) -> AnyCache:
        """Return the name of the peer's cache of the pair at this place."""
        pair = self.pairs[place]
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

    def _lower(self, src: TensorMemory, dst: TensorMemory) -> Prepared | None:
        """Return what a usual request executes, lowered without a plan; None: plan it."""
        (pair,), ((source, target),) = self.pairs, self.found
        if not self.moves or not _is_usual(pair):
            return None
        transfer, read, written = cast(Transfer, pair.transfer), pair.src, pair.dst
        to_blocks = written.blocks is not None
        kind: Kind = "C2C" if not to_blocks else "B2B" if source.side.paged else "C2B"
        operation = cast(
            "PlanOperation", self.name.replace("layers", "blocks" if to_blocks else "cache")
        )
        layers = self._layers_of(pair, source.side)
        bound = self.engine.transfers.rows.bind(
            operation, kind, source.side, target.side, src, dst,
            cast("Blocks", read.blocks if source.side.paged else (source.slot or 0,)),
            cast("Blocks", written.blocks if to_blocks else (target.slot or 0,)),
            layers, by_layer=self.by_layer, num_tokens=transfer.num_tokens,
            src_token=read.first_token, dst_token=written.first_token,
            reinterpret=transfer.reinterpret or self.engine.reinterpret,
        )  # fmt: skip
        if bound is None:
            return None
        if self._request is not None:
            self._keep_pair(self._request, operation, kind, src, dst)
        return bound[0], src, dst, bound[1]

    def _known(self, request: Request) -> Prepared | None:
        """Return what a request of a known pair executes; None: its names are to be resolved."""
        pair, link = request.pair, request.link
        # Only before the link is held. Later changes of the peer are found by checks of the memory.
        if (
            pair is None
            or not self.moves
            or self.link is not None
            or request.pairs is not link.pairs
        ):
            return None
        is_key = type(request.key) is BlocksCacheKey  # may name another cache now
        if is_key and not self._speculative:
            return None
        bound = pair.rows.bind(
            request.src_rows, request.dst_rows, request.num_tokens, request.src_token,
            request.dst_token,
        )  # fmt: skip
        if bound is None:
            return None
        self.hold(link)
        entry, theirs = request.entry, pair.theirs
        self.cache_id = entry.cache.cache_id
        self.speculated = is_key
        if request.lease is not None:
            self.leases = (request.lease.lease_id,)
            theirs = theirs.leased([request.lease])
        plan, descriptors = bound
        if request.pulls:
            return plan, theirs, entry.memory, descriptors
        return plan, entry.memory, theirs, descriptors

    def _keep_pair(
        self,
        request: Request,
        operation: PlanOperation,
        kind: Kind,
        src: TensorMemory,
        dst: TensorMemory,
    ) -> None:
        """Let later requests find the pair of these caches, if the peer's memory is mapped here."""
        link, writable = request.link, not request.pulls
        theirs = cast("PeerMemory", src if request.pulls else dst)
        if theirs.guard is None or self.link is not link or request.pair is not None:
            return
        if kind != request.kind:  # for example an empty source table, which means a slot
            return
        pairs = link.pairs  # first: a later change replaces the dict
        try:
            found = (
                link.cache(request.key, writable=writable, speculative=True)
                if request.lease is None
                else link.leased(request.lease, writable=writable)
            )
            shared = link.memory(found, writable=writable)  # without the lease
        except LLMException:
            return  # freed meanwhile: the transfer itself will raise
        ((source, target),) = self.found
        layers = cast(Transfer, self.pairs[0].transfer).layers
        rows = self.engine.transfers.rows.pair(
            operation, kind, source.side, target.side, src, dst, layers,
            by_layer=self.by_layer, by_tokens=request.by_tokens,
        )  # fmt: skip
        if rows is not None and rows.cuts and shared.addresses is theirs.addresses:
            request.keep(pairs, rows, shared)

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


def _operation_name(local: Local, src: Rows, dst: Rows) -> str:
    """Return the name of a transfer in logs, metrics and recordings, such as "pull_blocks"."""
    verb, cache = VERBS[local], dst.cache
    if dst.blocks is None and not (type(cache) is BlockLease and cache.paged):
        return f"{verb}_cache"
    if verb == "copy" and type(src.cache) is Cache and type(cache) is Cache:
        placements = {src.cache.cache_desc.placement, cache.cache_desc.placement}
        if len(placements) > 1:
            verb = "swap"
    return f"{verb}_blocks"


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

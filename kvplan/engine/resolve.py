"""From a transfer of names to a plan, and the memory of both sides."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, NoReturn, Unpack, cast

from kvplan.engine.operation import Operation, Prepared, SubmitOptions, TransferOptions
from kvplan.engine.pairs import Request, request_tables
from kvplan.lease import BlockLease
from kvplan.planning.blocks import is_empty
from kvplan.planning.layers import source_tensors
from kvplan.planning.plan import Plan
from kvplan.planning.planner import VERBS, Local, plan_pair
from kvplan.planning.segments import DEFAULT_COALESCE
from kvplan.planning.side import Side, is_same_cache, side
from kvplan.planning.texts import plural
from kvplan.planning.transfer import PeerTensors, Rows, Transfer
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
    from kvplan.execution import TensorMemory
    from kvplan.planning.blocks import Blocks
    from kvplan.planning.part import Kind
    from kvplan.planning.part import Operation as PlanOperation
    from kvplan.transport.protocol import PeerMemory
    from kvplan.types import AnyCacheKey

PEERS: Final = (CacheKeyByIdAndIndex, BlocksCacheKey, CacheKey, BlockLease, PeerTensors)
"""What names a cache of a peer."""

READ: Final = (CacheKeyByIdAndIndex, CacheKey, BlocksCacheKey, BlockLease)
WRITTEN: Final = (CacheKeyByIdAndIndex, BlocksCacheKey, BlockLease, PeerTensors)
_OTHER_KIND = {
    f"{verb}_{kind}": f"; {verb}_{other} takes a {takes} one"
    for verb in ("pull", "push", "copy")
    for kind, other, takes in (("cache", "blocks", "paged"), ("blocks", "cache", "contiguous"))
}
"""What takes the other kind of cache than an operation does."""


def local_of(src: Rows, dst: Rows) -> Local:
    """Return which side of a transfer is this process's."""
    if type(src) is not Rows or type(dst) is not Rows:
        check_type("src", src, Rows)
        check_type("dst", dst, Rows)
    from_peer, to_peer = isinstance(src.cache, PEERS), isinstance(dst.cache, PEERS)
    if from_peer and to_peer:
        raise invalid(
            f"src={shown(src.cache)} and dst={shown(dst.cache)} are both of peers; one side of a "
            "transfer is this process's"
        )
    return "dst" if from_peer else "src" if to_peer else "both"


class TransferOperation(Operation):
    """An operation between two caches: of this process, or one of them of a peer.

    Attributes:
        by_layer: as given.
    """

    __slots__ = ("_local", "_request", "_transfer", "by_layer")
    _local: Local

    def __init__(
        self,
        engine: Engine,
        transfer: Transfer,
        request: Request | None = None,
        *,
        by_layer: bool = False,
        speculative: bool = False,
        **options: Unpack[SubmitOptions],
    ) -> None:
        src, dst = cast(Rows, transfer.src), transfer.dst
        self._transfer, self.by_layer, self._request = transfer, by_layer, request
        if request is not None and request.pair is not None:
            self._local = "dst" if request.pulls else "src"
            name: str = request.pair.rows.operation
            if by_layer:
                name = f"{VERBS[self._local]}_layers"
        else:
            self._local = local_of(src, dst)
            if self._local == "both":
                refuse_notices(options)
            name = _operation_name(self._local, src, dst, by_layer=by_layer)
        super().__init__(engine, name, speculative=speculative, **options)

    def prepare(self) -> Prepared:
        """Find both caches, plan the transfer, and lower it where that needs no plan."""
        if (request := self._request) is not None and (known := self._known(request)) is not None:
            return known
        transfer, local = self._transfer, self._local
        src, dst = cast(Rows, transfer.src), transfer.dst
        src_blocks, dst_blocks, num_tokens = request_tables(src, dst, transfer.num_tokens)
        to_blocks = dst_blocks is not None
        # None: no block is moved, so the source may be paged or not.
        from_blocks: bool | None = False
        if to_blocks:
            from_blocks = (
                None if is_empty(dst_blocks) else not (src_blocks is None or is_empty(src_blocks))
            )
        table = "src_blocks" if to_blocks or self.by_layer else ""
        layers = transfer.layers
        reinterpret = transfer.reinterpret or self.engine.reinterpret
        src_slot, dst_slot = src.slot, dst.slot
        if local == "dst":
            target, dst_memory = self.own("dst", cast(Cache, dst.cache), paged=to_blocks)
            source, src_slot, src_memory = self.peer(
                "src", src, READ, paged=from_blocks, writable=False, table=table
            )
            if self.by_layer:
                layers = self._layers_of(source, layers, reinterpret)
        else:
            source, src_memory = self.own(
                "src", cast(Cache, src.cache), paged=from_blocks, table=table
            )
            if self.by_layer:
                layers = self._layers_of(source, layers, reinterpret)
            if local == "both":
                if is_same_cache(cast(Cache, src.cache), cast(Cache, dst.cache)):
                    target, dst_memory = source, src_memory
                else:
                    target, dst_memory = self.own("dst", cast(Cache, dst.cache), paged=to_blocks)
            elif isinstance(dst.cache, PeerTensors):
                _check_addresses(dst.cache, source, layers)
                target, dst_memory = self._tensors(dst.cache, source.stride, paged=to_blocks)
            else:
                target, dst_slot, dst_memory = self.peer(
                    "dst", dst, WRITTEN, paged=to_blocks, writable=True, table="dst_blocks"
                )
        if self.moves and _is_usual(transfer, src, dst, to_blocks=to_blocks):
            src_rows = src_blocks if source.paged else (src_slot or 0,)
            dst_rows = dst_blocks if to_blocks else (dst_slot or 0,)
            kind: Kind = "C2C" if not to_blocks else "B2B" if source.paged else "C2B"
            operation = cast(
                "PlanOperation",
                self.name.replace("layers", "blocks" if to_blocks else "cache"),
            )
            bound = self.engine.transfers.rows.bind(
                operation, kind, source, target, src_memory, dst_memory, cast("Blocks", src_rows),
                cast("Blocks", dst_rows), layers, by_layer=self.by_layer, num_tokens=num_tokens,
                src_token=src.first_token, dst_token=dst.first_token, reinterpret=reinterpret,
            )  # fmt: skip
            if bound is not None:
                if request is not None:
                    self._keep_pair(
                        request, operation, kind, source, target, src_memory, dst_memory
                    )
                return bound[0], src_memory, dst_memory, bound[1]
        if source.paged and local == "dst":
            src_slot = None  # the key's
        if target.paged and local == "src":
            dst_slot = None
        planned = Transfer(
            Rows(source, src_blocks, src_slot, src.first_token, src.offset),
            Rows(target, dst_blocks, dst_slot, dst.first_token, dst.offset),
            num_tokens, transfer.nbytes, layers, reinterpret, transfer.coalesce, transfer.rank,
        )  # fmt: skip
        part = plan_pair(planned, source, target, local, by_layer=self.by_layer)
        return Plan.made(part), src_memory, dst_memory, None

    def _known(self, request: Request) -> Prepared | None:
        """Return what a request of a known pair executes; None: its names are to be resolved."""
        pair, link = request.pair, request.link
        # Only before the link is held: what its peer publishes later, checks of the memory find.
        if (
            pair is None
            or not self.moves
            or self.link is not None
            or request.pairs is not link.pairs
        ):
            return None
        is_key = type(request.key) is BlocksCacheKey  # the peer says of which cache it is now
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
        source: Side,
        target: Side,
        src: TensorMemory,
        dst: TensorMemory,
    ) -> None:
        """Let requests of the same caches find their pair, if the peer's memory is mapped here."""
        link, writable = request.link, not request.pulls
        theirs = cast("PeerMemory", src if request.pulls else dst)
        if theirs.guard is None or self.link is not link or request.pair is not None:
            return
        if kind != request.kind:  # an empty table of the source, say, and a slot that is meant
            return
        pairs = link.pairs  # before what follows: another dict, if that changes later
        try:
            found = (
                link.cache(request.key, writable=writable, speculative=True)
                if request.lease is None
                else link.leased(request.lease, writable=writable)
            )
            shared = link.memory(found, writable=writable)  # of a lease: that of all leases
        except LLMException:
            return  # freed meanwhile, which the transfer finds
        rows = self.engine.transfers.rows.pair(
            operation, kind, source, target, src, dst, self._transfer.layers,
            by_layer=self.by_layer, by_tokens=request.by_tokens,
        )  # fmt: skip
        if rows is not None and rows.cuts and shared.addresses is theirs.addresses:
            request.keep(pairs, rows, shared)

    def own(
        self, argument: str, cache: Cache, *, paged: bool | None, table: str = ""
    ) -> tuple[Side, TensorMemory]:
        """Return the cache of this process that an argument names, to plan with and to transfer."""
        registry = self.engine.registry
        entry = registry.resolve(cache, argument)
        if self.cache_id < 0:
            self.cache_id = entry.cache.cache_id
        found = entry.side
        if found is None:  # addresses alone do not say which kind they are
            return side(argument, entry.cache, paged=paged is not False), entry.memory
        if paged is not None and found.paged is not paged:
            self._refuse_kind(argument, found.name, paged, table)
        return found, entry.memory

    def peer(
        self,
        argument: str,
        rows: Rows,
        kinds: tuple[type, ...],
        *,
        paged: bool | None,
        writable: bool,
        table: str = "",
    ) -> tuple[Side, int, TensorMemory]:
        """Return the cache and the slot of a peer that an argument names; a `CacheKey` is claimed.

        No transfer with the memory of a lease succeeds once the lease has ended.
        """
        key = rows.cache
        if not isinstance(key, kinds):
            raise TypeError(f"{argument}={shown(key)} must be {mismatch(key, *kinds)}")
        link = self._linked(argument, cast("AnyCacheKey | BlockLease", key))
        slot = 0
        if isinstance(key, BlockLease):
            found = link.leased(key, writable=writable)
            self.leases = (key.lease_id,)
            theirs = link.side(found)
            if paged is not None and theirs.paged is not paged:
                self._refuse_kind(argument, str(key), paged, table)
            if not theirs.paged and (slot := key.slot(argument)) >= theirs.count:
                _refuse_slot(argument, key, theirs)
            if rows.slot is not None and rows.slot != slot:
                _refuse_other_slot(argument, rows, slot)
            return theirs, slot, link.memory(found, writable=writable).leased([key])
        if isinstance(key, CacheKeyByIdAndIndex):
            found, slot = link.cache(key, writable=writable), key.batch_index
        elif isinstance(key, BlocksCacheKey):
            found = link.cache(key, writable=writable, speculative=self._speculative)
            self.speculated = self._speculative
        else:
            key = cast(CacheKey, key)
            _check_names_one(argument, key)
            if self.moves:
                self._claim = claim = link.claim(key)
                found, slot = claim.cache, claim.batch_index
            else:
                found, slot = link.find(key)
        theirs = link.side(found)
        if paged is not None and theirs.paged is not paged:
            self._refuse_kind(argument, str(key), paged, table)
        if slot >= (1 if theirs.paged else theirs.count):
            _refuse_slot(argument, key, theirs)
        if rows.slot is not None and rows.slot != slot:
            _refuse_other_slot(argument, rows, slot)
        return theirs, slot, link.memory(found, writable=writable)

    def _tensors(
        self, given: PeerTensors, stride: int, *, paged: bool
    ) -> tuple[Side, TensorMemory]:
        """Return the memory of a peer that `dst` names by addresses, to be written."""
        link = self._linked("dst", given)
        return link.tensors(given.addresses, given.stride or stride, paged=paged)

    def _layers_of(
        self, source: Side, layers: KvCacheExtParam, reinterpret: bool
    ) -> KvCacheExtParam:
        """Return the layers of a transfer layer by layer, with how many tensors are one."""
        if check_type("layers", layers, KvCacheExtParam).tensor_num_per_layer is not None:
            return layers
        said = source.known_tensors_per_layer("src", None)
        if said is None:
            raise invalid(
                f"tensor_num_per_layer=None of a cache of which nothing says it, {source}: layers "
                "become ready one by one, so how many tensors are one must be said (2: K and V), "
                "here or by the layout or the shard of the cache"
            )
        # Without `reinterpret` the planner finds the number, on both sides.
        return replace(layers, tensor_num_per_layer=said) if reinterpret else layers

    def _refuse_kind(self, argument: str, name: str, paged: bool, table: str) -> NoReturn:
        found, needed = ("contiguous", "paged") if paged else ("paged", "contiguous")
        if table and not paged:
            raise invalid(f"{argument}={name} is a paged cache; {table} must name blocks of it")
        message = f"{argument}={name} is a {found} cache; {self.name} needs a {needed} one"
        if table:
            raise invalid(f"{message}, or no {table}: then a slot is moved")
        raise invalid(message + _OTHER_KIND.get(self.name, ""))


def _operation_name(local: Local, src: Rows, dst: Rows, *, by_layer: bool) -> str:
    """Return what logs, metrics and recordings call a transfer, such as "pull_blocks"."""
    verb, cache = VERBS[local], dst.cache
    if by_layer:
        return f"{verb}_layers"
    if dst.blocks is None and not (type(cache) is BlockLease and cache.paged):
        return f"{verb}_cache"
    if verb == "copy" and type(src.cache) is Cache and type(cache) is Cache:
        placements = {src.cache.cache_desc.placement, cache.cache_desc.placement}
        if len(placements) > 1:
            verb = "swap"
    return f"{verb}_blocks"


def _refuse_slot(argument: str, key: AnyCacheKey | BlockLease, found: Side) -> NoReturn:
    if found.paged:
        raise invalid(f"{argument}={key} names a slot, and a paged cache has none")
    raise LLMException(
        f"{argument}={key} is out of range: that cache has {plural(found.count, 'slot')}",
        status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
    )


def _check_names_one(argument: str, key: CacheKey) -> None:
    if (key.req_id == NO_ID) is (key.prefix_id == NO_ID):
        raise invalid(f"{argument}={key} must name either a request (req_id) or a prefix")


def _is_usual(transfer: Transfer, src: Rows, dst: Rows, *, to_blocks: bool) -> bool:
    """Whether a request may be lowered without a plan: what is not usual the planner looks at."""
    return (
        transfer.nbytes is None
        and transfer.coalesce is DEFAULT_COALESCE
        and transfer.rank is None
        and type(src.offset) is type(dst.offset) is int
        and src.offset == dst.offset == 0
        and (
            (dst.slot is None and (src.blocks is None or src.slot is None))
            if to_blocks
            else src.blocks is None
        )
    )


def _refuse_other_slot(argument: str, rows: Rows, named: int) -> NoReturn:
    raise invalid(
        f"{argument} slot={shown(rows.slot)} must be None or {named}, the slot of {rows.cache}"
    )


def _check_addresses(dst: PeerTensors, source: Side, layers: KvCacheExtParam) -> None:
    needed = len(source_tensors(source, layers))
    if len(dst.addresses) != needed:
        raise invalid(
            f"addresses has {len(dst.addresses)} elements; {needed} are needed, one for each "
            "tensor of src that is transferred"
        )


def refuse_notices(options: TransferOptions) -> None:
    """Refuse notifications of a transfer that has no peer."""
    for name in ("notify", "notify_failure"):
        if options.get(name) is not None:
            raise invalid(f"{name} must be None: a copy inside this process has no peer")

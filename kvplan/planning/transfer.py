"""Values that describe a transfer: rows of two caches, and the block tables of leases."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeAlias, cast

import msgspec
from msgspec.structs import replace

from kvplan.lease import BlockLease
from kvplan.planning.blocks import Blocks, RequestBlocks
from kvplan.planning.layers import ALL_LAYERS
from kvplan.planning.plan import Plan
from kvplan.planning.segments import DEFAULT_COALESCE, Coalesce
from kvplan.planning.side import Described
from kvplan.status import invalid
from kvplan.types import AnyCacheKey, Cache, KvCacheExtParam
from kvplan.validation import INT64_MAX, UINT64_MAX, check_width, shown

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    # The parameter tells a type checker that one source makes a TransferTask, and several make a
    # GatherTask. The default lets `Transfer` mean either; `typing` has defaults from 3.13 on.
    Source_co = TypeVar(
        "Source_co",
        bound="Rows | Sequence[Rows]",
        covariant=True,
        default="Rows | Sequence[Rows]",
    )
else:
    from typing import TypeVar

    Source_co = TypeVar("Source_co", covariant=True)


@dataclass(frozen=True, slots=True)
class PeerTensors:
    """Memory of a peer, by addresses from the peer itself, as the destination of a push.

    Each address is that of row 0, in a tensor of one cache that the peer offers. The shortest rest
    of a tensor determines the number of rows.

    Args:
        cluster_id: the peer.
        addresses: addresses in the peer, one for each transferred tensor, in order.
        stride: bytes from one row to the next there, and of a block; None: as at the source.

    Raises:
        TypeError: a field of the wrong type.
        ValueError: cluster_id or an address outside uint64, stride outside int64.
        LLMException: LLM_PARAM_INVALID: no address, address 0, or stride below 1.
    """

    cluster_id: int
    addresses: Sequence[int]
    stride: int | None = None

    def __post_init__(self) -> None:
        check_width("cluster_id", self.cluster_id, 0, UINT64_MAX)
        if not isinstance(self.addresses, tuple | list):
            raise TypeError(f"addresses={shown(self.addresses)} must be a tuple or list of int")
        object.__setattr__(self, "addresses", tuple(self.addresses))
        if not self.addresses:
            raise invalid("addresses is empty; one for each tensor is needed")
        for position, address in enumerate(self.addresses):
            if check_width(f"addresses[{position}]", address, 0, UINT64_MAX) == 0:
                raise invalid(f"addresses[{position}]=0 is not an address of memory")
        if self.stride is not None and check_width("stride", self.stride, -(2**63), INT64_MAX) < 1:
            raise invalid(f"stride={self.stride} is out of range [1, {INT64_MAX}]")


AnyCache: TypeAlias = Described | AnyCacheKey | BlockLease | PeerTensors
"""A name of a cache in a transfer."""


class Rows(msgspec.Struct, frozen=True):
    """Rows of one side of a transfer: blocks of a paged cache, or a slot of a contiguous one.

    Values are checked when they are planned, not when they are made.

    Attributes:
        cache: the cache. Of this process: a `Cache`. Of a peer: a `CacheIndex`, a
            `CacheKey`, a `BlocksCacheKey`, a `BlockLease`, or, as destination only, `PeerTensors`.
            For `kvplan.plan`, which has no engine: a `CacheDesc`, a `Cache` or a `RemoteCache`.
        blocks: the block table, in the order of the request: a list, an array, or a host tensor.
            None: a slot of a contiguous cache, or all blocks of a lease.
        slot: the slot of a contiguous cache. None: the slot that the key or the lease names, or 0.
        first_token: number of the request's tokens to skip. The block table begins with token 0 of
            the request, or with the first token that the `Shard` of the cache names.
        offset: bytes of the slot to skip.
    """

    cache: AnyCache
    blocks: Blocks | None = None
    slot: int | None = None
    first_token: int = 0
    offset: int = 0


class Transfer(msgspec.Struct, Generic[Source_co], frozen=True):
    """A transfer from one cache to another, for `kvplan.plan` and the verbs of an engine.

    An engine pulls if `src` belongs to a peer, pushes if `dst` does, and copies if both are its
    own. Values are checked when they are planned, not when they are made.

    Attributes:
        src: the rows to read. A sequence of `Rows` is a gather: its caches hold parts of the model
            or of the request's tokens (see `Shard`), and each byte of `dst` comes from exactly one.
        dst: the rows to write.
        num_tokens: tokens to move, counted in the whole request, if the last block is not full or
            the block sizes differ. None: whole blocks, or the whole slot.
        nbytes: bytes of a slot to move. None: the rest of the slot, from its offset on, in the
            destination of a pull or the source of a push or copy.
        layers: the layers to move, as a range of each side. Default: all.
        reinterpret: True to copy bytes unchanged although the two caches give them different
            meanings.
        coalesce: how slices become segments.
        rank: for a gather, the position of the destination among those that pull the same request,
            to spread load over replicas. None: derived from the heads of `dst`.
    """

    src: Source_co
    dst: Rows
    num_tokens: int | None = None
    nbytes: int | None = None
    layers: KvCacheExtParam = ALL_LAYERS
    reinterpret: bool = False
    coalesce: Coalesce | bool = DEFAULT_COALESCE
    rank: int | None = None


class Planned(msgspec.Struct, frozen=True):
    """A plan that was made earlier, and the two caches between which it moves.

    An engine executes the plan unchanged if both caches still match it, and otherwise refuses it
    with the difference. `kvplan.plan` does not accept it.

    Attributes:
        plan: a `Plan` of one part, such as `load_plan` returns. A plan of several parts moves as a
            mapping of the plans in `plan.by_part()`.
        src, dst: the caches. Of this process: a `Cache`. Of a peer: a `CacheIndex`, a
            `BlocksCacheKey`, a `BlockLease`, or, as source, a `CacheKey`. A key of a slot must name
            the slot that the plan moves; a lease must contain every block that the plan moves.
    """

    plan: Plan
    src: Cache | AnyCacheKey | BlockLease
    dst: Cache | AnyCacheKey | BlockLease


AnyTransfer: TypeAlias = "Transfer | Mapping[str, Transfer]"
"""One transfer, or several caches of one request by name: they move as one."""

AnyRequest: TypeAlias = "Transfer | Planned | Mapping[str, Transfer | Planned]"
"""A transfer between caches, whether planned earlier or not."""

Latest = Callable[[BlockLease], BlockLease]
"""A function from a lease to its latest value: the owner may have moved blocks."""


def followed(argument: str, rows: Rows, latest: Latest) -> Rows:
    """Return rows with the latest value of their lease, and with its current blocks."""
    lease = rows.cache
    if not isinstance(lease, BlockLease) or (now := latest(lease)) is lease:
        return rows
    blocks = now.places_of(f"{argument}.blocks", lease, rows.blocks)
    slot = now.blocks[0] if lease.blocks == (rows.slot,) else rows.slot
    return replace(rows, cache=now, blocks=blocks, slot=slot)


def with_leases(transfer: Transfer, latest: Latest) -> Transfer:
    """Return a transfer with the block tables and token counts of its leases' latest values."""
    src = transfer.src
    named_rows = {"dst": transfer.dst}
    if isinstance(src, Rows):
        named_rows["src"] = src
    else:
        named_rows |= {f"src[{index}]": rows for index, rows in enumerate(src)}
    for field, rows in named_rows.items():
        named_rows[field] = followed(field, rows, latest)
    leased = [rows for rows in named_rows.values() if _is_leased(rows)]
    num_tokens = _num_tokens(leased, transfer.num_tokens) if leased else transfer.num_tokens
    written, *read = [
        _with_table(f"{field}.blocks", rows, num_tokens) if _is_leased(rows) else rows
        for field, rows in named_rows.items()
    ]
    sources = read[0] if isinstance(src, Rows) else read
    return replace(transfer, src=sources, dst=written, num_tokens=num_tokens)


def _is_leased(rows: Rows) -> bool:
    """Return whether a lease of blocks names the rows."""
    return isinstance(rows.cache, BlockLease) and rows.cache.paged


def _with_table(argument: str, rows: Rows, num_tokens: int | None) -> Rows:
    lease = cast(BlockLease, rows.cache)
    if rows.blocks is None and num_tokens is not None:
        blocks: Blocks = RequestBlocks(lease.blocks)
    else:
        blocks = lease.named(argument, rows.blocks)
    return replace(rows, blocks=blocks)


def _num_tokens(rows: Sequence[Rows], given: int | None) -> int | None:
    """Return the number of tokens of leases whose blocks all move; without one, `given`."""
    counts = {
        lease.num_tokens("num_tokens", given, each.first_token)
        for each in rows
        if (lease := cast(BlockLease, each.cache)).tokens is not None and each.blocks is None
    }
    if len(counts) > 1:
        raise invalid(
            "num_tokens must be given: the leases are of requests of "
            f"{sorted(filter(None, counts))} tokens"
        )
    return counts.pop() if counts else given

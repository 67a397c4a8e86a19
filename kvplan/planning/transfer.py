"""The values that say what to move: rows of one cache to rows of another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeAlias

import msgspec

from kvplan.lease import BlockLease
from kvplan.planning.blocks import Blocks
from kvplan.planning.layers import ALL_LAYERS
from kvplan.planning.plan import Plan
from kvplan.planning.segments import DEFAULT_COALESCE, Coalesce
from kvplan.planning.side import Described
from kvplan.status import invalid
from kvplan.types import AnyCacheKey, Cache, KvCacheExtParam
from kvplan.validation import INT64_MAX, UINT64_MAX, check_width, shown

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    # By this parameter a type checker knows that one source makes a TransferTask, several a
    # GatherTask. Its default, by which `Transfer` alone means either, is in `typing` from 3.13 on.
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
    """Memory of a peer by addresses that the peer itself gave, as destination of a push.

    Each address must lie in a tensor of one cache that the peer offers. The address is row 0, and
    there are as many rows as that tensor has room for behind it.

    Args:
        cluster_id: of the peer.
        addresses: there, one for each tensor that is transferred, in order.
        stride: bytes of a row (slot or block) there; None: those of the source.

    Raises:
        TypeError: a field of another type.
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
                raise invalid(f"addresses[{position}]=0 is no address of memory")
        if self.stride is not None and check_width("stride", self.stride, -(2**63), INT64_MAX) < 1:
            raise invalid(f"stride={self.stride} is out of range [1, {INT64_MAX}]")


AnyCache: TypeAlias = Described | AnyCacheKey | BlockLease | PeerTensors
"""What names a cache of a transfer."""


class Rows(msgspec.Struct, frozen=True):
    """Rows of one side of a transfer: blocks of a paged cache, or a slot of a contiguous one.

    Attributes:
        cache: what names the cache. Of this process: a `Cache`. Of a peer: a `CacheIndex`, a
            `CacheKey`, a `BlocksCacheKey`, a `BlockLease`, or, as destination only, `PeerTensors`.
            For `kvplan.plan`, which knows no engine: a `CacheDesc`, a `Cache` or a `RemoteCache`.
        blocks: the block table, in the order of the request: a list, an array, or a host tensor.
            None: a slot of a contiguous cache, or all blocks that a lease names.
        slot: of a contiguous cache. None: the one that the key or the lease names, otherwise 0.
        first_token: tokens of the request to skip. The block table begins with token 0 of the
            request, or with the first token that the `Shard` of the cache names.
        offset: bytes of the slot to skip.

    Values are checked when they are planned, not when they are made.
    """

    cache: AnyCache
    blocks: Blocks | None = None
    slot: int | None = None
    first_token: int = 0
    offset: int = 0


class Transfer(msgspec.Struct, Generic[Source_co], frozen=True):
    """What to move from one cache to another. Goes to `kvplan.plan` and to an engine's verbs.

    An engine pulls if `src` is a peer's, pushes if `dst` is, and copies if both are its own.

    Attributes:
        src: the rows that are read. A sequence of `Rows` is a gather: caches that hold parts of
            the model or of the request's tokens (see `Shard`), from which each byte of `dst` comes
            exactly once.
        dst: the rows that are written.
        num_tokens: tokens to move, where the last block is not full or both sides have blocks of
            unequal size, counted in the whole request. None: whole blocks, or the whole slot.
        nbytes: bytes of a slot to move. None: the whole slot, from its offset on.
        layers: the layers that move. Default: all.
        reinterpret: copy bytes as they are, whatever both caches say that the bytes mean.
        coalesce: how slices become segments.
        rank: of a gather: the place of the destination among those that pull the same request, to
            spread load over replicas. None: derived from the heads that `dst` has.

    Values are checked when they are planned, not when they are made.
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
    """A plan that was made before, with the caches to execute it between.

    An engine executes the plan as it is if both caches still are what the plan says; the
    difference is refused. Unlike a `Transfer`, it is nothing for `kvplan.plan`.

    Attributes:
        plan: what moves, a `Plan` of one part, such as `load_plan` returns. One of several moves
            as a mapping, of each part its plan in `plan.by_part()`.
        src, dst: what names the caches. Of this process: a `Cache`. Of a peer: a `CacheIndex`, a
            `BlocksCacheKey`, a `BlockLease`, or, as source, a `CacheKey`. A name of a slot must be
            of the slot that the plan moves, and a lease must have every block that it moves.
    """

    plan: Plan
    src: Cache | AnyCacheKey | BlockLease
    dst: Cache | AnyCacheKey | BlockLease


AnyTransfer: TypeAlias = "Transfer | Mapping[str, Transfer]"
"""One transfer, or several caches of one request by name: they move as one."""

AnyRequest: TypeAlias = "Transfer | Planned | Mapping[str, Transfer | Planned]"
"""What moves between caches: to be planned, or planned before."""

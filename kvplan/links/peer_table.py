"""The caches that a peer offers: found by id, by model and by address."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from kvplan.control.messages import ShardEntry, Table, TableEntry
from kvplan.layout import Interleaved, Shard
from kvplan.links.address_index import AddressIndex, Extent
from kvplan.planning.side import Side, side
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.types import CacheDesc, Placement

MAX_CACHES = 65536
"""Of one peer: as many as the local transport can register; bounds what a peer can cost."""

MAX_NBYTES = 256 << 20
"""Of all entries of one peer, as messages: 4 KiB for each of MAX_CACHES."""


@dataclass(frozen=True, slots=True)
class PeerCache:
    """A cache of a peer.

    Attributes:
        cluster_id: of the peer.
        cache_id: in the peer.
        desc: its description.
        paged: whether its rows are blocks.
        addresses: of each tensor, in the peer.
        metadata: what the transport needs to reach them; empty: it cannot.
        writable: whether it can be pushed to.
        model_id: of its BlocksCacheKey; None: it has none.
        side: of a plan over it.
        first, last: the lowest and the highest byte of all tensors.
    """

    cluster_id: int
    cache_id: int
    desc: CacheDesc
    paged: bool
    addresses: tuple[int, ...]
    metadata: bytes
    writable: bool
    model_id: int | None = None
    side: Side = field(init=False, repr=False, compare=False)
    first: int = field(init=False, repr=False, compare=False)
    last: int = field(init=False, repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        """About how many bytes of a message it takes."""
        return len(self.metadata) + 9 * len(self.addresses)

    def __post_init__(self) -> None:
        name = f"cache {self.cache_id} of cluster {self.cluster_id}"
        named = replace(
            side("cache", self.desc, paged=self.paged), name=name, cache_id=self.cache_id
        )
        object.__setattr__(self, "side", named)
        object.__setattr__(self, "first", min(self.addresses))
        object.__setattr__(self, "last", max(self.addresses) + self.desc.tensor_nbytes - 1)

    @classmethod
    def of(cls, cluster_id: int, entry: TableEntry) -> PeerCache:
        """The cache that a message of the peer `cluster_id` describes."""
        try:
            desc = CacheDesc(
                entry.num_tensors,
                entry.shape,
                entry.data_type,
                entry.placement,
                entry.batch_dim_index,
                entry.seq_len_dim_index,
                entry.kv_tensor_format,
                _shard(entry.shard),
            )
        except (LLMException, ValueError) as error:
            raise invalid(f"cache {entry.cache_id} of the peer's table: {error}") from error
        if len(entry.addresses) != desc.num_tensors:
            raise invalid(
                f"cache {entry.cache_id} of the peer's table has {len(entry.addresses)} addresses "
                f"for {desc.num_tensors} tensors"
            )
        return cls(
            cluster_id,
            entry.cache_id,
            desc,
            entry.paged,
            entry.addresses,
            entry.metadata,
            entry.writable,
            entry.model_id_of_blocks_key,
        )


def _shard(entry: ShardEntry | None) -> Shard | None:
    if entry is None:
        return None
    (layers, num_layers), (heads, num_heads) = (
        (None, None) if it is None else (range(it[0], it[1]), it[2])
        for it in (entry.layers, entry.heads)
    )
    tokens = None
    if entry.tokens is not None:
        tokens = range(*entry.tokens) if len(entry.tokens) == 2 else Interleaved(*entry.tokens)
    return Shard(entry.numbers or layers, heads, num_layers, num_heads, tokens)


class PeerTable:
    """The caches of one peer.

    Written by the control thread, read by any: each read is one lookup in a dict.

    Attributes:
        by_id: the caches that are offered, by their id.
        by_model: those with a BlocksCacheKey, by its model id.
    """

    def __init__(self, cluster_id: int) -> None:
        self.version = 0
        self._cluster_id = cluster_id
        self.by_id: dict[int, PeerCache] = {}
        self.by_model: dict[int, PeerCache] = {}
        self._nbytes = 0  # of all that are offered
        # By whether they can be written: of which version of the table, and what it was made into.
        self._indices: dict[bool, tuple[int, AddressIndex[PeerCache]]] = {}

    def apply(self, table: Table) -> list[int]:
        """Apply a message of the peer; returns the ids of caches that were changed or removed."""
        added = [PeerCache.of(self._cluster_id, entry) for entry in table.entries]
        removed = list(self.by_id) if table.first else list(table.removed)
        for cache_id in removed:
            self._remove(cache_id)
        for cache in added:
            self._remove(cache.cache_id)
            self.by_id[cache.cache_id] = cache
            self._nbytes += cache.nbytes
            if cache.model_id is not None:
                self.by_model[cache.model_id] = cache
        if len(self.by_id) > MAX_CACHES or self._nbytes > MAX_NBYTES:
            raise invalid(
                f"the peer offers {len(self.by_id)} caches of {self._nbytes} bytes; at most "
                f"{MAX_CACHES} of {MAX_NBYTES} can be"
            )
        self.version = table.version
        self._indices.clear()
        return removed + [cache.cache_id for cache in added]

    def caches(self) -> tuple[PeerCache, ...]:
        """All that are offered."""
        return (*self.by_id.values(),)  # a copy at once, as tuple() is only with a GIL

    def address_index(self, *, writable: bool) -> AddressIndex[PeerCache]:
        """All that are offered, by addresses; those that can be written alone if `writable`."""
        version = self.version  # first: what changes meanwhile makes it another's
        held = self._indices.get(writable)
        if held is not None and held[0] == version:
            return held[1]
        extents = (
            Extent(address, it.desc.tensor_nbytes, it, tensor)
            for it in self.caches()
            if it.writable or not writable
            for tensor, address in enumerate(it.addresses)
        )
        index = AddressIndex(f"cluster {self._cluster_id}", extents)
        self._indices[writable] = version, index
        return index

    def __len__(self) -> int:
        return len(self.by_id)

    def _remove(self, cache_id: int) -> None:
        cache = self.by_id.pop(cache_id, None)
        if cache is None:
            return
        self._nbytes -= cache.nbytes
        if cache.model_id is None:
            return
        if self.by_model.get(cache.model_id) is cache:
            del self.by_model[cache.model_id]


class AddressedCache(NamedTuple):
    """A cache that contains all addresses; `left`: bytes from each to the end of its tensor."""

    cache: PeerCache
    left: list[int]


def find_by_address(caches: Iterable[PeerCache], addresses: Sequence[int]) -> AddressedCache | None:
    """The cache that contains all addresses, or None.

    Of several (memory may be registered twice) a writable one, with the most room.
    """
    lowest, highest = min(addresses), max(addresses)
    found = [
        AddressedCache(it, left)
        for it in caches
        if it.first <= lowest and highest <= it.last and all(left := _left(it, addresses))
    ]
    return max(found, key=lambda it: (it.cache.writable, min(it.left)), default=None)


def no_cache_at(caches: Sequence[PeerCache], who: str, addresses: Sequence[int]) -> LLMException:
    """Why `find_by_address` returned None: LLM_KV_CACHE_NOT_EXIST, or LLM_PARAM_INVALID."""
    cache_ids: list[int] = []
    for position, address in enumerate(addresses):
        cache = next((it for it in caches if _left(it, [address])[0]), None)
        if cache is None:
            return LLMException(
                f"addresses[{position}]={address:#x} lies in no cache that {who} offers",
                status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
            )
        cache_ids.append(cache.cache_id)
    other = next((it for it, cache_id in enumerate(cache_ids) if cache_id != cache_ids[0]), 0)
    return invalid(
        f"addresses[0]={addresses[0]:#x} lies in cache {cache_ids[0]} of {who}, and "
        f"addresses[{other}]={addresses[other]:#x} in cache {cache_ids[other]}; one transfer goes "
        "to one cache"
    )


def _left(cache: PeerCache, addresses: Sequence[int]) -> list[int]:
    """Bytes from each address to the end of the tensor that contains it; 0: no tensor does."""
    starts = sorted(cache.addresses)
    nbytes = cache.desc.tensor_nbytes
    # Tensors have one size: of two that overlap, the one that begins last reaches furthest.
    positions = ((it, bisect_right(starts, it)) for it in addresses)
    return [max(0, starts[i - 1] + nbytes - it) if i else 0 for it, i in positions]


def not_reached(cache: PeerCache, transport: str) -> LLMException:
    """LLM_FEATURE_NOT_ENABLED: the transport does not reach the memory of a cache of the peer."""
    kind, remedy = (
        (
            "device",
            "both engines need a device, and a transport that reaches it: hccl; local, if "
            "it is memory of CUDA that peers can map (the log of its engine says why not); or tcp",
        )
        if cache.desc.placement is Placement.DEVICE
        else ("host", "let its engine allocate it, or link over another transport (local)")
    )
    return LLMException(
        f"{cache.side.name} is in {kind} memory, which transport {transport} does not reach: "
        f"{remedy}",
        status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
    )

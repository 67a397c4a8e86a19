"""The caches that a peer offers, by id, by model and by address."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from kvplan.control.messages import Offer, ShardEntry, Table, TableEntry
from kvplan.layout import Interleaved, Shard
from kvplan.lease import BlockLease
from kvplan.links.address_index import AddressIndex, Extent
from kvplan.planning.side import Side, side
from kvplan.status import LLMException, invalid, not_exist, unsupported
from kvplan.types import CacheDesc, Placement

MAX_CACHES = 65536
"""Maximum number of caches of one peer."""

MAX_MOVED_LEASES = 1 << 17
"""Maximum number of moved leases of one peer, as many as a transport can have."""

MAX_NBYTES = 256 << 20
"""Maximum size of the caches and moved leases of one peer: 4 KiB for each of MAX_CACHES."""


@dataclass(frozen=True, slots=True)
class PeerCache:
    """A cache of a peer.

    Attributes:
        cluster_id: Cluster id of the peer.
        cache_id: Id of the cache in the peer.
        desc: Description of the cache.
        paged: True if its rows are blocks.
        addresses: Address of each tensor in the peer.
        offers: Its metadata for each transport of the link that reaches it.
        writable: True if pushes may write to it.
        model_id: Model id of its BlocksCacheKey, or None.
        name: The name that the peer's program gave the memory, or "".
        side: The cache as a side of a plan.
        first: Lowest address of all tensors.
        last: Address of the last byte of all tensors.
    """

    cluster_id: int
    cache_id: int
    desc: CacheDesc
    paged: bool
    addresses: tuple[int, ...]
    offers: tuple[Offer, ...]
    writable: bool
    model_id: int | None = None
    name: str = ""
    side: Side = field(init=False, repr=False, compare=False)
    first: int = field(init=False, repr=False, compare=False)
    last: int = field(init=False, repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        """The approximate size of the cache in a message."""
        return sum(len(offer.metadata) for offer in self.offers) + 9 * len(self.addresses)

    def metadata(self, transport: str) -> bytes:
        """Return the metadata for a transport; empty if it does not reach the cache."""
        return next((offer.metadata for offer in self.offers if offer.transport == transport), b"")

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
        """Build the cache that a message of the peer `cluster_id` describes."""
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
                entry.row_stride,
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
            entry.offers,
            entry.writable,
            entry.model_id_of_blocks_key,
            entry.name,
        )


def _shard(entry: ShardEntry | None) -> Shard | None:
    if entry is None:
        return None
    (layers, num_layers), (heads, num_heads) = (
        (None, None) if part is None else (range(part[0], part[1]), part[2])
        for part in (entry.layers, entry.heads)
    )
    tokens = None
    if entry.tokens is not None:
        tokens = range(*entry.tokens) if len(entry.tokens) == 2 else Interleaved(*entry.tokens)
    return Shard(entry.numbers or layers, heads, num_layers, num_heads, tokens)


class PeerTable:
    """The caches of one peer.

    The control thread writes the table, and any thread reads it without a lock.

    Attributes:
        by_id: The offered caches by id.
        by_model: The offered caches that have a BlocksCacheKey, by its model id.
        leases: The leases whose blocks the peer has moved, by id.
    """

    def __init__(self, cluster_id: int) -> None:
        self.version = 0
        self._cluster_id = cluster_id
        self.by_id: dict[int, PeerCache] = {}
        self.by_model: dict[int, PeerCache] = {}
        self.leases: dict[int, BlockLease] = {}
        self._nbytes = 0  # of all offered caches and of moved leases
        # By `writable`: a version of the table, and the index of that version.
        self._indices: dict[bool, tuple[int, AddressIndex[PeerCache]]] = {}

    def apply(self, table: Table) -> list[int]:
        """Apply a message of the peer, and return the ids of changed and removed caches."""
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
        moved = [BlockLease.from_bytes(blob) for blob in table.moved]
        for lease_id in list(self.leases) if table.first else table.ended:
            self._end_lease(lease_id)
        for lease in moved:
            self._end_lease(lease.lease_id)
            self.leases[lease.lease_id] = lease
            self._nbytes += lease.nbytes
        if (
            len(self.by_id) > MAX_CACHES
            or len(self.leases) > MAX_MOVED_LEASES
            or self._nbytes > MAX_NBYTES
        ):
            raise invalid(
                f"the peer offers {len(self.by_id)} caches and has moved {len(self.leases)} "
                f"leases, of {self._nbytes} bytes; at most {MAX_CACHES} caches, {MAX_MOVED_LEASES} "
                f"leases and {MAX_NBYTES} bytes are allowed"
            )
        self.version = table.version
        self._indices.clear()
        return removed + [cache.cache_id for cache in added]

    def caches(self) -> tuple[PeerCache, ...]:
        """Return all offered caches."""
        return (*self.by_id.values(),)  # one atomic copy: tuple() needs the GIL for that

    def address_index(self, *, writable: bool) -> AddressIndex[PeerCache]:
        """Return the index by address of all offered caches, or only of the writable ones."""
        version = self.version  # read first, so that a concurrent change belongs to a later version
        held = self._indices.get(writable)
        if held is not None and held[0] == version:
            return held[1]
        extents = (
            Extent(address, cache.desc.tensor_nbytes, cache, tensor)
            for cache in self.caches()
            if cache.writable or not writable
            for tensor, address in enumerate(cache.addresses)
        )
        how = " as writable" if writable else ""
        index = AddressIndex(f"cluster {self._cluster_id}", extents, how)
        self._indices[writable] = version, index
        return index

    def __len__(self) -> int:
        return len(self.by_id)

    def _end_lease(self, lease_id: int) -> None:
        if (lease := self.leases.pop(lease_id, None)) is not None:
            self._nbytes -= lease.nbytes

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
    """A cache that contains all addresses, with the bytes from each to the end of its tensor."""

    cache: PeerCache
    left: list[int]


def find_by_address(caches: Iterable[PeerCache], addresses: Sequence[int]) -> AddressedCache | None:
    """Return the cache that contains all addresses, or None.

    Memory may be registered twice. Writable caches are preferred, then those with the most room.
    """
    lowest, highest = min(addresses), max(addresses)
    found = [
        AddressedCache(cache, left)
        for cache in caches
        if cache.first <= lowest and highest <= cache.last and all(left := _left(cache, addresses))
    ]
    return max(found, key=lambda found: (found.cache.writable, min(found.left)), default=None)


def no_cache_at(caches: Sequence[PeerCache], who: str, addresses: Sequence[int]) -> LLMException:
    """Return why `find_by_address` found no cache: LLM_KV_CACHE_NOT_EXIST or LLM_PARAM_INVALID."""
    cache_ids: list[int] = []
    for position, address in enumerate(addresses):
        cache = next((cache for cache in caches if _left(cache, [address])[0]), None)
        if cache is None:
            return not_exist(
                f"addresses[{position}]={address:#x} lies in no cache that {who} offers"
            )
        cache_ids.append(cache.cache_id)
    other = next(
        (position for position, cache_id in enumerate(cache_ids) if cache_id != cache_ids[0]), 0
    )
    return invalid(
        f"addresses[0]={addresses[0]:#x} lies in cache {cache_ids[0]} of {who}, and "
        f"addresses[{other}]={addresses[other]:#x} in cache {cache_ids[other]}; use one transfer "
        "for each cache"
    )


def _left(cache: PeerCache, addresses: Sequence[int]) -> list[int]:
    """Return the bytes from each address to the end of its tensor, 0 outside of all tensors."""
    starts = sorted(cache.addresses)
    nbytes = cache.desc.tensor_nbytes
    # All tensors have the same size, so the last one that begins before an address ends last.
    positions = ((address, bisect_right(starts, address)) for address in addresses)
    return [max(0, starts[i - 1] + nbytes - address) if i else 0 for address, i in positions]


def not_reached(cache: PeerCache, transport: str) -> LLMException:
    """Return LLM_FEATURE_NOT_ENABLED for a cache whose memory the transport does not reach."""
    kind, remedy = (
        (
            "device",
            "both engines need a device and a transport that reaches it: hccl, tcp, or local for "
            "CUDA memory that peers can map (the log of its engine says why they cannot)",
        )
        if cache.desc.placement is Placement.DEVICE
        else ("host", "let its engine allocate it, or link over another transport (local)")
    )
    return unsupported(
        f"{cache.side.name} is in {kind} memory, which transport {transport} does not reach: "
        f"{remedy}"
    )

"""The caches that a peer offers, as it tells them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvplan.control.messages import Table, TableEntry
from kvplan.planning.layout import Side, side
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.types import CacheDesc, Placement

MAX_CACHES = 65536
"""Of one peer: as many as the local transport can register, and a bound on what a peer can cost."""


MAX_NBYTES = 256 << 20
"""That all entries of one peer may take as messages: 4 KiB for each of the most caches."""


@dataclass(frozen=True, slots=True)
class PeerCache:
    """A cache of a peer.

    Attributes:
        cluster_id: of the peer.
        cache_id: in the peer.
        desc: its description.
        paged: whether its rows are blocks.
        addresses: of each tensor, in the peer.
        metadata: what the transport needs to reach them; empty: it does not.
        writable: whether it can be pushed to.
        model_id: of its BlocksCacheKey; None: it has none.
        side: as a plan sees it.
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
        """What a message takes for it, about."""
        return len(self.metadata) + 9 * len(self.addresses)

    def __post_init__(self) -> None:
        name = f"cache {self.cache_id} of cluster {self.cluster_id}"
        named = replace(side("cache", self.desc, paged=self.paged), name=name)
        object.__setattr__(self, "side", named)
        object.__setattr__(self, "first", min(self.addresses))
        object.__setattr__(self, "last", max(self.addresses) + self.desc.tensor_nbytes - 1)

    @classmethod
    def of(cls, cluster_id: int, entry: TableEntry) -> PeerCache:
        """The cache that a message of the peer `cluster_id` describes.

        Raises:
            LLMException: LLM_PARAM_INVALID: it describes none that can be.
        """
        try:
            desc = CacheDesc(
                entry.num_tensors,
                entry.shape,
                entry.data_type,
                entry.placement,
                entry.batch_dim_index,
                entry.seq_len_dim_index,
                entry.kv_tensor_format,
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


class PeerTable:
    """Written by the control thread, read by any: each read is one lookup in a dict.

    Args:
        cluster_id: of the peer.

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

    def apply(self, table: Table) -> list[int]:
        """Take what the peer says; return the ids of caches that are no longer what they were.

        Raises:
            LLMException: LLM_PARAM_INVALID: caches that cannot be, or too many of them.
        """
        told = [PeerCache.of(self._cluster_id, entry) for entry in table.entries]
        gone = list(self.by_id) if table.first else list(table.removed)
        for cache_id in gone:
            self._remove(cache_id)
        for cache in told:
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
        return gone + [cache.cache_id for cache in told]

    def caches(self) -> tuple[PeerCache, ...]:
        """All that are offered."""
        return tuple(self.by_id.values())

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


def unreached(cache: PeerCache, transport: str) -> LLMException:
    """Why a cache of the peer takes part in no transfer: it is where the link does not go."""
    kind, remedy = (
        ("device", "both engines need a device, and a transport between devices (hccl)")
        if cache.desc.placement is Placement.DEVICE
        else ("host", "let its engine allocate it, or link over another transport (local)")
    )
    return LLMException(
        f"{cache.side.name} is in {kind} memory, which transport {transport} does not reach: "
        f"{remedy}",
        status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
    )

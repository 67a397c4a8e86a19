"""What a peer has been told of our caches, and what is news to it."""

from __future__ import annotations

from collections.abc import Mapping

from kvplan.control.messages import Table, TableEntry
from kvplan.engine.entry import MAX_TOLD_NBYTES, CacheEntry, told_nbytes
from kvplan.types import Cache

_ID_NBYTES = 9


class ToldTable:
    """The table as one peer knows it; used by the control thread only.

    Args:
        transport: by which the peer reaches the caches.
    """

    def __init__(self, transport: str) -> None:
        self._transport = transport
        self._told: dict[int, Cache] = {}  # no entries: those hold memory that is free by now
        self._version = 0

    @property
    def version(self) -> int:
        """Number of messages that this table took."""
        return self._version

    def news(self, offered: Mapping[int, CacheEntry]) -> list[Table]:
        """The messages that bring the peer from what it knows to `offered`; they must all be sent.

        The first ones tell what was removed, so that no freed cache stays for a moment beside new
        ones at the same addresses.
        """
        now = {it: entry.cache for it, entry in offered.items()}
        removed = [it for it, cache in self._told.items() if now.get(it) is not cache]
        added = [entry for it, entry in offered.items() if self._told.get(it) is not entry.cache]
        self._told = now
        tables: list[Table] = []
        entries: list[TableEntry] = []
        chunk = len(removed) * _ID_NBYTES
        for entry in added:
            nbytes = told_nbytes(entry, self._transport)
            if chunk + nbytes > MAX_TOLD_NBYTES:
                tables.append(self._message(entries, removed))
                entries, removed, chunk = [], [], 0
            entries.append(self.describe(entry))
            chunk += nbytes
        if entries or removed or not self._version:
            tables.append(self._message(entries, removed))
        return tables

    def describe(self, entry: CacheEntry) -> TableEntry:
        """`entry` as the peer is told it."""
        cache, desc = entry.cache, entry.cache.cache_desc
        return TableEntry(
            cache_id=cache.cache_id,
            num_tensors=desc.num_tensors,
            shape=desc.shape,
            data_type=desc.data_type,
            placement=desc.placement,
            batch_dim_index=desc.batch_dim_index,
            seq_len_dim_index=desc.seq_len_dim_index,
            kv_tensor_format=desc.kv_tensor_format,
            paged=bool(entry.paged),
            model_id_of_blocks_key=None if entry.blocks_key is None else entry.blocks_key.model_id,
            addresses=cache.tensor_addrs,
            metadata=entry.metadata[self._transport],
            writable=entry.memory.writable,
        )

    def _message(self, entries: list[TableEntry], removed: list[int]) -> Table:
        self._version += 1
        return Table(self._version, self._version == 1, tuple(entries), tuple(removed))

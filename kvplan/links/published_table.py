"""The caches of this engine as one peer knows them, and how it is brought up to date."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from kvplan.control.channel import ChannelClosed
from kvplan.control.messages import MAX_NBYTES, ShardEntry, Sync, Synced, Table, TableEntry
from kvplan.logs import Log
from kvplan.status import LLMException
from kvplan.types import Cache

if TYPE_CHECKING:
    from kvplan.control.channel import Channel
    from kvplan.layout import Shard
    from kvplan.links.local_engine import OfferedCache, OfferedCaches

_LOG = Log("kvplan")

MAX_PUBLISHED_NBYTES: Final = MAX_NBYTES // 2
"""Of one cache, and of all in one message, by the estimate of `published_nbytes`."""

_ENTRY_NBYTES: Final = 512  # with a shape of many dimensions
_ADDRESS_NBYTES: Final = 9
_ID_NBYTES: Final = 9


class PublishedTable:
    """The table as one peer knows it; used by the control thread only."""

    def __init__(self, transport: str) -> None:
        self._transport = transport
        self._published: dict[int, Cache] = {}  # no entries: those would hold memory that was freed
        self._version = 0

    @property
    def version(self) -> int:
        """Number of messages so far."""
        return self._version

    def pending_updates(self, offered: Mapping[int, OfferedCache]) -> list[Table]:
        """The messages that bring the peer up to date with `offered`; all of them must be sent.

        The first ones remove, so that the peer never has both a freed cache and a new one at the
        same addresses.
        """
        now = {it: entry.cache for it, entry in offered.items()}
        published = self._published
        removed = [it for it, cache in published.items() if now.get(it) is not cache]
        added = [entry for it, entry in offered.items() if published.get(it) is not entry.cache]
        self._published = now
        tables: list[Table] = []
        entries: list[TableEntry] = []
        chunk = len(removed) * _ID_NBYTES
        for entry in added:
            nbytes = published_nbytes(entry, self._transport)
            if chunk + nbytes > MAX_PUBLISHED_NBYTES:
                tables.append(self._message(entries, removed))
                entries, removed, chunk = [], [], 0
            entries.append(self.describe(entry))
            chunk += nbytes
        if entries or removed or not self._version:
            tables.append(self._message(entries, removed))
        return tables

    def describe(self, entry: OfferedCache) -> TableEntry:
        """The entry of a message for a cache."""
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
            shard=_shard_entry(desc.shard),
            paged=bool(entry.paged),
            model_id_of_blocks_key=None if entry.blocks_key is None else entry.blocks_key.model_id,
            addresses=cache.tensor_addrs,
            metadata=entry.metadata[self._transport],
            writable=entry.memory.writable,
        )

    def _message(self, entries: list[TableEntry], removed: list[int]) -> Table:
        self._version += 1
        return Table(self._version, self._version == 1, tuple(entries), tuple(removed))


def _shard_entry(shard: Shard | None) -> ShardEntry | None:
    if shard is None:
        return None
    parts = ((shard.layers, shard.num_layers), (shard.heads, shard.num_heads))
    layers, heads = (
        None if part is None or total is None else (part[0], part[-1] + 1, total)
        for part, total in parts
    )
    numbers = shard.layers if isinstance(shard.layers, tuple) else ()
    tokens = shard.tokens
    if isinstance(tokens, range):
        return ShardEntry(layers, heads, numbers, (tokens.start, tokens.stop))
    if tokens is not None:
        return ShardEntry(layers, heads, numbers, (tokens.rank, tokens.ranks, tokens.size))
    return ShardEntry(layers, heads, numbers)


class Publisher:
    """Sends one peer the changes of the caches here; used by the control thread only."""

    def __init__(
        self, cluster_id: int, channel: Channel, offered: OfferedCaches, transport: str
    ) -> None:
        self.table = PublishedTable(transport)
        self._cluster_id = cluster_id
        self._channel = channel
        self._offered = offered
        self._sending = asyncio.Lock()
        self._unsent: deque[Table] = deque()  # after a timeout: the peer needs every message
        self._is_pending = False

    async def publish(self) -> int:
        """Send what the peer does not know yet; returns the version that it knows then."""
        async with self._sending:  # messages must keep their order
            self._is_pending = False
            self._unsent += self._offered.survey(self.table.pending_updates)
            while self._unsent:
                await self._channel.notify(self._unsent[0])
                self._unsent.popleft()
            return self.table.version

    async def publish_pending(self) -> None:
        """As `publish`, for a link that may end meanwhile; calls at one time publish once."""
        if not self._is_pending:
            self._is_pending = True
            with suppress(ChannelClosed):
                await self.publish()

    async def publish_and_confirm(self, timeout_s: float) -> None:
        """As `publish`, and the peer has it on return; a peer that does not answer is logged."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.publish()
                await self._channel.typed_request(Sync(), Synced, timeout_s)  # answered in order
        except ChannelClosed:
            pass
        except (TimeoutError, LLMException) as error:
            reason = str(error) or "no answer in time"
            _LOG.warning("publish peer=%d error=%r", self._cluster_id, reason)


def published_nbytes(entry: OfferedCache, transport: str) -> int:
    """About how many bytes of a message a cache takes, for a peer that uses `transport`."""
    desc = entry.cache.cache_desc
    own = _ENTRY_NBYTES + 4 * len(desc.kv_tensor_format or "")
    return own + len(entry.metadata[transport]) + _ADDRESS_NBYTES * desc.num_tensors

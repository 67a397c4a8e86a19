"""Publication of the offered caches and moved leases to the peer of a link."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

from kvplan.control.channel import ChannelClosed
from kvplan.control.messages import MAX_NBYTES, Offer, ShardEntry, Sync, Synced, Table, TableEntry
from kvplan.links.local_engine import CacheEntry, OfferedCaches
from kvplan.status import LLMException
from kvplan.system.logs import Log
from kvplan.types import Cache

if TYPE_CHECKING:
    from kvplan.control.channel import Channel
    from kvplan.layout import Shard
    from kvplan.lease import BlockLease

_LOG = Log("kvplan")
MAX_PUBLISHED_NBYTES: Final = MAX_NBYTES // 2
"""Maximum size of one cache and of one message, as `published_nbytes` estimates it."""
_ENTRY_NBYTES: Final = 512  # for a shape with many dimensions
_ADDRESS_NBYTES: Final = 9
_ID_NBYTES: Final = 9
_MAX_MOVED: Final = 4096  # leases in one message
_MAX_ENDED: Final = 1 << 15  # ids of leases in one message


class PublishedTable:
    """The table as one peer knows it. Only the control thread uses it."""

    def __init__(self, transports: tuple[str, ...]) -> None:
        self._transports = transports
        self._published: dict[int, Cache] = {}  # not entries, which would keep freed memory alive
        self._leases: dict[int, BlockLease] = {}
        self._version = 0

    @property
    def version(self) -> int:
        """The number of messages so far."""
        return self._version

    def pending_updates(
        self, offered: Mapping[int, CacheEntry], leases: Mapping[int, BlockLease]
    ) -> list[Table]:
        """Return the messages that bring the peer up to date. All must be sent.

        Removals come first, so that the peer never has a freed and a new cache at the same
        addresses.

        Args:
            offered: The caches that the peer may reach.
            leases: Live leases whose blocks this engine has moved.
        """
        now = {cache_id: entry.cache for cache_id, entry in offered.items()}
        published = self._published
        removed = [
            cache_id for cache_id, cache in published.items() if now.get(cache_id) is not cache
        ]
        added = [
            entry
            for cache_id, entry in offered.items()
            if published.get(cache_id) is not entry.cache
        ]
        self._published = now
        tables: list[Table] = []
        entries: list[TableEntry] = []
        chunk = len(removed) * _ID_NBYTES
        for entry in added:
            nbytes = published_nbytes(entry, self._transports)
            if chunk + nbytes > MAX_PUBLISHED_NBYTES:
                tables.append(self._message(entries, removed))
                entries, removed, chunk = [], [], 0
            entries.append(self.describe(entry))
            chunk += nbytes
        if entries or removed or not self._version:
            tables.append(self._message(entries, removed))
        return tables + self._moved(leases)

    def _moved(self, leases: Mapping[int, BlockLease]) -> list[Table]:
        """Return the messages that announce moved and ended leases."""
        before, self._leases = self._leases, dict(leases)
        ended = [lease_id for lease_id in before if lease_id not in leases]
        blobs = [
            lease.to_bytes()
            for lease_id, lease in self._leases.items()
            if before.get(lease_id) is not lease
        ]
        tables = [
            self._message((), (), (), ended[first : first + _MAX_ENDED])
            for first in range(0, len(ended), _MAX_ENDED)
        ]
        while blobs:
            chunk, nbytes = [blobs.pop()], 0
            while blobs and len(chunk) < _MAX_MOVED:
                nbytes += len(chunk[-1])
                if nbytes + len(blobs[-1]) > MAX_PUBLISHED_NBYTES:
                    break
                chunk.append(blobs.pop())
            tables.append(self._message((), (), chunk))
        return tables

    def describe(self, entry: CacheEntry) -> TableEntry:
        """Return the description of a cache for a message."""
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
            row_stride=desc.row_stride,
            paged=bool(entry.paged),
            model_id_of_blocks_key=None if entry.blocks_key is None else entry.blocks_key.model_id,
            addresses=cache.tensor_addrs,
            offers=tuple(
                Offer(name, metadata)
                for name in self._transports
                if (metadata := entry.offered.metadata[name])
            ),
            writable=entry.memory.writable,
            name=entry.name,
        )

    def _message(
        self,
        entries: Sequence[TableEntry],
        removed: Sequence[int],
        moved: Sequence[bytes] = (),
        ended: Sequence[int] = (),
    ) -> Table:
        self._version += 1
        return Table(
            self._version,
            self._version == 1,
            tuple(entries),
            tuple(removed),
            tuple(moved),
            tuple(ended),
        )


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
    """The sender of changes of the local caches to one peer. Only the control thread uses it."""

    def __init__(
        self,
        cluster_id: int,
        channel: Channel,
        offered: OfferedCaches,
        transports: tuple[str, ...],
    ) -> None:
        self.table = PublishedTable(transports)
        self._cluster_id = cluster_id
        self._channel = channel
        self._offered = offered
        self._sending = asyncio.Lock()
        self._unsent: deque[Table] = deque()  # kept on a timeout: the peer needs every message
        self._is_pending = False

    async def publish(self) -> int:
        """Send all changes, and return the version of the table after them."""
        async with self._sending:  # messages must keep their order
            self._is_pending = False
            leases = self._offered.moved_leases
            self._unsent += self._offered.survey(partial(self.table.pending_updates, leases=leases))
            while self._unsent:
                await self._channel.notify(self._unsent[0])
                self._unsent.popleft()
            return self.table.version

    async def publish_pending(self) -> None:
        """Publish on a link that may end at any time. Concurrent calls publish once."""
        if not self._is_pending:
            self._is_pending = True
            with suppress(ChannelClosed):
                await self.publish()

    async def publish_and_confirm(self, timeout_s: float) -> None:
        """Publish, and wait until the peer has the changes. Log a failure if the link goes on."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.publish()
                # The peer applies the tables before it answers.
                await self._channel.typed_request(Sync(), Synced, timeout_s)
        except ChannelClosed:
            pass
        except (TimeoutError, LLMException) as error:
            reason = str(error) or "no answer in time"
            _LOG.warning("publish peer=%d error=%r", self._cluster_id, reason)


def published_nbytes(entry: CacheEntry, transports: Iterable[str]) -> int:
    """Estimate the size of a cache in a message to a peer that uses `transports`."""
    desc = entry.cache.cache_desc
    own = _ENTRY_NBYTES + 4 * len((desc.kv_tensor_format or "") + entry.name)
    return (
        own
        + sum(len(entry.offered.metadata[name]) for name in transports)
        + _ADDRESS_NBYTES * desc.num_tensors
    )

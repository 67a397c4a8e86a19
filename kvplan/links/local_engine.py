"""This engine as its links see it: its limits, and the caches that it offers and publishes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from kvplan.control.auth import Keys
from kvplan.control.channel import ChannelClosed
from kvplan.control.loop import ControlLoop
from kvplan.control.messages import MAX_NBYTES, Offer, ShardEntry, Sync, Synced, Table, TableEntry
from kvplan.links.values import link_failed
from kvplan.status import LLMException
from kvplan.system.logs import Log
from kvplan.transport.choice import WHERE_MISSING
from kvplan.types import BlocksCacheKey, Cache, CacheKey, LlmRole

if TYPE_CHECKING:
    from kvplan.control.channel import Channel
    from kvplan.control.notifying import Inbox
    from kvplan.execution.memory import TensorMemory
    from kvplan.layout import Shard
    from kvplan.transport.protocol import Transport


_LOG = Log("kvplan")
_T = TypeVar("_T")
MAX_PUBLISHED_NBYTES: Final = MAX_NBYTES // 2
"""Of one cache, and of all in one message, by the estimate of `published_nbytes`."""
_ENTRY_NBYTES: Final = 512  # with a shape of many dimensions
_ADDRESS_NBYTES: Final = 9
_ID_NBYTES: Final = 9


class LinkOptions(Protocol):
    """The options of an engine that its links read; `kvplan.Options` documents them."""

    @property
    def sync_kv_cache_wait_time(self) -> int:
        """Milliseconds that a request to a peer may take."""

    @property
    def link_total_time(self) -> int:
        """Seconds within which all members of a communicator must have linked; 0: 60."""

    @property
    def link_retry_count(self) -> int:
        """Times that a peer given by its address is called, within the time of the call."""

    @property
    def tcp_source(self) -> str:
        """IP address of this host to connect from; empty: the system's choice."""

    @property
    def cluster_key_file(self) -> str | None:
        """Path of the key that all engines of a cluster share; None: there is none."""

    @property
    def heartbeat_interval_ms(self) -> int:
        """Milliseconds without a message after which a link sends one."""

    @property
    def heartbeat_timeout_ms(self) -> int:
        """Milliseconds without a message from a peer after which its link is broken."""

    @property
    def max_links(self) -> int:
        """Peers that may be linked at once."""

    @property
    def comm_port(self) -> int:
        """Of communicators across hosts: the port of device 0 of each."""

    @property
    def comm_dir(self) -> str | None:
        """Of communicators on one host: directory of the sockets; None: the user's own."""


class OfferedCache(Protocol):
    """A cache of this engine that peers may reach."""

    @property
    def cache(self) -> Cache:
        """Its id, description and addresses."""

    @property
    def memory(self) -> TensorMemory:
        """Its tensors."""

    @property
    def paged(self) -> bool | None:
        """Whether it is addressed by blocks."""

    @property
    def blocks_key(self) -> BlocksCacheKey | None:
        """The key of a paged cache, if it has one."""

    @property
    def metadata(self) -> Mapping[str, bytes]:
        """What a peer needs to reach it, by the name of the transport; empty: not by that one."""


class GrantedClaim(Protocol):
    """The right to pull by a key, as a peer is granted it."""

    @property
    def claim_id(self) -> int:
        """Of this engine's own count."""

    @property
    def entry(self) -> OfferedCache:
        """The cache that has the key."""

    @property
    def batch_index(self) -> int:
        """The slot that has the key."""


class OfferedCaches(Protocol):
    """The caches of this engine that peers may reach; for any thread."""

    def survey(self, look: Callable[[Mapping[int, OfferedCache]], _T]) -> _T:
        """Return what `look` makes of all that are offered, by id; it must keep no cache."""

    def find(self, key: CacheKey) -> tuple[OfferedCache, int]:
        """The cache and batch index that peers reach by `key`.

        Raises:
            LLMException: LLM_KV_CACHE_NOT_EXIST: there is none; LLM_PARAM_INVALID: a padding key.
        """

    def claim(self, key: CacheKey, holder: Hashable) -> GrantedClaim:
        """Let `holder` pull by `key`: the cache stays until the claim is released.

        Raises:
            LLMException: as `find`; LLM_REPEAT_REQUEST: another holder has claimed it;
                LLM_LINK_BUSY: this one has too many claims.
        """

    def release(
        self,
        claim_id: int,
        tensors: range | None,
        *,
        holder: Hashable,
        run: Callable[[Callable[[], None]], object],
    ) -> None:
        """End a claim of `holder`; one that is unknown is fine.

        Args:
            claim_id: of the claim.
            tensors: that were pulled, every byte confirmed; None: the pull failed.
            holder: whose claim it must be.
            run: called with what ends the caches that go with it, if there are any; that may wait
                for peers that write to them.
        """

    def release_holder(
        self, holder: Hashable, *, run: Callable[[Callable[[], None]], object]
    ) -> None:
        """End all claims of `holder`, who is gone; no pull of it counts. `run`: see `release`."""


@dataclass(frozen=True, eq=False)
class LocalEngine:
    """This engine, as its links need it.

    Attributes:
        cluster_id: of this engine.
        instance: 16 random bytes, which no other engine has, nor this one after a restart.
        role: of this engine, now.
        options: limits and deadlines.
        registry: the caches that are offered.
        inbox: takes the notifications of linked peers; None: they are refused.
        transports: in order of preference.
        missing: why other transports are not available, by name.
        control: the loop that all links run on.
        keys: what peers are authenticated with.
    """

    cluster_id: int
    instance: bytes
    role: Callable[[], LlmRole]
    options: LinkOptions
    registry: OfferedCaches
    inbox: Inbox | None
    transports: Sequence[Transport]
    missing: Mapping[str, str]
    control: ControlLoop
    keys: Keys

    def offers(self) -> tuple[Offer, ...]:
        """The transports by which a peer could reach this process."""
        return tuple(Offer(it.name, it.metadata(())) for it in self.transports)

    def choose(self, peer: int, offers: Sequence[Offer]) -> tuple[Transport, bytes]:
        """The transport to use with a peer that makes these offers, and the peer's metadata.

        The first that reaches all memory of the peer, as far as is known, else the first at all.
        """
        offered = {it.transport: it.metadata for it in offers}
        refusals = []
        partial: tuple[Transport, bytes] | None = None
        for transport in self.transports:
            name = transport.name
            if (metadata := offered.get(name)) is None:
                remedy = f" ({WHERE_MISSING[name]})" if name in WHERE_MISSING else ""
                refusals.append(f"{name}: cluster {peer} does not offer it{remedy}")
            elif (refusal := transport.refusal(metadata)) is not None:
                refusals.append(f"{name}: {refusal}")
            elif (lack := transport.shortfall(metadata)) is None:
                return transport, metadata
            elif partial is None:
                _LOG.info("peer=%d transport=%s is the last to be chosen: %s", peer, name, lack)
                partial = transport, metadata
        if partial is not None:
            return partial
        for name in offered.keys() & self.missing.keys():
            why = self.missing[name]
            refusals.append(f"{name}: cluster {self.cluster_id} does not have it: {why}")
        raise link_failed(
            f"no transport between cluster {self.cluster_id} and cluster {peer}: "
            f"{'; '.join(refusals)}"
        )

    def transport(self, name: str) -> Transport:
        """The transport that a peer has chosen."""
        for transport in self.transports:
            if transport.name == name:
                return transport
        raise link_failed(f"the peer chose {name!r}, which was not offered")


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

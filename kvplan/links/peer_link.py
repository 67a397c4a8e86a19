"""One link, as operations use it: the peer's caches, and the memory behind them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

from kvplan.control.channel import Channel, ChannelClosed
from kvplan.control.messages import Body, Claim, Find, Found, Sync, Synced
from kvplan.links.claims import Claims, PeerClaim
from kvplan.links.lifecycle import LinkLifecycle
from kvplan.links.notifying import Notifier
from kvplan.links.peer_table import (
    PeerCache,
    PeerTable,
    find_by_address,
    no_cache_at,
    not_reached,
)
from kvplan.links.values import LinkStatus, link_failed
from kvplan.planning.side import Side
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.types import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex, LlmRole, Placement
from kvplan.validation import shown

if TYPE_CHECKING:
    from kvplan.control.loop import ControlLoop
    from kvplan.control.messages import Table
    from kvplan.execution.memory import TensorMemory
    from kvplan.lease import BlockLease
    from kvplan.links.address_index import AddressIndex
    from kvplan.links.published_table import Publisher
    from kvplan.links.renewals import Renewals
    from kvplan.transport.protocol import PeerMemory, Streams, TransportLink

_Reply = TypeVar("_Reply", bound=Body)
_T = TypeVar("_T")
_MAY_HAVE_ARRIVED: Final = "; the notification may have been delivered"
_cache_id: Final = attrgetter("cache_id")
_MAX_REQUESTS = 16  # at a time; a peer refuses to serve many more
_MAX_JOINED = 64  # sets of caches whose memory is kept joined


class PeerLink(LinkLifecycle):
    """A link to one peer.

    Documented methods are for operations, from any thread; the rest is for the control thread.

    Args:
        cluster_id: the peer's.
        address: of the control channel.
        comm: the communicator that the link belongs to; empty: linked by address.
        control: the loop that the channel runs on.
        wait_ms: milliseconds that a request to the peer may take.

    Attributes:
        pairs: pairs of the peer's caches and others, as users of the link remember them: another
            dict whenever what is known of the peer's caches has changed.
    """

    def __init__(
        self, cluster_id: int, address: str, comm: str, control: ControlLoop, wait_ms: float
    ) -> None:
        super().__init__(cluster_id)
        self.address = address
        self.comm = comm
        self.comm_id: int | None = None
        self.phase = ""  # of a handshake that this engine initiates
        self.instance = b""
        self.secret = b""  # which the two ends of this link alone know
        self.role: LlmRole | None = None
        self.transport = ""
        self.channel: Channel | None = None
        self.streams: Streams | None = None
        self.connecting: asyncio.Task[TransportLink] | None = None
        self.transport_link: TransportLink | None = None
        self.renewals: Renewals | None = None
        self.publisher: Publisher | None = None
        self._slots = asyncio.Semaphore(_MAX_REQUESTS)
        self.notifier = Notifier(cluster_id)
        self._control = control
        self.wait_s = wait_ms / 1000
        self._claims = Claims(self, control, self._slots, self.wait_s)
        self._table = PeerTable(cluster_id)
        self.pairs: dict[Any, Any] = {}
        self._sides: dict[int, tuple[PeerCache, Side]] = {}
        self._memories: dict[tuple[int, bool], tuple[PeerCache, PeerMemory]] = {}
        self._joined: dict[
            tuple[tuple[int, ...], bool, bool], tuple[tuple[PeerCache, ...], PeerMemory]
        ] = {}

    def __str__(self) -> str:
        return f"cluster {self.cluster_id}"

    def cache(
        self,
        index: CacheKeyByIdAndIndex | BlocksCacheKey | BlockLease,
        *,
        writable: bool = False,
        speculative: bool = False,
    ) -> PeerCache:
        """The peer's cache that `index` names; the peer is asked for one that is not known yet.

        Args:
            index: its id, a lease with that, or a key.
            writable: whether it is to be written; then the peer must not have freed it.
            speculative: whether the cache that last had a key may be taken for the one that has it
                now, if the transfer notices a freed cache before it moves a byte.

        Raises:
            LLMException: LLM_KV_CACHE_NOT_EXIST: the peer does not offer it; LLM_TIMEOUT: it does
                not answer; LLM_LINK_FAILED, LLM_NOT_YET_LINK: the link has ended.
        """
        is_key = isinstance(index, BlocksCacheKey)
        if isinstance(index, BlocksCacheKey):
            offered, wanted = self._table.by_model, index.model_id
        else:
            offered, wanted = self._table.by_id, index.cache_id
        found = offered.get(wanted)
        link = self.transport_link
        if found is None or (
            self._may_be_freed(found, speculative=speculative)
            if is_key
            # It is this cache that is meant, freed or not: the transfer may find that out itself.
            else writable and (link is None or link.detects_freed == "after")
        ):
            self.sync()
            found = offered.get(wanted)
        if found is not None:
            return found
        name = "model_id" if is_key else "cache_id"
        raise LLMException(
            f"cluster {self.cluster_id} offers no cache with {name}={wanted}; it offers "
            f"{shown(sorted(offered))}",
            status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
        )

    def sync(self) -> None:
        """Have all that the peer has changed of its caches: that arrives before its reply.

        Raises:
            LLMException: as `cache`.
        """
        self._request(Sync(), Synced)

    def caches(self) -> tuple[PeerCache, ...]:
        """All that the peer offers, as far as it has been published."""
        return self._table.caches()

    def address_index(self, *, writable: bool, ask: bool = False) -> AddressIndex[PeerCache]:
        """All that the peer offers, by addresses.

        Args:
            writable: of those that may be written, to write: then it must not have freed them.
            ask: ask the peer first.

        Raises:
            LLMException: as `cache`.
        """
        link = self.transport_link
        if ask or (writable and (link is None or link.detects_freed == "after")):
            self.sync()
        return self._table.address_index(writable=writable)

    def _may_be_freed(self, cache: PeerCache, *, speculative: bool = False) -> bool:
        """Whether the peer may have freed it, and its key is another cache's, without our knowing.

        Args:
            cache: as it was last published.
            speculative: the caller accepts that the transfer may fail, and tries again then.
        """
        link = self.transport_link
        if link is None or link.detects_freed == "after":
            return True
        if link.detects_freed == "before":
            return not speculative
        try:
            self.memory(cache, writable=False).check()
        except LLMException as error:
            return error.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
        return False

    def leased(self, lease: BlockLease, *, writable: bool = False) -> PeerCache:
        """The cache that `lease` names.

        Raises:
            LLMException: as `cache`; LLM_KV_CACHE_NOT_EXIST: the peer was restarted.
        """
        if lease.instance != self.instance:
            raise LLMException(
                f"{lease} has ended: cluster {self.cluster_id} was restarted since",
                status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
            )
        found = None if writable else self._table.by_id.get(lease.cache_id)
        return self.cache(lease, writable=writable) if found is None else found

    def leased_memory(
        self, caches: Sequence[PeerCache], leases: Sequence[BlockLease], *, writable: bool
    ) -> PeerMemory:
        """As `joined_memory`, and transfers with it fail once one of `leases` has ended.

        Raises:
            LLMException: as `memory`; LLM_FEATURE_NOT_ENABLED: the transport checks no leases.
        """
        memory = self.joined_memory(caches, writable=writable)
        return memory.leased(leases) if leases else memory

    def memory(self, cache: PeerCache, *, writable: bool) -> PeerMemory:
        """The tensors of `cache`, as a side of a transfer.

        Raises:
            LLMException: LLM_KV_CACHE_NOT_EXIST: the peer has freed it; LLM_PARAM_INVALID: it is to
                be written, but is read-only; LLM_FEATURE_NOT_ENABLED: it is in memory that this
                link does not reach; LLM_LINK_FAILED, LLM_NOT_YET_LINK: the link has ended.
        """
        key = (cache.cache_id, writable)
        held = self._memories.get(key)
        if held is not None and held[0] is cache:
            return held[1]
        memory = self._transport_link_to(cache).memory(
            cache.addresses, cache.desc.tensor_nbytes, writable=writable, metadata=cache.metadata
        )
        self._memories[key] = (cache, memory)
        # A change of the table, or the end of the link, is visible before memories are cleared.
        if self._table.by_id.get(cache.cache_id) is not cache or not self.is_live:
            self._memories.pop(key, None)
        return memory

    def joined_memory(
        self, caches: Sequence[PeerCache], *, writable: bool, any_holder: bool = False
    ) -> PeerMemory:
        """The tensors of several caches, one cache after another, as one side of a transfer.

        Args:
            any_holder: whether bytes of several of them may be moved as those of any.

        Raises:
            LLMException: as `memory`.
        """
        if len(caches) == 1:
            return self.memory(caches[0], writable=writable)
        key = (tuple(map(_cache_id, caches)), writable, any_holder)
        held = self._joined.get(key)
        if held is not None and all(map(is_, held[0], caches)):
            return held[1]
        link, *_ = [self._transport_link_to(it) for it in caches]
        memory = link.memory(
            np.concatenate([np.array(it.addresses, dtype=np.uint64) for it in caches]),
            np.repeat(
                np.array([it.desc.tensor_nbytes for it in caches], dtype=np.uint64),
                [len(it.addresses) for it in caches],
            ),
            writable=writable,
            metadata=[it.metadata for it in caches for _ in it.addresses],
            any_holder=any_holder,
        )
        if len(self._joined) >= _MAX_JOINED:
            self._joined.clear()
        self._joined[key] = (tuple(caches), memory)
        if any(self._table.by_id.get(it.cache_id) is not it for it in caches) or not self.is_live:
            self._joined.pop(key, None)  # as of one cache
        return memory

    def side(self, cache: PeerCache) -> Side:
        """`cache` as a side of a plan, with how it is reached."""
        known = self._sides.get(cache.cache_id)
        if known is None or known[0] is not cache:
            link, copies = self.transport_link, None
            if link is not None and cache.metadata:
                on_device = cache.side.placement is Placement.DEVICE
                copies = link.copies(cache.metadata, on_device=on_device)
            side = replace(cache.side, way=self._described_way, copies=copies)
            known = self._sides[cache.cache_id] = cache, side
        return known[1]

    def tensors(
        self, addresses: Sequence[int], stride: int, *, paged: bool
    ) -> tuple[Side, TensorMemory]:
        """The peer's tensors at `addresses`, to be written in rows of `stride` bytes.

        As many rows as the cache has room for after each. The peer is asked for unknown addresses.

        Args:
            addresses: in the peer, at least one.
            stride: bytes of a row, > 0.
            paged: whether rows are blocks.

        Raises:
            LLMException: LLM_KV_CACHE_NOT_EXIST: an address in no cache that the peer offers;
                LLM_PARAM_INVALID: addresses in several caches, or less room than a row after one;
                otherwise as `cache` and `memory`.
        """
        known = find_by_address(self._table.caches(), addresses)
        if known is None or self._may_be_freed(known.cache):
            self._request(Sync(), Synced)
            known = find_by_address(self._table.caches(), addresses)
        if known is None:
            raise no_cache_at(self._table.caches(), str(self), addresses)
        cache, left = known
        link = self._transport_link_to(cache)
        if (count := min(left) // stride) == 0:
            short = left.index(min(left))
            raise invalid(
                f"addresses[{short}]={addresses[short]:#x} has {min(left)} bytes behind it, in its "
                f"tensor of cache {cache.cache_id} of {self}; a row takes stride={stride}"
            )
        name = f"addresses in cache {cache.cache_id} of {self}"
        side = Side(
            len(addresses),
            count,
            stride,
            paged,
            cache.desc.placement,
            name=name,
            way=self._described_way,
        )
        memory = link.memory(addresses, side.tensor_nbytes, writable=True, metadata=cache.metadata)
        return side, memory

    def _transport_link_to(self, cache: PeerCache) -> TransportLink:
        link = self.transport_link
        if link is None:
            raise self.refusal()
        if not cache.metadata:
            raise not_reached(cache, self.transport)
        return link

    def find(self, key: CacheKey) -> tuple[PeerCache, int]:
        """The peer's cache and batch index that have `key`.

        Raises:
            LLMException: as `cache`.
        """
        found = self._request(Find(key.req_id, key.prefix_id, key.model_id), Found)
        return self._cache_of(found), found.batch_index

    def claim(self, key: CacheKey) -> PeerClaim:
        """As `find`, and no other engine can pull by `key` until the claim is released.

        Raises:
            LLMException: as `cache`; LLM_REPEAT_REQUEST: another engine has claimed it;
                LLM_LINK_BUSY: this engine has too many claims there.
        """
        claim = Claim(key.req_id, key.prefix_id, key.model_id)
        channel = self._live_channel()
        found = self._wait_for(self._claims.claim(channel, claim))
        cache = self._cache_of(found)
        return PeerClaim(self._claims, channel, found.claim_id, cache, found.batch_index)

    def notify(self, data: bytes, timeout_ms: float | None = None) -> None:
        """Send a notification; on return the peer's engine has it.

        Args:
            data: of it.
            timeout_ms: milliseconds that it may take; None: as any request.

        Raises:
            LLMException: LLM_LINK_BUSY: the peer has too many unread; LLM_TIMEOUT, LLM_LINK_FAILED:
                it may have arrived or not; LLM_NOT_YET_LINK: the link had ended before.
        """
        if not self.notifier.send_directly(data):
            timeout_s = self.wait_s if timeout_ms is None else timeout_ms / 1000
            sending = self.notifier.send(self._live_channel(), data, timeout_s)
            self._wait_for(sending, timeout_s, _MAY_HAVE_ARRIVED)

    async def notify_async(self, data: bytes, timeout_ms: float | None = None) -> None:
        """As `notify`, for a coroutine of another loop. What is called later is sent later.

        Raises:
            LLMException: as `notify`.
        """
        if self.notifier.send_directly(data):
            return
        timeout_s = self.wait_s if timeout_ms is None else timeout_ms / 1000
        sending = self.notifier.send(self._live_channel(), data, timeout_s)
        token = self.notifier.defer()  # before the control thread begins to send
        settle: Callable[[object], None] = self.notifier.settle
        try:
            await self._control.run_for(sending)
        except TimeoutError:
            raise self._late(timeout_s, _MAY_HAVE_ARRIVED) from None
        except ChannelClosed as error:
            raise self._ended(error, _MAY_HAVE_ARRIVED) from error
        except asyncio.CancelledError:
            # The control thread may send it before it finds it cancelled.
            settle = partial(self._control.call_soon, settle)
            raise
        finally:
            with suppress(LLMException):  # the control thread has ended
                settle(token)

    def notify_soon(self, data: bytes) -> None:
        """Send a notification and do not wait; whether it was delivered is logged if it was not."""
        if not self.notifier.send_directly(data):
            request = self.notifier.defer(), self._live_channel, data, self.wait_s
            with suppress(LLMException):  # the loop has ended
                self._control.call_soon(self.notifier.send_later, *request)

    def forget(self) -> None:
        """Clear what is cached of the peer's memory; the transport is asked for it again."""
        self.pairs = {}
        self._memories.clear()
        self._joined.clear()
        self._sides.clear()

    def apply(self, table: Table) -> None:
        """Apply what the peer publishes of its caches.

        Raises:
            LLMException: LLM_PARAM_INVALID: it is not possible.
        """
        changed = self._table.apply(table)
        self.pairs = {}
        self._joined.clear()
        for cache_id in changed:
            self._sides.pop(cache_id, None)
            for writable in (False, True):
                self._memories.pop((cache_id, writable), None)
        self.prepare(changed)

    def prepare(self, cache_ids: Iterable[int] | None = None) -> None:
        """Have memory of the peer's caches (None: of all) reached before a transfer needs it."""
        link = self.transport_link
        if link is None or not self.is_live:
            return
        offered = self._table.by_id
        for cache_id in list(offered) if cache_ids is None else cache_ids:
            cache = offered.get(cache_id)
            if cache is not None and cache.metadata:
                link.prepare(partial(self._reach, cache))

    def _reach(self, cache: PeerCache) -> None:
        if self._table.by_id.get(cache.cache_id) is cache:
            self.memory(cache, writable=False)

    @property
    def way(self) -> str:
        """By what means bytes move over the link; empty before the peer's memory is reached."""
        return "" if self.transport_link is None else self.transport_link.way

    @property
    def _described_way(self) -> str:
        return f"{self.transport}: {self.way}"

    def death(self) -> str:
        """How the transport knows that the peer is gone; empty: it does not know that."""
        connecting = self.connecting
        if connecting is None or not connecting.done() or connecting.cancelled():
            return ""
        try:
            connecting.result().check()
        except LLMException as error:
            return str(error.args[0])
        return ""

    def status(self) -> LinkStatus:
        """The link as it is now."""
        return LinkStatus(
            cluster_id=self.cluster_id,
            instance=self.instance.hex(),
            role=self.role,
            state=self.state,
            transport=self.transport,
            way=self.way,
            address=self.address,
            comm_id=self.comm_id,
            since=self.since,
            age_s=max(0.0, time.time() - self.since),
            caches=len(self._table),
            bytes_pulled=self.traffic.pulled,
            bytes_pushed=self.traffic.pushed,
            operations=self.traffic.operations,
            in_flight=self.in_flight,
            last_error=self.last_error,
        )

    def _cache_of(self, found: Found) -> PeerCache:
        """The cache of a reply: the object in the table, if they are equal."""
        cache = PeerCache.of(self.cluster_id, found.entry)
        known = self._table.by_id.get(cache.cache_id)
        return known if known == cache else cache

    def _request(self, body: Body, expected: type[_Reply]) -> _Reply:
        return self._wait_for(self._send(self._live_channel(), body, expected))

    async def _send(self, channel: Channel, body: Body, expected: type[_Reply]) -> _Reply:
        async with asyncio.timeout(self.wait_s), self._slots:
            return await channel.typed_request(body, expected, self.wait_s)

    def _live_channel(self) -> Channel:
        if self.channel is None or not self.is_live:
            raise self.refusal()
        return self.channel

    def _wait_for(
        self, reply: Coroutine[Any, Any, _T], timeout_s: float | None = None, effect: str = ""
    ) -> _T:
        """Run a request in the control thread; says why there is no reply.

        Args:
            effect: what the request may have done at the peer. Then a link that ends meanwhile is
                never LLM_NOT_YET_LINK, which says that nothing was done.
        """
        try:
            return self._control.run(reply)
        except TimeoutError:
            raise self._late(self.wait_s if timeout_s is None else timeout_s, effect) from None
        except ChannelClosed as error:
            raise self._ended(error, effect) from error

    def _late(self, timeout_s: float, effect: str) -> LLMException:
        return LLMException(
            f"cluster {self.cluster_id} has not answered within {timeout_s * 1000:g} ms{effect}",
            status_code=LLMStatusCode.LLM_TIMEOUT,
        )

    def _ended(self, error: ChannelClosed, effect: str) -> LLMException:
        if self.is_live:
            why = link_failed(f"the link to cluster {self.cluster_id} has ended: {error}")
        else:
            why = self.refusal()
        return link_failed(f"{why.args[0]}{effect}") if effect else why

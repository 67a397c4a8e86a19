"""One link, as operations use it: the peer's caches, and the memory behind them."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from kvplan.control.channel import Channel, ChannelClosed
from kvplan.control.messages import Body, Claim, Find, Found, Release, Sync, Synced
from kvplan.engine.links.addressed import find_addressed, not_addressed
from kvplan.engine.links.asking import ask
from kvplan.engine.links.link_life import LinkLife
from kvplan.engine.links.local_end import link_failed
from kvplan.engine.links.peer_table import PeerCache, PeerTable, unreached
from kvplan.engine.links.releases import Releases
from kvplan.engine.links.state import LinkStatus
from kvplan.planning.layout import Side
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.types import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex, LlmRole
from kvplan.validation import shown

if TYPE_CHECKING:
    from kvplan.control.loop import ControlLoop
    from kvplan.control.messages import Table
    from kvplan.engine.links.renewals import Renewals
    from kvplan.engine.links.told_table import ToldTable
    from kvplan.execution.memory import TensorMemory
    from kvplan.transport.protocol import Streams, TransportLink

_Answer = TypeVar("_Answer", bound=Body)
_MAX_QUESTIONS = 16  # at a time; a peer refuses to serve much more


class PeerLink(LinkLife):
    """A link to one peer.

    What is documented here is for operations, from any thread; the rest is the control thread's.

    Args:
        cluster_id: the peer's.
        address: of the conversation.
        comm: the communicator that the link belongs to; empty: linked by address.
        control: the loop that the conversation runs on.
        wait_ms: that a question to the peer may take.
    """

    def __init__(
        self, cluster_id: int, address: str, comm: str, control: ControlLoop, wait_ms: float
    ) -> None:
        super().__init__(cluster_id)
        self.address = address
        self.comm = comm
        self.comm_id: int | None = None
        self.phase = ""  # of the handshake begun here
        self.instance = b""
        self.role: LlmRole | None = None
        self.transport = ""
        self.channel: Channel | None = None
        self.streams: Streams | None = None
        self.connecting: asyncio.Task[TransportLink] | None = None
        self.transport_link: TransportLink | None = None
        self.renewals: Renewals | None = None
        self.told: ToldTable | None = None
        self.telling = asyncio.Lock()
        self.is_news_due = False
        self._asking = asyncio.Semaphore(_MAX_QUESTIONS)
        self._late: set[asyncio.Task[None]] = set()  # claims that came too late
        self._control = control
        self._wait_s = wait_ms / 1000
        self._releases = Releases(self, control, self._asking, self._wait_s)
        self._table = PeerTable(cluster_id)
        self._sides: dict[int, tuple[PeerCache, Side]] = {}
        self._memories: dict[tuple[int, bool], tuple[PeerCache, TensorMemory]] = {}

    def __str__(self) -> str:
        return f"cluster {self.cluster_id}"

    def cache(
        self,
        index: CacheKeyByIdAndIndex | BlocksCacheKey,
        *,
        writable: bool = False,
        guess: bool = False,
    ) -> PeerCache:
        """The peer's cache that `index` names; one that is not known yet is asked for.

        Args:
            writable: whether it is to be written: then it must be the peer's still.
            guess: whether a key may be taken for the cache's that had it when last heard, where the
                transfer finds that freed before it moves a byte.

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
            self._may_be_freed(found, guess=guess)
            if is_key
            # It is this cache that is meant, freed or not: the transfer may find that out itself.
            else writable and (link is None or link.finds_freed == "after")
        ):
            self._ask(Sync(), Synced)  # all that the peer told before its answer is known then
            found = offered.get(wanted)
        if found is not None:
            return found
        name = "model_id" if is_key else "cache_id"
        raise LLMException(
            f"cluster {self.cluster_id} offers no cache with {name}={wanted}; it offers "
            f"{shown(sorted(offered))}",
            status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
        )

    def _may_be_freed(self, cache: PeerCache, *, guess: bool = False) -> bool:
        """Whether the peer may have freed it, which news has not told yet: its key is another's.

        Args:
            guess: that whoever asks can bear to find it out so, and asks again.
        """
        link = self.transport_link
        if link is None or link.finds_freed == "after":
            return True
        if link.finds_freed == "before":
            return not guess
        try:
            self.memory(cache, writable=False).check()
        except LLMException as error:
            return error.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
        return False

    def memory(self, cache: PeerCache, *, writable: bool) -> TensorMemory:
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
        memory = self._link_to(cache).memory(
            cache.addresses, cache.desc.tensor_nbytes, writable=writable, metadata=cache.metadata
        )
        self._memories[key] = (cache, memory)
        # Whoever changes the table, or ends the link, does that first and drops memories then.
        if self._table.by_id.get(cache.cache_id) is not cache or not self.is_live:
            self._memories.pop(key, None)
        return memory

    def side(self, cache: PeerCache) -> Side:
        """`cache` as a plan sees it, with how it is reached."""
        known = self._sides.get(cache.cache_id)
        if known is None or known[0] is not cache:
            known = self._sides[cache.cache_id] = cache, replace(cache.side, way=self._over)
        return known[1]

    def tensors(
        self, addresses: Sequence[int], stride: int, *, paged: bool
    ) -> tuple[Side, TensorMemory]:
        """The peer's tensors at `addresses`, to be written in rows of `stride` bytes.

        As many rows as the cache that holds them has behind each. Unknown addresses are asked for.

        Args:
            addresses: in the peer, at least one.
            stride: bytes of a row, > 0.
            paged: whether rows are blocks.

        Raises:
            LLMException: LLM_KV_CACHE_NOT_EXIST: an address in no cache that the peer offers;
                LLM_PARAM_INVALID: addresses in several caches, or less than a row behind one;
                otherwise as `cache` and `memory`.
        """
        known = find_addressed(self._table.caches(), addresses)
        if known is None or self._may_be_freed(known.cache):
            self._ask(Sync(), Synced)
            known = find_addressed(self._table.caches(), addresses)
        if known is None:
            raise not_addressed(self._table.caches(), str(self), addresses)
        cache, left = known
        link = self._link_to(cache)
        if (count := min(left) // stride) == 0:
            short = left.index(min(left))
            raise invalid(
                f"addresses[{short}]={addresses[short]:#x} has {min(left)} bytes behind it, in its "
                f"tensor of cache {cache.cache_id} of {self}; a row takes stride={stride}"
            )
        name = f"addresses in cache {cache.cache_id} of {self}"
        side = Side(
            len(addresses), count, stride, paged, cache.desc.placement, name, way=self._over
        )
        memory = link.memory(addresses, side.tensor_nbytes, writable=True, metadata=cache.metadata)
        return side, memory

    def _link_to(self, cache: PeerCache) -> TransportLink:
        link = self.transport_link
        if link is None:
            raise self.refusal()
        if not cache.metadata:
            raise unreached(cache, self.transport)
        return link

    def find(self, key: CacheKey) -> tuple[PeerCache, int]:
        """The peer's cache and batch index that have `key`.

        Raises:
            LLMException: as `cache`.
        """
        found = self._ask(Find(key.req_id, key.prefix_id, key.model_id), Found)
        return self._told_with(found), found.batch_index

    def claim(self, key: CacheKey) -> PeerClaim:
        """As `find`, and no other engine can pull by `key` before the claim is released.

        Raises:
            LLMException: as `cache`; LLM_REPEAT_REQUEST: another engine has claimed it;
                LLM_LINK_BUSY: this engine has too many claims there.
        """
        claim = Claim(key.req_id, key.prefix_id, key.model_id)
        found = self._answer_to(lambda channel: self._claim_in_turn(channel, claim))
        return PeerClaim(self, found.claim_id, self._told_with(found), found.batch_index)

    def release(self, claim_id: int, tensors: range | None) -> None:
        """End a claim: see `PeerClaim.release`."""
        pulled = None if tensors is None else (tensors.start, tensors.stop)
        assert self.channel is not None  # that the claim was granted on
        self._releases.tell(self.channel, Release(claim_id, pulled))

    def forget(self) -> None:
        """Have all memory anew from the transport when it is asked for again."""
        self._memories.clear()
        self._sides.clear()

    def learn(self, table: Table) -> None:
        """Take what the peer tells of its caches.

        Raises:
            LLMException: LLM_PARAM_INVALID: it cannot be true.
        """
        changed = self._table.apply(table)
        for cache_id in changed:
            self._sides.pop(cache_id, None)
            for writable in (False, True):
                self._memories.pop((cache_id, writable), None)

    @property
    def wait_s(self) -> float:
        """Seconds that a question to the peer may take."""
        return self._wait_s

    @property
    def way(self) -> str:
        """By what means bytes move over the link; empty before the peer is reached."""
        return "" if self.transport_link is None else self.transport_link.way

    @property
    def _over(self) -> str:
        return f"{self.transport}: {self.way}"

    def death(self) -> str:
        """Why the transport knows that the peer is gone; empty: it does not."""
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
            bytes_pulled=self.bytes_pulled,
            bytes_pushed=self.bytes_pushed,
            operations=self.operations,
            in_flight=self.in_flight,
            last_error=self.last_error,
        )

    def _told_with(self, found: Found) -> PeerCache:
        """The cache of an answer: the table's object where both say the same."""
        cache = PeerCache.of(self.cluster_id, found.entry)
        known = self._table.by_id.get(cache.cache_id)
        return known if known == cache else cache

    def _ask(self, question: Body, expected: type[_Answer]) -> _Answer:
        return self._answer_to(lambda channel: self._ask_in_turn(channel, question, expected))

    def _answer_to(self, asking: Callable[[Channel], Coroutine[Any, Any, _Answer]]) -> _Answer:
        channel = self.channel
        if channel is None or not self.is_live:
            raise self.refusal()
        try:
            return self._control.run(asking(channel))
        except TimeoutError:
            raise LLMException(
                f"cluster {self.cluster_id} has not answered within {self._wait_s * 1000:g} ms",
                status_code=LLMStatusCode.LLM_TIMEOUT,
            ) from None
        except ChannelClosed as error:
            if not self.is_live:
                raise self.refusal() from error
            raise link_failed(
                f"the link to cluster {self.cluster_id} has ended: {error}"
            ) from error

    async def _ask_in_turn(
        self, channel: Channel, question: Body, expected: type[_Answer]
    ) -> _Answer:
        async with asyncio.timeout(self._wait_s), self._asking:
            return await ask(channel, question, expected, self._wait_s)

    async def _claim_in_turn(self, channel: Channel, claim: Claim) -> Found:
        """As `_ask_in_turn`; what a peer grants when nobody waits for it any more is given back."""
        async with asyncio.timeout(self._wait_s):
            await self._asking.acquire()
            granting = asyncio.create_task(ask(channel, claim, Found, math.inf))
            granting.add_done_callback(lambda _: self._asking.release())
            try:
                return await asyncio.shield(granting)
            except asyncio.CancelledError:
                late = asyncio.create_task(self._give_back(channel, granting))
                self._late.add(late)
                late.add_done_callback(self._late.discard)
                raise

    async def _give_back(self, channel: Channel, granting: asyncio.Task[Found]) -> None:
        with suppress(LLMException, ChannelClosed):
            self._releases.tell_later(channel, Release((await granting).claim_id, None))


class PeerClaim:
    """The right to pull by a key: no other engine can, until it is released.

    Attributes:
        cache: that holds the slot.
        batch_index: of the slot.
    """

    __slots__ = ("_claim_id", "_link", "batch_index", "cache")

    def __init__(self, link: PeerLink, claim_id: int, cache: PeerCache, batch_index: int) -> None:
        self._link = link
        self._claim_id = claim_id
        self.cache = cache
        self.batch_index = batch_index

    def release(self, tensors: range | None) -> None:
        """End the claim.

        Args:
            tensors: of the peer's cache, that were pulled with every byte confirmed; None: none. A
                request's key is consumed once all tensors were.
        """
        self._link.release(self._claim_id, tensors)

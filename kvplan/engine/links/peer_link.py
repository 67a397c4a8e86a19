"""One link, as operations use it: the peer's caches, and the memory behind them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import ref

from kvplan.control.channel import Channel, ChannelClosed
from kvplan.control.messages import Body, Claim, Find, Found, Sync, Synced
from kvplan.engine.links.asking import ask
from kvplan.engine.links.claims import Claims, PeerClaim
from kvplan.engine.links.link_life import LinkLife
from kvplan.engine.links.local_end import link_failed
from kvplan.engine.links.peer_table import PeerCache, PeerTable
from kvplan.engine.links.state import LinkStatus
from kvplan.status import LLMException, LLMStatusCode
from kvplan.types import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex, LlmRole
from kvplan.validation import shown

if TYPE_CHECKING:
    from kvplan.control.loop import ControlLoop
    from kvplan.control.messages import Table
    from kvplan.engine.links.told_table import ToldTable
    from kvplan.execution.memory import TensorMemory
    from kvplan.transport.protocol import TransportLink

_LOG = logging.getLogger("kvplan")
_Answer = TypeVar("_Answer")
_Reply = TypeVar("_Reply", bound=Body)
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
        self.connecting: asyncio.Task[TransportLink] | None = None
        self.transport_link: TransportLink | None = None
        self.told: ToldTable | None = None
        self.telling = asyncio.Lock()
        self.is_news_due = False
        self._asking = asyncio.Semaphore(_MAX_QUESTIONS)
        self._claims = Claims(self._asking, wait_ms / 1000)
        self._control = control
        self._wait_s = wait_ms / 1000
        self._table = PeerTable(cluster_id)
        self._memories: dict[tuple[int, bool], tuple[PeerCache, TensorMemory]] = {}

    def __str__(self) -> str:
        return f"cluster {self.cluster_id}"

    def cache(self, index: CacheKeyByIdAndIndex | BlocksCacheKey) -> PeerCache:
        """The peer's cache that `index` names; one that is not known yet is asked for.

        Raises:
            LLMException: LLM_KV_CACHE_NOT_EXIST: the peer does not offer it; LLM_TIMEOUT: it does
                not answer; LLM_LINK_FAILED, LLM_NOT_YET_LINK: the link has ended.
        """
        found = self._known(index)
        if found is None or (isinstance(index, BlocksCacheKey) and self._is_freed(found)):
            self._ask(Sync(), Synced)  # all that the peer told before its answer is known then
            found = self._known(index)
        if found is not None:
            return found
        if isinstance(index, BlocksCacheKey):
            wanted, there = f"model_id={index.model_id}", self._table.model_ids()
        else:
            wanted, there = f"cache_id={index.cache_id}", self._table.ids()
        raise LLMException(
            f"cluster {self.cluster_id} offers no cache with {wanted}; it offers {shown(there)}",
            status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
        )

    def _is_freed(self, cache: PeerCache) -> bool:
        """Whether the peer has freed it, which news may not have told yet: its key is another's."""
        held = self._memories.get((cache.cache_id, False))
        try:
            memory = held[1] if held is not None else self.memory(cache, writable=False)
            memory.check()
        except LLMException as error:
            return error.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
        return False

    def memory(self, cache: PeerCache, *, writable: bool) -> TensorMemory:
        """The tensors of `cache`, as a side of a transfer.

        Raises:
            LLMException: LLM_KV_CACHE_NOT_EXIST: the peer has freed it; LLM_PARAM_INVALID: it is to
                be written, but is read-only; LLM_LINK_FAILED, LLM_NOT_YET_LINK: the link has ended.
        """
        key = (cache.cache_id, writable)
        held = self._memories.get(key)
        if held is not None and held[0] is cache:
            return held[1]
        link = self.transport_link
        if link is None:
            raise self.refusal()
        memory = link.memory(
            cache.addresses, cache.desc.tensor_nbytes, writable=writable, metadata=cache.metadata
        )
        self._memories[key] = (cache, memory)
        # Whoever changes the table, or ends the link, does that first and drops memories then.
        if self._table.by_id(cache.cache_id) is not cache or not self.is_live:
            self._memories.pop(key, None)
        return memory

    def find(self, key: CacheKey) -> tuple[PeerCache, int]:
        """The peer's cache and batch index that have `key`.

        Raises:
            LLMException: as `cache`.
        """
        found = self._ask(Find(key.req_id, key.prefix_id, key.model_id), Found)
        return self._told_with(found), found.batch_index

    def claim(self, key: CacheKey) -> PeerClaim:
        """As `find`, and nobody else can pull by `key` before the claim is released.

        Raises:
            LLMException: as `cache`; LLM_REPEAT_REQUEST: somebody else has claimed it.
        """
        question = Claim(key.req_id, key.prefix_id, key.model_id)
        claim = PeerClaim(self)
        holder = ref(claim)
        hash(holder)  # now: it is a key, and has none any more when the claim has gone first
        found = self._answer_to(lambda channel: self._claims.grant(channel, question, holder))
        claim.cache, claim.batch_index = self._told_with(found), found.batch_index
        return claim

    def release(self, claim: PeerClaim, tensors: range | None) -> None:
        """End a claim: see `PeerClaim.release`."""
        pulled = None if tensors is None else (tensors.start, tensors.stop)
        holder = ref(claim)
        try:
            self._answer_to(lambda channel: self._claims.release(channel, holder, pulled))
        except LLMException as error:
            # What was pulled is here; and the peer ends the claims of a link with the link.
            _LOG.warning("release peer=%d error=%r", self.cluster_id, str(error))

    def end(
        self,
        operation: object,
        nbytes_pulled: int = 0,
        nbytes_pushed: int = 0,
        error: BaseException | None = None,
    ) -> None:
        """An operation has its outcome; after an error no memory is taken for granted."""
        if error is not None:
            self.forget()
        super().end(operation, nbytes_pulled, nbytes_pushed, error)

    def forget(self) -> None:
        """Have all memory anew from the transport when it is asked for again."""
        self._memories.clear()

    def learn(self, table: Table) -> None:
        """Take what the peer tells of its caches.

        Raises:
            LLMException: LLM_PARAM_INVALID: it cannot be true.
        """
        changed = self._table.apply(table)
        for cache_id in changed:
            for writable in (False, True):
                self._memories.pop((cache_id, writable), None)

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

    def _known(self, index: CacheKeyByIdAndIndex | BlocksCacheKey) -> PeerCache | None:
        if isinstance(index, BlocksCacheKey):
            return self._table.by_model(index.model_id)
        return self._table.by_id(index.cache_id)

    def _told_with(self, found: Found) -> PeerCache:
        """The cache of an answer: the table's object where both say the same."""
        cache = PeerCache.of(self.cluster_id, found.entry)
        known = self._table.by_id(cache.cache_id)
        return known if known == cache else cache

    def _ask(self, question: Body, expected: type[_Reply]) -> _Reply:
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
        self, channel: Channel, question: Body, expected: type[_Reply]
    ) -> _Reply:
        async with asyncio.timeout(self._wait_s), self._asking:
            return await ask(channel, question, expected, self._wait_s)

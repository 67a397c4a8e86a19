"""One link, as operations use it: requests to the peer, claims, and notifications."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kvplan.control.channel import Channel, ChannelClosed
from kvplan.control.messages import Body, Claim, Find, Found, Release, Released, Sync, Synced
from kvplan.control.notifying import Notifier
from kvplan.links.peer_caches import PeerCaches
from kvplan.links.peer_table import PeerCache
from kvplan.links.values import LinkStatus
from kvplan.status import LLMException, LLMStatusCode, link_failed, message_of, timed_out
from kvplan.system.logs import Log
from kvplan.types import CacheKey, LlmRole

if TYPE_CHECKING:
    from kvplan.control.data_streams import DataStreams
    from kvplan.control.loop import ControlLoop
    from kvplan.links.lifecycle import LinkLifecycle
    from kvplan.links.publisher import Publisher
    from kvplan.links.renewals import Renewals
    from kvplan.transport.link import TransportLink


_LOG = Log("kvplan")
_PAUSE_S = 0.02  # before repeating a request to a peer that had too many
_T = TypeVar("_T")
_MAY_HAVE_ARRIVED: Final = "; the notification may have been delivered"
_MAX_REQUESTS = 16  # at a time; the peer refuses more than `channel.MAX_REQUESTS`


class PeerClaim:
    """The right to pull by a key, until it is released.

    Attributes:
        cache: The cache that holds the slot.
        batch_index: Index of the slot.
    """

    __slots__ = ("_channel", "_claim_id", "_claims", "batch_index", "cache")

    def __init__(
        self, claims: Claims, channel: Channel, claim_id: int, cache: PeerCache, batch_index: int
    ) -> None:
        self._claims = claims
        self._channel = channel
        self._claim_id = claim_id
        self.cache = cache
        self.batch_index = batch_index

    def release(self, tensors: range | None, timeout_ms: float | None = None) -> None:
        """End the claim. `tensors` were pulled whole and confirmed; None: no such tensor."""
        pulled = None if tensors is None else (tensors.start, tensors.stop)
        self._claims.release(self._channel, Release(self._claim_id, pulled), timeout_ms)


class Claims:
    """The claims of one link. Each release is repeated while the peer is silent or busy.

    A release belongs to the link, not to the call that held the claim. It continues after the call
    has returned, and keeps the link busy until the peer confirms or the link ends. Repeating a
    release is safe, because a peer ignores claims that it does not know.
    """

    def __init__(
        self, link: LinkLifecycle, control: ControlLoop, slots: asyncio.Semaphore, wait_s: float
    ) -> None:
        self._link = link
        self._control = control
        self._slots = slots
        self._wait_s = wait_s
        self._late: set[asyncio.Task[None]] = set()  # releases of claims whose caller has gone
        self._releasing: dict[int, asyncio.Task[None]] = {}  # by claim id, the oldest first
        # Repeat one at a time: a peer that was stopped would refuse the whole backlog.
        self._retrying = asyncio.Lock()

    async def claim(self, channel: Channel, claim: Claim, wait_s: float) -> Found:
        """Request a claim, and release it again if the caller no longer waits for it."""
        async with asyncio.timeout(wait_s):
            await self._slots.acquire()
            granting = asyncio.create_task(channel.typed_request(claim, Found, math.inf))
            granting.add_done_callback(lambda _: self._slots.release())
            try:
                return await asyncio.shield(granting)
            except asyncio.CancelledError:
                late = asyncio.create_task(self._release_late(channel, granting))
                self._late.add(late)
                late.add_done_callback(self._late.discard)
                raise

    def release(self, channel: Channel, release: Release, timeout_ms: float | None = None) -> None:
        """Release a claim; wait at most `timeout_ms`. Must not run in the control thread."""
        wait_s = self._wait_s if timeout_ms is None else min(self._wait_s, timeout_ms / 1000)
        try:
            self._control.call_soon(self._begin, channel, release)
            if wait_s and not self._control.run(self._wait_confirmed(release, wait_s)):
                self._warn(release, f"no answer within {wait_s * 1000:g} ms; it is sent again")
        except LLMException as error:
            self._warn(release, str(error))

    async def _release_late(self, channel: Channel, granting: asyncio.Task[Found]) -> None:
        with suppress(LLMException, ChannelClosed):
            self._begin(channel, Release((await granting).claim_id, None))

    def _begin(self, channel: Channel, release: Release) -> None:
        if release.claim_id in self._releasing:  # an interrupt ended the wait of the first call
            return
        self._link.add_pending_release(release.claim_id)
        releasing = asyncio.create_task(self._send(channel, release))
        self._releasing[release.claim_id] = releasing
        releasing.add_done_callback(lambda _: self._ended(release))

    async def _wait_confirmed(self, release: Release, wait_s: float) -> bool:
        if (releasing := self._releasing.get(release.claim_id)) is not None:
            await asyncio.wait([releasing], timeout=wait_s)
        return releasing is None or releasing.done()

    def _ended(self, release: Release) -> None:
        del self._releasing[release.claim_id]
        self._link.remove_pending_release(release.claim_id)

    async def _send(self, channel: Channel, release: Release) -> None:
        try:
            async with self._slots:
                if not await self._is_confirmed(channel, release):
                    async with self._retrying:
                        while not await self._is_confirmed(channel, release):
                            pass
        except (ChannelClosed, LLMException) as error:
            # Harmless: the pull is over, and the peer ends claims together with their link.
            self._warn(release, str(error))

    async def _is_confirmed(self, channel: Channel, release: Release) -> bool:
        try:
            await channel.typed_request(release, Released, self._wait_s)
        except TimeoutError:
            return False
        except LLMException as error:
            if error.status_code is not LLMStatusCode.LLM_LINK_BUSY:
                raise
            await asyncio.sleep(_PAUSE_S)
            return False
        return True

    def _warn(self, release: Release, why: str) -> None:
        _LOG.warning(
            "release peer=%d claim=%d error=%r", self._link.cluster_id, release.claim_id, why
        )


_Reply = TypeVar("_Reply", bound=Body)


class PeerLink(PeerCaches):
    """A link to one peer.

    Operations may call the public methods of this class in any thread.
    """

    def __init__(
        self, cluster_id: int, address: str, comm: str, control: ControlLoop, wait_ms: float
    ) -> None:
        super().__init__(cluster_id)
        self.address = address
        self.comm = comm
        self.comm_id: int | None = None
        self.phase = ""  # of a handshake that this engine initiates
        self.secret = b""  # known only to the two ends of this link
        self.role: LlmRole | None = None
        self.channel: Channel | None = None
        self.streams: DataStreams | None = None
        self.connecting: asyncio.Task[dict[str, TransportLink]] | None = None
        self.renewals: Renewals | None = None
        self.publisher: Publisher | None = None
        self._slots = asyncio.Semaphore(_MAX_REQUESTS)
        self.notifier = Notifier(cluster_id)
        self._control = control
        self.wait_s = wait_ms / 1000
        self._claims = Claims(self, control, self._slots, self.wait_s)

    def __str__(self) -> str:
        return f"cluster {self.cluster_id}"

    def sync(self, wait_ms: float | None = None) -> None:
        """See `PeerCaches.sync`."""
        self._request(Sync(), Synced, wait_ms)

    def find(self, key: CacheKey) -> tuple[PeerCache, int]:
        """Return the peer's cache and batch index for `key`."""
        found = self._request(Find(key.req_id, key.prefix_id, key.model_id), Found, None)
        return self._cache_of(found), found.batch_index

    def claim(self, key: CacheKey, wait_ms: float | None = None) -> PeerClaim:
        """Find `key` and claim it: its cache stays until the claim is released."""
        claim = Claim(key.req_id, key.prefix_id, key.model_id)
        channel = self._live_channel()
        wait_s = self._seconds(wait_ms)
        found = self._wait_for(self._claims.claim(channel, claim, wait_s), wait_s)
        cache = self._cache_of(found)
        return PeerClaim(self._claims, channel, found.claim_id, cache, found.batch_index)

    def notify(self, data: bytes, timeout_ms: float | None = None) -> None:
        """Send a notification, and wait until the peer's engine has it."""
        if not self.notifier.send_directly(data):
            timeout_s = self._seconds(timeout_ms)
            sending = self.notifier.send(self._live_channel(), data, timeout_s)
            self._wait_for(sending, timeout_s, _MAY_HAVE_ARRIVED)

    async def notify_async(self, data: bytes, timeout_ms: float | None = None) -> None:
        """Send a notification from a coroutine of another loop. Notifications keep their order."""
        if self.notifier.send_directly(data):
            return
        timeout_s = self._seconds(timeout_ms)
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
            # The control thread may still send before it sees the cancellation.
            settle = partial(self._control.call_soon, settle)
            raise
        finally:
            with suppress(LLMException):  # the control thread has ended
                settle(token)

    def notify_soon(self, data: bytes) -> None:
        """Send a notification without waiting. A failure is logged."""
        if not self.notifier.send_directly(data):
            request = self.notifier.defer(), self._live_channel, data, self.wait_s
            with suppress(LLMException):  # the loop has ended
                self._control.call_soon(self.notifier.send_later, *request)

    def death(self) -> str:
        """Return the transport's evidence that the peer has died, or an empty string."""
        connecting = self.connecting
        if connecting is None or not connecting.done() or connecting.cancelled():
            return ""
        try:
            for made in connecting.result().values():
                made.check()
        except LLMException as error:
            return message_of(error)
        return ""

    def status(self) -> LinkStatus:
        """Return the current status of the link."""
        return LinkStatus(
            cluster_id=self.cluster_id,
            instance=self.instance.hex(),
            role=self.role,
            state=self.state,
            transport=self.transport,
            way=self.way,
            passed_over=tuple(map(str, self.passed_over)),
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

    def _seconds(self, timeout_ms: float | None) -> float:
        return self.wait_s if timeout_ms is None else timeout_ms / 1000

    def _request(self, body: Body, expected: type[_Reply], wait_ms: float | None = None) -> _Reply:
        channel = self._live_channel()
        wait_s = self._seconds(wait_ms)
        return self._wait_for(self._send(channel, body, expected, wait_s), wait_s)

    async def _send(
        self, channel: Channel, body: Body, expected: type[_Reply], wait_s: float
    ) -> _Reply:
        async with asyncio.timeout(wait_s), self._slots:
            return await channel.typed_request(body, expected, wait_s)

    def _live_channel(self) -> Channel:
        if self.channel is None or not self.is_live:
            raise self.refusal()
        return self.channel

    def _wait_for(self, reply: Coroutine[Any, Any, _T], timeout_s: float, effect: str = "") -> _T:
        """Run a request in the control thread. If no reply comes, the error explains why."""
        try:
            return self._control.run(reply)
        except TimeoutError:
            raise self._late(timeout_s, effect) from None
        except ChannelClosed as error:
            raise self._ended(error, effect) from error

    def _late(self, timeout_s: float, effect: str) -> LLMException:
        ms = round(timeout_s * 1000, 1)
        return timed_out(f"cluster {self.cluster_id} has not answered within {ms:g} ms{effect}")

    def _ended(self, error: ChannelClosed, effect: str) -> LLMException:
        if self.is_live:
            why = link_failed(f"the link to cluster {self.cluster_id} has ended: {error}")
        else:
            why = self.refusal()
        return link_failed(f"{message_of(why)}{effect}") if effect else why

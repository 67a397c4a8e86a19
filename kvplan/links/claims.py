"""Claims on the keys of a peer: how they are granted, and released until the peer confirms it."""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress
from typing import TYPE_CHECKING

from kvplan.control.channel import Channel, ChannelClosed
from kvplan.control.messages import Claim, Found, Release, Released
from kvplan.logs import Log
from kvplan.status import LLMException, LLMStatusCode

if TYPE_CHECKING:
    from kvplan.control.loop import ControlLoop
    from kvplan.links.lifecycle import LinkLifecycle
    from kvplan.links.peer_table import PeerCache

_LOG = Log("kvplan")
_PAUSE_S = 0.02  # for a peer that has too many requests at a time


class PeerClaim:
    """The right to pull by a key: no other engine can, until it is released.

    Attributes:
        cache: that holds the slot.
        batch_index: of the slot.
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

    def release(self, tensors: range | None) -> None:
        """End the claim."""
        pulled = None if tensors is None else (tensors.start, tensors.stop)
        self._claims.release(self._channel, Release(self._claim_id, pulled))


class Claims:
    """The claims of one link: each release is sent again until the peer has confirmed it.

    Releases belong to the link, not to the call whose claim ends: they go on when that call waits
    no longer, and the link is busy until they are confirmed or it has ended. Sending one twice is
    safe: a peer ignores claims that it does not know.
    """

    def __init__(
        self, link: LinkLifecycle, control: ControlLoop, slots: asyncio.Semaphore, wait_s: float
    ) -> None:
        self._link = link
        self._control = control
        self._slots = slots
        self._wait_s = wait_s
        self._late: set[asyncio.Task[None]] = set()  # claims that nobody waits for any more
        self._releasing: dict[int, asyncio.Task[None]] = {}  # by claim id, the oldest first
        # One at a time is sent again: a peer that was stopped would refuse what has piled up.
        self._retrying = asyncio.Lock()

    async def claim(self, channel: Channel, claim: Claim) -> Found:
        """Request a claim; one that is granted when nobody waits for it any more is released."""
        async with asyncio.timeout(self._wait_s):
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

    def release(self, channel: Channel, release: Release) -> None:
        """Release a claim, and wait `wait_s` at most; from any thread but the control thread."""
        try:
            self._control.call_soon(self._begin, channel, release)
            is_confirmed = self._control.run(self._wait_confirmed(release))
        except LLMException as error:
            self._warn(release, str(error))
        else:
            if not is_confirmed:
                why = f"no answer within {self._wait_s * 1000:g} ms; it is sent again"
                self._warn(release, why)

    async def _release_late(self, channel: Channel, granting: asyncio.Task[Found]) -> None:
        with suppress(LLMException, ChannelClosed):
            self._begin(channel, Release((await granting).claim_id, None))

    def _begin(self, channel: Channel, release: Release) -> None:
        self._link.add_pending_release(release.claim_id)
        releasing = asyncio.create_task(self._send(channel, release))
        self._releasing[release.claim_id] = releasing
        releasing.add_done_callback(lambda _: self._ended(release))

    async def _wait_confirmed(self, release: Release) -> bool:
        releasing = self._releasing.get(release.claim_id)
        if releasing is not None:
            await asyncio.wait([releasing], timeout=self._wait_s)
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
            # What was pulled is here; and the peer ends the claims of a link with the link.
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

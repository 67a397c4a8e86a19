"""Claims on the keys of a peer: each is given back, whatever becomes of who asked for it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from weakref import ref

from kvplan.control.channel import Channel, ChannelClosed
from kvplan.control.messages import Claim, Found, Release, Released
from kvplan.engine.links.asking import ask
from kvplan.status import LLMException

if TYPE_CHECKING:
    from kvplan.engine.links.peer_link import PeerLink
    from kvplan.engine.links.peer_table import PeerCache

_LOOK_S = 0.2  # how often is looked for claims that were dropped


class PeerClaim:
    """The right to pull by a key: nobody else can, until it is released, or dropped.

    Attributes:
        cache: that holds the slot.
        batch_index: of the slot.
    """

    __slots__ = ("__weakref__", "_link", "batch_index", "cache")

    cache: PeerCache
    batch_index: int

    def __init__(self, link: PeerLink) -> None:
        self._link = link

    def release(self, tensors: range | None) -> None:
        """End the claim.

        Args:
            tensors: of the peer's cache, that were pulled with every byte confirmed; None: none. A
                request's key is consumed once all tensors were.
        """
        self._link.release(self, tensors)


class Claims:
    """What the peer of a link has granted; for the control thread only.

    Known by weak references: whoever asked may be interrupted before it holds what it got, or
    while it gives that back. What nobody holds any more is given back from here.

    Args:
        turns: one for each question at a time.
        wait_s: that a question to the peer may take.
    """

    def __init__(self, turns: asyncio.Semaphore, wait_s: float) -> None:
        self._turns = turns
        self._wait_s = wait_s
        self._open: dict[ref[PeerClaim], tuple[Channel, int]] = {}
        self._looking: asyncio.TimerHandle | None = None
        self._late: set[asyncio.Task[None]] = set()  # given back from here

    async def grant(self, channel: Channel, question: Claim, holder: ref[PeerClaim]) -> Found:
        """Claim for `holder`; what is granted when nobody waits any more is given back.

        Raises:
            TimeoutError, ChannelClosed, LLMException: as `ask`.
        """
        async with asyncio.timeout(self._wait_s):
            await self._turns.acquire()
            granting = asyncio.create_task(self._grant(channel, question, holder))
            granting.add_done_callback(lambda _: self._turns.release())
            try:
                return await asyncio.shield(granting)
            except asyncio.CancelledError:
                self._keep(self._give_back(granting, holder))
                raise

    async def release(
        self, channel: Channel, holder: ref[PeerClaim], pulled: tuple[int, int] | None
    ) -> None:
        """Give the claim of `holder` back; nothing happens if it has none.

        Raises:
            TimeoutError, ChannelClosed, LLMException: as `ask`.
        """
        if (granted := self._open.get(holder)) is None:
            return
        try:
            async with asyncio.timeout(self._wait_s), self._turns:
                await ask(channel, Release(granted[1], pulled), Released, self._wait_s)
        except asyncio.CancelledError:
            raise  # perhaps the peer was not told: it is, once nobody holds the claim
        except BaseException:
            self._open.pop(holder, None)
            raise
        self._open.pop(holder, None)

    async def _grant(self, channel: Channel, question: Claim, holder: ref[PeerClaim]) -> Found:
        found = await ask(channel, question, Found, math.inf)
        self._open[holder] = channel, found.claim_id
        if self._looking is None:
            self._look_again()
        return found

    async def _give_back(self, granting: asyncio.Task[Found], holder: ref[PeerClaim]) -> None:
        with suppress(LLMException, ChannelClosed, TimeoutError):
            await granting
            await self._drop(holder)

    async def _drop(self, holder: ref[PeerClaim]) -> None:
        if (granted := self._open.pop(holder, None)) is not None:
            with suppress(LLMException, ChannelClosed, TimeoutError):
                await ask(granted[0], Release(granted[1], None), Released, self._wait_s)

    def _look_again(self) -> None:
        self._looking = asyncio.get_running_loop().call_later(_LOOK_S, self._look)

    def _look(self) -> None:
        self._looking = None
        for holder, (channel, _) in tuple(self._open.items()):
            if channel.closed:
                del self._open[holder]  # the peer ends the claims of a link with the link
            elif holder() is None:
                self._keep(self._drop(holder))
        if self._open:
            self._look_again()

    def _keep(self, giving: Coroutine[Any, Any, None]) -> None:
        late = asyncio.create_task(giving)
        self._late.add(late)
        late.add_done_callback(self._late.discard)

"""How both ends of a link renew the connection behind it, while transfers go on.

Each says that it has opened a generation, makes it when the peer has said so too, and then says
whether it has it; each takes it into use once both do. Whichever end needs it begins; where both do
at once, they mean the same generation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kvplan.control.channel import ChannelClosed
from kvplan.control.messages import MAX_TEXT, Body, Renew, Renewed, Unused
from kvplan.links.local_engine import link_failed
from kvplan.logs import Log
from kvplan.status import LLMException, LLMStatusCode

if TYPE_CHECKING:
    from kvplan.control.loop import ControlLoop
    from kvplan.links.peer_link import PeerLink
    from kvplan.transport.protocol import Renewable

_LOG = Log("kvplan")
_MAX_ATTEMPTS = 4  # at a time; one that is given up may still wait for the peer
_RENEWAL_S = 30.0  # for the peer to come; whoever needs it waits as long as an operation may


class _Attempt:
    """A generation that is being made."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.is_made = False
        self.peer_has_made = False
        self.peer_metadata: bytes | None = None
        self.peer_has_begun = asyncio.Event()  # or it was given up
        self.outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Whoever waits for it may have gone; the log has it.
        self.outcome.add_done_callback(lambda done: done.cancelled() or done.exception())


class Renewals:
    """The renewals of one link; all but `ask` and `tell_unused` is the control thread's.

    Args:
        link: whose connection is renewed.
        renewable: the connection.
        control: the loop of the conversation.
    """

    def __init__(self, link: PeerLink, renewable: Renewable, control: ControlLoop) -> None:
        self._link = link
        self._renewable = renewable
        self._control = control
        self._highest = 0
        self._attempts: dict[int, _Attempt] = {}
        self._ended = ""
        self._background: set[asyncio.Task[None]] = set()
        renewable.ask = self.ask
        renewable.tell_unused = self.tell_unused

    def ask(self) -> None:
        """Have the connection renewed, and wait for it; in a thread that transfers.

        Raises:
            LLMException: LLM_TIMEOUT: it takes longer than an operation may; LLM_LINK_FAILED: one
                end cannot, and why; LLM_NOT_YET_LINK, LLM_LINK_FAILED: the link has ended.
        """
        try:
            self._control.run(self._renew())
        except TimeoutError:
            raise LLMException(
                f"the connection to cluster {self._link.cluster_id}, which does not reach memory "
                "that was registered after it, was not renewed within "
                f"{self._link.wait_s * 1000:g} ms; it goes on, so try again",
                status_code=LLMStatusCode.LLM_TIMEOUT,
            ) from None

    def tell_unused(self, generation: int) -> None:
        """Tell the peer that this end uses a generation no more; in any thread."""
        with suppress(LLMException):  # the loop has ended, and the link with it
            self._control.call_soon(self._tell, Unused(generation))

    def on_notice(self, body: Renew | Renewed | Unused) -> None:
        """Take what the peer tells."""
        match body:
            case Unused(generation):
                self._renewable.unused(generation)
            case Renew(generation, metadata):
                self._peer_begins(generation, metadata)
            case Renewed(generation, reason):
                attempt = self._attempts.get(generation)
                if attempt is not None and reason:
                    self._fail(attempt, link_failed(f"the peer cannot renew it: {reason}"))
                elif attempt is not None:
                    attempt.peer_has_made = True
                    self._settle(attempt)
                elif reason:  # the peer could not begin it, and will not hear of that number again
                    self._highest = max(self._highest, generation)

    def end(self, reason: str) -> None:
        """The link has ended: nothing is made any more, and whoever waits hears why."""
        self._ended = reason
        for attempt in tuple(self._attempts.values()):
            self._fail(attempt, self._link.refusal())

    async def _renew(self) -> None:
        if not self._link.is_live or self._ended:
            raise self._link.refusal()
        # The newest that is being made has what was registered before it, at this end at least.
        attempt = self._attempts.get(self._highest) or self._begin(self._highest + 1)
        async with asyncio.timeout(self._link.wait_s):
            await asyncio.shield(attempt.outcome)

    def _peer_begins(self, generation: int, metadata: bytes) -> None:
        attempt = self._attempts.get(generation)
        if attempt is None:
            if generation <= self._highest:
                return  # it was given up here, and the peer told so
            if len(self._attempts) >= _MAX_ATTEMPTS or self._ended:
                self._tell(Renewed(generation, "too many renewals at a time"))
                return
            attempt = self._begin(generation)
        attempt.peer_metadata = metadata
        attempt.peer_has_begun.set()

    def _begin(self, generation: int) -> _Attempt:
        self._highest = generation
        attempt = self._attempts[generation] = _Attempt(generation)
        self._spawn(self._make(attempt))
        return attempt

    async def _make(self, attempt: _Attempt) -> None:
        generation = attempt.generation
        try:
            metadata = await self._control.in_worker(self._renewable.open, generation)
            await self._send(Renew(generation, metadata))
            # Once it waits for the peer, nothing can end that but time.
            async with asyncio.timeout(_RENEWAL_S):
                await attempt.peer_has_begun.wait()
            if self._attempts.get(generation) is not attempt:
                return
            await self._control.in_worker(
                self._renewable.renew, generation, timeout_ms=_RENEWAL_S * 1000
            )
        except TimeoutError:
            self._fail(attempt, link_failed(f"the peer has not begun it within {_RENEWAL_S:g} s"))
            return
        except LLMException as error:
            self._fail(attempt, error)
            return
        except Exception as error:  # else whoever needs it would wait for this one again and again
            self._fail(attempt, link_failed(f"{type(error).__name__}: {error}"))
            return
        if self._attempts.get(generation) is not attempt:  # given up meanwhile
            self._renewable.abandon(generation)
            return
        await self._send(Renewed(generation, ""))
        attempt.is_made = True
        self._settle(attempt)

    def _settle(self, attempt: _Attempt) -> None:
        """Take it into use, if both ends have it."""
        is_given_up = self._attempts.get(attempt.generation) is not attempt
        if is_given_up or not attempt.is_made or not attempt.peer_has_made:
            return
        try:
            if attempt.peer_metadata is None:
                raise link_failed("the peer has not said what it renews")
            self._renewable.adopt(attempt.generation, attempt.peer_metadata)
        except LLMException as error:
            self._fail(attempt, error)
            return
        del self._attempts[attempt.generation]
        self._link.forget()  # what was had from the connection before
        _LOG.debug("link peer=%d generation=%d", self._link.cluster_id, attempt.generation)
        attempt.outcome.set_result(None)

    def _fail(self, attempt: _Attempt, error: LLMException) -> None:
        """Give it up: the connection that there is stays in use."""
        if self._attempts.pop(attempt.generation, None) is None:
            return
        attempt.peer_has_begun.set()
        self._renewable.abandon(attempt.generation)
        who = f"renewal {attempt.generation} of the link to cluster {self._link.cluster_id}"
        reason = f"{who}: {error.args[0]}"
        if not self._ended:
            _LOG.warning("%s", reason)
            self._tell(Renewed(attempt.generation, str(error.args[0])[:MAX_TEXT] or "it failed"))
        attempt.outcome.set_exception(LLMException(reason, status_code=error.status_code))

    def _tell(self, body: Body) -> None:
        self._spawn(self._send(body))

    async def _send(self, body: Body) -> None:
        channel = self._link.channel
        if channel is not None:
            with suppress(ChannelClosed):  # the link ends, which ends the renewal
                await channel.notify(body)

    def _spawn(self, coro: Coroutine[Any, Any, None]) -> None:
        running = asyncio.create_task(coro)
        self._background.add(running)
        running.add_done_callback(self._background.discard)

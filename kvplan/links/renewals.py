"""Renewal of the connection behind a link, while transfers continue.

Each end announces a new generation, makes it once the peer has announced it too, and reports
whether that succeeded. When both ends have made the generation, both switch to it. Either end may
begin; ends that begin at the same time use the same number.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kvplan.control.channel import Channel, ChannelClosed
from kvplan.control.messages import MAX_TEXT, Body, Renew, Renewed, Unused
from kvplan.status import LLMException, link_failed, message_of, timed_out
from kvplan.system.logs import LimitedLog, Log

if TYPE_CHECKING:
    from kvplan.control.loop import ControlLoop
    from kvplan.links.lifecycle import LinkLifecycle
    from kvplan.transport.protocol import Renewable

_LOG = Log("kvplan")
_PEER_LOG = LimitedLog(_LOG)
_MAX_ATTEMPTS = 4  # at a time, without abandoned ones
_RENEWAL_S = 30.0  # for the peer to join, and to connect; a caller waits at most `wait_s`


class _Attempt:
    """A generation that is being made."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.is_made = False
        self.peer_has_made = False
        self.peer_metadata: bytes | None = None
        self.peer_has_begun = asyncio.Event()  # set also when the attempt is abandoned
        self.outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Retrieve the logged error, so that asyncio does not warn about it.
        self.outcome.add_done_callback(lambda done: done.cancelled() or done.exception())


class Renewals:
    """The renewals of one link. Other threads may call only `request` and `notify_unused`."""

    def __init__(
        self,
        link: LinkLifecycle,
        channel: Channel,
        renewable: Renewable,
        control: ControlLoop,
        wait_s: float,
        on_renewed: Callable[[], None],
    ) -> None:
        self._link = link
        self._channel = channel
        self._renewable = renewable
        self._control = control
        self._wait_s = wait_s
        self._on_renewed = on_renewed
        self._highest = 0
        self._attempts: dict[int, _Attempt] = {}
        self._ended = ""
        self._background: set[asyncio.Task[None]] = set()
        renewable.request_renewal = self.request
        renewable.notify_unused = self.notify_unused

    def request(self, timeout_ms: float | None) -> None:
        """Renew the connection, and wait for the result; after LLM_TIMEOUT the renewal continues.

        The link limits a wait without timeout.
        """
        timeout_s = self._wait_s if timeout_ms is None else timeout_ms / 1000
        try:
            self._control.run(self._renew(timeout_s))
        except TimeoutError:
            raise timed_out(
                f"the connection to cluster {self._link.cluster_id} was not renewed in time (an "
                "error has disturbed it, or memory was registered later); the renewal continues: "
                "try again"
            ) from None

    def notify_unused(self, generation: int) -> None:
        """Notify the peer that this side no longer uses a generation."""
        with suppress(LLMException):  # the loop and the link have ended
            self._control.call_soon(self._notify, Unused(generation))

    def on_notice(self, body: Renew | Renewed | Unused) -> None:
        """Handle a notice of the peer."""
        match body:
            case Unused(generation):
                self._renewable.unused(generation)
            case Renew(generation, metadata):
                self._peer_begins(generation, metadata)
            case Renewed(reason, generation):
                attempt = self._attempts.get(generation)
                if attempt is not None and reason:
                    self._fail(attempt, link_failed(f"the peer cannot renew it: {reason}"))
                elif attempt is not None:
                    attempt.peer_has_made = True
                    self._adopt(attempt)
                elif reason:  # the peer could not begin it, and ignores that number from now on
                    self._highest = max(self._highest, generation)

    def end(self, reason: str) -> None:
        """End all renewals with the link, and pass the reason to the threads that wait for one."""
        self._ended = reason
        for attempt in list(self._attempts.values()):
            self._fail(attempt, self._link.refusal())

    async def _renew(self, timeout_s: float) -> None:
        if not self._link.is_live or self._ended:
            raise self._link.refusal()
        # Join a renewal in progress. If it lacks newer memory, the caller renews again.
        attempt = self._attempts.get(self._highest) or self._begin(self._highest + 1)
        async with asyncio.timeout(timeout_s):
            await asyncio.shield(attempt.outcome)

    def _peer_begins(self, generation: int, metadata: bytes) -> None:
        attempt = self._attempts.get(generation)
        if attempt is None:
            if generation <= self._highest:
                return  # abandoned here, and the peer was notified
            if len(self._attempts) >= _MAX_ATTEMPTS or self._ended:
                self._notify(Renewed("too many renewals at a time", generation))
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
            # Wait for the peer here: `end` can end this wait, but not the wait inside `renew`.
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
        except Exception as error:  # an attempt that stays would block every request
            self._fail(attempt, link_failed(f"{type(error).__name__}: {error}"))
            return
        if self._attempts.get(generation) is not attempt:  # abandoned in the meantime
            self._renewable.abandon(generation)
            return
        await self._send(Renewed("", generation))
        attempt.is_made = True
        self._adopt(attempt)

    def _adopt(self, attempt: _Attempt) -> None:
        """Use the generation if both ends have it."""
        is_abandoned = self._attempts.get(attempt.generation) is not attempt
        if is_abandoned or not attempt.is_made or not attempt.peer_has_made:
            return
        try:
            if attempt.peer_metadata is None:
                raise link_failed("the peer has sent no metadata of its new connection")
            self._renewable.adopt(attempt.generation, attempt.peer_metadata)
        except LLMException as error:
            self._fail(attempt, error)
            return
        del self._attempts[attempt.generation]
        self._on_renewed()
        _LOG.debug("link peer=%d generation=%d", self._link.cluster_id, attempt.generation)
        attempt.outcome.set_result(None)

    def _fail(self, attempt: _Attempt, error: LLMException) -> None:
        """Abandon the attempt. The current connection stays in use."""
        if self._attempts.pop(attempt.generation, None) is None:
            return
        attempt.peer_has_begun.set()
        self._renewable.abandon(attempt.generation)
        who = f"renewal {attempt.generation} of the link to cluster {self._link.cluster_id}"
        reason = f"{who}: {message_of(error)}"
        if not self._ended:
            _PEER_LOG.warning("%s", reason)
            self._notify(Renewed(message_of(error)[:MAX_TEXT] or "it failed", attempt.generation))
        attempt.outcome.set_exception(LLMException(reason, status_code=error.status_code))

    def _notify(self, body: Body) -> None:
        self._spawn(self._send(body))

    async def _send(self, body: Body) -> None:
        with suppress(ChannelClosed):  # the link ends, and the renewal with it
            await self._channel.notify(body)

    def _spawn(self, coro: Coroutine[Any, Any, None]) -> None:
        running = asyncio.create_task(coro)
        self._background.add(running)
        running.add_done_callback(self._background.discard)

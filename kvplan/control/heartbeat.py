"""Whether a peer still lives, as far as its silence tells."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

from kvplan.control.messages import Ping

if TYPE_CHECKING:
    from kvplan.control.channel import Channel

_CHECKS: Final = 2
"""Looks at the clock within the shorter one of interval and timeout, beside those when they end."""


class Heartbeat:
    """Pings a peer that was told nothing for a while, and ends a channel that is silent too long.

    Silence counts only while this process runs and has read all that has arrived: one that was
    stopped, or kept by the GIL, would otherwise take all of its peers for dead.

    Args:
        channel: the conversation.
        interval_s: seconds without sending after which a Ping is sent.
        timeout_s: seconds without hearing after which the channel is lost.
    """

    def __init__(self, channel: Channel, interval_s: float, timeout_s: float) -> None:
        self._channel = channel
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._step_s = min(interval_s, timeout_s) / _CHECKS
        self._heard = channel.heard
        self._silent_s = 0.0
        self._looked = time.monotonic()
        self._plan_look(self._looked)

    def stop(self) -> None:
        """Look no more."""
        self._timer.cancel()

    def _look(self) -> None:
        channel = self._channel
        # Who was heard meanwhile is not silent, whatever else has arrived.
        drained = channel.heard == self._heard and channel.connection.drain()
        if channel.closed:
            return
        now = time.monotonic()
        if channel.heard != self._heard:
            self._heard, self._silent_s = channel.heard, 0.0
        elif drained:
            self._silent_s += min(now - self._looked, self._step_s)
        self._looked = now
        if self._silent_s >= self._timeout_s:
            channel.lose(f"nothing heard for {self._silent_s:.3g} s")
            return
        if now - channel.sent >= self._interval_s:
            channel.post(Ping())
        self._plan_look(now)

    def _plan_look(self, now: float) -> None:
        """When a Ping is due or the time is up, but not at once where that cannot be done."""
        due_s = min(self._channel.sent + self._interval_s - now, self._timeout_s - self._silent_s)
        delay_s = min(max(due_s, self._step_s / 2), self._step_s)
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._look)

"""What a peer must still be told about claims that have ended here."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvplan.control.channel import Channel, ChannelClosed
from kvplan.control.messages import Release, Released
from kvplan.links.asking import ask
from kvplan.logs import Log
from kvplan.status import LLMException, LLMStatusCode

if TYPE_CHECKING:
    from kvplan.control.loop import ControlLoop
    from kvplan.links.link_life import LinkLife

_LOG = Log("kvplan")
_PAUSE_S = 0.02  # for a peer that is asked too much at a time


class Releases:
    """The releases of one link: each is told until the peer has answered, or the link has ended.

    They are the link's, not the calls' whose claims end: a call that waits no longer changes
    nothing, and until then the link is in use. To tell one twice is safe: a peer ignores claims
    that it does not know.

    Args:
        link: that the claims belong to.
        control: the loop that the conversation runs on.
        asking: admits the link's questions; a release takes its place until it is answered.
        wait_s: seconds without an answer after which it is told again.
    """

    def __init__(
        self, link: LinkLife, control: ControlLoop, asking: asyncio.Semaphore, wait_s: float
    ) -> None:
        self._link = link
        self._control = control
        self._asking = asking
        self._wait_s = wait_s
        self._telling: dict[int, asyncio.Task[None]] = {}  # by claim id, the oldest first
        # One at a time is told again: a peer that was stopped would refuse what has piled up.
        self._again = asyncio.Lock()

    def tell(self, channel: Channel, release: Release) -> None:
        """Have it told, and wait for that, but `wait_s` at most; from any thread but control's."""
        try:
            self._control.call_soon(self._begin, channel, release)
            is_told = self._control.run(self._until_told(release))
        except LLMException as error:
            self._warn(release, str(error))
        else:
            if not is_told:
                why = f"no answer within {self._wait_s * 1000:g} ms; it is told again"
                self._warn(release, why)

    def tell_later(self, channel: Channel, release: Release) -> None:
        """Have it told; in the control thread."""
        self._begin(channel, release)

    def _begin(self, channel: Channel, release: Release) -> None:
        self._link.hold(release.claim_id)
        telling = asyncio.create_task(self._tell(channel, release))
        self._telling[release.claim_id] = telling
        telling.add_done_callback(lambda _: self._told(release))

    async def _until_told(self, release: Release) -> bool:
        telling = self._telling.get(release.claim_id)
        if telling is not None:
            await asyncio.wait([telling], timeout=self._wait_s)
        return telling is None or telling.done()

    def _told(self, release: Release) -> None:
        del self._telling[release.claim_id]
        self._link.let_go(release.claim_id)

    async def _tell(self, channel: Channel, release: Release) -> None:
        try:
            async with self._asking:
                if not await self._is_answered(channel, release):
                    async with self._again:
                        while not await self._is_answered(channel, release):
                            pass
        except (ChannelClosed, LLMException) as error:
            # What was pulled is here; and the peer ends the claims of a link with the link.
            self._warn(release, str(error))

    async def _is_answered(self, channel: Channel, release: Release) -> bool:
        try:
            await ask(channel, release, Released, self._wait_s)
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

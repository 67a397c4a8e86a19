"""All links of one engine by state, and the steps between states with everything each entails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from kvplan.engine.entry import end_all
from kvplan.engine.links.local_end import LocalEnd, link_failed
from kvplan.engine.links.renewals import Renewals
from kvplan.engine.links.state import LOST, LinkState
from kvplan.engine.links.told_table import ToldTable
from kvplan.inspection.units import plural
from kvplan.logs import Log
from kvplan.status import LLMException, LLMStatusCode

if TYPE_CHECKING:
    from kvplan.engine.links.peer_link import PeerLink
    from kvplan.transport.protocol import TransportLink

_LOG = Log("kvplan")
_MAX_ERRORS = 1024
_LAST_WORDS_S = 1.0  # of a peer that has exited, or has closed the way to its memory


class Transitions:
    """Every change of state goes through here, in the control thread.

    Attributes:
        links: LINKED, UNLINKING, BROKEN and CLOSED ones, by cluster id; read by any thread.
        calling: LINKING ones whose handshake this end has begun.
        answering: LINKING ones whose handshake the peer has begun.
        errors: why a cluster could not be linked when last tried.
    """

    def __init__(self, end: LocalEnd) -> None:
        self.links: dict[int, PeerLink] = {}
        self.calling: dict[int, PeerLink] = {}
        self.answering: dict[int, PeerLink] = {}
        self.errors: dict[int, LLMException] = {}
        self._end = end
        self._watched: dict[PeerLink, int] = {}  # the descriptor that tells the peer's death
        self._background: set[asyncio.Task[None]] = set()
        self._refusal = ""  # of every new link

    def live(self) -> set[int]:
        """The clusters whose link stands, or is about to."""
        standing = {it for it, link in tuple(self.links.items()) if link.is_live}
        return standing | set(self.calling) | set(self.answering)

    def refuse_new(self, reason: str) -> None:
        """Let no link come to be from here on."""
        self._refusal = reason

    def not_linked(self, cluster_id: int) -> LLMException:
        """LLM_NOT_YET_LINK, with why the last try to link failed."""
        tried = self.errors.get(cluster_id)
        return LLMException(
            f"cluster {cluster_id} is not linked"
            + (f"; the last try failed: {tried.args[0]}" if tried is not None else ""),
            status_code=LLMStatusCode.LLM_NOT_YET_LINK,
        )

    def note_error(self, cluster_id: int, error: LLMException) -> None:
        """Remember why a cluster could not be linked."""
        self.errors.pop(cluster_id, None)
        self.errors[cluster_id] = error  # the newest last: the oldest goes
        while len(self.errors) > _MAX_ERRORS:
            del self.errors[next(iter(self.errors))]

    def check_room(self, cluster_id: int) -> None:
        """Refuse one link too many; what strangers have begun and not confirmed takes no room.

        Raises:
            LLMException: LLM_CLUSTER_NUM_EXCEED_LIMIT.
        """
        if self._refusal:
            raise link_failed(self._refusal)
        standing = {it for it, link in tuple(self.links.items()) if link.is_live}
        live, most = (standing | set(self.calling)) - {cluster_id}, self._end.options.max_links
        if len(live) >= most:
            raise LLMException(
                f"cluster {self._end.cluster_id} has {plural(len(live), 'link')}; max_links={most}",
                status_code=LLMStatusCode.LLM_CLUSTER_NUM_EXCEED_LIMIT,
            )

    def connect(
        self, link: PeerLink, name: str, metadata: bytes, challenge: bytes, timeout_s: float
    ) -> None:
        """Begin to reach the peer's memory; `connected` waits for it.

        Args:
            link: to the peer.
            name: of the transport.
            metadata: the peer's.
            challenge: of the handshake, which no other has.
            timeout_s: seconds that it may take.
        """
        transport = self._end.transport(name)
        link.transport = name
        link.told = ToldTable(name)
        assert link.channel is not None
        # Now: the peer may dial as soon as it has the challenge.
        streams = link.streams = link.channel.streams(challenge)

        async def connect() -> TransportLink:
            try:
                return await self._end.control.in_worker(
                    transport.connect,
                    metadata,
                    timeout_ms=timeout_s * 1000,
                    session=challenge,
                    streams=streams,
                )
            finally:
                streams.close()
                link.streams = None

        link.connecting = asyncio.create_task(connect())

    async def connected(self, link: PeerLink) -> None:
        """Wait until the peer's memory can be reached.

        Raises:
            LLMException: LLM_LINK_FAILED: it cannot, and why.
        """
        assert link.connecting is not None
        # Shielded: a link that a worker has made must not be lost, however this wait ends.
        try:
            link.transport_link = await asyncio.shield(link.connecting)
        except LLMException as error:
            raise link_error(link.transport, error) from error
        if link.transport_link.renewable is not None:
            link.renewals = Renewals(link, link.transport_link.renewable, self._end.control)

    def linked(self, link: PeerLink) -> None:
        """LINKING -> LINKED, in the place of the link that was there before."""
        assert link.channel is not None
        before = self.links.get(link.cluster_id)
        if before is not None:
            self.unlinked(before, "the peer has linked anew")
        self._settle(link)
        calling = self.calling.get(link.cluster_id)
        if calling is not None:
            self.failed(calling, link_failed("the peer's own handshake was quicker"))
        link.become(LinkState.LINKED)
        self.links[link.cluster_id] = link
        self.errors.pop(link.cluster_id, None)
        options = self._end.options
        link.channel.keep_alive(
            options.heartbeat_interval_ms / 1000, options.heartbeat_timeout_ms / 1000
        )
        self._log(link, logging.INFO)
        self._watch(link)

    def failed(self, link: PeerLink, error: LLMException) -> None:
        """LINKING -> UNLINKED."""
        if link.state is not LinkState.LINKING:
            return
        self._settle(link)
        self._cut(link, LinkState.UNLINKED, str(error.args[0]))
        link.become(LinkState.UNLINKED, str(error.args[0]))
        self.note_error(link.cluster_id, error)
        # By name it is tried again; what comes of all tries is told once.
        self._log(link, logging.DEBUG if link.comm else logging.WARNING)
        self._release(link, str(error.args[0]))

    def lost(self, link: PeerLink, reason: str, *, orderly: bool = False) -> None:
        """LINKED or UNLINKING -> BROKEN: from here on every transfer over the link fails.

        Args:
            link: which.
            reason: why.
            orderly: the peer wanted it so: CLOSED, and nothing to warn of.
        """
        if link.state not in {LinkState.LINKED, LinkState.UNLINKING}:
            return
        state = LinkState.CLOSED if orderly else LinkState.BROKEN
        # First: nothing succeeds over a link that is seen to have ended.
        self._cut(link, state, reason)
        link.become(state, reason)
        self._log(link, logging.INFO if orderly else logging.WARNING)
        self._release(link, reason)
        lost = [it for it in self.links.values() if it.state in LOST]
        if len(lost) > self._end.options.max_links:  # peers that never come back
            self.unlinked(min(lost, key=lambda it: it.since), "forgotten")

    def unlinked(self, link: PeerLink, reason: str) -> None:
        """Any state -> UNLINKED.

        Args:
            link: which.
            reason: what the peer is told, and those who still hold the link.
        """
        if link.state is LinkState.LINKING:
            self.failed(link, link_error("unlink", LLMException(reason)))
        if link.state is LinkState.UNLINKED:
            return
        was_lost = link.state in LOST
        self._cut(link, LinkState.UNLINKED, reason)
        link.become(LinkState.UNLINKED, reason)
        if self.links.get(link.cluster_id) is link:
            del self.links[link.cluster_id]
        self._log(link, logging.INFO)
        if not was_lost:
            self._release(link, reason, orderly=True)

    def spawn(self, task: Coroutine[Any, Any, None]) -> None:
        """Run `task` beside; `finish` waits for it."""
        running = asyncio.create_task(task)
        self._background.add(running)
        running.add_done_callback(self._background.discard)

    async def finish(self, timeout_s: float) -> None:
        """Wait for what runs beside, and stop it when the time is over."""
        if self._background:
            _, late = await asyncio.wait(tuple(self._background), timeout=timeout_s)
            for task in late:
                task.cancel()

    def _settle(self, link: PeerLink) -> None:
        for pending in (self.calling, self.answering):
            if pending.get(link.cluster_id) is link:
                del pending[link.cluster_id]

    def _watch(self, link: PeerLink) -> None:
        assert link.transport_link is not None
        if (fd := link.transport_link.death_fd) is not None:
            self._watched[link] = fd
            asyncio.get_running_loop().add_reader(fd, self._died, link)

    def _died(self, link: PeerLink) -> None:
        self._unwatch(link)  # it stays readable
        self.spawn(self._last_words(link))

    async def _last_words(self, link: PeerLink) -> None:
        """Wait for the conversation to tell that the link has ended: it says why, and how.

        Nothing succeeds meanwhile: the transport knows that the peer has gone.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_S):
                await link.ended.wait()
        self.lost(link, link.death() or "the peer has closed the way to its memory")

    def _unwatch(self, link: PeerLink) -> None:
        if (fd := self._watched.pop(link, None)) is not None:
            asyncio.get_running_loop().remove_reader(fd)

    def _cut(self, link: PeerLink, state: LinkState, reason: str) -> None:
        """Close the way to the peer's memory: every transfer over it fails, as in `state`."""
        self._unwatch(link)
        if link.connecting is None:
            return
        if link.streams is not None:
            link.streams.close()
        close = partial(_close_result, link.refusal_in(state, reason))
        if link.connecting.done():
            close(link.connecting)
        else:
            link.connecting.add_done_callback(close)

    def _release(self, link: PeerLink, reason: str, *, orderly: bool = False) -> None:
        """Let go of everything behind a link that has ended, by the wish of this end if orderly."""
        # Elsewhere: peers that write to the caches that go with it are waited for.
        worker = self._end.control.start_in_worker
        self._end.registry.release_holder(link, end=lambda held: worker(end_all, held))
        link.forget()
        if link.renewals is not None:
            link.renewals.end(reason)
        if link.channel is not None:
            # Later: what is served on it now must still be answered.
            close = partial(link.channel.close, reason, orderly=orderly)
            asyncio.get_running_loop().call_soon(close)

    def _log(self, link: PeerLink, level: int) -> None:
        _LOG.log(
            level,
            "link cluster=%d peer=%d state=%s transport=%s way=%r address=%s%s",
            self._end.cluster_id,
            link.cluster_id,
            link.state.name,
            link.transport or "-",
            link.way,
            link.address,
            f" reason={link.reason!r}" if link.reason else "",
        )


def _close_result(why: LLMException, connecting: asyncio.Task[TransportLink]) -> None:
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result().close(why)


def link_error(where: str, error: LLMException) -> LLMException:
    """`error` with where it came from, which its message need not tell."""
    return LLMException(f"{where}: {error.args[0]}", status_code=error.status_code)

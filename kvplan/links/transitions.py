"""State changes of links, which begin, break, and are ended by one side or by both."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from kvplan.control.channel import Channel, ChannelClosed
from kvplan.control.messages import Offer, Unlink, Unlinked
from kvplan.links.local_engine import LocalEngine
from kvplan.links.peer_link import PeerLink
from kvplan.links.publisher import Publisher
from kvplan.links.renewals import Renewals
from kvplan.links.values import LOST, LinkState
from kvplan.planning.texts import plural
from kvplan.status import (
    LLMException,
    LLMStatusCode,
    busy,
    link_failed,
    message_of,
    not_linked,
    within,
)
from kvplan.system.logs import Log

if TYPE_CHECKING:
    from kvplan.transport.link import TransportLink


_LOG = Log("kvplan")
_MAX_ERRORS = 1024
_MAX_ACCEPTED_WORKERS = 32  # threads that connect to peers which have begun a handshake
_LINKED_AGAIN = "the peer has linked again"
_DISCONNECT_S = 1.0  # to receive the reason why a peer has exited or closed its memory
_PEERS_SHARE = 0.5  # of the remaining time, so that the peer's refusal arrives in time


class Transitions:
    """The state changes of links, except those between LINKED and UNLINKING (see `Unlinker`).

    Attributes:
        links: Links in state LINKED, UNLINKING, BROKEN or CLOSED by cluster id. Any thread may
            read it.
        initiating: LINKING links whose handshake this side has begun.
        accepting: LINKING links whose handshake the peer has begun.
        errors: Error of the last failed attempt to link, by cluster id.
        observer: Called with each link that was linked, was lost or ended, or failed to link.
    """

    def __init__(self, engine: LocalEngine) -> None:
        self.links: dict[int, PeerLink] = {}
        self.initiating: dict[int, PeerLink] = {}
        self.accepting: dict[int, PeerLink] = {}
        self.errors: dict[int, LLMException] = {}
        self.observer: Callable[[PeerLink], object] | None = None
        self._engine = engine
        # The descriptors that signal the peer's death, for each link.
        self._watched: dict[PeerLink, list[int]] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._refusal = ""  # if not empty, the error of every new link
        self._accepted_workers = asyncio.Semaphore(_MAX_ACCEPTED_WORKERS)

    def live(self) -> set[int]:
        """Return the clusters whose link is up, being made or being ended."""
        up = {cluster_id for cluster_id, link in list(self.links.items()) if link.is_live}
        return up | set(self.initiating) | set(self.accepting)

    def refuse_new(self, reason: str) -> None:
        """Refuse every new link from now on."""
        self._refusal = reason

    def not_linked(self, cluster_id: int) -> LLMException:
        """Return LLM_NOT_YET_LINK with the error of the last attempt to link."""
        error = self.errors.get(cluster_id)
        return not_linked(
            f"cluster {cluster_id} is not linked"
            + (f"; the last attempt failed: {message_of(error)}" if error is not None else "")
        )

    def note_error(self, cluster_id: int, error: LLMException) -> None:
        """Remember why linking with a cluster failed."""
        self.errors.pop(cluster_id, None)
        self.errors[cluster_id] = error  # now the newest; the oldest is dropped
        while len(self.errors) > _MAX_ERRORS:
            del self.errors[next(iter(self.errors))]

    def check_capacity(self, cluster_id: int) -> None:
        """Refuse a link above the limit. Unconfirmed handshakes of peers do not count."""
        if self._refusal:
            raise link_failed(self._refusal)
        up = {cluster_id for cluster_id, link in list(self.links.items()) if link.is_live}
        live, most = (up | set(self.initiating)) - {cluster_id}, self._engine.options.max_links
        if len(live) >= most:
            raise LLMException(
                f"cluster {self._engine.cluster_id} has {plural(len(live), 'link')}; "
                f"max_links={most}",
                status_code=LLMStatusCode.LLM_CLUSTER_NUM_EXCEED_LIMIT,
            )

    def expect(self, link: PeerLink, challenge: bytes) -> None:
        """Make the data streams of a link. They can be opened until `connect` has ended."""
        assert link.channel is not None
        link.streams = link.channel.streams(challenge)

    def connect(
        self, link: PeerLink, offers: Iterable[Offer], challenge: bytes, timeout_s: float
    ) -> Publisher:
        """Begin to connect `link.transports`. `connected` waits for the end."""
        channel, streams = link.channel, link.streams
        assert channel is not None
        assert streams is not None
        offered = {offer.transport: offer.metadata for offer in offers}
        ways = [(self._engine.transport(name), offered.get(name, b"")) for name in link.transports]
        link.publisher = Publisher(link.cluster_id, channel, self._engine.registry, link.transports)

        def connect_each(deadline: float) -> dict[str, TransportLink]:
            made: dict[str, TransportLink] = {}
            for transport, metadata in ways:
                left_ms = max(0.0, deadline - time.monotonic()) * 1000
                try:
                    made[transport.name] = transport.connect(
                        metadata, timeout_ms=left_ms, session=challenge, streams=streams
                    )
                except LLMException as error:
                    for before in made.values():
                        before.close(error)
                    raise within(transport.name, error) from error
            return made

        def check_goes_on() -> None:
            if link.state is not LinkState.LINKING:  # ended, perhaps before `connect` was called
                raise link_failed(link.reason)

        async def connect() -> dict[str, TransportLink]:
            deadline = time.monotonic() + timeout_s
            try:
                check_goes_on()
                count = max(transport.num_streams(metadata) for transport, metadata in ways)
                await streams.prepare(range(count), timeout_s)
                check_goes_on()
                if all(transport.connects_at_once for transport, _ in ways):
                    return connect_each(deadline)
                # A peer that begins many handshakes must not occupy all threads.
                async with nullcontext() if streams.dials else self._accepted_workers:
                    check_goes_on()
                    return await self._engine.control.in_worker(connect_each, deadline)
            finally:
                streams.close_now()
                link.streams = None

        link.connecting = asyncio.create_task(connect())
        link.connecting.add_done_callback(_retrieve)
        return link.publisher

    async def connected(self, link: PeerLink) -> None:
        """Wait until `connect` has connected all transports."""
        assert link.connecting is not None
        if not link.connecting.done():  # not `await`: a cancelled wait must not cancel it
            await asyncio.wait((link.connecting,))
        link.transport_links = link.connecting.result()
        for made in link.transport_links.values():
            if (renewable := made.renewable) is not None:  # true for one transport at most
                assert link.channel is not None
                link.renewals = Renewals(
                    link, link.channel, renewable, self._engine.control, link.wait_s, link.forget
                )

    def linked(self, link: PeerLink) -> None:
        """Change LINKING to LINKED, and replace the previous link."""
        assert link.channel is not None
        before = self.links.get(link.cluster_id)
        if before is not None:
            self.lost(before, _LINKED_AGAIN)  # logs a warning if this end still had the link
            self.unlinked(before, _LINKED_AGAIN)
        self._end_handshake(link)
        initiating = self.initiating.get(link.cluster_id)
        if initiating is not None:
            self.failed(initiating, link_failed("the peer's own handshake was faster"))
        link.change_state(LinkState.LINKED)
        self.links[link.cluster_id] = link
        self.errors.pop(link.cluster_id, None)
        options = self._engine.options
        link.channel.keep_alive(
            options.heartbeat_interval_ms / 1000, options.heartbeat_timeout_ms / 1000
        )
        self._log(link, logging.INFO)
        self._watch(link)
        link.prepare()

    def failed(self, link: PeerLink, error: LLMException, *, cancelled: bool = False) -> None:
        """Change LINKING to UNLINKED; `cancelled` if the call that began it logs no outcome."""
        if link.state is not LinkState.LINKING:
            return
        self._end_handshake(link)
        self._close_transport(link, LinkState.UNLINKED, message_of(error))
        link.change_state(LinkState.UNLINKED, message_of(error))
        self.note_error(link.cluster_id, error)
        # Links by name are retried, and the outcome of all attempts is logged once. The call that
        # began any other handshake (`phase`) logs its outcome.
        level = logging.INFO if link.phase and not cancelled else logging.WARNING
        self._log(link, logging.DEBUG if link.comm else level)
        self._release_resources(link, message_of(error))

    def lost(self, link: PeerLink, reason: str, *, orderly: bool = False) -> None:
        """Change LINKED or UNLINKING to BROKEN, or to CLOSED if the peer ended it in order."""
        if link.state not in {LinkState.LINKED, LinkState.UNLINKING}:
            return
        state = LinkState.CLOSED if orderly else LinkState.BROKEN
        # First: once the state shows the end, no transfer may succeed.
        self._close_transport(link, state, reason)
        link.change_state(state, reason)
        self._log(link, logging.INFO if orderly else logging.WARNING)
        self._release_resources(link, reason)
        lost = [link for link in self.links.values() if link.state in LOST]
        if len(lost) > self._engine.options.max_links:  # drop peers that never come back
            self.unlinked(min(lost, key=lambda link: link.since), "forgotten")

    def unlinked(self, link: PeerLink, reason: str) -> None:
        """Change any state to UNLINKED."""
        if link.state is LinkState.LINKING:
            self.failed(link, within("unlink", LLMException(reason)))
        if link.state is LinkState.UNLINKED:
            return
        was_lost = link.state in LOST
        self._close_transport(link, LinkState.UNLINKED, reason)
        link.change_state(LinkState.UNLINKED, reason)
        if self.links.get(link.cluster_id) is link:
            del self.links[link.cluster_id]
        self._log(link, logging.INFO)
        if not was_lost:
            self._release_resources(link, reason, orderly=True)

    def spawn(self, task: Coroutine[Any, Any, None]) -> None:
        """Run `task` in the background. `finish` waits for it."""
        running = asyncio.create_task(task)
        self._background.add(running)
        running.add_done_callback(self._background.discard)

    async def finish(self, timeout_s: float) -> None:
        """Wait for background tasks, and cancel them after the timeout."""
        if self._background:
            _, late = await asyncio.wait(tuple(self._background), timeout=timeout_s)
            for task in late:
                task.cancel()

    def _end_handshake(self, link: PeerLink) -> None:
        for pending in (self.initiating, self.accepting):
            if pending.get(link.cluster_id) is link:
                del pending[link.cluster_id]

    def _watch(self, link: PeerLink) -> None:
        found = [made.death_fd for made in link.transport_links.values()]
        self._watched[link] = [fd for fd in found if fd is not None]
        for fd in self._watched[link]:
            asyncio.get_running_loop().add_reader(fd, self._on_death, link)

    def _on_death(self, link: PeerLink) -> None:
        self._unwatch(link)  # the descriptor stays readable
        self.spawn(self._lost_after_disconnect(link))

    async def _lost_after_disconnect(self, link: PeerLink) -> None:
        """End the link, but first give the peer time to send its own, better reason."""
        # No transfer succeeds in the meantime: the transport knows that the peer is gone.
        with suppress(TimeoutError):
            async with asyncio.timeout(_DISCONNECT_S):
                await link.ended.wait()
        self.lost(link, link.death() or "the peer has closed the access to its memory")

    def _unwatch(self, link: PeerLink) -> None:
        for fd in self._watched.pop(link, ()):
            asyncio.get_running_loop().remove_reader(fd)

    def _close_transport(self, link: PeerLink, state: LinkState, reason: str) -> None:
        """Close the access to the peer's memory. Transfers then fail with the error of `state`."""
        self._unwatch(link)
        if link.streams is not None:
            link.streams.close_now()
        if link.connecting is None:
            return
        close = partial(_close_result, link.refusal_in(state, reason))
        if link.connecting.done():
            close(link.connecting)
        else:
            link.connecting.add_done_callback(close)

    def _release_resources(self, link: PeerLink, reason: str, *, orderly: bool = False) -> None:
        """Release all resources of a link; `orderly` if this side ends the link on purpose."""
        # In a worker if a thread is left: this may wait for peers that write to the caches.
        self._engine.registry.release_holder(link, run=self._engine.control.start_in_worker)
        link.forget()
        link.notifier.end(self._engine.inbox)
        if link.renewals is not None:
            link.renewals.end(reason)
        if link.channel is not None:
            # Later, so that the answer to a request that is being served is sent first.
            close = partial(link.channel.close, reason, orderly=orderly)
            asyncio.get_running_loop().call_soon(close)

    def _log(self, link: PeerLink, level: int) -> None:
        if self.observer is not None:
            self.observer(link)
        _LOG.log(
            level,
            "link cluster=%d peer=%d state=%s transport=%s way=%r address=%s%s%s",
            self._engine.cluster_id,
            link.cluster_id,
            link.state.name,
            link.transport or "-",
            link.way,
            link.address,
            f" reason={link.reason!r}" if link.reason else "",
            f" passed_over={'; '.join(map(str, link.passed_over))!r}"
            if link.passed_over and link.state is LinkState.LINKED
            else "",
        )


def _retrieve(connecting: asyncio.Task[dict[str, TransportLink]]) -> None:
    """Retrieve the error of a task for which nothing waits any more, so that asyncio logs none."""
    if not connecting.cancelled():
        connecting.exception()


def _close_result(why: LLMException, connecting: asyncio.Task[dict[str, TransportLink]]) -> None:
    if not connecting.cancelled() and connecting.exception() is None:
        for made in connecting.result().values():
            made.close(why)


class Unlinker:
    """Unlinking by agreement of both ends.

    This end becomes idle first, because the other end closes the link as soon as it agrees. If
    operations do not end in time, the link stays and accepts new ones again.
    """

    def __init__(self, engine: LocalEngine, transitions: Transitions) -> None:
        self._engine = engine
        self._transitions = transitions
        self._waiting: dict[PeerLink, int] = {}  # number of calls that wait for the link to be idle

    async def unlink(self, cluster_id: int, timeout_s: float, *, force: bool) -> None:
        """End the link with a cluster."""
        link = self._transitions.links.get(cluster_id)
        if force:
            self.drop(cluster_id, f"cluster {self._engine.cluster_id} has unlinked by force")
        elif link is None:
            raise self._no_link(cluster_id)
        elif link.state in LOST:
            self._transitions.unlinked(link, "unlinked")
        else:
            await self._unlink(link, timeout_s)

    async def agree(self, channel: Channel, unlink: Unlink) -> Unlinked:
        """Agree to end the link on request of an idle peer."""
        link = channel.bound
        if isinstance(link, PeerLink) and link.state is LinkState.UNLINKED:
            return Unlinked()  # this side has ended the link, and closes the channel next
        if not isinstance(link, PeerLink) or link not in self._transitions.links.values():
            code = LLMStatusCode.LLM_NOT_YET_LINK
            raise LLMException("the link does not exist", status_code=code)
        async with self._idle(link, unlink.timeout_ms / 1000):
            self._transitions.unlinked(link, f"cluster {link.cluster_id} has unlinked")
        return Unlinked()

    async def drain(self, link: PeerLink, timeout_s: float) -> None:
        """Refuse operations until this end has none in flight over the link, which stays."""
        async with self._idle(link, timeout_s):
            pass

    def drop(self, cluster_id: int, reason: str) -> None:
        """End a link at once on this side, in any state. The peer is notified if possible."""
        for links in (
            self._transitions.initiating,
            self._transitions.accepting,
            self._transitions.links,
        ):
            if (link := links.get(cluster_id)) is not None:
                self._transitions.unlinked(link, reason)

    async def _unlink(self, link: PeerLink, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        assert link.channel is not None
        who = f"cluster {link.cluster_id}"
        async with self._idle(link, timeout_s):
            if link.state is LinkState.UNLINKING:
                left_s = max(0.0, deadline - loop.time())
                request = Unlink(int(left_s * 1000 * _PEERS_SHARE))
                try:
                    await link.channel.typed_request(request, Unlinked, left_s)
                except TimeoutError:
                    self._transitions.unlinked(
                        link, f"cluster {self._engine.cluster_id} has unlinked"
                    )
                    raise LLMException(
                        f"{who} has not confirmed within {timeout_s * 1000:g} ms; this side of "
                        "the link is torn down",
                        status_code=LLMStatusCode.LLM_UNLINK_FAILED,
                    ) from None
                except ChannelClosed:
                    pass  # the peer has ended the link
            # The link is UNLINKING or lost, or the peer has unlinked at the same time.
            self._transitions.unlinked(link, "unlinked")

    @asynccontextmanager
    async def _idle(self, link: PeerLink, timeout_s: float) -> AsyncIterator[None]:
        """Hold the link in UNLINKING, idle. The last caller restores LINKED unless it has ended."""
        if link.state is LinkState.LINKED:
            link.change_state(LinkState.UNLINKING)
        self._waiting[link] = self._waiting.get(link, 0) + 1
        try:
            if not await link.wait_idle(timeout_s):
                raise self._busy(link)
            yield
        finally:
            self._waiting[link] -= 1
            if not self._waiting[link]:
                del self._waiting[link]
                if link.state is LinkState.UNLINKING:
                    link.change_state(LinkState.LINKED)

    def _busy(self, link: PeerLink) -> LLMException:
        return busy(
            f"cluster {self._engine.cluster_id} has {plural(link.in_flight, 'operation')} in "
            f"flight with cluster {link.cluster_id}; the link stays"
        )

    def _no_link(self, cluster_id: int) -> LLMException:
        if cluster_id in self._transitions.initiating or cluster_id in self._transitions.accepting:
            return LLMException(
                f"cluster {cluster_id} is still being linked",
                status_code=LLMStatusCode.LLM_PROCESSING_LINK,
            )
        return self._transitions.not_linked(cluster_id)

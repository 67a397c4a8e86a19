"""How a link is ended in agreement: by the end that requests it, and at the other."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from kvplan.control.channel import Channel, ChannelClosed
from kvplan.control.messages import Unlink, Unlinked
from kvplan.inspection.units import plural
from kvplan.links.local_engine import LocalEngine
from kvplan.links.peer_link import PeerLink
from kvplan.links.transitions import Transitions
from kvplan.links.values import LOST, LinkState
from kvplan.status import LLMException, LLMStatusCode

_PEERS_SHARE = 0.5  # of the time left: so that the peer's refusal arrives before it is over


class Unlinker:
    """Ends links.

    Both ends must be idle: this one first, as the other tears down once it agrees. An end whose
    operations do not end in time permits new ones again, and the link stays.
    """

    def __init__(self, engine: LocalEngine, transitions: Transitions) -> None:
        self._engine = engine
        self._transitions = transitions
        self._waiting: dict[PeerLink, int] = {}  # how many calls wait for the link to be idle

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
        """The peer, which is idle by now, requests to end the link."""
        link = channel.bound
        if isinstance(link, PeerLink) and link.state is LinkState.UNLINKED:
            return Unlinked()  # this side is finalizing, and closes the channel next
        if not isinstance(link, PeerLink) or link not in self._transitions.links.values():
            raise LLMException("there is no link", status_code=LLMStatusCode.LLM_NOT_YET_LINK)
        with self._no_new_operations(link):
            if not await link.wait_idle(unlink.timeout_ms / 1000):
                raise self._busy(link)
            self._transitions.unlinked(link, f"cluster {link.cluster_id} has unlinked")
        return Unlinked()

    def drop(self, cluster_id: int, reason: str) -> None:
        """End a link at once, in any state, on this side; the peer is notified if possible."""
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
        with self._no_new_operations(link):
            if not await link.wait_idle(timeout_s):
                raise self._busy(link)
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
                    pass  # the link has ended from the other side
            # Now it is UNLINKING, lost, or the peer has unlinked at the same time.
            self._transitions.unlinked(link, "unlinked")

    @contextmanager
    def _no_new_operations(self, link: PeerLink) -> Iterator[None]:
        """LINKED -> UNLINKING; back to LINKED if the link exists when the last call leaves."""
        if link.state is LinkState.LINKED:
            link.change_state(LinkState.UNLINKING)
        self._waiting[link] = self._waiting.get(link, 0) + 1
        try:
            yield
        finally:
            self._waiting[link] -= 1
            if not self._waiting[link]:
                del self._waiting[link]
                if link.state is LinkState.UNLINKING:
                    link.change_state(LinkState.LINKED)

    def _busy(self, link: PeerLink) -> LLMException:
        return LLMException(
            f"cluster {self._engine.cluster_id} has {plural(link.in_flight, 'operation')} in "
            f"flight with cluster {link.cluster_id}; the link stays",
            status_code=LLMStatusCode.LLM_LINK_BUSY,
        )

    def _no_link(self, cluster_id: int) -> LLMException:
        if cluster_id in self._transitions.initiating or cluster_id in self._transitions.accepting:
            return LLMException(
                f"cluster {cluster_id} is only being linked",
                status_code=LLMStatusCode.LLM_PROCESSING_LINK,
            )
        return self._transitions.not_linked(cluster_id)

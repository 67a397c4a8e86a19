"""What this engine does when a peer asks, tells, or is heard of no more."""

from __future__ import annotations

from collections.abc import Callable

from kvplan.control.channel import Channel
from kvplan.control.messages import (
    Body,
    Claim,
    Confirm,
    Find,
    Found,
    Hello,
    Release,
    Released,
    Renew,
    Renewed,
    Sync,
    Synced,
    Table,
    Unlink,
    Unused,
)
from kvplan.engine.entry import HeldCache, end_all
from kvplan.engine.links.answering import Answerer
from kvplan.engine.links.local_end import LocalEnd, link_failed
from kvplan.engine.links.peer_link import PeerLink
from kvplan.engine.links.state import LinkState
from kvplan.engine.links.telling import tell
from kvplan.engine.links.transitions import Transitions
from kvplan.engine.links.unlinking import Unlinker
from kvplan.status import LLMException, LLMStatusCode
from kvplan.types import CacheKey


class PeerHandler:
    """Where every message of a peer arrives; called in the control thread.

    Args:
        end: this engine.
        transitions: of its links.
        answerer: of handshakes.
        unlinker: of links that peers end.
        admit: refuses a peer that says hello, or returns the id of the communicator that it links.
    """

    def __init__(
        self,
        end: LocalEnd,
        transitions: Transitions,
        answerer: Answerer,
        unlinker: Unlinker,
        admit: Callable[[Hello], int | None],
    ) -> None:
        self._end = end
        self._steps = transitions
        self._answerer = answerer
        self._unlinker = unlinker
        self._admit = admit

    async def on_request(self, channel: Channel, body: Body) -> Body:
        """Answer a peer.

        Raises:
            LLMException: the peer is told.
        """
        match body:
            case Hello():
                return await self._answerer.hello(channel, body, self._admit)
            case Confirm():
                return await self._answerer.confirm(channel, body)
            case Unlink():
                return await self._unlinker.agree(channel, body)
        link = self._linked(channel)
        assert link.told is not None
        match body:
            case Sync():
                return Synced(await tell(link, self._end.registry))
            case Find():
                entry, batch_index = self._end.registry.find(self._key(body))
                return Found(0, batch_index, link.told.describe(entry))
            case Claim():
                claim = self._end.registry.claim(self._key(body), link)
                return Found(claim.claim_id, claim.batch_index, link.told.describe(claim.entry))
            case Release():
                tensors = None if body.tensors is None else range(*body.tensors)
                ended: list[HeldCache] = []
                self._end.registry.release(body.claim_id, tensors, holder=link, end=ended.extend)
                if ended:  # peers that write to them are waited for, but not by this thread
                    await self._end.control.in_worker(end_all, ended)
                return Released()
        raise LLMException(f"{type(body).__name__} is no request")

    def on_notice(self, channel: Channel, body: Body) -> None:
        """Take what a peer tells."""
        link = channel.bound
        if not isinstance(link, PeerLink):
            channel.close(f"cluster {self._end.cluster_id} has no such link")
        elif not link.is_live:
            pass  # whatever has ended it closes the channel, and says why
        elif isinstance(body, Table):
            try:
                link.learn(body)
            except LLMException as error:
                self._lost(link, f"the peer's table cannot be: {error.args[0]}")
        elif link.renewals is not None and isinstance(body, Renew | Renewed | Unused):
            link.renewals.on_notice(body)

    def on_lost(self, channel: Channel, reason: str) -> None:
        """The peer has ended the conversation, or is not heard any more."""
        link, orderly = channel.bound, channel.closed_orderly
        if not orderly and isinstance(link, PeerLink) and link.is_live and (death := link.death()):
            reason = f"{reason}: {death}"
        self._lost(link, reason, orderly=orderly)

    def _lost(self, link: object, reason: str, *, orderly: bool = False) -> None:
        if not isinstance(link, PeerLink):
            return
        if link.state is LinkState.LINKING:
            # Of a handshake begun here, what waits for the peer's answer tells more.
            if self._steps.answering.get(link.cluster_id) is link:
                self._steps.failed(link, link_failed(reason))
        else:
            self._steps.lost(link, reason, orderly=orderly)

    def _linked(self, channel: Channel) -> PeerLink:
        link = channel.bound
        if isinstance(link, PeerLink) and link.state in {LinkState.LINKED, LinkState.UNLINKING}:
            return link
        raise LLMException(
            f"cluster {self._end.cluster_id} has no such link",
            status_code=LLMStatusCode.LLM_NOT_YET_LINK,
        )

    def _key(self, asked: Find | Claim) -> CacheKey:
        return CacheKey(self._end.cluster_id, asked.req_id, asked.model_id, asked.prefix_id)

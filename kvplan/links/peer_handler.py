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
from kvplan.links.answering import Answerer
from kvplan.links.local_engine import LocalEngine, link_failed
from kvplan.links.peer_link import PeerLink
from kvplan.links.state import LinkState
from kvplan.links.telling import tell
from kvplan.links.transitions import Transitions
from kvplan.links.unlinking import Unlinker
from kvplan.status import LLMException, LLMStatusCode
from kvplan.types import CacheKey


class PeerHandler:
    """Where every message of a peer arrives; called in the control thread.

    Args:
        engine: this one.
        transitions: of its links.
        answerer: of handshakes.
        unlinker: of links that peers end.
        admit: refuses a peer that says hello, or returns the id of the communicator that it links.
    """

    def __init__(
        self,
        engine: LocalEngine,
        transitions: Transitions,
        answerer: Answerer,
        unlinker: Unlinker,
        admit: Callable[[Hello], int | None],
    ) -> None:
        self._engine = engine
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
                return Synced(await tell(link, self._engine.registry))
            case Find():
                entry, batch_index = self._engine.registry.find(self._key(body))
                return Found(0, batch_index, link.told.describe(entry))
            case Claim():
                claim = self._engine.registry.claim(self._key(body), link)
                return Found(claim.claim_id, claim.batch_index, link.told.describe(claim.entry))
            case Release():
                tensors = None if body.tensors is None else range(*body.tensors)
                endings: list[Callable[[], None]] = []
                self._engine.registry.release(
                    body.claim_id, tensors, holder=link, run=endings.append
                )
                for end_caches in endings:  # waits for peers that write to them: not in this thread
                    await self._engine.control.in_worker(end_caches)
                return Released()
        raise LLMException(f"{type(body).__name__} is no request")

    def on_notice(self, channel: Channel, body: Body) -> None:
        """Take what a peer tells."""
        link = channel.bound
        if not isinstance(link, PeerLink):
            channel.close(f"cluster {self._engine.cluster_id} has no such link")
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
            f"cluster {self._engine.cluster_id} has no such link",
            status_code=LLMStatusCode.LLM_NOT_YET_LINK,
        )

    def _key(self, asked: Find | Claim) -> CacheKey:
        return CacheKey(self._engine.cluster_id, asked.req_id, asked.model_id, asked.prefix_id)

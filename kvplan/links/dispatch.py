"""The listener of an engine, and the handler of its peers' messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvplan.control.channel import Channel, Handler
from kvplan.control.connecting import Server
from kvplan.control.messages import (
    Body,
    Chosen,
    Claim,
    Confirm,
    Find,
    Found,
    Hello,
    Notify,
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
from kvplan.links.handshake import HandshakeAcceptor
from kvplan.links.local_engine import LocalEngine
from kvplan.links.peer_link import PeerLink
from kvplan.links.transitions import Transitions, Unlinker
from kvplan.links.values import LinkState
from kvplan.status import LLMException, link_failed, message_of, not_linked, unsupported
from kvplan.types import CacheKey

if TYPE_CHECKING:
    from kvplan.control.endpoint import Endpoint
    from kvplan.links.publisher import Publisher


class PeerHandler:
    """The handler of all messages from peers."""

    def __init__(
        self,
        engine: LocalEngine,
        transitions: Transitions,
        acceptor: HandshakeAcceptor,
        unlinker: Unlinker,
        admit: Callable[[Hello], int | None],
    ) -> None:
        self._engine = engine
        self._transitions = transitions
        self._acceptor = acceptor
        self._unlinker = unlinker
        self._admit = admit

    async def on_request(self, channel: Channel, body: Body) -> Body:
        """Answer a request of a peer."""
        match body:
            case Hello():
                return await self._acceptor.hello(channel, body, self._admit)
            case Confirm():
                return await self._acceptor.confirm(channel, body)
            case Unlink():
                return await self._unlinker.agree(channel, body)
            case Notify() if isinstance(channel.bound, PeerLink):
                # The peer may regard the link as linked before this side has read the reply.
                await channel.bound.settled.wait()
        link, publisher = self._linked(channel)
        match body:
            case Sync():
                return Synced(await publisher.publish())
            case Find():
                cache, batch_index = self._engine.registry.find(self._key(body))
                return Found(0, batch_index, publisher.table.describe(cache))
            case Claim():
                claim = self._engine.registry.claim(self._key(body), link)
                entry = publisher.table.describe(claim.entry)
                return Found(claim.claim_id, claim.batch_index, entry)
            case Release():
                tensors = None if body.tensors is None else range(*body.tensors)
                endings: list[Callable[[], None]] = []
                self._engine.registry.release(
                    body.claim_id, tensors, holder=link, run=endings.append
                )
                for end_caches in endings:
                    # In a worker if a thread is left: this may wait for peers that write to them.
                    await self._engine.control.start_in_worker(end_caches)
                return Released()
            case Notify():
                if (inbox := self._engine.inbox) is not None:
                    return link.notifier.receive(body, inbox)
                raise unsupported(
                    f"cluster {self._engine.cluster_id} does not accept notifications"
                )
        raise LLMException(f"{type(body).__name__} is not a request")

    def on_notice(self, channel: Channel, body: Body) -> None:
        """Handle a message that needs no reply."""
        link = channel.bound
        if not isinstance(link, PeerLink):
            channel.close(f"cluster {self._engine.cluster_id} has no such link")
        elif not link.is_live:
            pass  # the code that ended the link closes the channel with the reason
        elif isinstance(body, Chosen):
            self._acceptor.chosen(link, body)
        elif isinstance(body, Table):
            try:
                link.apply(body)
            except LLMException as error:
                self._lost(link, f"the peer's table is invalid: {message_of(error)}")
        elif link.renewals is not None and isinstance(body, Renew | Renewed | Unused):
            link.renewals.on_notice(body)

    def on_lost(self, channel: Channel, reason: str) -> None:
        """End the link of a channel that has ended."""
        link, orderly = channel.bound, channel.closed_orderly
        if not orderly and isinstance(link, PeerLink) and link.is_live and (death := link.death()):
            reason = f"{reason}: {death}"
        self._lost(link, reason, orderly=orderly)

    def _lost(self, link: object, reason: str, *, orderly: bool = False) -> None:
        if not isinstance(link, PeerLink):
            return
        if link.state is LinkState.LINKING:
            # A handshake that this side initiates fails where it awaits the peer's reply.
            if self._transitions.accepting.get(link.cluster_id) is link:
                self._transitions.failed(link, link_failed(reason))
        else:
            self._transitions.lost(link, reason, orderly=orderly)

    def _linked(self, channel: Channel) -> tuple[PeerLink, Publisher]:
        link = channel.bound
        if isinstance(link, PeerLink) and link.state in {LinkState.LINKED, LinkState.UNLINKING}:
            assert link.publisher is not None
            return link, link.publisher
        raise not_linked(f"cluster {self._engine.cluster_id} has no such link")

    def _key(self, body: Find | Claim) -> CacheKey:
        return CacheKey(self._engine.cluster_id, body.req_id, body.model_id, body.prefix_id)


class Listener:
    """The server of an engine, with at most one address."""

    def __init__(self, engine: LocalEngine, transitions: Transitions, handler: Handler) -> None:
        self._engine = engine
        self._transitions = transitions
        self._handler = handler
        self._server: Server | None = None

    @property
    def endpoint(self) -> Endpoint | None:
        """The address of the listener with its real port, or None. Any thread may read it."""
        server = self._server
        return None if server is None else server.endpoint

    async def listen(self, endpoint: Endpoint) -> None:
        """Listen at `endpoint` instead of the current address."""
        current, conflicting = self.endpoint, None
        if current is not None and current.port == endpoint.port != 0:
            # A port cannot be bound twice if one of the addresses is a wildcard.
            conflicting = current
            await self.stop()
        try:
            server = await self._serve(endpoint)
        except LLMException:
            if conflicting is not None:
                self._server = await self._serve(conflicting)
            raise
        await self._replace(server)

    async def stop(self) -> None:
        """Stop accepting links, and end the links that peers have made."""
        await self._replace(None)

    async def _replace(self, new: Server | None) -> None:
        server, self._server = self._server, new
        if server is None:
            return
        reason = f"cluster {self._engine.cluster_id} no longer listens"
        channels = set(server.channels)
        for link in (*self._transitions.accepting.values(), *self._transitions.links.values()):
            if link.channel in channels:
                self._transitions.unlinked(link, reason)
        try:
            await asyncio.sleep(0)  # let the channels send their reason
        finally:
            server.close()

    async def _serve(self, endpoint: Endpoint) -> Server:
        return await Server.listen(self._engine.control, endpoint, self._handler, self._engine.keys)

"""Where peers link with this engine."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvplan.control.server import Server
from kvplan.links.local_engine import LocalEngine
from kvplan.links.transitions import Transitions
from kvplan.status import LLMException

if TYPE_CHECKING:
    from kvplan.control.endpoint import Endpoint
    from kvplan.links.peer_handler import PeerHandler


class Listener:
    """Listens at one address, or at none; used by the control thread.

    Args:
        engine: this one.
        transitions: of its links.
        handler: of the conversations that peers begin.
    """

    def __init__(self, engine: LocalEngine, transitions: Transitions, handler: PeerHandler) -> None:
        self._engine = engine
        self._steps = transitions
        self._handler = handler
        self._server: Server | None = None

    @property
    def endpoint(self) -> Endpoint | None:
        """Where this engine listens, with the real port; None: nowhere. For any thread."""
        server = self._server
        return None if server is None else server.endpoint

    async def listen(self, endpoint: Endpoint) -> None:
        """Listen at `endpoint`, and nowhere else.

        Raises:
            LLMException: LLM_FAILED: it cannot be had; this engine listens where it did before.
        """
        before = self.endpoint
        # A port is had by one host address only where another stands for all of them.
        in_the_way = before if before is not None and before.port == endpoint.port != 0 else None
        if in_the_way is not None:
            await self.stop()
        try:
            server = await self._serve(endpoint)
        except LLMException:
            if in_the_way is not None:
                self._server = await self._serve(in_the_way)
            raise
        await self._replace(server)

    async def stop(self) -> None:
        """Let nobody link from here on; links that peers have begun are ended."""
        await self._replace(None)

    async def _replace(self, by: Server | None) -> None:
        server, self._server = self._server, by
        if server is None:
            return
        reason = f"cluster {self._engine.cluster_id} does not listen any more"
        channels = set(server.channels)
        for link in (*self._steps.answering.values(), *self._steps.links.values()):
            if link.channel in channels:
                self._steps.unlinked(link, reason)
        try:
            await asyncio.sleep(0)  # so that the peers hear it
        finally:
            server.close()

    async def _serve(self, endpoint: Endpoint) -> Server:
        return await Server.listen(self._engine.control, endpoint, self._handler, self._engine.keys)

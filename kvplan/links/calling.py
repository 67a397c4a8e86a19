"""The handshake, at the end that begins it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvplan.control.channel import ChannelClosed
from kvplan.control.client import connect
from kvplan.control.messages import Confirm, Hello, Linked, Welcome
from kvplan.links.answering import already_linked
from kvplan.links.asking import ask
from kvplan.links.local_engine import LocalEngine, link_failed
from kvplan.links.peer_link import PeerLink
from kvplan.links.state import LOST, LinkState
from kvplan.links.telling import tell, tell_later
from kvplan.links.transitions import Transitions, link_error
from kvplan.status import LLMException, LLMStatusCode, invalid

if TYPE_CHECKING:
    from kvplan.control.endpoint import Endpoint
    from kvplan.links.peer_handler import PeerHandler


_PAUSE_S = 0.05  # between attempts
_UNREACHED = "unreached"  # the phase of a handshake that has not begun
_GRACE_S = 0.02  # the phases have the same deadline, and know more about what was late


class Caller:
    """Links this engine with others.

    Where both ends call each other at once, the handshake of the lower cluster id goes on and the
    other's waits for it (see `Answerer.hello`); both calls succeed with the one link that results.
    """

    def __init__(self, engine: LocalEngine, transitions: Transitions) -> None:
        self._engine = engine
        self._steps = transitions
        self._calls: set[int] = set()

    async def link(
        self,
        cluster_id: int,
        endpoint: Endpoint,
        handler: PeerHandler,
        timeout_s: float,
        comm: str = "",
    ) -> PeerLink:
        """Link with the engine `cluster_id` that listens at `endpoint`.

        Args:
            cluster_id: the peer's.
            endpoint: where to call it.
            handler: of the conversation.
            timeout_s: seconds that all of it may take.
            comm: the communicator that is linked; empty: none.

        Raises:
            LLMException: LLM_PARAM_INVALID: this engine's own id; LLM_ALREADY_LINK;
                LLM_PROCESSING_LINK: another call is at it; LLM_LINK_BUSY: the link that there is
                has not ended yet; LLM_CLUSTER_NUM_EXCEED_LIMIT; LLM_LINK_FAILED: who could not be
                reached, in which phase, and why.
        """
        if cluster_id == self._engine.cluster_id:
            raise invalid(f"remote_cluster_id={cluster_id} is this engine's own")
        self._refuse_linked(cluster_id)
        if cluster_id in self._calls:
            raise LLMException(
                f"another call is linking cluster {cluster_id}",
                status_code=LLMStatusCode.LLM_PROCESSING_LINK,
            )
        self._calls.add(cluster_id)
        try:
            return await self._link(cluster_id, endpoint, handler, timeout_s, comm)
        finally:
            self._calls.discard(cluster_id)

    async def _link(
        self,
        cluster_id: int,
        endpoint: Endpoint,
        handler: PeerHandler,
        timeout_s: float,
        comm: str,
    ) -> PeerLink:
        running = asyncio.get_running_loop()
        deadline = running.time() + timeout_s
        # Members of a communicator are called until they are there.
        attempts = 1 if comm else self._engine.options.link_retry_count
        failure: LLMException | None = None
        while True:
            link = self._steps.links.get(cluster_id)
            if link is not None and link.state is LinkState.LINKED:
                return link
            if (answering := self._steps.answering.get(cluster_id)) is not None:
                if not await _settled(answering, deadline):
                    raise failure or link_failed(
                        f"cluster {cluster_id}: its own handshake has not ended within "
                        f"{timeout_s * 1000:g} ms"
                    )
            elif failure is None:
                self._steps.check_room(cluster_id)
                wait_ms = self._engine.options.sync_kv_cache_wait_time
                link = PeerLink(cluster_id, str(endpoint), comm, self._engine.control, wait_ms)
                failure = await self._attempt(link, endpoint, handler, deadline, timeout_s)
                attempts = attempts - 1 if link.phase == _UNREACHED else 0
            else:
                if attempts > 0:
                    await asyncio.sleep(min(_PAUSE_S, max(0.0, deadline - running.time())))
                # With no time for another attempt, why this one failed says more.
                if attempts == 0 or running.time() + _PAUSE_S > deadline:
                    raise failure
                failure = None

    async def _attempt(
        self,
        link: PeerLink,
        endpoint: Endpoint,
        handler: PeerHandler,
        deadline: float,
        timeout_s: float,
    ) -> LLMException | None:
        """Try once; returns why it failed."""
        cluster_id = link.cluster_id
        self._steps.calling[cluster_id] = link
        left_s = max(0.0, deadline - asyncio.get_running_loop().time())
        handshake = asyncio.create_task(self._handshake(link, endpoint, handler, left_s))
        settled = asyncio.create_task(link.settled.wait())
        error: LLMException | None = None
        try:
            await asyncio.wait(
                (handshake, settled),
                timeout=left_s + _GRACE_S,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if link.state is LinkState.UNLINKED:  # from elsewhere
                error = link_failed(f"{endpoint}: {link.phase}: {link.reason}")
            elif link.state is LinkState.LINKING:
                handshake.result()
        except (TimeoutError, asyncio.InvalidStateError):  # of the phase, or all of them
            late = f"no answer within {timeout_s * 1000:g} ms"
            error = link_failed(f"{endpoint}: {link.phase}: {late}")
        except ChannelClosed as raised:
            error = link_failed(f"{endpoint}: {link.phase}: {raised}")
        except LLMException as raised:
            # What cannot connect tells the endpoint and phases of its own.
            if link.phase == "connect":
                link.phase, error = _UNREACHED, raised
            else:
                error = link_error(f"{endpoint}: {link.phase}", raised)
        finally:
            handshake.cancel()
            settled.cancel()
            if error is not None:
                error = LLMException(
                    f"cluster {cluster_id} at {error.args[0]}", status_code=error.status_code
                )
            # Without an error here, the caller was interrupted.
            self._steps.failed(link, error or link_failed(f"cluster {cluster_id}: given up"))
        return error

    async def _handshake(
        self, link: PeerLink, endpoint: Endpoint, handler: PeerHandler, timeout_s: float
    ) -> None:
        engine = self._engine
        link.phase = "connect"
        source = engine.options.tcp_source
        channel = await connect(engine.control, endpoint, handler, engine.keys, timeout_s, source)
        link.channel = channel
        channel.bound = link
        link.phase = "hello"
        welcome = await ask(
            channel,
            Hello(
                cluster_id=engine.cluster_id,
                to_cluster_id=link.cluster_id,
                instance=engine.instance,
                role=engine.role(),
                comm=link.comm,
                offers=engine.offers(),
                timeout_ms=int(timeout_s * 1000),
            ),
            Welcome,
            timeout_s,
        )
        if welcome.cluster_id != link.cluster_id:
            raise link_failed(f"cluster {welcome.cluster_id} answered")
        link.instance, link.role = welcome.instance, welcome.role
        link.phase = "transport"
        self._steps.connect(link, welcome.transport, welcome.metadata, welcome.challenge, timeout_s)
        await tell(link, engine.registry)
        await self._steps.connected(link)
        link.phase = "confirm"
        await ask(channel, Confirm(welcome.challenge), Linked, timeout_s)
        self._steps.linked(link)
        self._steps.spawn(tell_later(link, engine.registry))  # of what has come meanwhile

    def _refuse_linked(self, cluster_id: int) -> None:
        link = self._steps.links.get(cluster_id)
        if link is None or link.state in LOST:
            return
        if link.state is LinkState.UNLINKING:
            raise LLMException(
                f"cluster {cluster_id} is still being unlinked",
                status_code=LLMStatusCode.LLM_LINK_BUSY,
            )
        raise already_linked(f"cluster {cluster_id} is linked already")


async def _settled(link: PeerLink, deadline: float) -> bool:
    try:
        async with asyncio.timeout_at(deadline):
            await link.settled.wait()
    except TimeoutError:
        return False
    return True

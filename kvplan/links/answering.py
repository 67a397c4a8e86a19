"""The handshake, at the end that is called."""

from __future__ import annotations

import asyncio
import resource
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvplan.control.channel import Channel
from kvplan.control.messages import Confirm, Hello, Linked, Welcome
from kvplan.links.local_engine import LocalEngine, link_failed
from kvplan.links.peer_link import PeerLink
from kvplan.links.state import LinkState
from kvplan.links.telling import tell
from kvplan.links.transitions import Transitions, link_error
from kvplan.status import LLMException, LLMStatusCode

if TYPE_CHECKING:
    from asyncio import TimerHandle

_FEWEST_BEGUN = 16
_DESCRIPTORS = 16  # of the limit, for each handshake that has begun; it takes 6
_LONGEST_S = 60.0  # a peer may not keep a handshake open longer, whatever it asks for


class Answerer:
    """Answers peers that link with this engine.

    Args:
        engine: this one.
        transitions: of its links.
        linked: told of each link that comes to be here.
    """

    def __init__(
        self, engine: LocalEngine, transitions: Transitions, linked: Callable[[PeerLink], None]
    ) -> None:
        self._engine = engine
        self._steps = transitions
        self._linked = linked
        self._challenges: dict[PeerLink, bytes] = {}
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        room = engine.options.max_links if files < 0 else files // _DESCRIPTORS
        self._most_begun = max(_FEWEST_BEGUN, min(engine.options.max_links, room))

    async def hello(
        self, channel: Channel, hello: Hello, admit: Callable[[Hello], int | None]
    ) -> Welcome:
        """A peer begins a handshake.

        Args:
            channel: its conversation.
            hello: what it says.
            admit: refuses it, or returns the id of the communicator that it links.

        Raises:
            LLMException: why not; the peer is told.
        """
        engine, steps = self._engine, self._steps
        if hello.to_cluster_id != engine.cluster_id:
            raise link_failed(
                f"cluster {engine.cluster_id} is here, not cluster {hello.to_cluster_id}"
            )
        if hello.cluster_id == engine.cluster_id:
            raise link_failed(f"cluster {engine.cluster_id} is here itself")
        comm_id = admit(hello)
        if channel.bound is not None:
            raise link_failed("the conversation has a link already")
        timeout_s = min(hello.timeout_ms / 1000, _LONGEST_S)
        await self._yield_to_own_call(hello, timeout_s)
        self._refuse_linked(hello)
        steps.check_room(hello.cluster_id)
        while len(steps.answering) >= self._most_begun:
            oldest = next(iter(steps.answering.values()))
            steps.failed(oldest, link_failed("hello: too many peers have begun and not confirmed"))
        transport, metadata = engine.choose(hello.cluster_id, hello.offers)
        address = channel.peer
        wait_ms = engine.options.sync_kv_cache_wait_time
        link = PeerLink(hello.cluster_id, address, hello.comm, engine.control, wait_ms)
        link.comm_id = comm_id
        link.instance, link.role, link.channel = hello.instance, hello.role, channel
        channel.bound = link
        steps.answering[hello.cluster_id] = link
        challenge = self._challenges[link] = secrets.token_bytes(16)
        steps.connect(link, transport.name, metadata, challenge, timeout_s)
        timer = asyncio.get_running_loop().call_later(timeout_s, self._expire, link)
        steps.spawn(self._forget(link, timer))
        return Welcome(
            cluster_id=engine.cluster_id,
            instance=engine.instance,
            role=engine.role(),
            challenge=challenge,
            transport=transport.name,
            metadata=transport.metadata(()),
        )

    async def confirm(self, channel: Channel, confirm: Confirm) -> Linked:
        """The peer reaches this engine's memory.

        Raises:
            LLMException: no link comes to be, and why; the peer is told.
        """
        link = channel.bound
        if not isinstance(link, PeerLink) or self._steps.answering.get(link.cluster_id) is not link:
            raise link_failed("confirm: there is no handshake to confirm")
        try:
            if not secrets.compare_digest(confirm.challenge, self._challenges[link]):
                raise link_failed("confirm: the challenge is another handshake's")
            try:
                await self._steps.connected(link)
            except LLMException as error:
                way = f"cluster {self._engine.cluster_id} cannot reach cluster {link.cluster_id}"
                raise link_error(way, error) from error
            self._steps.check_room(link.cluster_id)
        except LLMException as error:
            self._steps.failed(link, error)
            raise
        if link.state is not LinkState.LINKING:
            raise link_failed(link.reason)
        self._steps.linked(link)
        self._linked(link)
        await tell(link, self._engine.registry)
        return Linked()

    async def _yield_to_own_call(self, hello: Hello, timeout_s: float) -> None:
        """Both ends call each other: the lower id's handshake goes on, the other's waits here.

        The higher id never waits, so they cannot wait for each other.
        """
        own = self._steps.calling.get(hello.cluster_id)
        if own is None or self._engine.cluster_id > hello.cluster_id:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await own.settled.wait()
        except TimeoutError:
            raise link_failed("its own handshake has not ended in time") from None
        if own.state is LinkState.LINKED:
            raise already_linked(f"cluster {self._engine.cluster_id} has just linked from its end")

    def _refuse_linked(self, hello: Hello) -> None:
        """Raise unless no other link stands in the way of this handshake.

        A peer that calls again as the same instance has no link any more, whatever is known here;
        another instance of its cluster id must wait until the one before is dead.
        """
        link = self._steps.answering.get(hello.cluster_id)
        if link is not None:
            if link.instance != hello.instance and not link.death():
                raise LLMException(
                    f"another process of cluster {hello.cluster_id} is linking",
                    status_code=LLMStatusCode.LLM_PROCESSING_LINK,
                )
            self._steps.failed(link, link_failed("hello: the peer has begun anew"))
        link = self._steps.links.get(hello.cluster_id)
        if link is None or not link.is_live:
            return
        if death := link.death():
            self._steps.lost(link, death)
        elif link.instance != hello.instance:
            raise already_linked(
                f"cluster {self._engine.cluster_id} is linked with another process of cluster "
                f"{hello.cluster_id}, which lives ({link.address})"
            )
        elif link.state is LinkState.UNLINKING:
            raise LLMException(
                f"cluster {self._engine.cluster_id} is still unlinking",
                status_code=LLMStatusCode.LLM_LINK_BUSY,
            )
        # Otherwise this end's link goes when the new one stands: a hello alone proves nothing.

    def _expire(self, link: PeerLink) -> None:
        self._steps.failed(link, link_failed("confirm: the peer has not confirmed in time"))

    async def _forget(self, link: PeerLink, timer: TimerHandle) -> None:
        try:
            await link.settled.wait()
        finally:
            timer.cancel()
            del self._challenges[link]


def already_linked(reason: str) -> LLMException:
    """LLM_ALREADY_LINK, and with whom."""
    return LLMException(reason, status_code=LLMStatusCode.LLM_ALREADY_LINK)

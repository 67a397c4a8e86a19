"""The handshake that makes a link, at the initiating end and at the accepting end."""

from __future__ import annotations

import asyncio
import resource
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from kvplan.control.auth import link_secret, proof_of
from kvplan.control.channel import Channel, ChannelClosed, Handler
from kvplan.control.connecting import connect
from kvplan.control.messages import Chosen, Confirm, Hello, Linked, Offer, Welcome, encode
from kvplan.links.local_engine import LocalEngine
from kvplan.links.peer_link import PeerLink
from kvplan.links.transitions import Transitions
from kvplan.links.values import LOST, LinkState, other_cluster
from kvplan.status import (
    LLMException,
    LLMStatusCode,
    busy,
    invalid,
    link_failed,
    message_of,
    within,
)

if TYPE_CHECKING:
    from asyncio import TimerHandle

    from kvplan.control.endpoint import Endpoint

_PAUSE_S = 0.05  # between attempts
_NOT_CONNECTED = "not connected"  # the phase before a connection exists
_GRACE_S = 0.02  # after the deadline, so that the more precise error of a phase comes first

_MIN_ACCEPTING = 16
_DESCRIPTORS = 16  # of RLIMIT_NOFILE per accepted handshake; local needs 6, tcp 7 to 37
_PING_SHARE = 0.8  # of the handshake timeout; the rest is for sending the refusal
_MAX_TIMEOUT_S = 60.0  # limit for the timeout that a peer sends


class HandshakeInitiator:
    """The end that initiates handshakes with peers.

    If both ends initiate at the same time, the handshake of the lower cluster id continues and the
    other one waits for it (see `HandshakeAcceptor.hello`). Both calls of `link` return that link.
    """

    def __init__(self, engine: LocalEngine, transitions: Transitions) -> None:
        self._engine = engine
        self._transitions = transitions
        self._calls: set[int] = set()

    async def link(
        self,
        cluster_id: int,
        endpoint: Endpoint,
        handler: Handler,
        timeout_s: float,
        comm: str = "",
    ) -> PeerLink:
        """Link with the engine `cluster_id` that listens at `endpoint`."""
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
        handler: Handler,
        timeout_s: float,
        comm: str,
    ) -> PeerLink:
        engine, transitions = self._engine, self._transitions
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        # The rendezvous repeats the attempts for members of a communicator.
        attempts = 1 if comm else engine.options.link_retry_count
        failure: LLMException | None = None
        while True:
            link = transitions.links.get(cluster_id)
            if link is not None and link.state is LinkState.LINKED:
                return link
            if (accepting := transitions.accepting.get(cluster_id)) is not None:
                if not await _settled(accepting, deadline):
                    raise failure or link_failed(
                        f"cluster {cluster_id}: its own handshake has not ended within "
                        f"{timeout_s * 1000:g} ms"
                    )
            elif failure is None:
                transitions.check_capacity(cluster_id)
                wait_ms = engine.options.sync_kv_cache_wait_time
                link = PeerLink(cluster_id, str(endpoint), comm, engine.control, wait_ms)
                failure = await self._attempt(link, endpoint, handler, deadline, timeout_s)
                attempts = attempts - 1 if link.phase == _NOT_CONNECTED else 0
            else:
                if attempts > 0:
                    await asyncio.sleep(min(_PAUSE_S, max(0.0, deadline - loop.time())))
                # This failure explains more than the timeout of an attempt that has no time left.
                if attempts == 0 or loop.time() + _PAUSE_S > deadline:
                    raise failure
                failure = None

    async def _attempt(
        self,
        link: PeerLink,
        endpoint: Endpoint,
        handler: Handler,
        deadline: float,
        timeout_s: float,
    ) -> LLMException | None:
        """Try to link once, and return the error if that fails."""
        cluster_id = link.cluster_id
        self._transitions.initiating[cluster_id] = link
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
            if link.state is LinkState.UNLINKED:  # another handshake or an unlink ended it
                error = link_failed(f"{endpoint}: {link.phase}: {link.reason}")
            elif link.state is LinkState.LINKING:
                handshake.result()
        except (TimeoutError, asyncio.InvalidStateError):  # of one phase, or of the attempt
            late = f"no answer within {timeout_s * 1000:g} ms"
            error = link_failed(f"{endpoint}: {link.phase}: {late}")
        except ChannelClosed as raised:
            error = link_failed(f"{endpoint}: {link.phase}: {raised}")
        except LLMException as raised:
            # Errors of `connect` already name the endpoint and the phase.
            if link.phase == "connect":
                link.phase, error = _NOT_CONNECTED, raised
            else:
                error = within(f"{endpoint}: {link.phase}", raised)
        finally:
            handshake.cancel()
            settled.cancel()
            if error is not None:
                error = LLMException(
                    f"cluster {cluster_id} at {message_of(error)}", status_code=error.status_code
                )
            # If the link is still LINKING without an error, the call was cancelled.
            gone = link_failed(f"cluster {cluster_id}: cancelled")
            self._transitions.failed(link, error or gone, cancelled=error is None)
        return error

    async def _handshake(
        self, link: PeerLink, endpoint: Endpoint, handler: Handler, timeout_s: float
    ) -> None:
        engine = self._engine
        link.phase = "connect"
        source = engine.options.tcp_source
        channel = await connect(engine.control, endpoint, handler, engine.keys, timeout_s, source)
        link.channel = channel
        channel.bound = link
        link.phase = "hello"
        hello = Hello(
            cluster_id=engine.cluster_id,
            to_cluster_id=link.cluster_id,
            instance=engine.instance,
            role=engine.role(),
            comm=link.comm,
            offers=engine.offers(),
            timeout_ms=int(timeout_s * 1000),
        )
        if (before := self._transitions.links.get(link.cluster_id)) is not None:
            hello = replace(hello, proof=_proof(before, channel, hello))
        welcome = await channel.typed_request(hello, Welcome, timeout_s)
        if welcome.cluster_id != link.cluster_id:
            raise link_failed(f"cluster {welcome.cluster_id} answered")
        link.instance, link.role = welcome.instance, welcome.role
        link.secret = link_secret(welcome.challenge)
        link.transports, link.passed_over = engine.choose(
            link.cluster_id,
            welcome.offers,
            engine.trials(welcome.offers),
            welcome.trials,
        )
        self._transitions.expect(link, welcome.challenge)
        await channel.notify(Chosen(welcome.challenge, link.transports, link.passed_over))
        link.phase = "transport"
        publisher = self._transitions.connect(link, welcome.offers, welcome.challenge, timeout_s)
        await publisher.publish()
        await self._transitions.connected(link)
        link.phase = "confirm"
        await channel.typed_request(Confirm(welcome.challenge), Linked, timeout_s)
        self._transitions.linked(link)
        self._transitions.spawn(publisher.publish_pending())  # changes since the first publication

    def _refuse_linked(self, cluster_id: int) -> None:
        link = self._transitions.links.get(cluster_id)
        if link is None or link.state in LOST:
            return
        if link.state is LinkState.UNLINKING:
            raise busy(f"cluster {cluster_id} is still being unlinked")
        raise _already_linked(f"cluster {cluster_id} is linked already")


class _Accepted(NamedTuple):
    """A handshake that a peer has begun."""

    challenge: bytes  # which the peer must confirm
    offers: tuple[Offer, ...]  # of the peer
    timeout_s: float  # that the peer allows, within limits
    replaced: PeerLink | None  # a live link, whose other end the peer has proved to be


class HandshakeAcceptor:
    """The end that accepts the handshakes of peers."""

    def __init__(
        self, engine: LocalEngine, transitions: Transitions, on_linked: Callable[[PeerLink], None]
    ) -> None:
        self._engine = engine
        self._transitions = transitions
        self._on_linked = on_linked
        self._accepted: dict[PeerLink, _Accepted] = {}
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)  # never infinite on Linux
        limit = min(engine.options.max_links, files // _DESCRIPTORS)
        self._max_accepting = max(_MIN_ACCEPTING, limit)

    async def hello(
        self, channel: Channel, hello: Hello, admit: Callable[[Hello], int | None]
    ) -> Welcome:
        """Answer the first message of a peer's handshake."""
        engine, transitions = self._engine, self._transitions
        if hello.to_cluster_id != engine.cluster_id:
            raise other_cluster(engine.cluster_id, hello.to_cluster_id)
        if hello.cluster_id == engine.cluster_id:
            raise link_failed(f"cluster {engine.cluster_id} cannot link with itself")
        admit(hello)
        timeout_s = min(hello.timeout_ms / 1000, _MAX_TIMEOUT_S)
        await self._yield_to_own_handshake(hello, timeout_s)
        replaced = await self._live_link(channel, hello, timeout_s)
        if channel.bound is not None:  # by another Hello that arrived in the meantime
            raise link_failed("the channel has a link already")
        comm_id = admit(hello)  # again: the communicator may have been unlinked meanwhile
        self._end_unconfirmed(hello)
        transitions.check_capacity(hello.cluster_id)
        while len(transitions.accepting) >= self._max_accepting:
            oldest = next(iter(transitions.accepting.values()))
            transitions.failed(oldest, link_failed("hello: too many unconfirmed handshakes"))
        trials = engine.trials(hello.offers)
        engine.choose(hello.cluster_id, hello.offers, trials, ())  # refuses if none can work
        wait_ms = engine.options.sync_kv_cache_wait_time
        link = PeerLink(hello.cluster_id, channel.peer, hello.comm, engine.control, wait_ms)
        link.comm_id = comm_id
        link.instance, link.role, link.channel = hello.instance, hello.role, channel
        channel.bound = link
        transitions.accepting[hello.cluster_id] = link
        challenge = secrets.token_bytes(16)
        self._accepted[link] = _Accepted(challenge, hello.offers, timeout_s, replaced)
        link.secret = link_secret(challenge)
        transitions.expect(link, challenge)  # the peer may connect as soon as it has the challenge
        timer = asyncio.get_running_loop().call_later(timeout_s, self._expire, link)
        transitions.spawn(self._discard(link, timer))
        return Welcome(
            cluster_id=engine.cluster_id,
            instance=engine.instance,
            role=engine.role(),
            challenge=challenge,
            offers=engine.offers(),
            trials=trials,
        )

    def chosen(self, link: PeerLink, chosen: Chosen) -> None:
        """Begin to connect the transports that the peer has chosen."""
        accepted = self._accepted.get(link)
        if accepted is None or link.connecting is not None:
            return
        try:
            if not secrets.compare_digest(chosen.challenge, accepted.challenge):
                raise link_failed("transport: the challenge belongs to another handshake")
            link.transports, link.passed_over = chosen.transports, chosen.passed_over
            self._transitions.connect(link, accepted.offers, accepted.challenge, accepted.timeout_s)
        except LLMException as error:
            self._transitions.failed(link, error)

    async def confirm(self, channel: Channel, confirm: Confirm) -> Linked:
        """Complete a handshake once the transports are connected."""
        link = channel.bound
        if (
            not isinstance(link, PeerLink)
            or self._transitions.accepting.get(link.cluster_id) is not link
        ):
            raise link_failed("confirm: no handshake is waiting to be confirmed")
        accepted = self._accepted[link]
        try:
            if not secrets.compare_digest(confirm.challenge, accepted.challenge):
                raise link_failed("confirm: the challenge belongs to another handshake")
            if link.connecting is None:
                raise link_failed("confirm: no transport was chosen before")
            try:
                await self._transitions.connected(link)
            except LLMException as error:
                way = f"cluster {self._engine.cluster_id} cannot reach cluster {link.cluster_id}"
                raise within(way, error) from error
            self._transitions.check_capacity(link.cluster_id)
            before = self._transitions.links.get(link.cluster_id)
            if before is not None and before.is_live and before is not accepted.replaced:
                raise _already_linked(f"confirm: another link to {link} was made meanwhile")
        except LLMException as error:
            self._transitions.failed(link, error)
            raise
        if link.state is not LinkState.LINKING:
            raise link_failed(link.reason)
        self._transitions.linked(link)
        self._on_linked(link)
        assert link.publisher is not None
        await link.publisher.publish()
        return Linked()

    async def _yield_to_own_handshake(self, hello: Hello, timeout_s: float) -> None:
        """Wait for this side's own handshake. Only the end with the lower cluster id waits."""
        own = self._transitions.initiating.get(hello.cluster_id)
        if own is None or self._engine.cluster_id > hello.cluster_id:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await own.settled.wait()
        except TimeoutError:
            raise link_failed(
                f"the handshake of cluster {self._engine.cluster_id} has not ended in time"
            ) from None
        if own.state is LinkState.LINKED:
            raise _already_linked(f"cluster {self._engine.cluster_id} has just linked from its end")

    async def _live_link(self, channel: Channel, hello: Hello, timeout_s: float) -> PeerLink | None:
        """Return the live link that the sender of `hello` may replace, or None."""
        transitions = self._transitions
        link = transitions.links.get(hello.cluster_id)
        if link is None or not link.is_live:
            return None
        if death := link.death():
            transitions.lost(link, death)
            return None
        # The cluster id and the instance prove nothing: every peer of an engine knows both.
        if secrets.compare_digest(hello.proof, _proof(link, channel, hello)):
            if link.state is LinkState.UNLINKING:
                raise busy(f"cluster {self._engine.cluster_id} is still unlinking")
            return link  # kept until the new link is up: a Hello alone changes nothing
        if (state := await _state_of(link, timeout_s * _PING_SHARE)) is not None:
            error = _already_linked(
                f"cluster {self._engine.cluster_id} is linked with another process of cluster "
                f"{hello.cluster_id}, which {state} ({link.address})"
            )
            self._engine.control.refusals.note(channel.peer, message_of(error))
            raise error
        return None

    def _end_unconfirmed(self, hello: Hello) -> None:
        """End an earlier, unconfirmed handshake of the same process, or of one that has died."""
        link = self._transitions.accepting.get(hello.cluster_id)
        if link is None:
            return
        if link.instance != hello.instance and not link.death():
            raise LLMException(
                f"another process of cluster {hello.cluster_id} is linking",
                status_code=LLMStatusCode.LLM_PROCESSING_LINK,
            )
        self._transitions.failed(link, link_failed("hello: the peer has begun again"))

    def _expire(self, link: PeerLink) -> None:
        self._transitions.failed(link, link_failed("confirm: the peer has not confirmed in time"))

    async def _discard(self, link: PeerLink, timer: TimerHandle) -> None:
        try:
            await link.settled.wait()
        finally:
            timer.cancel()
            del self._accepted[link]


def _proof(link: PeerLink, channel: Channel, hello: Hello) -> bytes:
    """Return the proof that the sender of `hello` is an end of `link`."""
    return proof_of(link.secret, channel.connection.nonce, encode(replace(hello, proof=b"")))


async def _state_of(link: PeerLink, timeout_s: float) -> str | None:
    """Ping the peer of a link; return its state in words, or None if the link has ended."""
    assert link.channel is not None
    try:
        async with asyncio.timeout(timeout_s):
            try:
                await link.channel.ping()
            except ChannelClosed:
                await link.ended.wait()  # the link ends after its channel
                return None
    except TimeoutError:  # only the heartbeat ends a link because of silence
        return "has not answered a ping yet" if link.is_live else None
    return "is alive" if link.is_live else None


async def _settled(link: PeerLink, deadline: float) -> bool:
    try:
        async with asyncio.timeout_at(deadline):
            await link.settled.wait()
    except TimeoutError:
        return False
    return True


def _already_linked(reason: str) -> LLMException:
    return LLMException(reason, status_code=LLMStatusCode.LLM_ALREADY_LINK)

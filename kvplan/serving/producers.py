"""The producers of a consumer: links, compatibility, and messages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

from kvplan.engine.datadist import LlmDataDist
from kvplan.links import ClusterInfo, LinkState, LinkStatus
from kvplan.serving.messages import Compatibility, Hello, Message, Source, encode
from kvplan.serving.tasks import ExchangeOptions, PeerThreads
from kvplan.status import (
    LLMException,
    LLMStatusCode,
    busy,
    invalid,
    link_failed,
    not_exist,
    timed_out,
    without_frames,
)

_T = TypeVar("_T")

_LOOK_S: Final = 0.25  # interval at which links of awaited peers are checked
_LOST: Final = {LLMStatusCode.LLM_LINK_FAILED, LLMStatusCode.LLM_NOT_YET_LINK}


@dataclass
class _Peer:
    """The known state of a producer's worker."""

    mutex: asyncio.Lock = field(default_factory=asyncio.Lock)  # held to link and send a Hello
    greeted: asyncio.Future[Hello] | None = None  # with the producer's Hello
    hello: Hello | None = None  # None before a handshake
    difference: str = ""  # why the producer does not fit
    instance: str = ""  # the engine of the cluster that has answered
    users: int = 0  # requests in `greet`, or between `greet` and `leave`
    requests: int = 0  # only those between `greet` and `leave`
    # Time, source, process and error of the last failed handshake.
    failure: tuple[float, Source | None, bytes, LLMException | None] = 0.0, None, b"", None


class Producers:
    """Links with producers on demand. All methods run in the loop of the exchange.

    A link does not end while `is_asking` returns True for its cluster, which then waits for an
    answer from this side.
    """

    def __init__(
        self,
        engine: LlmDataDist,
        hello: Hello,
        compatibility: Compatibility,
        *,
        options: ExchangeOptions,
        threads: PeerThreads,
        is_asking: Callable[[int], bool],
    ) -> None:
        self._engine = engine
        self._hello = hello
        self._is_asking = is_asking
        self._compatibility = compatibility
        self._options = options
        self._link_timeout_ms = options.link_timeout_ms
        self._threads = threads
        self._peers: dict[int, _Peer] = {}
        # Awaited answers: source, deadline, and the error text of a late answer.
        self._awaited: dict[asyncio.Future[Any], tuple[Source, float, str]] = {}

    async def notify(self, cluster_id: int, message: Message) -> None:
        """Send a message. A stopped peer delays only its own messages."""
        await self._engine.notify_async(
            cluster_id,
            encode(message),
            timeout_ms=self._link_timeout_ms,
            tag=type(message).__name__,
        )

    async def ask(self, source: Source, instance: bytes, messages: Sequence[Message]) -> None:
        """Send messages to a greeted producer; link again if the link has ended."""
        try:
            for message in messages:
                await self.notify(source.cluster_id, message)
        except LLMException as error:
            if error.status_code not in _LOST:
                raise
            self._peers[source.cluster_id].hello = None
            await self._meet(self._peers[source.cluster_id], source, instance)
            for message in messages:
                await self.notify(source.cluster_id, message)

    def answered(self, cluster_id: int, hello: Hello) -> None:
        """Take the Hello of a peer, if one is awaited."""
        peer = self._peers.get(cluster_id)
        if peer and peer.greeted and not peer.greeted.done():
            peer.greeted.set_result(hello)

    async def greet(self, source: Source, instance: bytes) -> None:
        """Link with a producer's process once, and check that it fits; then `leave` must follow.

        The producer may have been replaced while its old process lives and is linked. That link is
        ended first; if requests still use it, the error names both addresses.
        """
        peer = self._peers.setdefault(source.cluster_id, _Peer())
        peer.users += 1
        try:
            if peer.hello is None or peer.hello.instance != instance:
                await self._meet(peer, source, instance)
        except BaseException:
            peer.users -= 1
            raise
        if peer.difference:
            peer.users -= 1
            raise invalid(
                f"cluster {source.cluster_id} at {source.address} does not fit: {peer.difference}"
            )
        peer.requests += 1

    def leave(self, source: Source) -> None:
        """End the use of a link by a request that has greeted its producer."""
        peer = self._peers[source.cluster_id]
        peer.users -= 1
        peer.requests -= 1

    def keep(self, linked: Collection[int]) -> None:
        """Forget producers that are not linked any more, and that no request uses."""
        for cluster_id in self._peers.keys() - set(linked):
            if not self._peers[cluster_id].users:
                del self._peers[cluster_id]

    def __len__(self) -> int:
        """Return the number of known producers."""
        return len(self._peers)

    async def _meet(self, peer: _Peer, source: Source, instance: bytes) -> None:
        """Link with a producer and exchange Hellos, unless another request has just done so."""
        asked = time.monotonic()
        async with peer.mutex:
            when, *what, failure = peer.failure
            if failure is not None and what == [source, instance] and when >= asked:
                # Otherwise all requests that wait here would try again, one after another.
                raise without_frames(failure)
            try:
                await self._try_to_meet(peer, source, instance)
            except LLMException as error:
                peer.failure = time.monotonic(), source, instance, error
                raise

    async def _try_to_meet(self, peer: _Peer, source: Source, instance: bytes) -> None:
        hello = await self._hello_of(peer, source)
        if hello.instance != instance and await self._unlinked_from(peer, source):
            hello = await self._hello_of(peer, source)
        if hello.instance != instance:
            raise not_exist(
                f"cluster {source.cluster_id} at {source.address} is not the process that the "
                f"reference names ({hello.instance.hex()[:8]}, not {instance.hex()[:8]}): it has "
                "restarted, or was replaced"
            )

    async def _hello_of(self, peer: _Peer, source: Source) -> Hello:
        """Return the Hello of the linked engine of a cluster; link first if none is linked."""
        if peer.hello is not None and peer.instance == self._linked(source)[0]:
            return peer.hello
        peer.hello = None
        cluster = ClusterInfo(source.cluster_id, source.address)
        results = await self._engine.link_clusters_async([cluster], self._link_timeout_ms)
        if results[0].status is not LLMStatusCode.LLM_ALREADY_LINK:
            results.raise_for_status()
        peer.greeted = asyncio.get_running_loop().create_future()
        instance, _ = self._linked(source)
        try:
            await self.notify(source.cluster_id, self._hello)
            timeout_ms = self._options.pull_timeout_ms
            hello = await self.wait_for(source, peer.greeted, timeout_ms, "did not answer")
        finally:
            peer.greeted = None
        peer.hello, peer.instance = hello, instance
        peer.difference = self._compatibility.difference(hello.fields)
        return hello

    async def _unlinked_from(self, peer: _Peer, source: Source) -> bool:
        """End the link with another process; return False if it is at the source's address."""
        _, at = self._linked(source)
        if at == source.address:
            return False
        if peer.requests or self._is_asking(source.cluster_id):
            raise busy(
                f"cluster {source.cluster_id} at {source.address} is not linked: another process "
                f"of that cluster, at {at}, is in use; try again when its requests have ended"
            )
        peer.hello = None
        unlink = partial(
            self._engine.unlink_clusters, [source.cluster_id], timeout_ms=self._link_timeout_ms
        )
        results = await self._threads.run(source.cluster_id, unlink)
        if results[0].status is not LLMStatusCode.LLM_NOT_YET_LINK:
            results.raise_for_status()
        return True

    async def wait_for(
        self,
        source: Source,
        answer: asyncio.Future[_T],
        timeout_ms: float,
        late: str,
    ) -> _T:
        """Wait for an answer of a producer while it is linked; `late` describes a timeout."""
        late = f"{late} in {timeout_ms:g} ms"
        self._awaited[answer] = source, time.monotonic() + timeout_ms / 1000, late
        try:
            return await answer
        finally:
            del self._awaited[answer]

    async def look(self) -> None:
        """Fail late answers, and awaited answers of producers that have lost their link."""
        while True:
            await asyncio.sleep(_LOOK_S)
            if not self._awaited:
                continue
            now, linked = time.monotonic(), self.linked()
            for answer, (source, end, late) in self._awaited.items():
                peer = f"cluster {source.cluster_id} at {source.address}"
                if answer.done():
                    continue
                if source.cluster_id not in linked:
                    answer.set_exception(
                        link_failed(f"the link with {peer} broke before it answered")
                    )
                elif now > end:
                    answer.set_exception(timed_out(f"{peer} {late}"))

    def linked(self) -> dict[int, LinkStatus]:
        """Return the links with other engines, by cluster id."""
        links = self._engine.links()
        return {link.cluster_id: link for link in links if link.state is LinkState.LINKED}

    def _linked(self, source: Source) -> tuple[str, str]:
        """Return the linked engine of a cluster and its address; empty if none is linked."""
        link = self.linked().get(source.cluster_id)
        return ("", "") if link is None else (link.instance, link.address)

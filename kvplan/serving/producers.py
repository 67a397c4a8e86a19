"""The producers that a consumer is linked with: what they are, and messages to them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from kvplan.links import ClusterInfo, LinkState, LinkStatus
from kvplan.serving.messages import Hello, Message, encode
from kvplan.serving.reference import Compatibility, Source
from kvplan.status import LLMException, LLMStatusCode

if TYPE_CHECKING:
    from kvplan.engine.datadist import LlmDataDist

_T = TypeVar("_T")

_LOOK_S = 0.25  # whether a peer that has to answer is still linked


@dataclass
class _Peer:
    """A producer's worker, as far as it is known."""

    mutex: asyncio.Lock = field(default_factory=asyncio.Lock)
    greeted: asyncio.Future[Hello] | None = None  # its answer
    instance: str = ""  # which engine of the cluster that was
    requests: int = 0  # that have greeted it, and have not left it
    # The last failure: when, of which source, and of which process.
    failure: tuple[float, Source | None, bytes, LLMException | None] = 0.0, None, b"", None


class Producers:
    """Links with producers as they are needed; all methods run in the loop of the exchange."""

    def __init__(
        self,
        engine: LlmDataDist,
        hello: Hello,
        compatibility: Compatibility,
        *,
        link_timeout_ms: int,
        answer_timeout_ms: float,
        threads: Executor,
        is_asking: Callable[[int], bool],
    ) -> None:
        self._engine = engine
        self._hello = hello
        self._is_asking = is_asking
        self._compatibility = compatibility
        self._link_timeout_ms = link_timeout_ms
        self._answer_timeout_ms = answer_timeout_ms
        self._threads = threads
        self._peers: dict[int, _Peer] = {}

    async def notify(self, cluster_id: int, message: Message) -> None:
        """Send a message. A stopped peer delays only its own messages."""
        await self._engine.notify_async(
            cluster_id,
            encode(message),
            timeout_ms=self._link_timeout_ms,
            tag=type(message).__name__,
        )

    def answered(self, cluster_id: int, hello: Hello) -> None:
        """A peer says what it is; if nobody waits for that it is dropped."""
        peer = self._peers.get(cluster_id)
        if peer and peer.greeted and not peer.greeted.done():
            peer.greeted.set_result(hello)

    async def greet(self, source: Source, instance: bytes) -> None:
        """Link with a producer's process, and compare what both are, once; call `leave` afterwards.

        If another process of the same cluster is linked, because the producer was replaced while
        its old process lives, that link is ended first. If requests still use it, the error names
        both addresses.
        """
        peer = self._peers.setdefault(source.cluster_id, _Peer())
        asked = time.monotonic()
        async with peer.mutex:
            when, *what, error = peer.failure
            if error is not None and what == [source, instance] and when >= asked:
                # It was tried meanwhile. Otherwise all that wait would, one after another.
                raise LLMException(str(error.args[0]), status_code=error.status_code)
            try:
                hello = await self._hello_of(peer, source)
                if hello.instance != instance and await self._unlinked_from(peer, source):
                    hello = await self._hello_of(peer, source)
                self._check(source, hello, instance)
            except LLMException as error:
                peer.failure = time.monotonic(), source, instance, error
                raise
            peer.requests += 1

    def leave(self, source: Source) -> None:
        """End the use of a link by a request that has greeted its producer."""
        self._peers[source.cluster_id].requests -= 1

    async def _hello_of(self, peer: _Peer, source: Source) -> Hello:
        """Return the answer of the linked engine; link first if no engine of the cluster is."""
        if peer.greeted is not None and peer.instance == self._linked(source):
            return peer.greeted.result()
        peer.greeted = None
        cluster = ClusterInfo(source.cluster_id, source.address)
        results = await self._engine.link_clusters_async([cluster], self._link_timeout_ms)
        if results[0].status is not LLMStatusCode.LLM_ALREADY_LINK:
            results.raise_for_status()
        greeted = asyncio.get_running_loop().create_future()
        peer.greeted = greeted
        peer.instance = self._linked(source)
        try:
            await self.notify(source.cluster_id, self._hello)
            return await self.wait_for(source, greeted, self._answer_timeout_ms)
        except BaseException:
            peer.greeted = None
            raise

    async def _unlinked_from(self, peer: _Peer, source: Source) -> bool:
        """End the link with another process of a cluster; False: it is at the source's address."""
        at = next((it.address for it in self._engine.links() if self._is_of(it, source)), "")
        if at == source.address:
            return False
        if peer.requests or self._is_asking(source.cluster_id):
            raise LLMException(
                f"cluster {source.cluster_id} at {source.address} is not linked: another process "
                f"of that cluster, at {at}, is in use; try again when its requests have ended",
                status_code=LLMStatusCode.LLM_LINK_BUSY,
            )
        peer.greeted = None
        unlink = partial(
            self._engine.unlink_clusters, [source.cluster_id], timeout_ms=self._link_timeout_ms
        )
        loop = asyncio.get_running_loop()
        results = await loop.run_in_executor(self._threads, unlink)
        if results[0].status is not LLMStatusCode.LLM_NOT_YET_LINK:
            results.raise_for_status()
        return True

    def _check(self, source: Source, hello: Hello, instance: bytes) -> None:
        if hello.instance != instance:
            raise LLMException(
                f"cluster {source.cluster_id} at {source.address} is another process than the "
                f"reference names ({hello.instance.hex()[:8]}, and not {instance.hex()[:8]}): it "
                "has restarted, or was replaced",
                status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
            )
        if difference := self._compatibility.difference(hello.fields):
            raise LLMException(
                f"cluster {source.cluster_id} at {source.address} does not fit: {difference}",
                status_code=LLMStatusCode.LLM_PARAM_INVALID,
            )

    async def wait_for(self, source: Source, answer: asyncio.Future[_T], timeout_ms: float) -> _T:
        """Wait for what a producer has to answer, as long as it is linked."""
        end = time.monotonic() + timeout_ms / 1000
        while not (await asyncio.wait([answer], timeout=_LOOK_S))[0]:
            if not self._linked(source):
                raise LLMException(
                    f"the link with cluster {source.cluster_id} at {source.address} broke before "
                    "it answered",
                    status_code=LLMStatusCode.LLM_LINK_FAILED,
                )
            if time.monotonic() > end:
                raise LLMException(
                    f"cluster {source.cluster_id} at {source.address} did not answer in "
                    f"{timeout_ms:g} ms",
                    status_code=LLMStatusCode.LLM_TIMEOUT,
                )
        return answer.result()

    def _linked(self, source: Source) -> str:
        """Which engine of a cluster is linked; empty: none."""
        return next((it.instance for it in self._engine.links() if self._is_of(it, source)), "")

    def _is_of(self, link: LinkStatus, source: Source) -> bool:
        return link.cluster_id == source.cluster_id and link.state is LinkState.LINKED

"""The producers that a consumer is linked with: what they are, and messages to them."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakValueDictionary

from kvplan.links import ClusterInfo, LinkState
from kvplan.serving.messages import Hello, Message, encode
from kvplan.serving.reference import Compatibility, Source
from kvplan.status import LLMException, LLMStatusCode

if TYPE_CHECKING:
    from kvplan.engine.datadist import LlmDataDist

_T = TypeVar("_T")

_LOOK_S = 0.25  # whether a peer that has to answer is still linked
_MOST_SENT = 4  # messages to one peer at once


@dataclass
class _Peer:
    """A producer's worker, as far as it is known."""

    mutex: asyncio.Lock = field(default_factory=asyncio.Lock)
    greeted: asyncio.Future[str] | None = None  # how it differs; empty: not at all
    instance: str = ""  # which process of the cluster that was
    failure: tuple[float, Source | None, LLMException | None] = 0.0, None, None  # the last one


class Producers:
    """Links with producers as they are needed; all methods run in the loop of the exchange.

    Args:
        engine: links, and sends messages.
        compatibility: what a producer must agree to.
        link_timeout_ms: milliseconds for a link, and for the delivery of a message.
        answer_timeout_ms: for what a producer says of itself.
        threads: in which messages are sent.
    """

    def __init__(
        self,
        engine: LlmDataDist,
        compatibility: Compatibility,
        *,
        link_timeout_ms: int,
        answer_timeout_ms: float,
        threads: Executor,
    ) -> None:
        self._engine = engine
        self._compatibility = compatibility
        self._link_timeout_ms = link_timeout_ms
        self._answer_timeout_ms = answer_timeout_ms
        self._threads = threads
        self._peers: dict[int, _Peer] = {}
        self._sending: WeakValueDictionary[int, asyncio.Semaphore] = WeakValueDictionary()

    async def notify(self, cluster_id: int, message: Message) -> None:
        """Send a message; a peer that is stopped holds up what is for itself, and no other's."""
        data, timeout_ms = encode(message), self._link_timeout_ms
        sending = self._sending.setdefault(cluster_id, asyncio.Semaphore(_MOST_SENT))
        async with sending:
            tag = type(message).__name__
            send = partial(self._engine.notify, cluster_id, data, timeout_ms=timeout_ms, tag=tag)
            await asyncio.get_running_loop().run_in_executor(self._threads, send)

    def answered(self, cluster_id: int, hello: Hello) -> None:
        """A peer says what it is; if nobody waits for that it is dropped."""
        peer = self._peers.get(cluster_id)
        if peer and peer.greeted and not peer.greeted.done():
            peer.greeted.set_result(self._compatibility.difference(hello.fields))

    async def greet(self, source: Source) -> None:
        """Link with a producer, and compare what both are, once.

        Raises:
            LLMException: of linking; LLM_PARAM_INVALID: it differs, and in what.
        """
        peer = self._peers.setdefault(source.cluster_id, _Peer())
        asked = time.monotonic()
        async with peer.mutex:
            if peer.greeted is not None and peer.instance == self._linked(source):
                self._check(source, peer.greeted.result())
                return
            when, what, error = peer.failure
            if error is not None and what == source and when >= asked:
                # It was tried meanwhile. Otherwise all that wait would, one after another.
                raise LLMException(str(error.args[0]), status_code=error.status_code)
            try:
                difference = await self._meet(peer, source)
            except LLMException as error:
                peer.failure = time.monotonic(), source, error
                raise
            self._check(source, difference)

    async def _meet(self, peer: _Peer, source: Source) -> str:
        peer.greeted = None
        cluster = ClusterInfo(source.cluster_id, source.address)
        results = await self._engine.link_clusters_async([cluster], self._link_timeout_ms)
        if results[0].status is not LLMStatusCode.LLM_ALREADY_LINK:
            results.raise_for_status()
        greeted = asyncio.get_running_loop().create_future()
        peer.greeted = greeted
        peer.instance = self._linked(source)
        try:
            fields = dict(self._compatibility.fields)
            await self.notify(source.cluster_id, Hello(fields, answer=False))
            return await self.wait_for(source, greeted, self._answer_timeout_ms)
        except BaseException:
            peer.greeted = None
            raise

    def _check(self, source: Source, difference: str) -> None:
        if difference:
            raise LLMException(
                f"cluster {source.cluster_id} at {source.address} does not fit: {difference}",
                status_code=LLMStatusCode.LLM_PARAM_INVALID,
            )

    async def wait_for(self, source: Source, answer: asyncio.Future[_T], timeout_ms: float) -> _T:
        """Wait for what a producer has to answer, as long as it is linked.

        Raises:
            LLMException: LLM_LINK_FAILED, LLM_TIMEOUT.
        """
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
        """Which process of a cluster is linked; empty: none."""
        for it in self._engine.links():
            if it.cluster_id == source.cluster_id and it.state is LinkState.LINKED:
                return it.instance
        return ""

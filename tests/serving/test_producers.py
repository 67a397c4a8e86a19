"""Links with producers that fail: the requests that share a failure, and its duration."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvplan import ClusterInfo, LlmDataDist, LLMException, LLMStatusCode
from kvplan.links import LinkResult, LinkResults, LinkState
from kvplan.serving import producers as producers_module
from kvplan.serving.messages import Compatibility, Done, Handle, Hello, Reference, Source
from kvplan.serving.producers import Producers
from kvplan.serving.puller import Pull, Puller
from kvplan.serving.tasks import ExchangeOptions
from tests.support.refusals import refused

SOURCE = Source(7, "127.0.0.1:1")


class Engine:
    """An engine that fails each link to a producer, once it may answer."""

    def __init__(self) -> None:
        self.answers = asyncio.Event()
        self.tries = 0

    def links(self) -> list[Any]:
        return []

    async def link_clusters_async(self, clusters: Sequence[ClusterInfo], timeout_ms: int) -> None:
        self.tries += 1
        await self.answers.wait()
        text = f"{clusters[0].endpoint()}: connection refused"
        raise LLMException(text, status_code=LLMStatusCode.LLM_LINK_FAILED)


class Greeted(Engine):
    """An engine with a link to a process that answers each greeting at once."""

    producers: Producers

    def __init__(self, link: Any) -> None:
        super().__init__()
        self.greeted: list[str] = []
        self._link = link

    async def link_clusters_async(self, clusters: Sequence[ClusterInfo], timeout_ms: int) -> Any:
        already = LLMException("linked", status_code=LLMStatusCode.LLM_ALREADY_LINK)
        return LinkResults([LinkResult(SOURCE.cluster_id, already.status_code, already)])

    def links(self) -> list[Any]:
        return [self._link]

    async def notify_async(self, *_: object, **__: object) -> None:
        self.greeted.append(self._link.instance)
        process = f"process {self._link.instance}".encode()
        self.producers.answered(SOURCE.cluster_id, Hello({}, process, answer=True))


def producers_of(engine: Engine, threads: Any = None) -> Producers:
    return Producers(
        cast(LlmDataDist, engine),
        Hello({}, b"consumer", answer=False),
        Compatibility({}),
        options=ExchangeOptions(),
        threads=threads,
        is_asking=lambda _: False,
    )


async def errors_of(
    engine: Engine, producers: Producers, *wanted: tuple[Source, bytes]
) -> list[str]:
    """Greet several producers at once, all of which wait for the first answer of the engine."""
    waiting = [asyncio.create_task(producers.greet(*each)) for each in wanted]
    await asyncio.sleep(0)  # until all of them wait
    engine.answers.set()
    return [str(each) for each in await asyncio.gather(*waiting, return_exceptions=True)]


def test_a_failure_is_shared_by_waiting_requests_only() -> None:
    async def try_links() -> None:
        producers = producers_of(engine := Engine())
        errors = await errors_of(engine, producers, *[(SOURCE, b"producer")] * 3)
        assert errors == ["127.0.0.1:1: connection refused (LLM_LINK_FAILED)"] * 3
        assert engine.tries == 1
        for number in (2, 3):
            with refused("LLM_LINK_FAILED", "connection refused"):
                await producers.greet(SOURCE, b"producer")
            assert engine.tries == number

    asyncio.run(try_links())


def test_a_failure_is_shared_by_requests_to_one_address_and_process() -> None:
    """The producer of a cluster was replaced: requests wait for the old and for the new one."""
    other = Source(SOURCE.cluster_id, "127.0.0.1:2")

    async def try_links() -> None:
        producers = producers_of(engine := Engine())
        errors = await errors_of(
            engine, producers, (SOURCE, b"producer"), (SOURCE, b"another"), (other, b"another")
        )
        assert [text[:11] for text in errors] == ["127.0.0.1:1", "127.0.0.1:1", "127.0.0.1:2"]
        assert engine.tries == 3

    asyncio.run(try_links())


def test_each_engine_of_a_producer_is_greeted_once() -> None:
    """A request for another process of the producer does not greet the linked engine again."""
    link = SimpleNamespace(
        cluster_id=SOURCE.cluster_id, state=LinkState.LINKED, instance="1", address=SOURCE.address
    )
    engine = Greeted(link)
    greeted, producers = engine.greeted, producers_of(engine)
    engine.producers = producers

    async def greet() -> None:
        await producers.greet(SOURCE, b"process 1")
        with refused("LLM_KV_CACHE_NOT_EXIST", "not the process that the reference names"):
            await producers.greet(SOURCE, b"process 2")
        assert greeted == ["1"]
        link.instance = "2"
        await producers.greet(SOURCE, b"process 2")
        assert greeted == ["1", "2"]

    asyncio.run(greet())


def test_a_stopped_producer_does_not_keep_others_from_freeing_a_request() -> None:
    """A stopped producer, even one without a reader, delays the message to none of the others."""
    sources = [Source(number, f"127.0.0.1:{number}") for number in (1, 2, 3, 4)]
    notified: list[int] = []

    class Stopped:
        async def greet(self, source: Source, instance: bytes) -> None:
            if source.cluster_id == 3:
                await asyncio.Event().wait()

        async def notify(self, cluster_id: int, message: Done) -> None:
            if cluster_id == 1:
                await asyncio.Event().wait()
            notified.append(cluster_id)

    async def ended() -> None:
        unused: Any = None
        puller = Puller(
            unused, [], cast(Producers, Stopped()), rank=0, push=False, options=ExchangeOptions(),
            movers=unused, helpers=unused, report=unused,
        )  # fmt: skip
        reference = Reference(b"producer", Handle.new(), b"digest", 8, tuple(sources))
        target = asyncio.get_running_loop().create_future()
        pull = Pull("one", reference, (*sources[:2],), (*sources[2:],), [1, 1, 1, 1], target)
        sending = asyncio.create_task(puller._send_done(pull))
        for _ in range(8):  # turns of the loop
            await asyncio.sleep(0)
        assert sorted(notified) == [2, 4]
        sending.cancel()

    asyncio.run(ended())


def test_an_engine_whose_link_has_ended_meanwhile_is_replaced() -> None:
    """Another process of the cluster is linked, and leaves before it is unlinked."""
    link = SimpleNamespace(
        cluster_id=SOURCE.cluster_id, state=LinkState.LINKED, instance="1", address="127.0.0.1:2"
    )

    class Leaving(Greeted):
        def unlink_clusters(self, clusters: Sequence[int], timeout_ms: int) -> LinkResults:
            link.instance, link.address = "2", SOURCE.address
            gone = LLMException("not linked", status_code=LLMStatusCode.LLM_NOT_YET_LINK)
            return LinkResults([LinkResult(clusters[0], gone.status_code, gone)])

    class Threads:
        async def run(self, cluster_id: int, function: Any) -> Any:
            return function()

    engine = Leaving(link)
    engine.producers = producers_of(engine, threads=Threads())
    asyncio.run(engine.producers.greet(SOURCE, b"process 2"))
    assert engine.greeted == ["1", "2"]


def test_an_answer_fails_once_it_is_late_or_its_link_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other answers of the same time stay. Later ones fail after an idle time, too."""
    monkeypatch.setattr(producers_module, "_LOOK_S", 0.0)

    class Linked(Engine):
        def links(self) -> list[Any]:
            return [SimpleNamespace(cluster_id=id_, state=LinkState.LINKED) for id_ in (1, 2)]

    producers, hour_ms = producers_of(Linked()), 3_600_000

    def wait_for(cluster_id: int, timeout_ms: float) -> tuple[Any, Any]:
        answer = asyncio.get_running_loop().create_future()
        source = Source(cluster_id, f"127.0.0.1:{cluster_id}")
        wait = producers.wait_for(source, answer, timeout_ms, "did not answer")
        return answer, asyncio.create_task(wait)

    async def ended() -> None:
        looking = asyncio.create_task(producers.look())
        for _ in range(3):
            for _ in range(5):
                await asyncio.sleep(0)
            answers, waits = zip(
                wait_for(3, hour_ms), wait_for(1, hour_ms), wait_for(2, 0.0), wait_for(3, hour_ms),
                strict=True,
            )  # fmt: skip
            answers[0].set_result("first")
            await asyncio.wait(waits[2:], timeout=30)
            assert [wait.done() for wait in waits] == [True, False, True, True]
            answers[1].set_result("second")
            assert [await wait for wait in waits[:2]] == ["first", "second"]
            with refused("LLM_TIMEOUT", "cluster 2 at 127.0.0.1:2 did not answer in 0 ms"):
                await waits[2]
            with refused("LLM_LINK_FAILED", "the link with cluster 3 at 127.0.0.1:3 broke before"):
                await waits[3]
        assert not looking.done()
        looking.cancel()

    asyncio.run(ended())

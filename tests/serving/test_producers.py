"""Links with producers that fail: who shares a failure, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

from kvplan import ClusterInfo, LlmDataDist, LLMException, LLMStatusCode
from kvplan.serving.messages import Compatibility, Hello, Source
from kvplan.serving.producers import Producers
from kvplan.serving.tasks import ExchangeOptions
from tests.support.refusals import refused

SOURCE = Source(7, "127.0.0.1:1")


class Engine:
    """An engine that no producer can be linked with, once it may answer."""

    def __init__(self) -> None:
        self.answers = asyncio.Event()
        self.tries = 0

    def links(self) -> list[Any]:
        return []

    async def link_clusters_async(self, clusters: Sequence[ClusterInfo], timeout_ms: int) -> None:
        self.tries += 1
        await self.answers.wait()
        raise LLMException("connection refused", status_code=LLMStatusCode.LLM_LINK_FAILED)


def test_a_failure_is_of_the_requests_that_waited_for_it_and_of_no_later_one() -> None:
    async def tried() -> None:
        engine = Engine()
        producers = Producers(
            cast(LlmDataDist, engine),
            Hello({}, b"consumer", answer=False),
            Compatibility({}),
            options=ExchangeOptions(),
            threads=cast(Any, None),
            is_asking=lambda _: False,
        )
        waiting = [asyncio.create_task(producers.greet(SOURCE, b"producer")) for _ in range(3)]
        await asyncio.sleep(0)  # until all of them wait
        engine.answers.set()
        errors = await asyncio.gather(*waiting, return_exceptions=True)
        assert [str(error) for error in errors] == ["connection refused (LLM_LINK_FAILED)"] * 3
        assert engine.tries == 1
        for number in (2, 3):
            with refused("LLM_LINK_FAILED", "connection refused"):
                await producers.greet(SOURCE, b"producer")
            assert engine.tries == number

    asyncio.run(tried())

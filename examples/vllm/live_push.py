"""Mode "push" over HTTP: the prefilling server sends each layer while it computes the next.

It computes in chunks, and has so few blocks that long prompts have to begin again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from typing import Any

import aiohttp

from examples.vllm.clients import AT_ONCE, CHUNK, LIMITS, Answers, Client
from examples.vllm.report import Answer, Report, connector
from examples.vllm.server import Proxy, Server

FEW = 66  # blocks of the prefilling server: vLLM wants room for a request of 2,048 tokens
SECONDS = aiohttp.ClientTimeout(total=900)


class Pushed(Answers):
    """The checks, in the order in which they are made."""

    def __init__(self, report: Report, held: ExitStack, client: Client) -> None:
        super().__init__(report, held)
        self.client = client
        limits = LIMITS | {"prefill_timeout_ms": 240_000, "mode": "push"}
        few = [
            *("--num-gpu-blocks-override", str(FEW), "--max-num-batched-tokens", str(CHUNK)),
            # Prompts take turns, and begin before there is room for all of them.
            *("--long-prefill-token-threshold", "64", "--no-scheduler-reserve-full-isl"),
        ]
        self.prefill = Server("push-prefill", 0, connector("kv_producer", **limits), *few)
        self.decode = Server("push-decode", 1, connector("kv_consumer", **limits))
        self.servers: tuple[Server, ...] = (self.prefill, self.decode)
        for server in self.servers:
            held.callback(server.close)
        for server in self.servers:
            server.started()
        self.proxy = Proxy("push-proxy", [self.prefill], [self.decode], "--push")
        held.callback(self.proxy.close)
        self.proxy.started()
        report.say("two servers that push and their proxy are up")

    def checks(self) -> Iterator[Callable[[], Coroutine[Any, Any, None]]]:
        yield self.same_tokens
        yield self.leaves_at_random
        yield self.killed

    async def run(self) -> None:
        numbers = range(len(self.prompts))
        self.alone = await self.answers(self.decode, numbers)
        await self.forget()
        await self.client.complete(self.proxy, self.prompts[0])  # it learns who prefills
        for check in self.checks():
            await check()

    async def same_tokens(self) -> None:
        numbers = range(len(self.prompts))
        await self.forget()
        problems = self.right(numbers, await self.answers(self.proxy, numbers))
        pushed = self.decode.metrics()["vllm:kvplan_tokens_pushed_total"]
        preempted = self.prefill.metrics()["vllm:num_preemptions_total"]
        total = sum(map(len, self.prompts))
        if pushed < total / 2:
            problems.append(f"only {pushed:.0f} of {total} tokens were pushed")
        if not preempted:
            problems.append("nothing was preempted while it was pushed")
        self.report.check(
            "what is pushed while it is computed has the same tokens, also of preempted requests",
            problems + await self.leaks(),
            f"{len(numbers)} prompts, {AT_ONCE} at once, {pushed:.0f} of {total} tokens pushed, "
            f"{preempted:.0f} preemptions",
        )

    async def leaves_at_random(self) -> None:
        await self.forget()
        chance = random.Random(11)
        numbers = [index for index in range(len(self.prompts)) for _ in range(2)]
        leaving = [
            self.client.leave(self.proxy, self.prompts[number], chance.uniform(0.0, 3.0))
            for number in numbers
        ]
        answers: list[Answer] = (
            await asyncio.gather(self.answers(self.proxy, numbers[::4]), *leaving)
        )[0]
        problems = self.right(numbers[::4], answers)
        self.report.check(
            "clients that leave during a push change no other's tokens, and no block leaks",
            problems + await self.leaks(),
            f"{len(leaving)} left, {len(answers)} stayed",
        )

    async def killed(self) -> None:
        await self.forget()
        numbers = list(range(8, 18))
        going = asyncio.ensure_future(self.answers(self.proxy, numbers))
        await asyncio.sleep(1.0)  # anywhere in the middle
        self.prefill.kill()
        self.servers = (self.decode,)
        problems = self.right(numbers, await going)
        self.report.check(
            "a prefill server that is killed during a push brings no other tokens",
            problems + await self.leaks(),
        )


def run(report: Report) -> None:
    """Make the checks."""

    async def checks() -> None:
        async with aiohttp.ClientSession(timeout=SECONDS) as session:
            await Pushed(report, held, Client(session)).run()

    with ExitStack() as held:
        asyncio.run(checks())

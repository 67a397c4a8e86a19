"""Mode "push" over HTTP: the prefilling server sends each layer while it computes the next.

It computes in chunks, and has so few blocks that long prompts have to begin again.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import aiohttp

from examples.vllm.live_servers import AT_ONCE, CHUNK, LIMITS, LONGEST_S, Client
from examples.vllm.report import Answer, Report, connector, differences, prompts
from examples.vllm.server import Proxy, Server

FEW = 72  # blocks of the prefilling server; the longest prompt takes 60
SECONDS = aiohttp.ClientTimeout(total=300)


class Pushed:
    """The checks, in the order in which they are made."""

    def __init__(self, report: Report, held: ExitStack, client: Client) -> None:
        self.report, self.held, self.client = report, held, client
        self.prompts = prompts()
        limits = LIMITS | {"prefill_timeout_ms": 60_000, "mode": "push"}
        few = [
            *("--num-gpu-blocks-override", str(FEW), "--max-num-batched-tokens", str(CHUNK)),
            # Prompts take turns, and begin before there is room for all of them.
            *("--long-prefill-token-threshold", "64", "--no-scheduler-reserve-full-isl"),
        ]
        self.prefill = Server("push-prefill", 0, connector("kv_producer", **limits), *few)
        self.decode = Server("push-decode", 1, connector("kv_consumer", **limits))
        for it in (self.prefill, self.decode):
            held.callback(it.close)
        for it in (self.prefill, self.decode):
            it.started()
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

    async def answers(self, to: Server | Proxy, numbers: Sequence[int]) -> list[Answer]:
        """What is answered to prompts that are asked at once; every other one is streamed."""
        asked = (self.client.complete(to, self.prompts[it], stream=bool(it % 2)) for it in numbers)
        return await asyncio.gather(*asked)

    def wrong(self, numbers: Sequence[int], found: Sequence[Answer]) -> list[str]:
        """Answers that are wrong, or none."""
        problems = differences([self.alone[it] for it in numbers], found)
        return problems + [
            f"prompt {n}: no answer"
            for n, it in zip(numbers, found, strict=True)
            if it.reason == "error"
        ]

    async def forget(self) -> None:
        """Let both forget their prefix caches."""
        for it in (self.prefill, self.decode):
            async with self.client.session.post(f"{it.url}/reset_prefix_cache") as response:
                response.raise_for_status()

    async def same_tokens(self) -> None:
        numbers = range(len(self.prompts))
        await self.forget()
        problems = self.wrong(numbers, await self.answers(self.proxy, numbers))
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
        numbers = [it for it in range(len(self.prompts)) for _ in range(2)]
        leaving = [
            self.client.leave(self.proxy, self.prompts[it], chance.uniform(0.0, 3.0))
            for it in numbers
        ]
        answers: list[Answer] = (
            await asyncio.gather(self.answers(self.proxy, numbers[::4]), *leaving)
        )[0]
        problems = self.wrong(numbers[::4], answers)
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
        problems = self.wrong(numbers, await going)
        self.report.check(
            "a prefill server that is killed during a push brings no other tokens",
            problems + await self.leaks(self.decode),
        )

    async def leaks(self, *servers: Server) -> list[str]:
        """Servers that hold blocks though no request runs."""
        found = []
        for it in servers or (self.prefill, self.decode):
            usage, end = 1.0, time.monotonic() + LONGEST_S
            while usage and time.monotonic() < end:  # what is fetched is free a step later
                await self.client.complete(it, [1, 2, 3], max_tokens=1)
                await asyncio.sleep(0.2)
                usage = it.metrics()["vllm:kv_cache_usage_perc"]
            if usage:
                found.append(f"{it.name} still uses {usage:.1%} of its blocks")
        return found


def run(report: Report) -> None:
    """Make the checks."""

    async def checks() -> None:
        async with aiohttp.ClientSession(timeout=SECONDS) as session:
            await Pushed(report, held, Client(session)).run()

    with ExitStack() as held:
        asyncio.run(checks())

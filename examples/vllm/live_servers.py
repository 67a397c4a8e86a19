"""Three servers and a proxy over HTTP, as users run them; clients that leave, and servers that do.

One server prefills, in chunks of 256 tokens. Two generate: one over shared memory, with room for
all; one over TCP, and with so few blocks that requests have to leave it again.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, ExitStack
from typing import Any

import aiohttp

from examples.vllm.clients import AT_ONCE, CHUNK, LIMITS, Answers, Client, until
from examples.vllm.report import Answer, Report, connector, differences
from examples.vllm.server import Proxy, Server, Service

FEW = 66  # blocks of the small cache; the longest request takes 64
QUESTIONS = (
    "What is a KV cache?",
    "Name three colours.",
    "Write one sentence about the sea.",
    "How many legs have two dogs?",
)


class Served(Answers):
    """The checks, in the order in which they are made."""

    def __init__(self, report: Report, held: ExitStack) -> None:
        super().__init__(report, held)
        chunks = ("--max-num-batched-tokens", str(CHUNK))
        self.prefill = self.server("server-prefill", 0, "kv_producer", *chunks, **LIMITS)
        self.decode = self.server("server-decode", 1, "kv_consumer", **LIMITS)
        self.small = self.server(
            "server-small",
            1,
            "kv_consumer",
            *("--num-gpu-blocks-override", str(FEW)),
            engine={"kvplan.transport": "tcp"},
            **LIMITS,
        )
        self.servers = (self.prefill, self.decode, self.small)
        for server in self.servers:
            server.started()
        self.proxy = self.proxy_over("proxy", self.decode, self.small)
        self.to_decode = self.proxy_over("proxy-decode", self.decode)
        self.to_small = self.proxy_over("proxy-small", self.small)
        report.say("three servers and their proxies are up")

    def server(self, name: str, core: int, role: str, *arguments: str, **options: Any) -> Server:
        item = Server(name, core, connector(role, **options), *arguments)
        self.held.callback(item.close)
        return item

    def proxy_over(self, name: str, *decode: Server) -> Proxy:
        proxy = Proxy(name, [self.prefill], decode, timeout_s=30)
        self.held.callback(proxy.close)
        proxy.started()
        return proxy

    def checks(self) -> Iterator[Callable[[], Coroutine[Any, Any, None]]]:
        yield self.same_tokens
        yield self.chats
        yield self.same_id
        yield self.clear_errors
        yield self.leaves_in_stream
        yield self.leaves_at_random
        yield self.preempted
        yield self.measured
        yield self.stopped
        yield self.killed
        yield self.nothing_leaks

    async def run(self) -> None:
        async with AsyncExitStack() as held:
            timeout = aiohttp.ClientTimeout(total=900)
            session = aiohttp.ClientSession(timeout=timeout)
            self.client = Client(await held.enter_async_context(session))
            self.alone = await self.answers(self.prefill, range(len(self.prompts)))
            self.chats_alone = [
                await self.client.chat(self.prefill, question) for question in QUESTIONS
            ]
            self.report.say("one server alone has answered")
            await self.forget()
            for check in self.checks():
                await check()

    def fetched(self) -> float:
        """Return the tokens that were fetched so far; vLLM's own count has failures, too."""
        return self.counted("kvplan_tokens_fetched_total", self.decode, self.small)

    async def same_tokens(self) -> None:
        numbers = range(len(self.prompts))
        before = self.fetched()
        problems = self.right(numbers, await self.answers(self.proxy, numbers))
        fetched, total = self.fetched() - before, sum(map(len, self.prompts))
        if fetched < total / 2:
            problems.append(f"only {fetched:.0f} of {total} tokens were fetched")
        self.report.check(
            "through the proxy, to two servers in turn, tokens are those of one server alone",
            problems,
            f"{len(numbers)} prompts, {AT_ONCE} at once, {fetched:.0f} of {total} tokens fetched",
        )

    async def chats(self) -> None:
        problems = []
        for stream in (False, True):
            for question, alone in zip(QUESTIONS, self.chats_alone, strict=True):
                answer = await self.client.chat(self.proxy, question, stream=stream)
                if answer != alone:
                    problems.append(f"{question} {answer!r}, and alone {alone!r}")
        self.report.check("chats say what one server alone says, streamed or not", problems)

    async def same_id(self) -> None:
        body = {"model": "model", "prompt": self.prompts[5], "max_tokens": 2}
        headers = {"X-Request-Id": "kvplan-live-17"}
        url = f"{self.to_decode.url}/v1/completions"
        async with self.client.session.post(url, json=body, headers=headers) as response:
            answer = await response.json()
            returned = response.headers.get("X-Request-Id")
        problems = []
        if returned != "kvplan-live-17" or "kvplan-live-17" not in answer["id"]:
            problems.append(f"X-Request-Id {returned}, id {answer['id']}")
        if "kvplan-live-17" not in self.decode.said():
            problems.append("the decode server's log does not say the id")
        self.report.check("X-Request-Id reaches the servers, and their logs", problems)

    async def clear_errors(self) -> None:
        problems = []
        long = {"model": "model", "prompt": [5] * 4000, "max_tokens": 2}
        for body, status in (("no JSON", 400), (json.dumps([1]), 400), (json.dumps(long), 400)):
            url = f"{self.to_decode.url}/v1/completions"
            headers = {"Content-Type": "application/json"}
            async with self.client.session.post(url, data=body, headers=headers) as response:
                text = await response.text()
                if response.status != status or '"error"' not in text:
                    problems.append(f"{body[:20]}: {response.status} {text[:200]}")
        self.report.check("what cannot be asked is answered with an error that says so", problems)

    async def leaves_in_stream(self) -> None:
        before = self.counted("generation_tokens_total", self.decode)
        for number in (6, 14):
            await self.client.leave_in_stream(self.to_decode, self.prompts[number], 3)
        idle = await until(lambda: not self.counted("num_requests_running", self.decode))
        generated = self.counted("generation_tokens_total", self.decode) - before
        problems = [] if idle else ["the server goes on with the request"]
        if generated > 1500:
            problems.append(f"{generated:.0f} tokens were generated")
        self.report.check(
            "a client that leaves in mid-stream ends its request",
            problems,
            f"{generated:.0f} of 3000 tokens were generated",
        )

    async def leaves_at_random(self) -> None:
        """Let clients leave while others stay; on both sides, and at any moment."""
        await self.forget()
        chance = random.Random(7)
        numbers = [index for index in range(len(self.prompts)) for _ in range(2)]
        leaving = [
            self.client.leave(self.proxy, self.prompts[number], chance.uniform(0.0, 2.0))
            for number in numbers
        ]
        staying = asyncio.gather(self.answers(self.proxy, numbers[::4]), *leaving)
        answers: list[Answer] = (await staying)[0]
        problems = self.right(numbers[::4], answers)
        idle = await until(lambda: not self.counted("num_requests_running", *self.servers))
        problems += [] if idle else ["servers go on with requests"]
        problems += await self.leaks()
        self.report.check(
            "clients that leave at random moments change no other's tokens, and no block leaks",
            problems,
            f"{len(leaving)} left, {len(answers)} stayed",
        )

    async def preempted(self) -> None:
        """More tokens than the cache has room for: 8 requests that begin with 8 blocks each."""
        await self.forget()
        text = [token for prompt in self.prompts for token in prompt]
        asked = [text[at : at + 250] for at in range(0, 250 * AT_ONCE, 250)]

        async def of(to: Service) -> list[Answer]:
            all_at_once = (self.client.complete(to, item, max_tokens=200) for item in asked)
            return await asyncio.gather(*all_at_once)

        alone = await of(self.decode)
        before = self.counted("num_preemptions_total", self.small)
        found = await of(self.to_small)
        preempted = self.counted("num_preemptions_total", self.small) - before
        problems = differences(alone, found)
        if not preempted:
            problems.append("nothing was preempted")
        problems += await self.leaks()
        self.report.check(
            "requests that are preempted go on with the same tokens, and no block leaks",
            problems,
            f"{preempted:.0f} preemptions with {FEW} blocks, over TCP",
        )

    async def measured(self) -> None:
        """Check what /metrics says of all that was before."""
        ours, theirs = self.prefill.metrics(), self.decode.metrics()
        name = "vllm:kvplan_"
        counts = {
            "fetched requests": theirs[f"{name}requests_fetched_total"],
            "fetched MiB": theirs[f"{name}bytes_fetched_total"] / 2**20,
            "transfers": theirs[f"{name}transfer_seconds_count"],
            "offered": ours[f"{name}requests_offered_total"],
            "freed": ours[f"{name}requests_freed_total"],
        }
        problems = [f"{what} is 0" for what, value in counts.items() if not value]
        if counts["offered"] != counts["freed"]:
            problems.append("what was offered is not free")
        counts["ms each"] = 1000 * theirs[f"{name}transfer_seconds_sum"] / counts["transfers"]
        self.report.check(
            "/metrics says what was fetched, offered and freed",
            problems,
            ", ".join(f"{value:.0f} {what}" for what, value in counts.items()),
        )

    async def nothing_leaks(self) -> None:
        self.report.check("no block is held when all has ended", await self.leaks())

    async def stopped(self) -> None:
        """Stop the prefilling server while it is fetched from, for longer than limits."""
        await self.forget()
        numbers = list(range(8, 18))
        params = [
            item.params
            for item in await asyncio.gather(
                *(
                    self.client.complete(
                        self.prefill,
                        self.prompts[item],
                        max_tokens=1,
                        kv_transfer_params={"do_remote_decode": True},
                    )
                    for item in numbers
                )
            )
        ]

        async def fetch(number: int, at: int, to: Server) -> Answer:
            given = {} if params[at] is None else {"kv_transfer_params": params[at]}
            return await self.client.complete(to, self.prompts[number], **given)

        going = [
            asyncio.ensure_future(fetch(number, at, (self.decode, self.small)[at % 2]))
            for at, number in enumerate(numbers)
        ]
        await asyncio.sleep(0.05)  # anywhere in the middle
        self.prefill.send(signal.SIGSTOP)
        found = await asyncio.gather(*going)
        problems = self.right(numbers, found)
        self.prefill.send(signal.SIGCONT)
        problems += self.right([9, 10], await self.answers(self.proxy, [9, 10]))
        problems += await self.leaks()
        self.report.check(
            "a prefill server that stands still brings no other tokens, and goes on", problems
        )

    async def killed(self) -> None:
        await self.forget()
        numbers = list(range(6, 18))
        going = asyncio.ensure_future(self.answers(self.proxy, numbers))
        await asyncio.sleep(1.0)
        self.prefill.kill()
        problems = self.right(numbers, await going)
        problems += self.right([3, 7], await self.answers(self.proxy, [3, 7]))
        if "the decode server computes the prompt" not in self.proxy.said():
            problems.append("the proxy's log does not say that it is down")
        self.report.check("without the prefill server the decode servers compute prompts", problems)
        again = Server(
            "server-again", 0, connector("kv_producer", **LIMITS), port=self.prefill.port
        )
        self.held.callback(again.close)
        await asyncio.to_thread(again.started)
        self.prefill, self.servers = again, (again, self.decode, self.small)
        await self.forget()
        before = self.fetched()
        problems = self.right(numbers, await self.answers(self.proxy, numbers))
        fetched = self.fetched() - before
        if not fetched:
            problems.append("nothing was fetched")
        self.report.check(
            "when it is back at the same address, it is used again",
            problems,
            f"{fetched:.0f} tokens fetched",
        )


def run(report: Report) -> None:
    """Make the checks."""
    with ExitStack() as held:
        asyncio.run(Served(report, held).run())

"""Clients of servers that speak OpenAI's protocol, and whether what they are answered is right."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import aiohttp

from examples.vllm.report import TOKENS, Answer, Report, differences, prompts
from examples.vllm.server import Server, Service

AT_ONCE = 8
CHUNK = 256  # tokens that the prefilling server computes in a step
LIMITS = {"lease_ttl_ms": 15_000, "renew_interval_ms": 1_000, "pull_timeout_ms": 4_000}
LONGEST_S = 60.0  # for what has to happen some time


class Client:
    """Sends requests, a few at once.

    Args:
        session: of aiohttp.
        at_once: how many requests are open at most.
    """

    def __init__(self, session: aiohttp.ClientSession, at_once: int = AT_ONCE) -> None:
        self.session = session
        self._slots = asyncio.Semaphore(at_once)

    async def complete(
        self, to: Service, prompt: Sequence[int], *, stream: bool = False, **given: Any
    ) -> Answer:
        """Generate greedily from token ids."""
        body = {
            "model": "model",
            "prompt": list(prompt),
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": stream,
            **given,
        }
        async with self._slots:
            url = f"{to.url}/v1/completions"
            async with self.session.post(url, json=body) as response:
                if response.status != 200:
                    return Answer([], "error")
                if not stream:
                    answer = await response.json()
                    choice = answer["choices"][0]
                    params = answer.get("kv_transfer_params")
                    return Answer(choice["token_ids"], choice["finish_reason"], params)
                tokens: list[int] = []
                reason = None
                async for item in events(response):
                    for choice in item.get("choices", ()):
                        tokens += choice.get("token_ids") or ()
                        reason = choice.get("finish_reason") or reason
                return Answer(tokens, reason)

    async def chat(self, to: Service, question: str, *, stream: bool = False) -> str:
        """Ask a question; returns what is answered."""
        body = {
            "model": "model",
            "messages": [{"role": "user", "content": question}],
            "max_completion_tokens": TOKENS,
            "temperature": 0,
            "stream": stream,
        }
        async with self._slots:
            url = f"{to.url}/v1/chat/completions"
            async with self.session.post(url, json=body) as response:
                response.raise_for_status()
                if not stream:
                    return str((await response.json())["choices"][0]["message"]["content"])
                pieces = [
                    choice["delta"].get("content") or ""
                    async for event in events(response)
                    for choice in event.get("choices", ())
                ]
                return "".join(pieces)

    async def leave(self, to: Service, prompt: Sequence[int], after_s: float) -> None:
        """Ask for a long answer, and go after some time, whatever has come."""
        with suppress(TimeoutError):
            async with asyncio.timeout(after_s):
                await self.complete(to, prompt, stream=True, max_tokens=1000)

    async def leave_in_stream(self, to: Service, prompt: Sequence[int], events_seen: int) -> None:
        """Ask for a long answer, and go when some of it has come."""
        body = {"model": "model", "prompt": list(prompt), "max_tokens": 1500, "stream": True}
        body |= {"temperature": 0, "ignore_eos": True}
        async with self.session.post(f"{to.url}/v1/completions", json=body) as response:
            async for _ in events(response):
                events_seen -= 1
                if not events_seen:
                    response.close()
                    return


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Yield the JSON objects of a stream of server-sent events."""
    async for line in response.content:
        data = line.decode().removeprefix("data:").strip()
        if line.startswith(b"data:") and data != "[DONE]":
            yield json.loads(data)


async def until(what: Callable[[], bool]) -> bool:
    """Wait until something is so; returns whether it came to be."""
    end = time.monotonic() + LONGEST_S
    while not await asyncio.to_thread(what):
        if time.monotonic() > end:
            return False
        await asyncio.sleep(0.2)
    return True


class Answers:
    """A base of checks of what servers answer to the prompts.

    Attributes:
        servers: all that must hold no block in the end.
        client, alone: set before the checks: who asks, and what one server alone has answered.
    """

    servers: tuple[Server, ...]
    client: Client
    alone: list[Answer]

    def __init__(self, report: Report, held: ExitStack) -> None:
        self.report, self.held = report, held
        self.prompts = prompts()

    async def answers(self, to: Service, numbers: Sequence[int], **given: Any) -> list[Answer]:
        """Return the answers to prompts that are asked at once; every other one is streamed."""
        return await asyncio.gather(
            *(
                self.client.complete(to, self.prompts[number], stream=bool(number % 2), **given)
                for number in numbers
            )
        )

    def right(self, numbers: Sequence[int], found: Sequence[Answer]) -> list[str]:
        """Return the answers that are wrong, or missing."""
        problems = differences([self.alone[number] for number in numbers], found)
        return problems + [
            f"prompt {n}: no answer"
            for n, item in zip(numbers, found, strict=True)
            if item.reason == "error"
        ]

    async def forget(self) -> None:
        """Let the servers forget their prefix caches."""
        for server in self.servers:
            async with self.client.session.post(f"{server.url}/reset_prefix_cache") as response:
                response.raise_for_status()

    @staticmethod
    def counted(name: str, *servers: Server) -> float:
        """Return a counter of servers, summed."""
        return sum(server.metrics().get(f"vllm:{name}", 0.0) for server in servers)

    async def leaks(self) -> list[str]:
        """Return servers that hold blocks though no request runs."""

        async def held(server: Server) -> list[str]:
            usage, end = 1.0, time.monotonic() + LONGEST_S
            while usage and time.monotonic() < end:  # what is fetched is free a step later
                await self.client.complete(server, [1, 2, 3], max_tokens=1)
                await asyncio.sleep(0.2)
                usage = self.counted("kv_cache_usage_perc", server)
            return [f"{server.name} still uses {usage:.1%} of its blocks"] if usage else []

        return [text for server in self.servers for text in await held(server)]

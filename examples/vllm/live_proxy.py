"""The proxy over servers that only pretend: what it does when they fail, and when clients leave."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from typing import Any

import aiohttp
from aiohttp import web

from examples.vllm.proxy import Proxy
from examples.vllm.report import Report, free_port

PATH = "/v1/completions"
SERVER = {"protocol": 2, "instance": "aa", "sources": [[7, "10.0.0.1:26000"]]}
PARAMS = {"do_remote_prefill": True, "kvplan": {**SERVER, "handle": "00" * 16}}
FOREVER_S = 600.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Pretended:
    """Servers that pretend, and what they were asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any], str]] = []
        self.cancelled = asyncio.Event()
        self.together = asyncio.Barrier(2)

    async def prefill(self, request: web.Request) -> web.StreamResponse:
        """Keeps a KV cache."""
        await self._asked("prefill", request)
        return web.json_response({"kv_transfer_params": PARAMS})

    async def fails(self, request: web.Request) -> web.StreamResponse:
        """Answers with an error."""
        await self._asked("fails", request)
        return web.Response(status=500, text="no memory left")

    async def hangs(self, request: web.Request) -> web.StreamResponse:
        """Never answers."""
        await self._asked("hangs", request)
        return await self._forever()

    async def prefill_pushes(self, request: web.Request) -> web.StreamResponse:
        """Keeps a KV cache; of a transfer once the other side is asked, too."""
        body = await self._asked("prefill", request)
        if "kvplan" in body["kv_transfer_params"]:
            if body.get("suffix") == "fail":
                return web.Response(status=500, text="no memory left")
            await self.together.wait()
        return web.json_response({"kv_transfer_params": PARAMS})

    async def decode_pushed(self, request: web.Request) -> web.StreamResponse:
        """Answers; to a transfer once the other side is asked, too."""
        body = await self._asked("decode", request)
        if "transfer" in body.get("kv_transfer_params", {}).get("kvplan", ()):
            if body.get("suffix") == "fail":
                return await self._forever()
            await self.together.wait()
        return web.Response(text="answer")

    async def decode(self, request: web.Request) -> web.StreamResponse:
        """Answers in pieces: to `suffix` "break" with a part, to "wait" without an end."""
        body = await self._asked("decode", request)
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        await stream.write(b"data: 1\n\n")
        if body.get("suffix") == "break":
            assert request.transport is not None
            request.transport.abort()
        elif body.get("suffix") == "wait":
            await self._forever()
        else:
            await stream.write(b"data: [DONE]\n\n")
            await stream.write_eof()
        return stream

    async def _asked(self, name: str, request: web.Request) -> dict[str, Any]:
        body: dict[str, Any] = await request.json()
        self.asked.append((name, body, request.headers["X-Request-Id"]))
        return body

    async def _forever(self) -> web.StreamResponse:
        try:
            await asyncio.sleep(FOREVER_S)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        raise AssertionError("it was to be cancelled")


async def serve(held: AsyncExitStack, app: web.Application) -> str:
    """Serve an application until the end; returns its URL."""
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
    await runner.setup()
    held.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    return f"http://{host}:{port}"


class Checks:
    """The checks; each has a proxy of its own."""

    def __init__(self, report: Report, held: AsyncExitStack, session: aiohttp.ClientSession):
        self.report, self.held, self.session = report, held, session
        self.servers = Pretended()

    async def over(
        self,
        prefill: list[Handler | None],
        decode: list[Handler | None],
        timeout_s: float = 30,
        *,
        push: bool = False,
    ) -> str:
        """A proxy over servers; None is one that is down."""
        urls = []
        for handler in (*prefill, *decode):
            app = web.Application()
            if handler is None:
                urls.append(f"http://127.0.0.1:{free_port()}")
                continue
            app.router.add_post(PATH, handler)
            urls.append(await serve(self.held, app))
        proxy = Proxy(urls[: len(prefill)], urls[len(prefill) :], timeout_s, push=push)
        self.servers.asked.clear()
        self.servers.cancelled.clear()
        return await serve(self.held, proxy.application())

    async def post(self, url: str, **body: Any) -> tuple[int, str]:
        """Status and text of an answer; 0: it broke."""
        try:
            async with self.session.post(url + PATH, json={"prompt": [1, 2], **body}) as response:
                return response.status, await response.text()
        except aiohttp.ClientError as error:
            return 0, str(error)

    def say(self, name: str, found: object, expected: object) -> None:
        self.report.check(name, [] if found == expected else [f"{found} instead of {expected}"])

    def whom(self) -> list[str]:
        """Who was asked, in that order."""
        return [name for name, _, _ in self.servers.asked]

    async def run(self) -> None:
        it = self.servers
        url = await self.over([it.prefill], [it.decode])
        answer = await self.post(url, stream=True, min_tokens=3, max_tokens=9)
        (_, first, id_1), (_, second, id_2) = it.asked
        asked = [first[key] for key in ("max_tokens", "stream", "kv_transfer_params")]
        asked += [first.get("min_tokens"), second["max_tokens"], second["kv_transfer_params"]]
        expected = [1, False, {"do_remote_decode": True}, None, 9, PARAMS]
        self.say("the proxy asks for one token, and then for the rest", asked, expected)
        whole = (200, "data: 1\n\ndata: [DONE]\n\n")
        self.say("the answer is passed on, under one id", (answer, id_1), (whole, id_2))

        url = await self.over([it.fails, None, it.prefill], [None, it.decode])
        found = [await self.post(url) for _ in range(3)]
        found_last = it.asked[-1][1].get("kv_transfer_params")
        self.say(
            "others are asked for servers that fail", (found, found_last), ([whole] * 3, PARAMS)
        )

        url = await self.over([it.fails, None], [it.decode])
        found_one, asked_with = await self.post(url), it.asked[-1][1].get("kv_transfer_params")
        text = "without a prefill server the decode server gets the request as it is"
        self.say(text, (found_one, asked_with), (whole, None))
        url = await self.over([it.hangs], [it.decode], timeout_s=0.5)
        found_one = await self.post(url)
        text = "a prefill server that hangs is left, and its request ended"
        self.say(text, (found_one, self.whom()), (whole, ["hangs", "decode"]))

        url = await self.over([it.prefill], [it.decode])
        for body in ({"n": 2}, {"prompt": ["a", "b"]}, {"echo": True}):
            await self.post(url, **body)
        self.say("what one KV cache cannot serve is not prefilled", self.whom(), ["decode"] * 3)
        status, _ = await self.post(url, suffix="break")
        self.say("an answer that breaks off does not look whole", status, 0)

        url = await self.over([it.prefill], [None])
        status, text = await self.post(url)
        self.say(
            "without a decode server there is an error", (status, '"error"' in text), (502, True)
        )

        url = await self.over([it.prefill_pushes], [it.decode_pushed], push=True)
        await self.post(url)  # which says what the prefill server is
        it.asked.clear()
        status, _ = await self.post(url)
        asked_of = {name: body["kv_transfer_params"] for name, body, _ in it.asked}
        transfer = asked_of["prefill"]["kvplan"].get("transfer")
        expected_of = {
            "prefill": {"do_remote_decode": True, "kvplan": {"transfer": transfer}},
            "decode": {"do_remote_prefill": True, "kvplan": {**SERVER, "transfer": transfer}},
        }
        text = "with --push both are asked at the same time, for one transfer"
        self.say(text, (status, asked_of, bool(transfer)), (200, expected_of, True))
        it.asked.clear()
        status, _ = await self.post(url, suffix="fail")
        with suppress(TimeoutError):
            await asyncio.wait_for(it.cancelled.wait(), 30)
        text = "if the prefill server fails then, the decode server is asked again"
        found_last = it.asked[-1][0], it.asked[-1][1].get("kv_transfer_params")
        self.say(text, (status, found_last, it.cancelled.is_set()), (200, ("decode", None), True))

        for name, prefill, suffix in (
            ("while its prompt is computed", it.hangs, ""),
            ("while its answer comes", it.prefill, "wait"),
        ):
            url = await self.over([prefill], [it.decode])
            leaving = asyncio.ensure_future(self.post(url, suffix=suffix))
            last = "decode" if suffix else "hangs"
            while last not in self.whom():
                await asyncio.sleep(0.01)
            leaving.cancel()
            with suppress(asyncio.CancelledError):
                await leaving
            with suppress(TimeoutError):
                await asyncio.wait_for(it.cancelled.wait(), 30)
            text = f"a client that leaves {name} ends its request"
            self.say(text, it.cancelled.is_set(), True)


async def _run(report: Report) -> None:
    async with AsyncExitStack() as held:
        session = await held.enter_async_context(aiohttp.ClientSession())
        await Checks(report, held, session).run()


def run(report: Report) -> None:
    """Make the checks."""
    logging.getLogger("proxy").setLevel(logging.CRITICAL)  # all of this is to fail
    asyncio.run(_run(report))

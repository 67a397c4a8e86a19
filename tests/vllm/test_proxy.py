"""The proxy over pretended servers: its requests, failing servers, and clients that leave."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import pytest

pytest.importorskip("aiohttp")  # the extra `test` has it; vLLM brings it to users

import aiohttp
from aiohttp import web

from kvplan.vllm.proxy import Proxy
from tests.support.ports import free_port

PATH = "/v1/completions"
SERVER = {"protocol": 4, "instance": "aa", "sources": [[7, "10.0.0.1:26000"]]}
PARAMS = {"do_remote_prefill": True, "kvplan": {**SERVER, "handle": "00" * 16}}
WHOLE = (200, "data: 1\n\ndata: [DONE]\n\n")
DEADLINE_S = 60.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Pretended:
    """Pretended servers, and the requests that they got."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any], str]] = []
        self.arrived = asyncio.Condition()
        self.cancelled = asyncio.Event()
        self.both = asyncio.Barrier(2)
        self.decoding: set[str] = set()  # names that a decode server has been asked by

    def names(self) -> list[str]:
        return [name for name, _, _ in self.asked]

    async def prefill(self, request: web.Request) -> web.StreamResponse:
        await self.read("prefill", request)
        return web.json_response({"kv_transfer_params": PARAMS})

    async def keeps_nothing(self, request: web.Request) -> web.StreamResponse:
        await self.read("keeps_nothing", request)
        return web.json_response({"kv_transfer_params": None})

    async def is_another(self, request: web.Request) -> web.StreamResponse:
        await self.read("is_another", request)
        return web.json_response(["not a server of vLLM"])

    async def fails(self, request: web.Request) -> web.StreamResponse:
        await self.read("fails", request)
        return web.Response(status=500, text="no memory left")

    async def refuses(self, request: web.Request) -> web.StreamResponse:
        await self.read("refuses", request)
        return web.Response(status=400, text="the prompt is too long")

    async def hangs(self, request: web.Request) -> web.StreamResponse:
        await self.read("hangs", request)
        return await self.never()

    async def disconnects(self, request: web.Request) -> web.Response:
        await self.read("disconnects", request)
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async def prefill_pushes(self, request: web.Request) -> web.StreamResponse:
        """Answer a transfer only after the decode server has a request, too."""
        body = await self.read("prefill", request)
        if "kvplan" in body["kv_transfer_params"]:
            if body.get("suffix") == "fail":
                return web.Response(status=500, text="no memory left")
            await self.both.wait()
        return web.json_response({"kv_transfer_params": PARAMS})

    async def decode_pushed(self, request: web.Request) -> web.StreamResponse:
        """Answer a transfer only after the prefill server has a request, too."""
        body = await self.read("decode", request)
        if "transfer" in body.get("kv_transfer_params", {}).get("kvplan", ()):
            if body.get("suffix") == "fail":
                return await self.never()
            await self.both.wait()
        return web.Response(text="answer")

    async def decode(self, request: web.Request) -> web.StreamResponse:
        """Answer in pieces; suffix "break" breaks the answer off, and "wait" never ends it."""
        body = await self.read("decode", request)
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        await stream.write(b"data: 1\n\n")
        if body.get("suffix") == "break":
            assert request.transport is not None
            request.transport.abort()
        elif body.get("suffix") == "wait":
            await self.never()
        else:
            await stream.write(b"data: [DONE]\n\n")
            await stream.write_eof()
        return stream

    async def read(self, name: str, request: web.Request) -> dict[str, Any]:
        """Record a request; as vLLM, let a decode server refuse a name that is in use."""
        body: dict[str, Any] = await request.json()
        async with self.arrived:
            self.asked.append((name, body, request.headers["X-Request-Id"]))
            self.arrived.notify_all()
        if name == "decode":
            if request.headers["X-Request-Id"] in self.decoding:  # a cancelled one ends later
                raise web.HTTPBadRequest(text="the name is in use")
            self.decoding.add(request.headers["X-Request-Id"])
        return body

    async def never(self) -> web.StreamResponse:
        try:
            await asyncio.sleep(DEADLINE_S)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        raise AssertionError("the request was not cancelled")


async def serve(held: AsyncExitStack, app: web.Application) -> str:
    """Serve an application until the end, and return its URL."""
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
    await runner.setup()
    held.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    return f"http://{host}:{port}"


def unused_url() -> str:
    """Return a URL at which no server listens."""
    return f"http://127.0.0.1:{free_port()}"


async def models(request: web.Request) -> web.Response:
    return web.json_response({"of": request.headers.get("Authorization")}, status=203)


async def healthy(_: web.Request) -> web.Response:
    return web.Response()


class Client:
    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url, self.session = url, session

    async def post(self, path: str = PATH, **body: Any) -> tuple[int, str]:
        """Return the status and text of an answer; status 0 if it broke off."""
        try:
            given = {"prompt": [1, 2], **body}
            async with self.session.post(self.url + path, json=given) as response:
                return response.status, await response.text()
        except aiohttp.ClientError as error:
            return 0, str(error)


@asynccontextmanager
async def proxy_over(
    prefill: Sequence[Handler | str | None],
    decode: Sequence[Handler | str | None],
    timeout_s: float = DEADLINE_S,
    *,
    push: bool = False,
) -> AsyncIterator[Client]:
    """Yield a client of a proxy over servers; None is one that is down."""
    async with AsyncExitStack() as held:
        session = await held.enter_async_context(aiohttp.ClientSession())
        urls = []
        for handler in (*prefill, *decode):
            if handler is None or isinstance(handler, str):
                urls.append(handler or unused_url())
                continue
            app = web.Application()
            app.router.add_post(PATH, handler)
            app.router.add_post("/v1/chat/completions", handler)
            app.router.add_get("/health", healthy)
            app.router.add_get("/v1/models", models)
            urls.append(await serve(held, app))
        proxy = Proxy(urls[: len(prefill)], urls[len(prefill) :], timeout_s, push=push)
        yield Client(await serve(held, proxy.application()), session)


def test_a_prefill_server_is_asked_for_one_token_and_a_decode_server_for_the_rest() -> None:
    async def run() -> None:
        servers = Pretended()
        async with proxy_over([servers.prefill], [servers.decode]) as client:
            options: dict[str, Any] = {
                "min_tokens": 3,
                "stream_options": {"include_usage": True},
                "n": None,
            }
            assert await client.post(stream=True, max_tokens=9, seed=5, **options) == WHOLE
        (_, first, first_id), (_, second, second_id) = servers.asked
        asked = {"prompt": [1, 2], "seed": 5, "n": None}
        prefilled = {"do_remote_decode": True}
        one = {"max_tokens": 1, "stream": False, "kv_transfer_params": prefilled}
        rest = {"max_tokens": 9, "stream": True, "kv_transfer_params": PARAMS}
        assert (first, second) == (asked | one, asked | options | rest)
        assert first_id == second_id

    asyncio.run(run())


def test_a_chat_is_asked_for_one_token_by_the_name_of_chats() -> None:
    async def run() -> None:
        servers = Pretended()
        async with proxy_over([servers.prefill], [servers.decode]) as client:
            assert await client.post("/v1/chat/completions", max_completion_tokens=9) == WHOLE
        (_, first, _), (_, second, _) = servers.asked
        assert (first["max_tokens"], first["max_completion_tokens"]) == (1, 1)
        assert (second.get("max_tokens"), second["max_completion_tokens"]) == (None, 9)

    asyncio.run(run())


def test_other_servers_replace_those_that_fail() -> None:
    async def run() -> None:
        servers = Pretended()
        prefill = [servers.fails, None, servers.prefill]
        async with proxy_over(prefill, [None, servers.decode]) as client:
            assert [await client.post() for _ in range(3)] == [WHOLE] * 3
        decoded = [body for name, body, _ in servers.asked if name == "decode"]
        assert [body.get("kv_transfer_params") for body in decoded] == [PARAMS] * 3

    asyncio.run(run())


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_host_that_does_not_answer_is_not_waited_for(
    side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection never opens, as behind a firewall; a prompt and an answer may take long."""

    async def answers(connect_s: float) -> bool:
        monkeypatch.setattr("kvplan.vllm.proxy._CONNECT_S", connect_s)  # a stall may take longer
        servers = Pretended()
        with (
            socket.create_server(("127.0.0.1", 0), backlog=0) as silent,
            socket.create_connection(silent.getsockname()),  # the queue of `silent` is full
        ):
            sides: Any = {"prefill": [servers.prefill], "decode": [servers.decode]}
            sides[side].insert(0, f"http://127.0.0.1:{silent.getsockname()[1]}")
            async with proxy_over(**sides) as client, asyncio.timeout(DEADLINE_S / 2):
                answer = await client.post()
                async with client.session.get(f"{client.url}/health") as response:
                    healthy = [*(await response.json()).values()]
        return (answer, healthy.count(False), servers.names()) == (WHOLE, 1, ["prefill", "decode"])

    assert any(asyncio.run(answers(connect_s)) for connect_s in (0.2, 2.0))


def test_a_decode_server_that_failed_is_asked_last() -> None:
    """Otherwise every request in its turn waits for it again."""

    async def run() -> None:
        servers = Pretended()
        async with proxy_over([servers.prefill], [servers.disconnects, servers.decode]) as client:
            assert [await client.post() for _ in range(4)] == [WHOLE] * 4
        assert servers.names().count("disconnects") == 1

    asyncio.run(run())


@pytest.mark.parametrize("kind", ["fails", "keeps_nothing", "is_another"])
def test_without_a_prefilled_cache_the_decode_server_gets_the_original_request(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        servers = Pretended()
        async with proxy_over([getattr(servers, kind)], [servers.decode]) as client:
            assert await client.post() == WHOLE
        assert servers.names() == [kind, "decode"]
        assert "kv_transfer_params" not in servers.asked[-1][1]

    asyncio.run(run())
    assert "the decode server computes the prompt" in caplog.text


def test_a_refused_request_does_not_count_as_a_failure_of_the_server() -> None:
    """No other server is asked to prefill the request, and this one takes its next turn."""

    async def run() -> None:
        servers = Pretended()
        async with proxy_over([servers.refuses, servers.prefill], [servers.decode]) as client:
            assert [await client.post() for _ in range(3)] == [WHOLE] * 3
        assert servers.names() == ["refuses", "decode", "prefill", "decode", "refuses", "decode"]

    asyncio.run(run())


def test_a_prefill_server_that_hangs_times_out() -> None:
    async def run() -> None:
        # On a busy machine the time may be over before the server is asked.
        for timeout_s in (0.2, 2.0, 20.0):
            servers = Pretended()
            async with proxy_over([servers.hangs], [servers.decode], timeout_s=timeout_s) as client:
                assert await client.post() == WHOLE
                if "hangs" in servers.names():
                    await asyncio.wait_for(servers.cancelled.wait(), DEADLINE_S)
                    break
        assert servers.names() == ["hangs", "decode"]

    asyncio.run(run())


def test_a_request_that_one_kv_cache_cannot_serve_is_not_prefilled() -> None:
    async def run() -> None:
        servers = Pretended()
        bodies: list[dict[str, Any]] = [{"n": 2}, {"prompt": ["a", "b"]}, {"echo": True}]
        bodies += [{"best_of": 2}, {"prompt_logprobs": 0}]
        async with proxy_over([servers.prefill], [servers.decode]) as client:
            for body in bodies:
                assert await client.post(**body) == WHOLE
        assert servers.names() == ["decode"] * len(bodies)

    asyncio.run(run())


def test_a_broken_answer_breaks_off_for_the_client() -> None:
    async def run() -> None:
        servers = Pretended()
        async with proxy_over([servers.prefill], [servers.decode]) as client:
            status, _ = await client.post(suffix="break")
        assert status == 0

    asyncio.run(run())


@pytest.mark.parametrize("given", ["mine", ""])
def test_a_request_that_no_server_can_take_gets_an_error_in_openais_form(given: str) -> None:
    async def run() -> None:
        servers = Pretended()
        async with proxy_over([servers.prefill], [None]) as client:
            url, headers = client.url + PATH, {"X-Request-Id": given}
            async with client.session.post(url, json={}, headers=headers) as response:
                text = await response.text()
                assert (response.status, '"server_error"' in text) == (502, True)
                assert len(response.headers["X-Request-Id"]) == (len(given) or 32)
            for data in ("[1]", "{"):
                async with client.session.post(url, data=data) as response:
                    text = await response.text()
                    assert (response.status, '"invalid_request_error"' in text) == (400, True)

    asyncio.run(run())


@pytest.mark.parametrize("key", [None, "Bearer key"])
def test_models_come_from_a_decode_server_that_answers(key: str | None) -> None:
    async def run() -> None:
        servers = Pretended()
        headers = {} if key is None else {"Authorization": key}
        for decode, expected in (([None, servers.decode], (203, {"of": key})), ([None], 502)):
            async with (
                proxy_over([servers.prefill], decode) as client,
                client.session.get(f"{client.url}/v1/models", headers=headers) as response,
            ):
                body = await response.json()
                assert expected in (response.status, (response.status, body))

    asyncio.run(run())


def test_push_asks_both_servers_at_once_for_one_transfer() -> None:
    async def run() -> None:
        servers = Pretended()
        both = [servers.prefill_pushes], [servers.decode_pushed]
        async with proxy_over(*both, push=True) as client:
            await client.post()  # its answer describes the prefill server
            servers.asked.clear()
            status, _ = await client.post()
        asked = {name: body["kv_transfer_params"] for name, body, _ in servers.asked}
        transfer = asked["prefill"]["kvplan"]["transfer"]
        assert status == 200
        assert transfer
        assert asked == {
            "prefill": {"do_remote_decode": True, "kvplan": {"transfer": transfer}},
            "decode": {"do_remote_prefill": True, "kvplan": {**SERVER, "transfer": transfer}},
        }

    asyncio.run(run())


@pytest.mark.parametrize("refuses", [False, True], ids=["waits", "refuses"])
def test_the_first_push_after_a_restart_of_the_prefill_server_is_fetched(refuses: bool) -> None:
    """The decode server was asked for a transfer of the process before, which never comes."""

    async def run() -> None:
        servers, reads = Pretended(), 0
        again = {**PARAMS, "kvplan": {**SERVER, "instance": "bb", "handle": "11" * 16}}

        async def prefill(request: web.Request) -> web.StreamResponse:
            nonlocal reads
            reads += 1
            if reads == 2:
                async with servers.arrived:
                    await servers.arrived.wait_for(lambda: "decode" in servers.names())
            await servers.read("prefill", request)
            return web.json_response({"kv_transfer_params": again if reads > 1 else PARAMS})

        async def decode(request: web.Request) -> web.StreamResponse:
            reference = (await servers.read("decode", request))["kv_transfer_params"]["kvplan"]
            if reference.get("transfer") and reference["instance"] == "aa":
                return web.Response(status=500, text="gone") if refuses else await servers.never()
            return web.Response(text="answer")

        async with proxy_over([prefill], [decode], push=True) as client:
            await client.post()
            servers.asked.clear()
            url, body, named = client.url + PATH, {"prompt": [1, 2]}, {"X-Request-Id": "mine"}
            async with client.session.post(url, json=body, headers=named) as response:
                assert (response.status, await response.text()) == (200, "answer")
                assert response.headers["X-Request-Id"] == "mine"
            assert await client.post() == (200, "answer")
        asked = [body["kv_transfer_params"] for name, body, _ in servers.asked if name == "decode"]
        assert [params["kvplan"]["instance"] for params in asked] == ["aa", "bb", "bb"]
        assert asked[1] == again
        assert asked[2]["kvplan"]["transfer"]

    asyncio.run(run())


@pytest.mark.parametrize("prefill", [1, 2])
def test_a_decode_server_is_asked_again_if_the_push_fails(prefill: int) -> None:
    """The transfer belongs to one prefill server; the others are asked in turn, without it."""

    async def run() -> None:
        servers = Pretended()
        both = [servers.prefill_pushes] * prefill, [servers.decode_pushed]
        async with proxy_over(*both, push=True) as client:
            for _ in range(prefill):
                await client.post()
            servers.asked.clear()
            status, _ = await client.post(suffix="fail")
            await asyncio.wait_for(servers.cancelled.wait(), DEADLINE_S)
        asked = [body["kv_transfer_params"] for name, body, _ in servers.asked if name == "prefill"]
        name, body, _ = servers.asked[-1]
        found = PARAMS if prefill > 1 else None
        assert (status, name, body.get("kv_transfer_params")) == (200, "decode", found)
        assert ["kvplan" in params for params in asked] == [True, False][:prefill]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("kind", "suffix", "last"), [("hangs", "", "hangs"), ("prefill", "wait", "decode")]
)
def test_a_client_that_leaves_ends_its_request(kind: str, suffix: str, last: str) -> None:
    async def run() -> None:
        servers = Pretended()
        async with proxy_over([getattr(servers, kind)], [servers.decode]) as client:
            leaving = asyncio.ensure_future(client.post(suffix=suffix))
            async with servers.arrived:
                await servers.arrived.wait_for(lambda: last in servers.names())
            leaving.cancel()
            with suppress(asyncio.CancelledError):
                await leaving
            await asyncio.wait_for(servers.cancelled.wait(), DEADLINE_S)
        assert servers.cancelled.is_set()

    asyncio.run(run())


@pytest.mark.parametrize("prefill_is_up", [False, True])
def test_health_needs_a_decode_server(prefill_is_up: bool) -> None:
    async def run() -> None:
        servers = Pretended()
        up, down = [servers.prefill], [None]
        sides = (up, down) if prefill_is_up else (down, up)
        async with (
            proxy_over(*sides) as client,
            client.session.get(f"{client.url}/health") as response,
        ):
            assert response.status == (503 if prefill_is_up else 200)
            assert list((await response.json()).values()) == [prefill_is_up, not prefill_is_up]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("body", "charset"), [("[" * 100_000, "utf-8"), ("{}", "unheard-of"), ("{}", "zlib")]
)
def test_a_body_that_cannot_be_read_is_the_clients_mistake(body: str, charset: str) -> None:
    async def run() -> None:
        servers = Pretended()
        async with proxy_over([servers.prefill], [servers.decode]) as client:
            headers = {"Content-Type": f"application/json; charset={charset}"}
            async with client.session.post(
                client.url + PATH, data=body.encode(), headers=headers
            ) as response:
                found = await response.text()
                assert (response.status, "the body is not JSON" in found) == (400, True)

    asyncio.run(run())

"""A proxy over vLLM servers with kvplan between them: some compute prompts, others generate.

It speaks OpenAI's protocol (/v1/completions, /v1/chat/completions, streaming or not). Each request
goes to a prefilling server for one token, and then, with what that says of the prompt's KV cache,
to a decoding server, whose answer is passed on as it comes. What cannot be prefilled elsewhere is
computed by the decoding server. With --push, for servers with mode "push", both are asked at the
same time, by a name that the proxy makes up. It needs aiohttp, which vLLM brings.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web

logger = logging.getLogger("proxy")

PATHS = ("/v1/completions", "/v1/chat/completions")
BODY_MAX = 256 << 20  # bytes: images are in it
REST_S = 5.0  # how long a server that failed is asked last
KEPT_S = 2.0  # connections that are idle: vLLM's servers close them after 5 s
REQUEST_ID = "X-Request-Id"
PRODUCER = ("protocol", "instance", "sources")  # of a reference: what it says of its server
OWN_HEADERS = {  # of one connection, or the proxy's own
    *("connection", "content-encoding", "content-length", "host", "keep-alive"),
    *("transfer-encoding", "upgrade", REQUEST_ID.lower()),
}


class Servers:
    """Servers that take turns; one that has failed is asked last for a while."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.urls = tuple(urls)
        self._next = 0
        self._failed: dict[str, float] = {}

    def turn(self) -> Iterator[str]:
        """All of them, in the order in which they are to be asked."""
        at, self._next = self._next, (self._next + 1) % len(self.urls)
        now = time.monotonic()
        order = self.urls[at:] + self.urls[:at]
        yield from sorted(order, key=lambda it: self._failed.get(it, -REST_S) + REST_S > now)

    def failed(self, url: str) -> None:
        """This one did not answer."""
        self._failed[url] = time.monotonic()


@dataclass(frozen=True)
class Call:
    """A client's request.

    Attributes:
        request: as aiohttp has it.
        body: its JSON object.
        name: what logs call it, here and in the servers: its X-Request-Id, or a new one.
    """

    request: web.Request
    body: dict[str, Any]
    name: str

    @classmethod
    async def read(cls, request: web.Request) -> Call:
        """Read a request.

        Raises:
            Refused: its body is no JSON object.
        """
        try:
            body = await request.json()
        except ValueError as error:
            raise Refused(400, f"the body is no JSON: {error}") from None
        if not isinstance(body, dict):
            raise Refused(400, f"the body is {type(body).__name__} and no JSON object")
        return cls(request, body, request.headers.get(REQUEST_ID) or uuid.uuid4().hex)

    @property
    def headers(self) -> dict[str, str]:
        """What servers are given of the client's headers."""
        return _passed(self.request.headers) | {REQUEST_ID: self.name}

    def stays(self) -> str:
        """Why its prompt cannot be computed elsewhere; empty if it can."""
        prompt = self.body.get("prompt")
        if isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int):
            return "it has several prompts"
        if (self.body.get("n") or 1) != 1 or (self.body.get("best_of") or 1) != 1:
            return "it wants several answers"
        if self.body.get("echo") or self.body.get("prompt_logprobs") is not None:
            return "it wants to know about the tokens of the prompt"
        return ""

    def prefill(self, params: dict[str, Any]) -> dict[str, Any]:
        """What a prefilling server is asked: one token, in one piece."""
        body = self.body | {"kv_transfer_params": params, "stream": False, "max_tokens": 1}
        if self.request.path == "/v1/chat/completions":
            body["max_completion_tokens"] = 1
        for it in ("stream_options", "min_tokens"):
            body.pop(it, None)
        return body

    def decode(self, params: dict[str, Any] | None) -> dict[str, Any]:
        """What a decoding server is asked."""
        body = {k: v for k, v in self.body.items() if k != "kv_transfer_params"}
        return body if params is None else body | {"kv_transfer_params": params}


class Refused(Exception):  # noqa: N818
    """The client is answered with an error of the proxy's own."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status

    def response(self, headers: dict[str, str] | None = None) -> web.Response:
        """As OpenAI's protocol has it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": f"proxy: {self}", "type": kind, "param": None, "code": self.status}
        return web.json_response({"error": error}, status=self.status, headers=headers)


class Proxy:
    """The servers, and what is done with a request.

    When a client has gone, aiohttp cancels its handler (`handler_cancellation`); that closes the
    connection to the server that works for it, and vLLM aborts the request.

    Args:
        prefill, decode: URLs of the servers.
        prefill_timeout_s: how long the first may take for a prompt, its queue included.
        push: whether both are asked at the same time.
    """

    def __init__(
        self,
        prefill: Sequence[str],
        decode: Sequence[str],
        prefill_timeout_s: float,
        *,
        push: bool = False,
    ) -> None:
        self.prefill, self.decode = Servers(prefill), Servers(decode)
        self._push = push
        self._producers: dict[str, dict[str, Any]] = {}  # what prefill servers last said they are
        self._prefill_timeout = aiohttp.ClientTimeout(total=prefill_timeout_s, sock_connect=5)
        self._session: aiohttp.ClientSession | None = None

    def application(self) -> web.Application:
        """What aiohttp runs."""
        app = web.Application(client_max_size=BODY_MAX)
        for path in PATHS:
            app.router.add_post(path, self.complete)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/health", self.health)
        app.cleanup_ctx.append(self._connected)
        return app

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Answer a completion."""
        try:
            call = await Call.read(request)
        except Refused as refused:
            return refused.response()
        try:
            if reason := call.stays():
                return await self.decoded(call, None, reason)
            urls = list(self.prefill.turn())
            return await (self.push(call, urls) if self._push else self.pull(call, urls))
        except Refused as refused:
            logger.warning("%s: %s", call.name, refused)
            return refused.response({REQUEST_ID: call.name})
        except ConnectionResetError:  # while an answer was passed on
            logger.info("%s: the client has gone", call.name)
            raise
        except asyncio.CancelledError:
            logger.info("%s: the client has gone", call.name)
            raise

    async def pull(self, call: Call, urls: Sequence[str]) -> web.StreamResponse:
        """First the prompt, then the rest: the decoding server fetches what was computed."""
        params = await self.prefilled(call, {"do_remote_decode": True}, urls)
        return await self.decoded(call, params, "no prefill server has")

    async def push(self, call: Call, urls: Sequence[str]) -> web.StreamResponse:
        """Both at once: the prefilling server sends each layer when it has computed it.

        A server that has not said yet what it is computes as for `pull`, and so do the others if
        this one fails.
        """
        if (producer := self._producers.get(urls[0])) is None:
            return await self.pull(call, urls)
        transfer = f"{call.name}-{uuid.uuid4().hex}"[-128:]
        theirs = {"do_remote_decode": True, "kvplan": {"transfer": transfer}}
        mine = {"do_remote_prefill": True, "kvplan": producer | {"transfer": transfer}}
        decoding = asyncio.ensure_future(self._opened(call, mine))
        try:
            if await self.prefilled(call, theirs, urls[:1]) is not None:
                url, response = await decoding
                async with response:
                    return await self._pass_on(call, url, response)
        finally:
            await _ended(decoding)
        return await self.pull(call, urls[1:])

    async def prefilled(
        self, call: Call, params: dict[str, Any], urls: Iterable[str]
    ) -> dict[str, Any] | None:
        """Let the first of prefilling servers that can compute the prompt.

        Returns:
            What it says of it for the decoding server; None if none has computed it.
        """
        reasons = []
        for url in urls:
            try:
                async with self._http.post(
                    url + call.request.path,
                    json=call.prefill(params),
                    headers=call.headers,
                    timeout=self._prefill_timeout,
                ) as response:
                    if response.status == web.HTTPOk.status_code:
                        answer = await response.json()
                        found: dict[str, Any] | None = answer.get("kv_transfer_params")
                        if found:
                            self._remember(url, found)
                            return found
                        reasons.append(f"{url} keeps no KV cache: is it a kv_producer?")
                        break
                    text = (await response.text())[:300]
                    reasons.append(f"{url} answers {response.status}: {text}")
                    if response.status < 500:
                        break
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                reasons.append(f"{url}: {_said(error)}")
            self.prefill.failed(url)
        if reasons:
            logger.warning("%s: not prefilled: %s", call.name, "; ".join(reasons))
        return None

    async def decoded(
        self, call: Call, params: dict[str, Any] | None, reason: str
    ) -> web.StreamResponse:
        """Let a decoding server generate, and pass on what it says.

        Args:
            params: what was said of the prompt's cache; None: it computes that, too.
            reason: why it does, for the log.

        Raises:
            Refused: none answers.
        """
        if params is None:
            logger.warning("%s: the decode server computes the prompt: %s", call.name, reason)
        url, response = await self._opened(call, params)
        async with response:
            return await self._pass_on(call, url, response)

    async def _opened(
        self, call: Call, params: dict[str, Any] | None
    ) -> tuple[str, aiohttp.ClientResponse]:
        """The answer of a decoding server as it begins, and which one that is."""
        reasons = []
        for url in self.decode.turn():
            try:
                return url, await self._http.post(
                    url + call.request.path, json=call.decode(params), headers=call.headers
                )
            except aiohttp.ClientError as error:
                reasons.append(f"{url}: {_said(error)}")
                self.decode.failed(url)
        raise Refused(502, f"no decode server answers: {'; '.join(reasons)}")

    async def models(self, request: web.Request) -> web.Response:
        """The models of a decoding server."""
        for url in self.decode.turn():
            try:
                async with self._http.get(
                    url + request.path, headers=_authorization(request)
                ) as it:
                    return web.Response(
                        body=await it.read(), status=it.status, content_type=it.content_type
                    )
            except aiohttp.ClientError:
                self.decode.failed(url)
        return Refused(502, "no decode server answers").response()

    async def health(self, _: web.Request) -> web.Response:
        """Which servers answer; 503 if none does that generates."""
        urls = [*self.prefill.urls, *self.decode.urls]
        answers = dict(zip(urls, await asyncio.gather(*map(self._answers, urls)), strict=True))
        up = any(answers[it] for it in self.decode.urls)
        return web.json_response(answers, status=200 if up else 503)

    async def _answers(self, url: str) -> bool:
        try:
            timeout = aiohttp.ClientTimeout(total=5)
            async with self._http.get(f"{url}/health", timeout=timeout) as it:
                return it.ok
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def _pass_on(
        self, call: Call, url: str, response: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        headers = _passed(response.headers) | {REQUEST_ID: call.name}
        passed = web.StreamResponse(status=response.status, headers=headers)
        await passed.prepare(call.request)
        try:
            async for piece in response.content.iter_any():
                await passed.write(piece)
        except aiohttp.ClientError as error:
            logger.warning("%s: %s broke off: %s", call.name, url, _said(error))
            # An answer that ends in the middle must not look like a whole one.
            assert call.request.transport is not None
            call.request.transport.abort()
            return passed
        await passed.write_eof()
        return passed

    async def _connected(self, _: web.Application) -> Any:
        """Hold connections to the servers while the application runs."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5),
        )
        async with self._session:
            yield

    def _remember(self, url: str, params: Mapping[str, Any]) -> None:
        """What a prefilling server has said that it is, without the request that it said it of."""
        reference = params.get("kvplan") or {}
        self._producers[url] = {it: reference.get(it) for it in PRODUCER}

    @property
    def _http(self) -> aiohttp.ClientSession:
        assert self._session is not None, "the application does not run"
        return self._session


async def _ended(opening: asyncio.Future[tuple[str, aiohttp.ClientResponse]]) -> None:
    """Close an answer that nobody reads any more; one that was read is closed already."""
    opening.cancel()
    with suppress(asyncio.CancelledError, aiohttp.ClientError, Refused):
        (await opening)[1].close()


def _said(error: BaseException) -> str:
    """An error in words: some have none of their own."""
    return str(error) or type(error).__name__


def _passed(headers: Mapping[str, str]) -> dict[str, str]:
    """Headers without those of one connection, and without the request's id."""
    return {k: v for k, v in headers.items() if k.lower() not in OWN_HEADERS}


def _authorization(request: web.Request) -> dict[str, str]:
    given = request.headers.get("Authorization")
    return {} if given is None else {"Authorization": given}


def _url(text: str) -> str:
    """Check a server's URL."""
    it = urlsplit(text)
    if it.scheme not in ("http", "https") or not it.hostname or it.path.strip("/"):
        raise argparse.ArgumentTypeError(f"{text!r} must be like http://127.0.0.1:8100")
    return text.rstrip("/")


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(
        prog="python proxy.py",
        description="OpenAI's protocol over vLLM servers with kvplan between them.",
        epilog="Example: python proxy.py --prefill http://127.0.0.1:8100 "
        "--decode http://127.0.0.1:8200 --decode http://127.0.0.1:8201 --port 8000",
    )
    add = parser.add_argument
    for role in ("prefill", "decode"):
        add(
            f"--{role}",
            metavar="URL",
            type=_url,
            action="append",
            required=True,
            help=f"a {role} server (repeatable: they take turns)",
        )
    add("--host", default="127.0.0.1", help="address to listen at (%(default)s)")
    add("--port", type=int, default=8000, help="port to listen at (%(default)s)")
    add(
        "--prefill-timeout",
        metavar="S",
        type=float,
        default=120.0,
        help="seconds that a prompt may take, its queue included (%(default)s)",
    )
    add(
        "--push",
        action="store_true",
        help='ask both servers at the same time, for servers with "mode": "push"',
    )
    parsed = parser.parse_args(given)
    if not parsed.prefill_timeout > 0:
        parser.error(f"--prefill-timeout {parsed.prefill_timeout}: must be > 0")
    return parsed


def main() -> int:
    """Serve until it is interrupted."""
    asked = arguments()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    proxy = Proxy(asked.prefill, asked.decode, asked.prefill_timeout, push=asked.push)
    web.run_app(
        proxy.application(),
        host=asked.host,
        port=asked.port,
        print=logger.info,
        handler_cancellation=True,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

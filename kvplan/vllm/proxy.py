"""`python -m kvplan.vllm.proxy`: an OpenAI-compatible proxy over servers of vLLM.

The proxy sends a request to /v1/completions or /v1/chat/completions, streaming or not, to a
prefill server, which computes one token. Then it sends the request to a decode server, with the
reference to the KV cache of the prompt, and forwards the answer as it arrives. With --push, for
servers of mode "push", both servers get the request at the same time. The proxy then generates the
name by which they find each other's request.

The program needs aiohttp, which vLLM installs.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.parse import urlsplit

from kvplan.control.endpoint import PORT_MAX

try:
    import aiohttp
    from aiohttp import web
except ImportError:
    raise ImportError(
        "kvplan.vllm.proxy needs aiohttp, which vLLM installs: run it with vLLM's Python, or "
        "`pip install aiohttp`"
    ) from None

logger = logging.getLogger("proxy")

_PATHS: Final = ("/v1/completions", "/v1/chat/completions")
_MAX_BODY_NBYTES: Final = 256 << 20  # images are part of the body
_FAILED_S: Final = 5.0  # time for which a failed server is asked last
_CONNECT_S: Final = 5.0  # timeout for connecting with a server, and for its health
_IDLE_S: Final = 2.0  # lifetime of an idle connection; vLLM's servers close it after 5 s
_REQUEST_ID: Final = "X-Request-Id"
_PRODUCER_FIELDS: Final = ("protocol", "instance", "sources")  # of a reference to a KV cache
_OWN_HEADERS: Final = {  # of one connection, or set by the proxy
    *("connection", "content-encoding", "content-length", "host", "keep-alive"),
    *("transfer-encoding", "upgrade", _REQUEST_ID.lower()),
}


class Servers:
    """Servers that take turns; one that has failed is asked last for a while."""

    def __init__(self, urls: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self.urls, self._clock = tuple(urls), clock
        self._next = 0
        self._last_until: dict[str, float] = {}

    def turn(self) -> Iterator[str]:
        """Yield all servers in the order in which to ask them."""
        first, self._next = self._next, (self._next + 1) % len(self.urls)
        now = self._clock()
        order = self.urls[first:] + self.urls[:first]
        yield from sorted(order, key=lambda url: self._last_until.get(url, now) > now)

    def failed(self, url: str) -> None:
        """Remember that this server did not answer."""
        self._last_until[url] = self._clock() + _FAILED_S


@dataclass(frozen=True)
class Call:
    """A client's request."""

    request: web.Request
    body: dict[str, Any]
    name: str  # X-Request-Id, also in the logs of the servers; a new one if the client sent none
    suffix: str = ""  # of the name at the servers

    @classmethod
    async def read(cls, request: web.Request) -> Call:
        """Read a request; raise `Refused` if its body is not a JSON object."""
        try:
            body = await request.json()
        except (ValueError, LookupError, RecursionError) as error:  # LookupError: the charset
            raise Refused(400, f"the body is not JSON: {error}") from None
        if not isinstance(body, dict):
            raise Refused(400, f"the body is {type(body).__name__}; it must be a JSON object")
        return cls(request, body, request.headers.get(_REQUEST_ID) or uuid.uuid4().hex)

    @property
    def headers(self) -> dict[str, str]:
        """The headers that servers get: the client's, and the name of the request."""
        return _forwarded(self.request.headers) | {_REQUEST_ID: self.name + self.suffix}

    def unsplittable(self) -> str:
        """Return why a prefill server cannot compute the prompt; empty if it can."""
        prompt = self.body.get("prompt")
        if isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int):
            return "the request has several prompts"
        if (self.body.get("n") or 1) != 1 or (self.body.get("best_of") or 1) != 1:
            return "the request asks for several answers"
        if self.body.get("echo") or self.body.get("prompt_logprobs") is not None:
            return "the request asks for the tokens of its prompt"
        return ""

    def prefill_body(self, params: dict[str, Any]) -> dict[str, Any]:
        """Return the request for a prefill server: one token, not streamed."""
        body = self.body | {"kv_transfer_params": params, "stream": False, "max_tokens": 1}
        if self.request.path == "/v1/chat/completions":
            body["max_completion_tokens"] = 1
        for key in ("stream_options", "min_tokens"):
            body.pop(key, None)
        return body

    def decode_body(self, params: dict[str, Any] | None) -> dict[str, Any]:
        """Return the request for a decode server, without the client's own parameters."""
        body = {key: value for key, value in self.body.items() if key != "kv_transfer_params"}
        return body if params is None else body | {"kv_transfer_params": params}


class Refused(Exception):  # noqa: N818
    """The reason for which the proxy itself answers a request with an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status

    def response(self, headers: dict[str, str] | None = None) -> web.Response:
        """Return the error in OpenAI's form."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": f"proxy: {self}", "type": kind, "param": None, "code": self.status}
        return web.json_response({"error": error}, status=self.status, headers=headers)


class Proxy:
    """The servers, and the handlers of requests.

    When a client leaves, aiohttp cancels the handler of its request (`handler_cancellation`). The
    handler then closes the connection to the server, and vLLM aborts the request.

    Args:
        prefill_timeout_s: seconds that a prefill server may take for a prompt, including its queue.
        push: True to ask both servers at the same time.
    """

    def __init__(
        self,
        prefill: Sequence[str],
        decode: Sequence[str],
        prefill_timeout_s: float,
        *,
        push: bool = False,
    ) -> None:
        self._prefill, self._decode = Servers(prefill), Servers(decode)
        self._push = push
        self._producers: dict[str, dict[str, Any]] = {}  # by URL, from each server's last answer
        self._prefill_timeout = aiohttp.ClientTimeout(prefill_timeout_s, sock_connect=_CONNECT_S)
        self._session: aiohttp.ClientSession | None = None

    def application(self) -> web.Application:
        """Return the application for aiohttp to run."""
        app = web.Application(client_max_size=_MAX_BODY_NBYTES)
        for path in _PATHS:
            app.router.add_post(path, self._complete)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.cleanup_ctx.append(self._connected)
        return app

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        try:
            call = await Call.read(request)
        except Refused as refused:
            return refused.response()
        try:
            if reason := call.unsplittable():
                return await self._decoded(call, None, reason)
            urls = list(self._prefill.turn())
            return await (self._both(call, urls) if self._push else self._in_turn(call, urls))
        except Refused as refused:
            logger.warning("%s: %s", call.name, refused)
            return refused.response({_REQUEST_ID: call.name})
        except (ConnectionResetError, asyncio.CancelledError):
            logger.info("%s: the client has left", call.name)
            raise

    async def _in_turn(self, call: Call, urls: Sequence[str]) -> web.StreamResponse:
        """Let a prefill server compute the prompt; then a decode server fetches its cache."""
        params = await self._prefilled(call, {"do_remote_decode": True}, urls)
        return await self._decoded(call, params, "no prefill server has computed it")

    async def _both(self, call: Call, urls: Sequence[str]) -> web.StreamResponse:
        """Ask both servers at once; the prefill server sends each computed layer."""
        if (producer := self._producers.get(urls[0])) is None:  # it has not answered yet
            return await self._in_turn(call, urls)
        transfer = f"{call.name}-{uuid.uuid4().hex}"[-128:]
        for_prefill = {"do_remote_decode": True, "kvplan": {"transfer": transfer}}
        for_decode = {"do_remote_prefill": True, "kvplan": producer | {"transfer": transfer}}
        decoding = asyncio.ensure_future(self._opened(call, for_decode))
        try:
            found = await self._prefilled(call, for_prefill, urls[:1])
            if found is not None and _producer_of(found) == producer:
                url, response = await decoding
                async with response:
                    return await self._forward(call, url, response)
        finally:
            await _close_unread(decoding)
        # The first request at a decode server may end later, and has the name until then.
        call = replace(call, suffix="-again")
        if found is None:
            return await self._in_turn(call, urls[1:])
        logger.info("%s: %s was restarted: nothing was pushed", call.name, urls[0])
        return await self._decoded(call, found, "")

    async def _prefilled(
        self, call: Call, params: dict[str, Any], urls: Iterable[str]
    ) -> dict[str, Any] | None:
        """Return the `kv_transfer_params` of the first prefill server that answers, or None."""
        reasons = []
        for url in urls:
            try:
                async with self._http.post(
                    url + call.request.path,
                    json=call.prefill_body(params),
                    headers=call.headers,
                    timeout=self._prefill_timeout,
                ) as response:
                    if response.status == web.HTTPOk.status_code:
                        answer = await response.json()
                        if found := _object_in(answer, "kv_transfer_params"):
                            self._producers[url] = _producer_of(found)
                            return found
                        reasons.append(f"{url} keeps no KV cache; it must be a kv_producer")
                        break
                    text = (await response.text())[:300]
                    reasons.append(f"{url} answers {response.status}: {text}")
                    if response.status < 500:
                        break
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                reasons.append(f"{url}: {_text(error)}")
            self._prefill.failed(url)
        if reasons:
            logger.warning("%s: not prefilled: %s", call.name, "; ".join(reasons))
        return None

    async def _decoded(
        self, call: Call, params: dict[str, Any] | None, reason: str
    ) -> web.StreamResponse:
        """Let a decode server generate, without `params` also prefill, and forward its answer."""
        if params is None:
            logger.warning("%s: the decode server computes the prompt: %s", call.name, reason)
        url, response = await self._opened(call, params)
        async with response:
            return await self._forward(call, url, response)

    async def _opened(
        self, call: Call, params: dict[str, Any] | None
    ) -> tuple[str, aiohttp.ClientResponse]:
        """Return the URL of a decode server that answers, and the beginning of its answer."""
        reasons = []
        for url in self._decode.turn():
            try:
                return url, await self._http.post(
                    url + call.request.path, json=call.decode_body(params), headers=call.headers
                )
            except aiohttp.ClientError as error:
                reasons.append(f"{url}: {_text(error)}")
                self._decode.failed(url)
        raise Refused(502, f"no decode server answers: {'; '.join(reasons)}")

    async def _models(self, request: web.Request) -> web.Response:
        given = request.headers.get("Authorization")
        headers = {} if given is None else {"Authorization": given}
        for url in self._decode.turn():
            try:
                async with self._http.get(url + request.path, headers=headers) as answer:
                    return web.Response(
                        body=await answer.read(),
                        status=answer.status,
                        content_type=answer.content_type,
                    )
            except aiohttp.ClientError:
                self._decode.failed(url)
        return Refused(502, "no decode server answers").response()

    async def _health(self, _: web.Request) -> web.Response:
        """Report which servers answer; the status is 503 if no decode server does."""
        urls = [*self._prefill.urls, *self._decode.urls]
        answers = dict(zip(urls, await asyncio.gather(*map(self._answers, urls)), strict=True))
        up = any(answers[url] for url in self._decode.urls)
        return web.json_response(answers, status=200 if up else 503)

    async def _answers(self, url: str) -> bool:
        try:
            timeout = aiohttp.ClientTimeout(total=_CONNECT_S)
            async with self._http.get(f"{url}/health", timeout=timeout) as answer:
                return bool(answer.ok)
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def _forward(
        self, call: Call, url: str, response: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        headers = _forwarded(response.headers) | {_REQUEST_ID: call.name}
        forwarded = web.StreamResponse(status=response.status, headers=headers)
        await forwarded.prepare(call.request)
        try:
            async for piece in response.content.iter_any():
                await forwarded.write(piece)
        except aiohttp.ClientError as error:
            logger.warning("%s: %s broke off: %s", call.name, url, _text(error))
            # A part of an answer must not look like the whole.
            assert call.request.transport is not None
            call.request.transport.abort()
            return forwarded
        await forwarded.write_eof()
        return forwarded

    async def _connected(self, _: web.Application) -> Any:
        """Hold connections to the servers while the application runs."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
        )
        async with self._session:
            yield

    @property
    def _http(self) -> aiohttp.ClientSession:
        assert self._session is not None, "the application does not run"
        return self._session


async def _close_unread(opening: asyncio.Future[tuple[str, aiohttp.ClientResponse]]) -> None:
    """Close an answer that will not be read; one that was read is closed already."""
    opening.cancel()
    with suppress(asyncio.CancelledError, aiohttp.ClientError, Refused):
        (await opening)[1].close()


def _object_in(answer: object, name: str) -> dict[str, Any]:
    """Return the JSON object of this name in a server's answer; empty if there is none."""
    found = answer.get(name) if isinstance(answer, dict) else None
    return found if isinstance(found, dict) else {}


def _producer_of(params: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a server's `kv_transfer_params` that name its process."""
    reference = _object_in(params, "kvplan")
    return {field: reference.get(field) for field in _PRODUCER_FIELDS}


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _forwarded(headers: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in headers.items() if key.lower() not in _OWN_HEADERS}


def _url(text: str) -> str:
    with suppress(ValueError):  # the port is out of range
        url = urlsplit(text)
        is_whole = url.port != 0 and url.hostname and not url.path.strip("/")
        if is_whole and url.scheme in ("http", "https"):
            return text.rstrip("/")
    raise argparse.ArgumentTypeError(f"{text!r} must be like http://127.0.0.1:8100")


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m kvplan.vllm.proxy",
        description="An OpenAI-compatible proxy over vLLM servers with kvplan between them.",
        epilog="Example: python -m kvplan.vllm.proxy --prefill http://127.0.0.1:8100 "
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
    if not 0 < parsed.prefill_timeout < math.inf:
        parser.error(f"--prefill-timeout {parsed.prefill_timeout}: must be > 0 and finite")
    if not 0 <= parsed.port <= PORT_MAX:
        parser.error(f"--port {parsed.port}: must be in [0, {PORT_MAX}]")
    return parsed


def main() -> int:
    """Serve until the process is interrupted."""
    asked = arguments()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    proxy = Proxy(asked.prefill, asked.decode, asked.prefill_timeout, push=asked.push)
    try:
        web.run_app(
            proxy.application(),
            host=asked.host,
            port=asked.port,
            print=logger.info,
            handler_cancellation=True,
        )
    except OSError as error:
        logger.critical("cannot serve at %s:%d: %s", asked.host, asked.port, error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

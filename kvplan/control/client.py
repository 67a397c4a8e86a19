"""How an engine connects to a peer, and how it reports that it cannot."""

from __future__ import annotations

import asyncio
import os
import socket
from functools import partial
from typing import Any

from kvplan.control.auth import ClusterKey, Keys
from kvplan.control.channel import Channel, Handler
from kvplan.control.connection import DISCONNECTED
from kvplan.control.data_streams import DialledStreams, bind_source, way_of
from kvplan.control.endpoint import Endpoint, endpoint_of
from kvplan.control.loop import ControlLoop
from kvplan.status import LLMException, LLMStatusCode
from kvplan.system_limits import reason_of


async def connect(
    loop: ControlLoop,
    endpoint: Endpoint,
    handler: Handler,
    keys: Keys,
    timeout_s: float,
    source: str = "",
) -> Channel:
    """Begin a conversation with the engine that listens on `endpoint`."""
    channel: Channel | None = None
    key: ClusterKey | None = None
    phase = "resolve"
    try:
        async with asyncio.timeout(timeout_s):
            addresses = await _resolve(loop, endpoint)
            phase = "connect"
            stream = await _connect_any(addresses, source)
            try:
                phase = "authenticate"
                address = stream.getpeername()
                key = await keys.at(loop, endpoint_of(address))
                phase = "handshake" if key is None else "authenticate"
                channel = Channel(
                    loop,
                    key,
                    handler,
                    listening=False,
                    peer=str(endpoint),
                    streams=partial(
                        DialledStreams,
                        family=stream.family,
                        # A Unix socket may have another name at the other end.
                        address=endpoint.path or address,
                        way=way_of(stream.getsockname(), address),
                        source=source,
                        private=key is not None,
                    ),
                )
            except BaseException:
                stream.close()
                raise
            channel.connection.stream.attach(stream)
            channel.connection.open()
            await channel.connection.ready()
    except BaseException as error:
        if channel is not None:
            channel.close("could not connect")
        if isinstance(error, TimeoutError):
            reason = f"no answer within {timeout_s * 1000:.0f} ms"
        elif isinstance(error, OSError):
            reason = reason_of(error)
        elif isinstance(error, LLMException):
            reason = str(error.args[0])
        else:
            raise
        if channel is not None and channel.connection.greeted and reason == DISCONNECTED:
            causes = (
                "too many pending connections"
                if key is None
                else "another key, or too many pending connections"
            )
            reason += f"; has it {causes}? Its log says"
        if key is not None and " key" in reason:
            reason += f"; {key.advice}"
        raise LLMException(
            f"{endpoint}: {phase}: {reason}", status_code=LLMStatusCode.LLM_LINK_FAILED
        ) from None
    channel.introduced = True
    return channel


async def _resolve(loop: ControlLoop, endpoint: Endpoint) -> list[tuple[int, int, Any]]:
    """The families, protocols and addresses of the endpoint."""
    if endpoint.path:
        return [(socket.AF_UNIX, 0, endpoint.path)]
    resolve = partial(socket.getaddrinfo, endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    try:
        found: list[Any] = resolve(flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        found = await loop.in_worker(resolve)
    return list(
        dict.fromkeys((family, protocol, address) for family, _, protocol, _, address in found)
    )


async def _connect_any(addresses: list[tuple[int, int, Any]], source: str) -> socket.socket:
    """Connect to the first address that answers."""
    running = asyncio.get_running_loop()
    refused: dict[str, None] = {}
    for family, protocol, address in addresses:
        stream = socket.socket(family, socket.SOCK_STREAM, protocol)
        try:
            stream.setblocking(False)
            bind_source(stream, source)
            await running.sock_connect(stream, address)
        except BaseException as error:
            stream.close()
            if not isinstance(error, OSError):
                raise
            reason = os.strerror(error.errno) if error.errno else str(error)
            refused[reason] = None
        else:
            return stream
    raise OSError("; ".join(refused))

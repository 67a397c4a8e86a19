"""How an engine connects to a peer, and what it says when it cannot."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
from typing import Any

from kvplan.control.channel import Channel, Handler
from kvplan.control.cluster_key import ClusterKey
from kvplan.control.connection import DISCONNECTED
from kvplan.control.endpoint import Endpoint
from kvplan.control.loop import ControlLoop
from kvplan.status import LLMException, LLMStatusCode


async def connect(
    loop: ControlLoop,
    endpoint: Endpoint,
    handler: Handler,
    key: ClusterKey | None,
    timeout_s: float,
) -> Channel:
    """Begin a conversation with the engine that listens on `endpoint`.

    Raises:
        LLMException: LLM_LINK_FAILED, with the endpoint, the phase that failed (resolve, connect,
            or authenticate; handshake without a key) and the system's or the peer's reason.
    """
    channel: Channel | None = None
    phase = "resolve"
    try:
        async with asyncio.timeout(timeout_s):
            addresses = await _resolve(loop, endpoint)
            phase = "connect"
            channel = Channel(loop, key, handler, listening=False, peer=str(endpoint))
            await _connect_any(channel, endpoint, addresses)
            phase = "handshake" if key is None else "authenticate"
            channel.connection.open()
            await channel.connection.ready()
    except BaseException as error:
        if channel is not None:
            channel.close("could not connect")
        if isinstance(error, TimeoutError):
            reason = f"no answer within {timeout_s * 1000:.0f} ms"
        elif isinstance(error, OSError):
            reason = error.strerror or str(error)
            if key is not None and reason == DISCONNECTED:
                reason += "; has it another cluster key?"
        else:
            raise
        raise LLMException(
            f"{endpoint}: {phase}: {reason}", status_code=LLMStatusCode.LLM_LINK_FAILED
        ) from None
    channel.introduced = True
    return channel


async def _resolve(loop: ControlLoop, endpoint: Endpoint) -> list[str]:
    if endpoint.path:
        return [endpoint.path]
    try:
        ipaddress.ip_address(endpoint.host)
    except ValueError:
        found: list[Any] = await loop.in_worker(
            socket.getaddrinfo, endpoint.host, endpoint.port, type=socket.SOCK_STREAM
        )
        return list(dict.fromkeys(str(address[0]) for *_, address in found))
    return [endpoint.host]


async def _connect_any(channel: Channel, endpoint: Endpoint, addresses: list[str]) -> None:
    """Connect to the first address that answers."""
    running = asyncio.get_running_loop()
    stream = channel.connection.stream
    refused: dict[str, None] = {}
    for address in addresses:
        try:
            if endpoint.path:
                await running.create_unix_connection(lambda: stream, address)
            else:
                await running.create_connection(lambda: stream, address, endpoint.port)
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            refused[reason] = None
        else:
            return
    raise OSError("; ".join(refused))

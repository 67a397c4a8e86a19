"""Opening of channels, at the listening and at the connecting end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import time
import warnings
from errno import ECONNREFUSED
from functools import partial
from pathlib import Path
from typing import Any, Final

from kvplan.control.auth import ClusterKey, Keys
from kvplan.control.channel import Channel, Handler
from kvplan.control.connection import DISCONNECTED
from kvplan.control.data_streams import DialledStreams, bind_source, way_of
from kvplan.control.endpoint import Endpoint, endpoint_of
from kvplan.control.loop import ControlLoop
from kvplan.control.pending_connections import (
    AcceptedStreams,
    PendingConnection,
    PendingConnections,
)
from kvplan.status import LLMException, link_failed, message_of
from kvplan.system.limits import reason_of, system_error
from kvplan.system.logs import Log

MAX_PENDING: Final = 1024
"""Maximum number of pending connections.

The limit is lower if the process may open few files: a channel takes up to 4 of them, and pending
connections take at most half.
"""

PENDING_S: Final = 10.0
"""Seconds until a connection without a channel ends, or a silent channel without a link."""

_SWEEP_S: Final = 1.0
_PAUSE_S: Final = 0.1  # before accepting again after a lack of descriptors
_ACCEPTED_AT_ONCE: Final = 64  # connections, before the loop does other work

_log = Log("kvplan.control")


class Server:
    """A server on one endpoint, made by `listen`."""

    def __init__(self, loop: ControlLoop, endpoint: Endpoint, handler: Handler) -> None:
        self.endpoint = endpoint
        self._control = loop
        self._loop = asyncio.get_running_loop()
        self._handler = handler
        self._key: ClusterKey | None = None
        self._key_inside: ClusterKey | None = None  # of connections to a loopback address
        self._channels: dict[Channel, float] = {}  # in order of arrival
        self._listening: socket.socket | None = None
        self._sweeping: asyncio.TimerHandle | None = None
        self._inode = 0
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)  # never infinite on Linux
        limit = min(MAX_PENDING, files // 8)
        self._pending = PendingConnections(limit, self._open_channel, loop.refusals)

    @classmethod
    async def listen(
        cls, loop: ControlLoop, endpoint: Endpoint, handler: Handler, keys: Keys
    ) -> Server:
        """Begin to accept connections."""
        server = cls(loop, endpoint, handler)
        try:
            where = None if endpoint.path else (await loop.in_worker(_resolve, endpoint))[0]
            here = endpoint if where is None else Endpoint(str(where[-1][0]), endpoint.port)
            await server._take_keys(keys, here)
            if server._key is None and not here.is_loopback:
                _log.warning("event=listen_open endpoint=%s", endpoint)
            server._listening = server._bind(where)
        except OSError as error:
            raise system_error(f"cannot listen on {endpoint}", error) from None
        server._resume()
        loop.register(server)
        server._sweep()
        return server

    @property
    def channels(self) -> tuple[Channel, ...]:
        """The open channels, the oldest first."""
        return (*self._channels,)  # one atomic copy: tuple() needs the GIL for that

    def close(self) -> None:
        """Stop accepting, and end all channels that were accepted here."""
        if self._listening is None:
            return
        self._loop.remove_reader(self._listening)
        self._listening.close()
        self._listening = None
        if self._sweeping is not None:
            self._sweeping.cancel()
        if self.endpoint.path:
            with contextlib.suppress(OSError):
                if Path(self.endpoint.path).stat().st_ino == self._inode:
                    Path(self.endpoint.path).unlink()
        self._pending.close()
        for channel in self.channels:
            channel.close("the server is closed")
        self._control.unregister(self)

    async def wait_closed(self) -> None:
        """Return at once: channels wait for their own connections."""

    async def _take_keys(self, keys: Keys, here: Endpoint) -> None:
        """Read the keys of connections to `here`. A wildcard includes loopback addresses."""
        self._key = self._key_inside = await keys.at(self._control, here)
        if here.is_wildcard:
            self._key_inside = await keys.at(self._control, Endpoint("127.0.0.1"))
        if self._key_inside is not None:
            self._control.start_authenticator()

    def _bind(self, where: tuple[Any, ...] | None) -> socket.socket:
        listening = socket.socket(socket.AF_UNIX) if where is None else socket.socket(*where[:3])
        try:
            if where is None:
                self._bind_path(listening)
            else:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listening.bind(where[-1])
                self.endpoint = endpoint_of(listening.getsockname())
            listening.setblocking(False)
            # The longest possible queue: a connection that finds it full is retried after a second.
            listening.listen(socket.SOMAXCONN)  # fails if another process listens here by now
        except OSError:
            listening.close()
            raise
        return listening

    def _bind_path(self, listening: socket.socket) -> None:
        path = Path(self.endpoint.path)
        if _is_abandoned(path):
            path.unlink()
        listening.bind(str(path))
        path.chmod(0o600)  # no process can connect before `listen`
        self._inode = path.stat().st_ino

    def _resume(self) -> None:
        if self._listening is not None:
            self._loop.add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        assert self._listening is not None
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                stream, name = self._listening.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue  # the peer has already closed the connection
            except OSError as error:
                _log.warning("event=accept_failed endpoint=%s error=%r", self.endpoint, error)
                self._loop.remove_reader(self._listening)
                self._loop.call_later(_PAUSE_S, self._resume)
                return
            stream.setblocking(False)
            self._pending.add(PendingConnection(stream, name, self._key_of(stream)))

    def _key_of(self, stream: socket.socket) -> ClusterKey | None:
        if self._key is self._key_inside:
            return self._key
        return self._key_inside if endpoint_of(stream.getsockname()).is_loopback else self._key

    def _open_channel(self, connection: PendingConnection) -> Channel:
        channel = Channel(
            self._control,
            connection.key,
            self._handler,
            listening=True,
            # The other end of a Unix socket has no name.
            peer=connection.peer if connection.name else str(self.endpoint),
            streams=partial(
                AcceptedStreams,
                loop=self._control,
                pending=self._pending,
                way=way_of(connection.name, connection.socket.getsockname()),
                private=connection.key is not None,
            ),
            on_end=partial(self._forget, connection),
        )
        self._channels[channel] = time.monotonic()
        channel.connection.open(bytes(connection.received), connection.nonce)
        channel.connection.stream.attach(connection.socket)
        return channel

    def _forget(self, connection: PendingConnection, channel: Channel) -> None:
        self._channels.pop(channel, None)
        self._pending.remove(connection)

    def _sweep(self) -> None:
        now = time.monotonic()
        for channel, begun in list(self._channels.items()):
            silent = now - max(begun, channel.last_received)
            if channel.bound is None and not channel.serving and silent > PENDING_S:
                channel.drop(f"silent for {PENDING_S:g} s without a link")
        self._pending.sweep(now - PENDING_S)
        self._sweeping = self._loop.call_later(_SWEEP_S, self._sweep)


def warn_unauthenticated(endpoint: Endpoint, stacklevel: int) -> None:
    """Warn a caller that will listen without a key at an address that other hosts may reach."""
    with contextlib.suppress(OSError):
        if not endpoint.is_loopback and not Endpoint(_resolve(endpoint)[0][-1][0]).is_loopback:
            warnings.warn(
                f"listening on {endpoint} without a cluster key: every process that reaches it "
                "may link, and read and overwrite the caches; make a key with 'kvplan keygen', and "
                "give all engines its file (kvplan.cluster_key_file)",
                RuntimeWarning,
                stacklevel=stacklevel + 1,
            )


def warn_loopback_name(endpoint: Endpoint, stacklevel: int) -> None:
    """Warn a caller that will listen at a host name that only this host can reach."""
    with contextlib.suppress(OSError):
        if endpoint.is_name and (address := Endpoint(_resolve(endpoint)[0][-1][0])).is_loopback:
            warnings.warn(
                f"listening on {endpoint}: {endpoint.host} resolves to {address.host} here, which "
                "only processes of this host reach; listen at the address of a network, or correct "
                "the name in /etc/hosts",
                RuntimeWarning,
                stacklevel=stacklevel + 1,
            )


def _resolve(endpoint: Endpoint, flags: int = socket.AI_PASSIVE) -> list[Any]:
    """Return the results of `socket.getaddrinfo`."""
    try:
        kind = socket.SOCK_STREAM
        return socket.getaddrinfo(endpoint.host, endpoint.port, type=kind, flags=flags)
    except UnicodeError as error:  # of a label that is empty or too long
        raise socket.gaierror(socket.EAI_NONAME, str(error)) from None


def _is_abandoned(path: Path) -> bool:
    """Return True if `path` is the socket of a process that has died."""
    # Another kind of socket refuses with another error, and a live process may have a full queue.
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        return path.is_socket() and probe.connect_ex(str(path)) == ECONNREFUSED


async def connect(
    loop: ControlLoop,
    endpoint: Endpoint,
    handler: Handler,
    keys: Keys,
    timeout_s: float,
    source: str = "",
) -> Channel:
    """Open a channel to the engine that listens on `endpoint`."""
    channel: Channel | None = None
    key: ClusterKey | None = None
    phase = "resolve"
    try:
        end = asyncio.get_running_loop().time() + timeout_s
        async with asyncio.timeout_at(end):
            addresses = await _addresses_of(loop, endpoint)
            phase = "connect"
            stream = await _connect_any(addresses, source, end)
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
                        loop=loop,
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
            reason = message_of(error)
        else:
            raise
        if channel is not None and channel.connection.greeted and reason == DISCONNECTED:
            causes = (
                "too many pending connections"
                if key is None
                else "another key, or too many pending connections"
            )
            reason += f"; it may have {causes}: see its log"
        if key is not None and " key" in reason:
            reason += f"; {key.advice}"
        raise link_failed(f"{endpoint}: {phase}: {reason}") from None
    channel.introduced = True
    return channel


async def _addresses_of(loop: ControlLoop, endpoint: Endpoint) -> list[tuple[int, int, Any]]:
    """Return the families, protocols and addresses of the endpoint."""
    if endpoint.path:
        return [(socket.AF_UNIX, 0, endpoint.path)]
    try:
        found = _resolve(endpoint, socket.AI_NUMERICHOST)
    except socket.gaierror:
        found = await loop.in_worker(_resolve, endpoint, 0)
    return list(dict.fromkeys((family, protocol, where) for family, _, protocol, _, where in found))


async def _connect_any(addresses: list[Any], source: str, end: float) -> socket.socket:
    """Connect to the first address that answers within its share of the time that is left."""
    loop = asyncio.get_running_loop()
    refused: dict[str, None] = {}
    for index, (family, protocol, address) in enumerate(addresses):
        share_s = (end - loop.time()) / (len(addresses) - index)
        stream: socket.socket | None = None
        try:
            stream = socket.socket(family, socket.SOCK_STREAM, protocol)
            stream.setblocking(False)
            bind_source(stream, source)
            async with asyncio.timeout(share_s):
                await loop.sock_connect(stream, address)
        except BaseException as error:
            if stream is not None:
                stream.close()
            if not isinstance(error, OSError):
                raise
            reason = os.strerror(error.errno) if error.errno else str(error)
            refused[reason or f"no answer within {share_s * 1000:.0f} ms"] = None
        else:
            return stream
    raise OSError("; ".join(refused))

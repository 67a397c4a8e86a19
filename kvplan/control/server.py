"""Where peers connect: accepts conversations, within limits."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import stat
import time
import warnings
from pathlib import Path
from typing import Any, Final

from kvplan.control.channel import Channel, Handler
from kvplan.control.cluster_key import ClusterKey
from kvplan.control.endpoint import Endpoint
from kvplan.control.loop import ControlLoop
from kvplan.logs import Log
from kvplan.status import LLMException

MAX_VISITORS: Final = 1024
"""Conversations that nothing is bound to; one more ends the oldest of them.

Fewer where the process may open few files: a conversation takes up to 4 of them, and visitors take
at most half of what there is.
"""

VISIT_S: Final = 10.0
"""Seconds after which a silent visitor's conversation is ended."""

_SWEEP_S: Final = 1.0
_AT_A_TIME: Final = 64  # are accepted before others are served

_log = Log("kvplan.control")


class Server:
    """Listens on one endpoint; made by `listen`, used on the loop's thread."""

    def __init__(
        self, loop: ControlLoop, endpoint: Endpoint, handler: Handler, key: ClusterKey | None
    ) -> None:
        self.endpoint = endpoint
        self._owner = loop
        self._handler = handler
        self._key = key
        self._channels: dict[Channel, float] = {}  # in order of arrival
        self._listener: asyncio.Server | None = None
        self._sweeping: asyncio.TimerHandle | None = None
        self._inode = 0
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._max_visitors = MAX_VISITORS if files < 0 else min(MAX_VISITORS, files // 8)

    @classmethod
    async def listen(
        cls, loop: ControlLoop, endpoint: Endpoint, handler: Handler, key: ClusterKey | None
    ) -> Server:
        """Begin to accept peers.

        Args:
            loop: runs the conversations, and closes the server when it stops.
            endpoint: port 0 takes a free one, which `Server.endpoint` then tells.
            handler: is called with what peers say.
            key: None admits everybody who can reach the endpoint; off this host that is logged.

        Raises:
            LLMException: LLM_FAILED with the phase and the system's error.
        """
        server = cls(loop, endpoint, handler, key)
        if key is not None:
            loop.start_gatekeeper()
        try:
            listening = await (server._bind_path() if endpoint.path else server._bind_address())
        except OSError as error:
            raise LLMException(f"cannot listen on {endpoint}: {error.strerror or error}") from None
        listening.setblocking(False)
        running = asyncio.get_running_loop()
        create = running.create_unix_server if endpoint.path else running.create_server
        server._listener = await create(
            server._accept, sock=listening, backlog=_AT_A_TIME, start_serving=False
        )
        try:
            await server._listener.start_serving()
        except BaseException:  # a caller that gives up has no server to close
            server.close()
            raise
        # The longest queue there is: others wait in it, not for a second.
        listening.listen(socket.SOMAXCONN)
        loop.keep(server)
        server._sweep()
        return server

    @property
    def channels(self) -> tuple[Channel, ...]:
        """The conversations that live, oldest first."""
        return tuple(self._channels)

    def close(self) -> None:
        """Accept nobody any more, and end all conversations that have begun here."""
        if self._listener is None:
            return
        self._listener.close()
        self._listener = None
        if self._sweeping is not None:
            self._sweeping.cancel()
        if self.endpoint.path:
            with contextlib.suppress(OSError):
                if Path(self.endpoint.path).stat().st_ino == self._inode:
                    Path(self.endpoint.path).unlink()
        for channel in self.channels:
            channel.close("the server is closed")
        self._owner.forget(self)

    async def wait_closed(self) -> None:
        """Nothing to wait for: the conversations' connections are waited for by themselves."""

    async def _bind_address(self) -> socket.socket:
        endpoint = self.endpoint
        found = await self._owner.in_worker(_resolve, endpoint)
        family, kind, protocol, _, address = found
        self.endpoint = Endpoint(str(address[0]), endpoint.port)
        if self._key is None and not self.endpoint.is_loopback:
            _log.warning("event=listen_open endpoint=%s", endpoint)
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
        except OSError:
            listening.close()
            raise
        self.endpoint = Endpoint(self.endpoint.host, listening.getsockname()[1])
        return listening

    async def _bind_path(self) -> socket.socket:
        path = Path(self.endpoint.path)
        listening = socket.socket(socket.AF_UNIX)
        try:
            if _is_abandoned(path):
                path.unlink()
            listening.bind(str(path))
            path.chmod(0o600)  # nobody connects before `listen`
            self._inode = path.stat().st_ino
        except OSError:
            listening.close()
            raise
        return listening

    def _accept(self) -> asyncio.Protocol:
        channel = Channel(
            self._owner,
            self._key,
            self._handler,
            listening=True,
            # The system has no name for the other end of a path: where both meet will do.
            peer=str(self.endpoint) if self.endpoint.path else "",
            forget=self._forget,
        )
        self._channels[channel] = time.monotonic()
        visitors = [each for each in self._channels if each.bound is None]
        if len(visitors) > self._max_visitors:
            visitors[0].drop("too many conversations without a link")
        return channel.connection.stream

    def _forget(self, channel: Channel) -> None:
        self._channels.pop(channel, None)

    def _sweep(self) -> None:
        now = time.monotonic()
        for channel, begun in list(self._channels.items()):
            silent = now - max(begun, channel.heard)
            if channel.bound is None and not channel.serving and silent > VISIT_S:
                channel.drop(f"silent for {VISIT_S:g} s without a link")
        self._sweeping = asyncio.get_running_loop().call_later(_SWEEP_S, self._sweep)


def warn_of_strangers(endpoint: Endpoint, stacklevel: int) -> None:
    """Warn whoever is about to listen, without a key, where other hosts may reach it.

    Args:
        endpoint: where; nothing is said of one that cannot be had.
        stacklevel: as of `warnings.warn`: 1 is the caller of this function.
    """
    with contextlib.suppress(OSError):
        if not endpoint.is_loopback and not Endpoint(_resolve(endpoint)[-1][0]).is_loopback:
            warnings.warn(
                f"listening on {endpoint} without a cluster key: whoever can reach it may link "
                "and read caches; make a key with 'kvplan keygen'",
                RuntimeWarning,
                stacklevel=stacklevel + 1,
            )


def _resolve(endpoint: Endpoint) -> tuple[Any, ...]:
    """What `socket.getaddrinfo` finds first."""
    kind, flags = socket.SOCK_STREAM, socket.AI_PASSIVE
    return socket.getaddrinfo(endpoint.host, endpoint.port, type=kind, flags=flags)[0]


def _is_abandoned(path: Path) -> bool:
    """Whether `path` is the socket of a process that has died."""
    try:
        if not stat.S_ISSOCK(path.stat().st_mode):
            return False
    except FileNotFoundError:
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) != 0

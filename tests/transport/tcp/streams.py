"""Connections for links without engines: one end listens and accepts, the other dials."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from kvplan.status import link_failed

HOST = "127.0.0.1"
SECRET = bytes(range(32))


class Dialled:
    """The end that dials."""

    dials = True
    secret = SECRET
    private = True

    def __init__(self, port: int) -> None:
        self.way = f"{HOST} -> {HOST}:{port}"
        self._port = port

    def open(self, indices: Sequence[int], timeout_s: float) -> list[socket.socket]:
        return [self.open_one(index, timeout_s) for index in indices]

    def open_one(self, index: int, timeout_s: float) -> socket.socket:
        connection = socket.create_connection((HOST, self._port), timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(bytes([index]))
        connection.setblocking(False)
        return connection

    def close(self) -> None:
        pass


class Recorded(Dialled):
    """The end that dials through this process, which records all bytes that pass."""

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self.passed: dict[int, bytearray] = {}  # by connection

    def open_one(self, index: int, timeout_s: float) -> socket.socket:
        far, (near, ours) = super().open_one(index, timeout_s), socket.socketpair()
        ours.setblocking(False)
        far.setblocking(True)
        passed = self.passed[index] = bytearray()
        for ends in ((far, near), (near, far)):
            threading.Thread(target=self._pass_on, args=(*ends, passed), daemon=True).start()
        return ours

    def _pass_on(self, source: socket.socket, sink: socket.socket, passed: bytearray) -> None:
        with suppress(OSError), source:
            while chunk := source.recv(1 << 16):
                passed += chunk
                sink.sendall(chunk)
            sink.shutdown(socket.SHUT_WR)


class Accepted:
    """The end that listens."""

    dials = False
    secret = SECRET
    private = True

    def __init__(self) -> None:
        self._listener = socket.create_server((HOST, 0), backlog=64)
        self.port: int = self._listener.getsockname()[1]
        self.way = f"{HOST}:{self.port} <- {HOST}"
        self._accepting = threading.Lock()
        self._came: dict[int, socket.socket] = {}
        self.accepted = 0
        self._closed = False

    def open(self, indices: Sequence[int], timeout_s: float) -> list[socket.socket]:
        deadline = time.monotonic() + timeout_s
        with self._accepting:
            while missing := set(indices) - set(self._came):
                try:
                    self._listener.settimeout(max(deadline - time.monotonic(), 0.001))
                    connection, _ = self._listener.accept()
                except OSError as error:
                    why = "it was closed" if self._closed else error
                    raise link_failed(f"connection {min(missing)} has not come: {why}") from error
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._came[connection.recv(1)[0]] = connection
                self.accepted += 1
                connection.setblocking(False)
            return [self._came.pop(index) for index in indices]

    def close(self) -> None:
        self._closed = True
        try:
            self._listener.shutdown(socket.SHUT_RDWR)  # a blocked `accept` returns
        except OSError:  # closed before
            return
        with self._accepting:
            self._listener.close()
            for value in self._came.values():
                value.close()

"""A TCP proxy that records the bytes of a connection."""

from __future__ import annotations

import socket
import threading

from kvplan.control.endpoint import Endpoint
from tests.control.conversation import DEADLINE_S


class RecordingProxy:
    """A proxy of one connection: `recorded` has the client's bytes, `heard` the server's."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.endpoint = Endpoint(*self._listening.getsockname())
        self.recorded: list[bytes] = []
        self.heard = bytearray()
        self._target = (endpoint.host, endpoint.port)
        self._thread = threading.Thread(target=self._relay)
        self._thread.start()

    def finish(self) -> bytes:
        self._thread.join(DEADLINE_S)
        return b"".join(self.recorded)

    def _relay(self) -> None:
        near, _ = self._listening.accept()
        with self._listening, near, socket.create_connection(self._target) as far:
            back = threading.Thread(target=self._back, args=(far, near))
            back.start()
            while chunk := near.recv(1 << 16):
                self.recorded.append(chunk)
                far.sendall(self.passed_on(chunk))
            far.shutdown(socket.SHUT_WR)
            back.join(DEADLINE_S)

    def passed_on(self, chunk: bytes) -> bytes:
        return chunk

    def _back(self, far: socket.socket, near: socket.socket) -> None:
        while chunk := far.recv(1 << 16):
            self.heard += chunk
            near.sendall(chunk)

"""Descriptors of device memory for linked peers that the system does not let duplicate them.

`pidfd_getfd` needs the right to attach to the owner, which the seccomp filter of a container may
deny. The owner then sends the descriptor over an abstract Unix socket (SCM_RIGHTS). A request has
the token of a link, 32 bytes, and the number of an export, 8 bytes. The answer is one byte with the
descriptor, or nothing.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import struct
import threading
from typing import Final
from weakref import WeakValueDictionary

from kvplan.device.sharing import Exported

_TIMEOUT_S: Final = 1.0  # of a connection; a linked peer needs one round trip
_BACKLOG: Final = 16
_NUMBER: Final = struct.Struct("!Q")
_TOKEN_NBYTES: Final = 32
_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid


def token_of(session: bytes) -> bytes:
    """Return the proof of a link whose handshake had this secret."""
    return hmac.digest(session, b"kvplan descriptors", "sha256")


class DescriptorServer:
    """Sends descriptors of this process to linked peers, one after the other.

    Attributes:
        name: The name of the socket, without the leading zero byte of abstract names.
    """

    def __init__(self) -> None:
        self.name = f"kvplan-descriptors-{secrets.token_hex(16)}"
        self._tokens: set[bytes] = set()
        self._exports: WeakValueDictionary[int, Exported] = WeakValueDictionary()
        self._thread: threading.Thread | None = None
        self._mutex = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.bind(f"\0{self.name}")
            self._socket.listen(_BACKLOG)
        except OSError:
            self._socket.close()
            raise

    def add(self, exported: Exported) -> None:
        """Let linked peers ask for the descriptor of an export, as long as that exists."""
        self._exports[exported.ref.number] = exported

    def admit(self, token: bytes) -> None:
        """Answer the requests of a link. The first one starts the thread."""
        with self._mutex:
            self._tokens.add(token)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve, name="kvplan-descriptors", daemon=True
                )
                self._thread.start()

    def dismiss(self, token: bytes) -> None:
        """Refuse the requests of a link that has ended. Idempotent."""
        self._tokens.discard(token)

    def close(self) -> None:
        """End the thread. Idempotent."""
        with self._mutex, contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self.close_in_child()

    def close_in_child(self) -> None:
        """Close the socket without ending the parent's."""
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            with connection, contextlib.suppress(OSError):
                self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        if _credentials(connection)[1] not in (os.geteuid(), 0):
            return  # another user may not make this thread wait
        connection.settimeout(_TIMEOUT_S)
        request = connection.recv(_TOKEN_NBYTES + _NUMBER.size)
        token, number = request[:_TOKEN_NBYTES], request[_TOKEN_NBYTES:]
        if len(number) != _NUMBER.size or token not in self._tokens:
            return
        exported = self._exports.get(*_NUMBER.unpack(number))  # held until its descriptor is sent
        if exported is not None:
            socket.send_fds(connection, [b"\0"], [exported.ref.fd])


def can_ask(pid: int, name: str) -> bool:
    """Return True if process `pid` has a server of this name, which this process reaches."""
    try:
        _connect(pid, name).close()
    except OSError:
        return False
    return True


def ask(pid: int, name: str, token: bytes, number: int) -> int:
    """Return the descriptor of an export of process `pid`, which the caller closes.

    Raises:
        OSError: The server cannot be reached, or refuses the request.
    """
    with _connect(pid, name) as connection:
        connection.sendall(token + _NUMBER.pack(number))
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    if not descriptors:
        raise PermissionError(f"process {pid} does not send a descriptor of its device memory")
    return descriptors[0]


def _connect(pid: int, name: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(_TIMEOUT_S)
        connection.connect(f"\0{name}")
        owner = _credentials(connection)[0]
    except BaseException:
        connection.close()
        raise
    if owner != pid:
        connection.close()
        raise PermissionError(f"the socket {name} belongs to process {owner}")
    return connection


def _credentials(connection: socket.socket) -> tuple[int, ...]:
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(found)

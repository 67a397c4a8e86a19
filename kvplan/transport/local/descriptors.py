"""A server of device memory's file descriptors, for linked peers that may not duplicate them.

`pidfd_getfd` needs the right to trace the owner, which the seccomp filter of a container may deny.
The owner then sends the descriptor over an abstract Unix socket (SCM_RIGHTS). A connection has one
request: the token of a link (32 bytes) and the number of an export (8 bytes). The answer is a byte,
with the descriptor unless the request is refused.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from typing import Final
from weakref import WeakValueDictionary

from kvplan.device.sharing import Exported
from kvplan.system.limits import start_thread
from kvplan.system.users import peer_credentials

_TIMEOUT_S: Final = 1  # for a request, which is one round trip
_PAUSE_S: Final = 0.1  # if this process has no free descriptor
_MAX_WAITING: Final = 64  # connections without a request; a newer one replaces the oldest
_BACKLOG: Final = 64
_NUMBER: Final = struct.Struct("!Q")
_TOKEN_NBYTES: Final = 32
_REQUEST_NBYTES: Final = _TOKEN_NBYTES + _NUMBER.size
_DESCRIPTOR: Final = struct.Struct("i")
_TIMEVAL: Final = struct.Struct("@ll")


def token_of(session: bytes) -> bytes:
    """Return the token of a link, derived from the secret of its handshake."""
    return hmac.digest(session, b"kvplan descriptors", "sha256")


class DescriptorServer:
    """Sends descriptors of this process to linked peers.

    Attributes:
        name: The name of the socket, without the leading zero byte of abstract names.
    """

    def __init__(self) -> None:
        self.name = f"kvplan-descriptors-{secrets.token_hex(16)}"
        self._tokens: set[bytes] = set()
        self._exports: WeakValueDictionary[int, Exported] = WeakValueDictionary()
        self._thread: threading.Thread | None = None
        self._mutex = threading.Lock()
        self._closed = threading.Event()
        self._socket = _packets()
        self._socket.setblocking(False)
        try:
            self._socket.bind(f"\0{self.name}")
            self._socket.listen(_BACKLOG)
        except OSError:
            self._socket.close()
            raise

    def add(self, exported: Exported) -> None:
        """Let linked peers request the descriptor of an export, as long as the export exists."""
        self._exports[exported.ref.number] = exported

    def admit(self, token: bytes) -> None:
        """Answer the requests of a link. The first one starts the thread."""
        with self._mutex:
            self._tokens.add(token)
            if self._thread is None:
                self._thread = start_thread("kvplan-descriptors", self._serve)

    def dismiss(self, token: bytes) -> None:
        """Refuse the requests of a link that has ended. Idempotent."""
        self._tokens.discard(token)

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._closed.set()
        with self._mutex, contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self.close_in_child()

    def close_in_child(self) -> None:
        """Close the socket without ending the parent's."""
        self._socket.close()

    def _serve(self) -> None:
        waiting: dict[socket.socket, float] = {}  # deadlines, the earliest first
        # poll, unlike epoll, has no descriptor that a forked child would keep.
        with selectors.PollSelector() as polled:
            polled.register(self._socket, selectors.EVENT_READ)
            try:
                while not self._closed.is_set():
                    timeout = min(waiting.values()) - time.monotonic() if waiting else None
                    for key, _ in polled.select(timeout):
                        if key.data is None:
                            self._accept(waiting, polled)
                        elif key.data in waiting:
                            with contextlib.suppress(OSError):  # the client is gone
                                self._answer(key.data)
                            _drop(key.data, waiting, polled)
                    now = time.monotonic()
                    for late in [each for each, deadline in waiting.items() if deadline <= now]:
                        _drop(late, waiting, polled)
            finally:
                for connection in waiting:
                    connection.close()

    def _accept(self, waiting: dict[socket.socket, float], polled: selectors.BaseSelector) -> None:
        try:
            connection, _ = self._socket.accept()
        except BlockingIOError:
            return
        except OSError:  # closed, or out of descriptors
            self._closed.wait(_PAUSE_S)
            return
        if peer_credentials(connection).uid not in (os.geteuid(), 0):
            connection.close()
            return
        if len(waiting) >= _MAX_WAITING:
            _drop(next(iter(waiting)), waiting, polled)
        connection.setblocking(False)
        polled.register(connection, selectors.EVENT_READ, connection)
        waiting[connection] = time.monotonic() + _TIMEOUT_S

    def _answer(self, connection: socket.socket) -> None:
        request = connection.recv(_REQUEST_NBYTES + 1)
        exported = None  # keeps the descriptor open until it is sent
        if len(request) == _REQUEST_NBYTES and request[:_TOKEN_NBYTES] in self._tokens:
            exported = self._exports.get(*_NUMBER.unpack(request[_TOKEN_NBYTES:]))
        socket.send_fds(connection, [b"\0"], [] if exported is None else [exported.ref.fd])


def _drop(
    connection: socket.socket,
    waiting: dict[socket.socket, float],
    polled: selectors.BaseSelector,
) -> None:
    del waiting[connection]
    polled.unregister(connection)
    connection.close()


def can_ask(pid: int, name: str) -> bool:
    """Return whether this process can connect to the server of process `pid`."""
    try:
        _connected(pid, name, timeout_s=0).close()
    except BlockingIOError:  # its backlog is full
        return True
    except OSError:
        return False
    return True


def ask(pid: int, name: str, token: bytes, number: int) -> int:
    """Request the descriptor of an export of process `pid`; the caller closes it.

    Raises:
        OSError: The server cannot be reached, or refuses the request.
    """
    with _connected(pid, name) as connection:
        connection.sendall(token + _NUMBER.pack(number))
        # recv_fds of Python 3.11 ignores its flags, so that child programs would inherit it.
        space = socket.CMSG_LEN(_DESCRIPTOR.size)
        _, rights, _, _ = connection.recvmsg(1, space, socket.MSG_CMSG_CLOEXEC)
    if not rights:
        raise PermissionError(f"process {pid} does not send a descriptor of its device memory")
    descriptor: int = _DESCRIPTOR.unpack(rights[0][2])[0]
    return descriptor


def _packets() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _connected(pid: int, name: str, timeout_s: int = _TIMEOUT_S) -> socket.socket:
    connection = _packets()
    try:
        connection.setblocking(timeout_s > 0)
        # Not settimeout: connect would then fail at once while the backlog is full.
        for timeout in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, timeout, _TIMEVAL.pack(timeout_s, 0))
        connection.connect(f"\0{name}")
        owner = peer_credentials(connection).pid
    except BaseException:
        connection.close()
        raise
    if owner != pid:
        connection.close()
        raise PermissionError(f"the socket {name} belongs to process {owner}, not {pid}")
    return connection

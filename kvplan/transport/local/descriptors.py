"""A server that sends descriptors of device memory to linked peers that cannot duplicate them.

`pidfd_getfd` needs the right to trace the owner, which the seccomp filter of a container may deny.
Besides, memory in pieces may need more descriptors than a process can open (40 GiB in pieces of
2 MiB: 20,480), so the owner makes them on request. It sends them over an abstract Unix socket
(SCM_RIGHTS). A connection has one request: the token of a link (32 bytes), the number of an export
and the index of a piece (8 bytes each). The answer has the sizes of that piece and some that follow
it (8 bytes each), with their descriptors; or a zero byte and the reason of a refusal.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterable
from typing import Final
from weakref import WeakValueDictionary

from kvnative._backend import NativeError
from kvplan.device.sharing import Exported, Piece
from kvplan.system.limits import reason_of, start_thread
from kvplan.system.users import peer_credentials
from kvplan.validation import printable

_TIMEOUT_S: Final = 1  # for a request, which is one round trip
_PAUSE_S: Final = 0.1  # if this process has no free descriptor
_MAX_WAITING: Final = 64  # connections without a request; a newer one replaces the oldest
_BACKLOG: Final = 64
MAX_BATCH: Final = 64
"""The maximum number of descriptors of an answer. Linux sends at most 253 in a message."""

_TOKEN_NBYTES: Final = 32
_NUMBERS: Final = struct.Struct("!QQ")
_REQUEST_NBYTES: Final = _TOKEN_NBYTES + _NUMBERS.size
_SIZE: Final = struct.Struct("!Q")
_DESCRIPTOR: Final = struct.Struct("i")
_MAX_REASON: Final = 500
_TIMEVAL: Final = struct.Struct("@ll")


def token_of(session: bytes) -> bytes:
    """Return the token of a link, derived from the secret of its handshake."""
    return hmac.digest(session, b"kvplan descriptors", "sha256")


class DescriptorServer:
    """A server that sends descriptors of this process to linked peers.

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
        self._socket = _new_socket()
        self._socket.setblocking(False)
        try:
            self._socket.bind(f"\0{self.name}")
            self._socket.listen(_BACKLOG)
        except OSError:
            self._socket.close()
            raise

    def add(self, exported: Exported) -> None:
        """Let linked peers request the descriptors of an export, as long as the export exists."""
        self._exports[exported.ref.number] = exported

    def admit(self, token: bytes) -> None:
        """Answer the requests of a link. The first call starts the thread."""
        with self._mutex:
            if self._thread is None:
                self._thread = start_thread("kvplan-descriptors", self._serve)
            self._tokens.add(token)

    def dismiss(self, token: bytes) -> None:
        """Refuse the requests of a link that has ended. Idempotent."""
        self._tokens.discard(token)

    def close(self) -> None:
        """Close the socket and end the thread. Idempotent."""
        self._closed.set()
        with self._mutex, contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self.close_in_child()

    def close_in_child(self) -> None:
        """Close the socket only in this process: that of a parent stays open."""
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
        exported, first = None, 0
        if len(request) == _REQUEST_NBYTES and request[:_TOKEN_NBYTES] in self._tokens:
            number, first = _NUMBERS.unpack(request[_TOKEN_NBYTES:])
            exported = self._exports.get(number)
        pieces: list[Piece] = []
        reason = "it is not registered any more, or the link has ended"
        try:
            if exported is not None:
                pieces = exported.descriptors(first, MAX_BATCH)
        except (OSError, LookupError, OverflowError, ValueError, MemoryError, NativeError) as error:
            reason = reason_of(error)
        try:
            if pieces:
                sizes = b"".join(_SIZE.pack(nbytes) for _, nbytes in pieces)
                socket.send_fds(connection, [sizes], [fd for fd, _ in pieces])
            else:
                connection.send(b"\0" + reason.encode()[:_MAX_REASON])
        finally:
            close_all(pieces)


def _drop(
    connection: socket.socket,
    waiting: dict[socket.socket, float],
    polled: selectors.BaseSelector,
) -> None:
    del waiting[connection]
    polled.unregister(connection)
    connection.close()


def refusal(pid: int, name: str) -> str | None:
    """Return why this process cannot connect to the server of process `pid`; None: it can."""
    try:
        _connected(pid, name, timeout_s=0).close()
    except BlockingIOError:  # its backlog is full
        return None
    except OSError as error:
        return reason_of(error)
    return None


def ask(pid: int, name: str, token: bytes, number: int, first: int = 0) -> list[Piece]:
    """Request descriptors of an export of process `pid`, from piece `first`.

    The caller closes them.
    """
    with _connected(pid, name) as connection:
        connection.sendall(token + _NUMBERS.pack(number, first))
        # Not recv_fds, which ignores flags in Python 3.11: child programs would inherit the files.
        answer, rights, flags, _ = connection.recvmsg(
            max(MAX_BATCH * _SIZE.size, 1 + _MAX_REASON),
            socket.CMSG_LEN(MAX_BATCH * _DESCRIPTOR.size),
            socket.MSG_CMSG_CLOEXEC,
        )
    received = b"".join(content[: len(content) // 4 * 4] for _, _, content in rights)
    fds = [fd for (fd,) in _DESCRIPTOR.iter_unpack(received)]
    is_cut = flags & socket.MSG_CTRUNC  # this process may not open that many descriptors
    if fds and not is_cut and len(answer) == len(fds) * _SIZE.size:
        sizes = [size for (size,) in _SIZE.iter_unpack(answer)]
        return list(zip(fds, sizes, strict=True))
    close_all((fd, 0) for fd in fds)
    if is_cut:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    why = printable(answer[1:].decode(errors="replace"))
    raise PermissionError(
        f"process {pid} does not send a descriptor of its device memory{why and ': '}{why}"
    )


def close_all(pieces: Iterable[Piece]) -> None:
    """Close descriptors of pieces."""
    for fd, _ in pieces:
        os.close(fd)


def _new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _connected(pid: int, name: str, timeout_s: int = _TIMEOUT_S) -> socket.socket:
    connection = _new_socket()
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

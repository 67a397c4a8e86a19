"""Frames of docs/internals/tcp-protocol.md, made by hand, and links to plain sockets."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
from collections.abc import Sequence
from typing import NamedTuple

from kvnative._backend import KVN_PEER_GONE
from kvnative._tcp import TcpNativeLink, TcpService
from tests.tcp.peer import TIMEOUT_MS, listen
from tests.tcp.records import MOST, TAG, Records

PULL, PUSH = 1, 2
MOVED, DEREGISTERED, OUTSIDE, READ_ONLY, UNMAPPED = range(5)
ANSWER_NBYTES = 24
MAX_RANGES, MAX_RUNS, MAX_NBYTES = 64, 1024, 16 << 20


class Range(NamedTuple):
    slot: int
    generation: int
    reserved: int = 0

    def packed(self) -> bytes:
        return struct.pack("<IIQ", self.slot, self.reserved, self.generation)


class Run(NamedTuple):
    address: int
    nbytes: int
    count: int = 1
    stride: int = 0
    range: int = 0

    def packed(self) -> bytes:
        return struct.pack("<QIIII", self.address, self.nbytes, self.count, self.stride, self.range)


def request(
    kind: int,
    ranges: Sequence[Range],
    runs: Sequence[Run],
    *,
    number: int = 0,
    nbytes: int | None = None,
    reserved: int = 0,
    num_ranges: int | None = None,
    num_runs: int | None = None,
) -> bytes:
    """Return a request, without the bytes of a push. Its header may lie."""
    said = sum(run.nbytes * run.count for run in runs) if nbytes is None else nbytes
    head = struct.pack(
        "<BBHIQQ",
        kind,
        reserved,
        len(ranges) if num_ranges is None else num_ranges,
        len(runs) if num_runs is None else num_runs,
        said % 2**64,
        number,
    )
    first = (ranges[0] if ranges else Range(0, 0)).packed() + (
        runs[0] if runs else Run(0, 0)
    ).packed()
    return b"".join([head, first, *(range_.packed() for range_ in (*ranges[1:], *runs[1:]))])


def answer(number: int, reason: int = MOVED, offset: int = 0, reserved: int = 0) -> bytes:
    return struct.pack("<QIIQ", number, reason, reserved, offset)


class Answer(NamedTuple):
    number: int
    reason: int
    reserved: int
    offset: int


class Raw:
    """A plain socket as the peer of a link's connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        connection.settimeout(TIMEOUT_MS / 1000)

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def read(self, nbytes: int) -> bytes:
        """Read that many bytes, or those before the end."""
        got = bytearray()
        while len(got) < nbytes and (some := self.socket.recv(nbytes - len(got))):
            got += some
        return bytes(got)

    def read_answer(self) -> Answer:
        return Answer(*struct.unpack("<QIIQ", self.read(ANSWER_NBYTES)))

    def read_request(self) -> tuple[int, int, bytes]:
        """Return the number, the size and the bytes of a request, without the data of a push."""
        head = self.read(64)
        _, _, num_ranges, num_runs, nbytes, number = struct.unpack("<BBHIQQ", head[:24])
        return number, nbytes, head + self.read(16 * (num_ranges - 1) + 24 * (num_runs - 1))

    def drain(self) -> bytes:
        """Read everything up to the end or a reset."""
        got = bytearray()
        with contextlib.suppress(ConnectionResetError):
            while some := self.socket.recv(1 << 20):
                got += some
        return bytes(got)

    def finish(self) -> None:
        """Shut down sending."""
        with contextlib.suppress(OSError):  # the other end has closed it
            self.socket.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("2i", 1, 0))
        self.socket.close()


class Sealed(Raw):
    """A socket as the peer of an encrypted connection, which knows the secret, and lies."""

    def __init__(self, connection: socket.socket, secret: bytes, index: int, *, answers: bool):
        super().__init__(connection)
        self._out = Records(secret, index, answers=answers)
        self._in = Records(secret, index, answers=not answers)
        self._opened = bytearray()

    def send(self, data: bytes) -> None:
        for at in range(0, len(data), MOST):
            super().send(self._out.seal(data[at : at + MOST]))

    def read(self, nbytes: int) -> bytes:
        while len(self._opened) < nbytes and (some := self._read_record()):
            self._opened += some
        got = bytes(self._opened[:nbytes])
        del self._opened[:nbytes]
        return got

    def drain(self) -> bytes:
        got, self._opened = self._opened, bytearray()
        with contextlib.suppress(ConnectionResetError):
            while some := self._read_record():
                got += some
        return bytes(got)

    def _read_record(self) -> bytes:
        """Return the content of the next record; empty at the end."""
        if not (header := super().read(4)):
            return b""
        (nbytes,) = struct.unpack("<I", header)
        return self._in.open(header, super().read(nbytes + TAG))


class Attacked(NamedTuple):
    """A link of a service, with plain sockets as the peer of its two connections."""

    link: TcpNativeLink
    asks: Raw  # sends requests to the service
    answers: Raw  # answers requests of the service

    def wait_for_failure(self) -> str:
        ready = select.select([self.link.death_fd], [], [], TIMEOUT_MS / 1000)[0]
        assert ready, "the link did not fail"
        assert self.link.failure is not None
        status, message = self.link.failure
        assert status == KVN_PEER_GONE
        return message

    def close(self) -> None:
        self.link.close("the test is over")
        self.asks.socket.close()
        self.answers.socket.close()


def attack(service: TcpService, room: int = 0, secret: bytes | None = None) -> Attacked:
    """Return a link, which is encrypted if there is a `secret`.

    `room`: bytes that the sockets may hold; 0: the system chooses.
    """
    with listen() as listener:
        if room:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
        near = [socket.create_connection(listener.getsockname()) for _ in range(2)]
        far = [listener.accept()[0] for _ in range(2)]
    for item in (*near, *far):
        item.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for item in near:
        item.setblocking(False)
        if room:
            item.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, room)
    try:
        asks, answers = near[0].detach(), near[1].detach()
        link = service.link([asks], [answers], peer="hostile", secret=secret, dials=True)
    except BaseException:
        for item in far:
            item.close()
        raise
    if secret is None:
        return Attacked(link, Raw(far[1]), Raw(far[0]))
    return Attacked(
        link,
        Sealed(far[1], secret, 1, answers=False),
        Sealed(far[0], secret, 0, answers=True),
    )

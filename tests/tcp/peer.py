"""The tests' side of peer_process.py: a peer, its memory, and backends to reach it."""

from __future__ import annotations

import ctypes
import mmap
import socket
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvnative._backend import Backend, striped
from kvnative._lower import Descriptors
from kvnative._tcp import TcpNativeLink, TcpService, tcp_backend
from tests.support.peer import Peer
from tests.support.spare import copy_of

NBYTES = 24 << 20
TIMEOUT_MS = 20_000
PAGE = mmap.PAGESIZE
DIRECTIONS = ["get", "put"]
SECRET = bytes(range(32))

Bytes = NDArray[np.uint8]
Column = NDArray[np.uint64]
Span = tuple[int, int, int]  # local offset, peer's offset, nbytes

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def u64(*values: int) -> Column:
    return np.array(values, dtype=np.uint64)


def protect(address: int, nbytes: int, how: str = "none") -> None:
    """Set the protection of pages; with "none" the kernel treats them as unmapped."""
    bits = {"none": 0, "read": mmap.PROT_READ, "all": mmap.PROT_READ | mmap.PROT_WRITE}[how]
    assert _libc.mprotect(address, nbytes, bits) == 0


def listen() -> socket.socket:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(TIMEOUT_MS / 1000)
    return listener


def prepare(connection: socket.socket) -> int:
    """Return the descriptor of a connection, prepared for a link."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setblocking(False)
    return connection.detach()


def dial(address: tuple[str, int], count: int) -> list[int]:
    return [prepare(socket.create_connection(address)) for _ in range(count)]


def answer(listener: socket.socket, count: int) -> list[int]:
    return [prepare(listener.accept()[0]) for _ in range(count)]


def socket_pair() -> tuple[int, int]:
    """Return both ends of a connection within this process."""
    with listen() as listener:
        (near,) = dial(listener.getsockname(), 1)
        (far,) = answer(listener, 1)
    return near, far


def link_within(
    near: TcpService, far: TcpService, connections: int = 1, secret: bytes | None = None
) -> tuple[TcpNativeLink, TcpNativeLink]:
    """Link two services of this process, and return both ends."""
    pairs = [socket_pair() for _ in range(2 * connections)]
    ends = []
    for end, service in enumerate((near, far)):
        files = [pair[end] for pair in pairs]
        files = files if end == 0 else [*files[connections:], *files[:connections]]
        ends.append(
            service.link(
                files[:connections],
                files[connections:],
                peer="within",
                secret=secret,
                dials=end == 0,
            )
        )
    return ends[0], ends[1]


def backend_of(
    link: TcpNativeLink,
    direction: str,
    address: int,
    nbytes: int,
    *,
    slot: int = 0,
    generation: int = 1,
    index: int = 0,
) -> Backend:
    """Return a backend that knows one range of the peer."""
    return tcp_backend(link, index, direction, *map(u64, (slot, generation, address, nbytes)))


def descriptors(direction: str, here: int, there: int, spans: Sequence[Span]) -> Descriptors:
    """Return descriptors of spans, from the start addresses of local memory and the peer's."""
    columns = np.array(spans, dtype=np.uint64).reshape(-1, 3)
    mine, theirs = columns[:, 0] + np.uint64(here), columns[:, 1] + np.uint64(there)
    dst, src = (mine, theirs) if direction == "get" else (theirs, mine)
    return Descriptors.from_columns(dst, src, np.ascontiguousarray(columns[:, 2]))


def blocks(count: int, nbytes: int, seed: int = 2, total: int = NBYTES) -> list[Span]:
    """Return spans of `count` blocks, at random places in `total` bytes there, in order here."""
    places = np.random.default_rng(seed).permutation(total // nbytes)[:count]
    return [(i * nbytes, int(place) * nbytes, nbytes) for i, place in enumerate(places)]


def both(there: Bytes, direction: str, here: Bytes, spans: Sequence[Span]) -> tuple[Bytes, Bytes]:
    """Return the expected memory here and there after a transfer, computed by NumPy."""
    here, there = copy_of(here), copy_of(there)
    for mine, theirs, nbytes in spans:
        if direction == "get":
            here[mine : mine + nbytes] = there[theirs : theirs + nbytes]
        else:
            there[theirs : theirs + nbytes] = here[mine : mine + nbytes]
    return here, there


class TcpPeer(Peer):
    """A process with a service. Its memory is a file, which this process sees as `memory`."""

    module = "tests.tcp.peer_process"

    def __init__(self, file: Path, nbytes: int = NBYTES) -> None:
        with file.open("wb") as made:
            made.truncate(nbytes)
        self.memory: Bytes = np.memmap(file, dtype=np.uint8).view(np.ndarray)  # slices faster
        self._content = np.random.default_rng(1).integers(0, 256, nbytes, dtype=np.uint8)
        self.fill()
        super().__init__(str(file))
        self.base: int = self.run("result = base")

    def fill(self) -> None:
        """Restore the original content of its memory."""
        self.memory[:] = self._content

    def link(
        self, service: TcpService, connections: int = 1, secret: bytes | None = None
    ) -> TcpNativeLink:
        """Link `service` to the peer, whose own end is the last of `links` there."""
        with listen() as listener:
            self.send(
                f"""
                files = dial({listener.getsockname()}, 2 * {connections})
                links.append(service.link(
                    files[:{connections}], files[{connections}:], peer="it", secret={secret},
                    dials=True))
                """
            )
            files = answer(listener, 2 * connections)
        self.answer()
        return service.link(files[connections:], files[:connections], peer="peer", secret=secret)

    def add_range(
        self, slot: int, offset: int, nbytes: int, *, writable: bool = True, generation: int = 1
    ) -> None:
        self.run(f"service.add_range({slot}, base + {offset}, {nbytes}, {writable}, {generation})")

    def remove_range(self, slot: int) -> None:
        self.run(f"service.remove_range({slot})")

    def backend(
        self,
        link: TcpNativeLink,
        direction: str,
        *,
        slot: int = 0,
        generation: int = 1,
        offset: int = 0,
        nbytes: int | None = None,
    ) -> Backend:
        """Return a backend that knows one range of the peer, over all connections of the link."""
        inner = [
            backend_of(
                link, direction, self.base + offset, nbytes or self.memory.nbytes,
                slot=slot, generation=generation, index=index,
            )
            for index in range(link.connections)
        ]  # fmt: skip
        return inner[0] if len(inner) == 1 else striped(inner, min_nbytes=1 << 16)

    def descriptors(self, direction: str, local: Bytes, spans: Sequence[Span]) -> Descriptors:
        return descriptors(direction, local.ctypes.data, self.base, spans)

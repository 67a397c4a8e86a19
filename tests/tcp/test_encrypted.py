"""A man in the middle of an encrypted link: what he can read, and his attacks."""

from __future__ import annotations

import io
import os
import select
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest

from kvnative._backend import KVN_OK, KVN_PEER_GONE
from kvnative._executor import Executor
from kvnative._report import Report
from kvnative._tcp import TcpNativeLink, TcpService, check_encryption
from tests.support.rights import denying
from tests.tcp.peer import (
    DIRECTIONS,
    SECRET,
    TIMEOUT_MS,
    Bytes,
    backend_of,
    descriptors,
    link_within,
    socket_pair,
)
from tests.tcp.records import RECORDS_OF_KEY, Records

SIZE = 1 << 20
HEADER, TAG = 4, 16
ATTACKED = 3  # number of the attacked record of a transfer
FORGED = "a record that was not sealed by the peer"

directions = pytest.mark.parametrize("direction", DIRECTIONS)

Attack = Callable[[list[bytes]], list[bytes]]


def flip(record: bytes, at: int) -> bytes:
    changed = bytearray(record)
    changed[at] ^= 1
    return bytes(changed)


# Changes of the latest record that has arrived.
ATTACKS: dict[str, Attack] = {
    "a bit of its length": lambda came: [flip(came[-1], 0)],
    "a length of 0": lambda came: [bytes(HEADER) + came[-1][HEADER:]],
    "the greatest length": lambda came: [b"\xff" * HEADER + came[-1][HEADER:]],
    "its first bit": lambda came: [flip(came[-1], HEADER)],
    "its last bit": lambda came: [flip(came[-1], -TAG - 1)],
    "a bit of its tag": lambda came: [flip(came[-1], -1)],
    "it is lost": lambda _: [],
    "it comes twice": lambda came: [came[-1], came[-1]],
    "one from before": lambda came: [came[-2]],
    "the first again": lambda came: [came[0]],
    "one from nowhere": lambda came: [len(came[-1]).to_bytes(HEADER, "little") + bytes(9_999)],
}


class Relay:
    """A connection within this process, from `near` to `far`, through an attacker.

    Attributes:
        passed: all bytes towards either end.

    Args:
        attack: changes a record on the way `towards` one end.
        reflects: the number of the record that also goes back to its sender; 0: none.
    """

    def __init__(self, attack: Attack | None = None, towards: str = "", reflects: int = 0):
        self.passed = {"near": bytearray(), "far": bytearray()}
        self.near, to_near = socket.socketpair()
        self.far, to_far = socket.socketpair()
        self._ends = to_near, to_far
        self._threads = []
        for source, sink, name in ((to_far, to_near, "near"), (to_near, to_far, "far")):
            change = attack if name == towards else None
            pumped = (source, sink, name, change, reflects if name == towards else 0)
            self._threads.append(threading.Thread(target=self._pump, args=pumped, daemon=True))
            self._threads[-1].start()

    def close(self) -> None:
        self._shut()
        for thread in self._threads:
            thread.join()
        for end in self._ends:
            end.close()

    def _shut(self) -> None:
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _pump(
        self,
        source: socket.socket,
        sink: socket.socket,
        name: str,
        attack: Attack | None,
        reflects: int,
    ) -> None:
        came: list[bytes] = []
        with suppress(OSError), source.makefile("rb", buffering=0) as stream:
            while True:
                if attack is None and not reflects:
                    chunks = [stream.read(1 << 16)]
                else:
                    came.append(read_record(stream))
                    chunks = came[-1:]
                    if len(came) == ATTACKED and attack is not None:
                        chunks = attack(came)
                if chunks and not chunks[0]:
                    break
                for chunk in chunks:
                    self.passed[name] += chunk
                    sink.sendall(chunk)
                if reflects and len(came) == reflects:
                    source.sendall(came[-1])
        self._shut()


def read_exactly(stream: socket.SocketIO, nbytes: int) -> bytes:
    found = b""
    while len(found) < nbytes and (more := stream.read(nbytes - len(found))):
        found += more
    return found


def read_record(stream: socket.SocketIO) -> bytes:
    header = read_exactly(stream, HEADER)
    return header + read_exactly(stream, int.from_bytes(header, "little") + TAG) if header else b""


class Ends:
    """Two services, memory of the far one in slot 0, and local memory."""

    def __init__(self) -> None:
        self.near = TcpService(threads=1, max_ranges=1)
        self.far = TcpService(threads=1, max_ranges=1)
        self.there = np.zeros(SIZE, dtype=np.uint8)
        self.here = np.zeros(SIZE, dtype=np.uint8)
        self.far.add_range(0, self.there.ctypes.data, SIZE, True, 1)
        self.links: list[TcpNativeLink] = []
        self._relays: list[Relay] = []

    def link(
        self, asking: Relay, other: Relay, near: bytes | None = SECRET, far: bytes | None = SECRET
    ) -> TcpNativeLink:
        """Return the link of the near end, which sends requests through the relay `asking`."""
        self._relays += asking, other
        files = []
        for item in (asking, other):
            item.near.setblocking(False)
            item.far.setblocking(False)
            files.append([item.near.detach(), item.far.detach()])
        self.links = [
            self.near.link([files[0][0]], [files[1][0]], peer="far", secret=near, dials=True),
            self.far.link([files[1][1]], [files[0][1]], peer="near", secret=far),
        ]
        return self.links[0]

    def move(self, direction: str, nbytes: int = SIZE) -> Report:
        base, here = self.there.ctypes.data, self.here.ctypes.data
        with Executor(backend_of(self.links[0], direction, base, SIZE)) as executor:
            return executor.run(descriptors(direction, here, base, [(0, 0, nbytes)]), TIMEOUT_MS)

    def sides(self, direction: str) -> tuple[Bytes, Bytes]:
        """Return source and destination."""
        return (self.there, self.here) if direction == "get" else (self.here, self.there)

    def failures(self) -> str:
        return " | ".join(link.failure[1] for link in self.links if link.failure is not None)

    def close(self) -> None:
        self.near.close()
        self.far.close()
        for relay in self._relays:
            relay.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.close()


@pytest.mark.parametrize("secret", [None, SECRET], ids=["plain", "encrypted"])
def test_only_lengths_can_be_read_on_the_way(ends: Ends, secret: bytes | None) -> None:
    """Bytes and addresses are unreadable, and equal bytes look different each time."""
    relays = Relay(), Relay()
    ends.link(*relays, near=secret, far=secret)
    words = b"16 bytes of text"
    ends.there[:] = np.tile(np.frombuffer(words, np.uint8), SIZE // len(words))
    for direction in DIRECTIONS:
        assert ends.move(direction).status == KVN_OK
    np.testing.assert_array_equal(ends.here, ends.there)
    seen = bytes(relays[0].passed["near"] + relays[0].passed["far"])
    assert len(seen) > 2 * SIZE
    assert (words in seen) is (secret is None)
    assert (ends.there.ctypes.data.to_bytes(8, "little") in seen) is (secret is None)
    chunks = [seen[at : at + 16] for at in range(0, len(seen) - 16, 16)]
    assert (len(set(chunks)) == len(chunks)) is (secret is not None)


@directions
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_changed_record_ends_the_link(ends: Ends, direction: str, attack: str) -> None:
    """Bytes before the record have arrived, but none of the record or after it."""
    towards = "near" if direction == "get" else "far"
    link = ends.link(Relay(ATTACKS[attack], towards), Relay())
    source, destination = ends.sides(direction)
    source[:] = np.random.default_rng(1).integers(1, 256, SIZE)
    report = ends.move(direction)
    assert report.status == KVN_PEER_GONE
    assert FORGED in ends.failures()
    assert link.failure is not None
    same = destination == source
    arrived = SIZE if same.all() else int(same.argmin())
    assert arrived < ATTACKED << 15
    assert not destination[arrived:].any()


@directions
def test_a_record_that_is_reflected_to_its_sender_ends_the_link(ends: Ends, direction: str) -> None:
    # The record whose number its sender expects: a request has arrived, an answer has not.
    towards, number = ("near", 2) if direction == "get" else ("far", 1)
    ends.link(Relay(towards=towards, reflects=number), Relay())
    source, destination = ends.sides(direction)
    source[:] = 7
    report = ends.move(direction)
    # All requested bytes may have arrived before.
    assert report.status in (KVN_OK, KVN_PEER_GONE)
    assert set(np.unique(destination)) <= {0, 7}
    assert (source == 7).all()
    assert select.select([link.death_fd for link in ends.links], [], [], TIMEOUT_MS / 1000)[0]
    assert FORGED in ends.failures()


def test_swapped_connections_end_the_link(ends: Ends) -> None:
    """Each connection has its own keys."""
    pairs = [socket_pair() for _ in range(4)]
    near, far = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    ends.links = [
        ends.near.link(near[:2], near[2:], peer="far", secret=SECRET, dials=True),
        ends.far.link(far[2:], [far[1], far[0]], peer="near", secret=SECRET),
    ]
    ends.there[:] = 7
    assert ends.move("get").status == KVN_PEER_GONE
    assert FORGED in ends.failures()
    assert not ends.here.any()


def test_another_secret_ends_the_link(ends: Ends) -> None:
    ends.there[:] = 7
    ends.link(Relay(), Relay(), far=bytes(32))
    assert ends.move("get", 1).status == KVN_PEER_GONE
    assert FORGED in ends.failures()
    assert not ends.here.any()


def test_keys_change_on_the_way(ends: Ends) -> None:
    """Keys change after 4,096 records of a direction, of at most 32 KiB.

    Each record is checked against the protocol, because both ends would accept a repeated nonce.
    """
    asking = Relay()
    ends.link(asking, Relay())
    for direction, seed in zip(DIRECTIONS, (1, 2), strict=True):
        source, destination = ends.sides(direction)
        for _ in range(140):
            assert ends.move(direction).status == KVN_OK
        source[:] = np.random.default_rng(seed).integers(0, 256, SIZE)
        assert ends.move(direction).status == KVN_OK
        np.testing.assert_array_equal(destination, source)
    for towards, answers in (("far", False), ("near", True)):
        came, records = io.BytesIO(asking.passed[towards]), Records(SECRET, 0, answers=answers)
        count = 0
        while header := came.read(HEADER):
            records.open(header, came.read(int.from_bytes(header, "little") + TAG))
            count += 1
        assert count > RECORDS_OF_KEY


def test_records_that_arrive_with_an_awaited_answer(ends: Ends) -> None:
    """They have left the socket, and no thread waits for them, so the service reads on."""
    ends.links = list(link_within(ends.near, ends.far, secret=SECRET))
    here, there = ends.here.ctypes.data, ends.there.ctypes.data
    large, small = [(0, 0, SIZE)], [(0, 0, 64)]  # one turn of a waiting thread
    with Executor(backend_of(ends.links[0], "get", there, SIZE)) as executor:
        for _ in range(300):
            first, second = [
                executor.submit(descriptors("get", here, there, item)) for item in (large, small)
            ]
            assert first.wait(TIMEOUT_MS).status == KVN_OK
            deadline = time.monotonic() + 60
            while not second.done:
                assert time.monotonic() < deadline


def test_a_secret_of_another_length_is_refused(ends: Ends) -> None:
    with pytest.raises(ValueError, match="secret has 31 bytes; it must have 32"):
        ends.link(Relay(), Relay(), near=bytes(31))


def test_without_libcrypto_encryption_is_refused() -> None:
    """A mount namespace has an empty file in place of libcrypto."""
    check_encryption()
    if shutil.which("unshare") is None or subprocess.run(["unshare", "--mount", "true"]).returncode:
        pytest.skip("only root outside of containers can make a mount namespace, with `unshare`")
    hidden = """
    for library in $(ldconfig -p | sed -n 's/.*libcrypto.so.* => //p'); do
        mount --bind /dev/null "$library"
    done
    exec "$@"
    """
    program = """
from kvnative._backend import KVN_UNSUPPORTED, CallError
from kvnative._tcp import check_encryption
from kvplan.transport.tcp.transport import TcpTransport
try:
    check_encryption()
except CallError as error:
    assert error.status == KVN_UNSUPPORTED
    TcpTransport(encrypt=True)
"""
    found = subprocess.run(
        ["unshare", "--mount", "sh", "-c", hidden, "sh", sys.executable, "-c", program],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert found.returncode == 1
    assert "LLM_FEATURE_NOT_ENABLED" in found.stderr.splitlines()[-1], found.stderr
    assert "encrypt=True: encryption needs OpenSSL's libcrypto.so.3" in found.stderr


def test_encryption_that_the_sandbox_does_not_allow_is_refused() -> None:
    """Docker denies the call by default on older kernels."""
    program = """
from kvnative._backend import KVN_UNSUPPORTED, CallError
from kvnative._tcp import check_encryption
try:
    check_encryption()
except CallError as error:
    print(error.status == KVN_UNSUPPORTED, error)
"""
    found = subprocess.run(
        [sys.executable, "-c", dedent(denying("process_vm_readv")) + program],
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    assert found.stdout == (
        "True encryption needs process_vm_readv and process_vm_writev: Operation not permitted\n"
    )


REFUSED = """
import socket, sys
import numpy as np
from kvnative._executor import Executor
from kvnative._lower import Descriptors
from kvnative._tcp import TcpService, tcp_backend

near, far = socket.socketpair()
other, _ = socket.socketpair()
for end in (near, other):
    end.setblocking(False)
service = TcpService(1, max_ranges=1)
link = service.link([near.detach()], [other.detach()], peer="it", secret=bytes(32), dials=True)
local = np.full(100_000, ord("x"), np.uint8)
one, base, size = (np.array([value], np.uint64) for value in (1, 4096, local.size))
here = np.array([local.ctypes.data], np.uint64)
with Executor(tcp_backend(link, 0, "put", one, one, base, size)) as executor:
    print(executor.run(Descriptors.from_columns(base, here, size), 10_000).message)
service.close()
while chunk := far.recv(1 << 20):
    assert b"xxxx" not in chunk, "it was sent as it is"
"""


def test_bytes_that_libcrypto_cannot_encrypt_are_not_sent(tmp_path: Path) -> None:
    if not shutil.which("cc"):
        pytest.skip("there is no C compiler")
    source, made = Path(__file__).with_name("refusing_libcrypto.c"), tmp_path / "libcrypto.so.3"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", made, source], check=True)
    found = subprocess.run(
        [sys.executable, "-c", REFUSED], env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert (found.stderr, found.returncode) == ("", 0)
    assert found.stdout.strip()  # the reason of the failure

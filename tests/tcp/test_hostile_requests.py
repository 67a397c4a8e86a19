"""Peers with forbidden requests: only their link fails, or only they are refused."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvnative._backend import KVN_OK
from kvnative._executor import Executor
from kvnative._tcp import TcpService
from tests.support.held import allocated
from tests.tcp.frames import (
    DEREGISTERED,
    MAX_NBYTES,
    MAX_RANGES,
    MAX_RUNS,
    MOVED,
    OUTSIDE,
    PULL,
    PUSH,
    READ_ONLY,
    Answer,
    Attacked,
    Range,
    Run,
    attack,
    request,
)
from tests.tcp.peer import SECRET, TIMEOUT_MS, Bytes, backend_of, descriptors, link_within

SLOT, GENERATION, READABLE = 4, 77, 5
NBYTES = 1 << 20
OWN = Range(SLOT, GENERATION)
SMALL = 1 << 16


@pytest.fixture(scope="module")
def victim() -> Iterator[TcpService]:
    """A service with one thread for all peers."""
    service = TcpService(1, max_ranges=16)
    yield service
    service.close()


@pytest.fixture(scope="module")
def memory(victim: TcpService) -> Bytes:
    """Memory whose middle third is registered, followed by a read-only page; the rest must stay."""
    memory = np.random.default_rng(9).integers(0, 256, 3 * NBYTES, dtype=np.uint8)
    victim.add_range(SLOT, memory.ctypes.data + NBYTES, NBYTES, True, GENERATION)
    victim.add_range(READABLE, memory.ctypes.data + 2 * NBYTES, 4096, False, GENERATION)
    return memory


@pytest.fixture(params=[None, SECRET], ids=["plain", "encrypted"])
def attacked(victim: TcpService, request: pytest.FixtureRequest) -> Iterator[Attacked]:
    attacker = attack(victim, secret=request.param)
    yield attacker
    attacker.close()


def start(memory: Bytes) -> int:
    """Return the address of the registered memory."""
    return int(memory.ctypes.data) + NBYTES


def check_served(attacked: Attacked, memory: Bytes, number: int = 1 << 40) -> None:
    attacked.asks.send(request(PULL, [OWN], [Run(start(memory) + 5, 100)], number=number))
    assert attacked.asks.read_answer() == Answer(number, MOVED, 0, 0)
    assert attacked.asks.read(100) == memory[NBYTES + 5 :][:100].tobytes()
    assert attacked.asks.read_answer() == Answer(number, MOVED, 0, 0)
    assert attacked.link.failure is None


AT = 1 << 20
WORDS = {
    "kind": "unknown kind",
    "reserved": "reserved",
    "ranges": "too many ranges, or none",
    "runs": "too many runs, or none",
    "nbytes": "too many bytes, or none",
    "run": "a run that is empty, overlaps itself or has no range",
    "wraps": "beyond the end of all addresses",
    "more": "more bytes than it says",
    "fewer": "fewer bytes than it says",
}
BROKEN: dict[str, tuple[str, bytes]] = {
    "zeros": ("kind", bytes(64)),
    "ones": ("kind", b"\xff" * 64),
    "text": ("kind", b"GET / HTTP/1.1\r\n" * 4),
    "kind 3": ("kind", request(3, [OWN], [Run(AT, 8)])),
    "reserved of the head": ("reserved", request(PULL, [OWN], [Run(AT, 8)], reserved=1)),
    "reserved of the first range": (
        "reserved",
        request(PULL, [Range(SLOT, GENERATION, 1)], [Run(AT, 8)]),
    ),
    "reserved of the last range": (
        "reserved",
        request(PULL, [OWN, Range(SLOT, GENERATION, 1 << 31)], [Run(AT, 8)]),
    ),
    "no ranges": ("ranges", request(PULL, [], [Run(AT, 8)])),
    "65 ranges": ("ranges", request(PULL, [OWN] * (MAX_RANGES + 1), [Run(AT, 8)])),
    "65535 ranges": ("ranges", request(PUSH, [OWN], [Run(AT, 8)], num_ranges=65535)),
    "no runs": ("runs", request(PULL, [OWN], [], nbytes=8)),
    "1025 runs": ("runs", request(PULL, [OWN], [Run(AT, 8)] * (MAX_RUNS + 1))),
    "all runs": ("runs", request(PULL, [OWN], [Run(AT, 8)], num_runs=2**32 - 1)),
    "no bytes": ("nbytes", request(PULL, [OWN], [Run(AT, 8)], nbytes=0)),
    "a byte too many": ("nbytes", request(PULL, [OWN], [Run(AT, MAX_NBYTES + 1)])),
    "all bytes": ("nbytes", request(PULL, [OWN], [Run(AT, 8)], nbytes=2**64 - 1)),
    "an empty run": ("run", request(PULL, [OWN], [Run(AT, 8), Run(AT, 0)])),
    "a run of no pieces": ("run", request(PULL, [OWN], [Run(AT, 8, 0)], nbytes=8)),
    "pieces on top of each other": ("run", request(PUSH, [OWN], [Run(AT, 8, 2, 0)])),
    "pieces that overlap": ("run", request(PUSH, [OWN], [Run(AT, 8, 2, 7)])),
    "a range that is not there": ("run", request(PULL, [OWN], [Run(AT, 8, range=1)])),
    "a range far away": ("run", request(PULL, [OWN], [Run(AT, 8, range=2**32 - 1)])),
    "an address that wraps": ("wraps", request(PULL, [OWN], [Run(2**64 - 4, 8)])),
    "a stride that wraps": (
        "wraps",
        request(PULL, [OWN], [Run(2**64 - 2**32, 8, 3, 2**32 - 1)]),
    ),
    "all there is, twice": (
        "more",
        request(PULL, [OWN], [Run(0, 2**32 - 1, 2**32 - 1, 2**32 - 1)] * 2, nbytes=8),
    ),
    "sums that wrap": (
        "more",
        request(PULL, [OWN], [Run(0, 1 << 31, 1 << 31, 1 << 31)] * 4 + [Run(0, 8)], nbytes=8),
    ),
    "a byte more": ("more", request(PULL, [OWN], [Run(AT, 8), Run(AT, 8)], nbytes=15)),
    "a byte less": ("fewer", request(PULL, [OWN], [Run(AT, 8), Run(AT, 8)], nbytes=17)),
}


class TestBroken:
    @pytest.mark.parametrize("name", BROKEN)
    def test_a_broken_request_ends_the_link(
        self, attacked: Attacked, memory: Bytes, name: str
    ) -> None:
        words, data = BROKEN[name]
        check_served(attacked, memory)
        before = memory.copy()
        attacked.asks.send(data)
        assert WORDS[words] in attacked.wait_for_failure()
        assert attacked.asks.drain() == b""  # no answer
        assert attacked.answers.drain() == b""
        assert np.array_equal(memory, before)

    @pytest.mark.parametrize("behind", [1, 63, 64, 65, 64 + 16 + 24, 64 + 16 + 24 + 4095])
    @pytest.mark.parametrize("ends", ["close", "reset"])
    def test_a_request_that_is_cut_off(
        self, attacked: Attacked, memory: Bytes, behind: int, ends: str
    ) -> None:
        """A push of 4096 bytes that is cut up to its first byte writes only received bytes."""
        runs = [Run(start(memory), 96), Run(start(memory) + 8192, 4000)]
        whole = request(PUSH, [OWN, OWN], runs) + b"\x33" * 4096
        before = memory.copy()
        attacked.asks.send(whole[:behind])
        if ends == "close":
            attacked.asks.socket.close()
        else:
            attacked.asks.reset()
        assert attacked.wait_for_failure()
        after = memory[NBYTES:][:96].copy(), memory[NBYTES + 8192 :][:4000].copy()
        memory[NBYTES:][:96] = before[NBYTES:][:96]
        memory[NBYTES + 8192 :][:4000] = before[NBYTES + 8192 :][:4000]
        assert np.array_equal(memory, before)
        written = np.concatenate(after)
        original = np.concatenate([memory[NBYTES:][:96], memory[NBYTES + 8192 :][:4000]])
        came = max(0, behind - (64 + 16 + 24))
        assert np.array_equal(written[came:], original[came:])

    def test_others_continue(self, victim: TcpService, attacked: Attacked, memory: Bytes) -> None:
        other = attack(victim)
        attacked.asks.send(b"\xff" * 64)
        attacked.wait_for_failure()
        check_served(other, memory)
        other.close()

    @given(data=st.data())
    @settings(
        max_examples=4 * settings().max_examples,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    def test_noise(self, victim: TcpService, memory: Bytes, data: st.DataObject) -> None:
        """Requests with changed bytes, followed by anything, change no protected memory."""
        frame = bytearray(
            request(
                data.draw(st.sampled_from([PULL, PUSH])),
                [OWN, Range(READABLE, GENERATION)],
                [Run(start(memory), 64, 4, 128), Run(start(memory) + NBYTES, 100, range=1)],
            )
        )
        for at, byte in data.draw(
            st.lists(st.tuples(st.integers(0, len(frame) - 1), st.integers(0, 255)), max_size=4)
        ):
            frame[at] = byte
        tail = data.draw(st.binary(max_size=600))
        content = memory.copy()
        attacker = attack(victim)
        attacker.asks.send(bytes(frame) + tail)
        attacker.asks.socket.shutdown(socket.SHUT_WR)
        attacker.asks.drain()
        attacker.close()
        assert np.array_equal(memory[:NBYTES], content[:NBYTES])
        assert np.array_equal(memory[2 * NBYTES :], content[2 * NBYTES :])
        memory[:] = content


class TestRefused:
    """Well-formed requests, which are answered without ending the link."""

    @pytest.mark.parametrize("kind", [PULL, PUSH])
    @pytest.mark.parametrize(
        ("ranges", "offset", "count", "reason", "at"),
        [
            ([Range(2**32 - 1, 1)], 0, 1, OUTSIDE, 0),
            ([Range(16, 1)], 0, 1, OUTSIDE, 0),
            ([Range(0, 1)], 0, 1, DEREGISTERED, 0),
            ([Range(SLOT, 0)], 0, 1, DEREGISTERED, 0),
            ([Range(SLOT, GENERATION + 1)], 0, 1, DEREGISTERED, 0),
            ([Range(SLOT, 2**64 - 1)], 0, 1, DEREGISTERED, 0),
            ([OWN], -1, 1, OUTSIDE, 0),
            ([OWN], -NBYTES, 1, OUTSIDE, 0),
            ([OWN], NBYTES - 99, 1, OUTSIDE, 99),
            ([OWN], NBYTES, 1, OUTSIDE, 0),
            ([OWN], NBYTES - 250, 3, OUTSIDE, 150),
            ([OWN], NBYTES - 140, 3, OUTSIDE, 100),
            ([OWN], 2**62, 1, OUTSIDE, 0),
        ],
    )
    def test_a_refused_request_is_answered(
        self,
        attacked: Attacked,
        memory: Bytes,
        kind: int,
        ranges: list[Range],
        offset: int,
        count: int,
        reason: int,
        at: int,
    ) -> None:
        before = memory.copy()
        run = Run(start(memory) + offset, 100, count, 200)
        attacked.asks.send(request(kind, ranges, [run], number=3))
        if kind == PUSH:
            attacked.asks.send(b"\x33" * 100 * count)
        assert attacked.asks.read_answer() == Answer(3, reason, 0, at)
        check_served(attacked, memory)
        assert np.array_equal(memory, before)

    def test_a_push_to_read_only_memory(self, attacked: Attacked, memory: Bytes) -> None:
        before = memory.copy()
        runs = [Run(start(memory), 8), Run(start(memory) + NBYTES, 8, range=1)]
        ranges = [OWN, Range(READABLE, GENERATION)]
        attacked.asks.send(request(PUSH, ranges, runs, number=3) + b"\x33" * 16)
        assert attacked.asks.read_answer() == Answer(3, READ_ONLY, 0, 8)
        check_served(attacked, memory)
        assert np.array_equal(memory, before)

    def test_the_second_of_two_ranges(self, attacked: Attacked, memory: Bytes) -> None:
        runs = [Run(start(memory), 8, 3, 16), Run(start(memory), 8, range=1)]
        attacked.asks.send(request(PULL, [OWN, Range(SLOT, 1)], runs, number=2**64 - 1))
        assert attacked.asks.read_answer() == Answer(2**64 - 1, DEREGISTERED, 0, 24)
        check_served(attacked, memory)


class TestLimits:
    """The largest possible requests."""

    def test_all_ranges_and_runs(self, attacked: Attacked, memory: Bytes) -> None:
        ranges = [OWN] * MAX_RANGES
        runs = [
            Run(start(memory) + i * 512, 3, 5, 17 + i % 9, i % MAX_RANGES) for i in range(MAX_RUNS)
        ]
        attacked.asks.send(request(PULL, ranges, runs, number=8))
        expected = b"".join(
            memory[NBYTES + i * 512 + piece * run.stride :][:3].tobytes()
            for i, run in enumerate(runs)
            for piece in range(5)
        )
        assert attacked.asks.read_answer() == Answer(8, MOVED, 0, 0)
        assert attacked.asks.read(len(expected)) == expected
        assert attacked.asks.read_answer() == Answer(8, MOVED, 0, 0)

    def test_all_bytes(self, attacked: Attacked, memory: Bytes) -> None:
        runs = [Run(start(memory), NBYTES)] * (MAX_NBYTES // NBYTES)
        attacked.asks.send(request(PULL, [OWN], runs))
        assert attacked.asks.read_answer() == Answer(0, MOVED, 0, 0)
        for _ in runs:
            assert attacked.asks.read(NBYTES) == memory[NBYTES : 2 * NBYTES].tobytes()
        assert attacked.asks.read_answer() == Answer(0, MOVED, 0, 0)

    def test_the_smallest_pieces(self, attacked: Attacked, memory: Bytes) -> None:
        run = Run(start(memory), 1, NBYTES // 8, 8)
        attacked.asks.send(request(PULL, [OWN], [run]))
        attacked.asks.read_answer()
        assert attacked.asks.read(run.count) == memory[NBYTES : 2 * NBYTES : 8].tobytes()

    def test_a_request_may_arrive_byte_by_byte(self, attacked: Attacked, memory: Bytes) -> None:
        before = memory[NBYTES:][:8192].copy()
        runs = [Run(start(memory), 10, 3, 1000), Run(start(memory) + 5000, 7)]
        for byte in request(PUSH, [OWN, OWN], runs, number=1) + bytes(range(37)):
            attacked.asks.send(bytes([byte]))
        assert attacked.asks.read_answer() == Answer(1, MOVED, 0, 0)
        places = [*range(10), *range(1000, 1010), *range(2000, 2010), *range(5000, 5007)]
        expected = before.copy()
        expected[places] = range(37)
        assert np.array_equal(memory[NBYTES:][:8192], expected)
        memory[NBYTES:][:8192] = before


class TestSlow:
    def test_a_push_whose_bytes_never_come(
        self, victim: TcpService, attacked: Attacked, memory: Bytes
    ) -> None:
        """The memory can be deregistered, others are served, and later bytes are dropped."""
        own = np.zeros(SMALL, dtype=np.uint8)
        victim.add_range(1, own.ctypes.data, SMALL, True, 1)
        run = Run(own.ctypes.data, SMALL)
        attacked.asks.send(request(PUSH, [Range(1, 1)], [run], number=1) + b"\x33" * 1000)
        other = attack(victim)
        check_served(other, memory)
        while not own[999]:
            pass
        victim.remove_range(1)
        attacked.asks.send(b"\x33" * (SMALL - 1000))
        assert attacked.asks.read_answer() == Answer(1, DEREGISTERED, 0, 0)
        assert (own[:1000] == 0x33).all()
        assert not own[1000:].any()
        check_served(attacked, memory)
        other.close()

    def test_a_pull_whose_bytes_are_never_read(
        self, victim: TcpService, attacked: Attacked, memory: Bytes
    ) -> None:
        """After a deregistration, the promised bytes are zeros, and a refusal follows."""
        own = np.full(MAX_NBYTES, 0x11, dtype=np.uint8)
        victim.add_range(1, own.ctypes.data, MAX_NBYTES, True, 1)
        attacked.asks.send(request(PULL, [Range(1, 1)], [Run(own.ctypes.data, MAX_NBYTES)]))
        assert attacked.asks.read_answer() == Answer(0, MOVED, 0, 0)
        check_other = attack(victim)
        check_served(check_other, memory)
        victim.remove_range(1)
        own[:] = 0xEE
        came = np.frombuffer(attacked.asks.read(MAX_NBYTES), dtype=np.uint8)
        assert attacked.asks.read_answer() == Answer(0, DEREGISTERED, 0, 0)
        sent = int((came == 0x11).sum())
        assert (came[:sent] == 0x11).all()
        assert not came[sent:].any()
        check_served(attacked, memory)
        check_other.close()

    def test_a_client_that_reads_no_answers(self, victim: TcpService, memory: Bytes) -> None:
        """Requests wait in the socket and use no memory of this process."""
        attacked, before = attack(victim), allocated()
        one = request(PULL, [OWN] * MAX_RANGES, [Run(start(memory), 1)] * MAX_RUNS)
        attacked.asks.socket.setblocking(False)
        rest = b""
        with contextlib.suppress(BlockingIOError):
            for _ in range(1 << 14):  # 400 MB, or less if a call sends a part
                rest = rest or one
                rest = rest[attacked.asks.socket.send(rest) :]
            pytest.fail("all of it was taken")
        other = attack(victim)
        check_served(other, memory)
        assert allocated() - before < 1 << 20
        other.close()
        assert attacked.link.failure is None
        attacked.close()


@pytest.mark.parametrize("kind", ["refused", "a byte"])
class TestFlood:
    """A peer that sends requests faster than they are served, and reads the answers."""

    @pytest.fixture
    def flood(self, kind: str, victim: TcpService, memory: Bytes) -> Iterator[Attacked]:
        owned = OWN if kind == "a byte" else Range(SLOT, 1)
        data = request(PULL, [owned], [Run(start(memory), 1)]) * 16_384
        attacker = attack(victim)
        asking = attacker.asks.socket

        def send() -> None:
            with contextlib.suppress(OSError):  # until the link is closed
                while True:
                    asking.sendall(data)

        threads = [threading.Thread(target=send), threading.Thread(target=attacker.asks.drain)]
        for thread in threads:
            thread.start()
        yield attacker
        attacker.link.close("the test is over")
        for thread in threads:
            thread.join()
        attacker.close()

    def test_others_are_served(
        self, victim: TcpService, flood: Attacked, memory: Bytes, kind: str
    ) -> None:
        asker = TcpService(1, max_ranges=1)
        link, far = link_within(asker, victim)
        local = np.zeros(SMALL, dtype=np.uint8)
        backend = backend_of(link, "get", start(memory), NBYTES, slot=SLOT, generation=GENERATION)
        began = time.monotonic()
        with Executor(backend) as executor:
            for _ in range(50):
                report = executor.run(
                    descriptors("get", local.ctypes.data, start(memory), [(0, 0, SMALL)]),
                    TIMEOUT_MS,
                )
                assert report.status == KVN_OK, report.message
        assert time.monotonic() - began < TIMEOUT_MS / 1000  # about 0.1 s
        assert np.array_equal(local, memory[NBYTES:][:SMALL])
        assert flood.link.failure is None
        asker.close()
        far.close("the test is over")

    def test_its_link_can_be_closed(self, flood: Attacked, kind: str) -> None:
        flood.link.close("enough")
        assert flood.link.death_fd == -1

"""The process backend and Peer: memory of another process, and the failing descriptor."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvnative._backend import KVN_OK, KVN_PEER_GONE, KVN_UNMAPPED, ThreadPool
from kvnative._executor import Executor
from kvnative._host import GenerationTable
from kvnative._lower import Descriptors
from kvnative._process import Peer, process_backend
from kvnative._report import Report
from kvnative._task import Revocable, revoke
from tests.native.scatter import write_again
from tests.support.peer import Peer as OtherProcess
from tests.support.spare import assert_same
from tests.support.wrappers import limit_batch

PAGE = mmap.PAGESIZE
NBYTES = 8 << 20
Bytes = NDArray[np.uint8]

# NBYTES of memory, whose bytes are 7 times the page's number, then a page that cannot be written,
# and one that cannot even be read.
MEMORY = f"""
    import ctypes, mmap
    memory = mmap.mmap(-1, {NBYTES + 2 * PAGE}, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for page in range({NBYTES // PAGE}):
        memory[page * {PAGE}:(page + 1) * {PAGE}] = bytes([page * 7 % 256]) * {PAGE}
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    mprotect = ctypes.CDLL(None).mprotect
    mprotect(ctypes.c_void_p(base + {NBYTES}), ctypes.c_size_t({PAGE}), mmap.PROT_READ)
    mprotect(ctypes.c_void_p(base + {NBYTES + PAGE}), ctypes.c_size_t({PAGE}), 0)
    result = base
"""


class Other(OtherProcess):
    def __init__(self) -> None:
        super().__init__()
        self.base = int(self.run(MEMORY))

    def read(self, offset: int, nbytes: int) -> Bytes:
        found = self.run(f"result = memory[{offset}:{offset + nbytes}]")
        return np.frombuffer(found, dtype=np.uint8)


@pytest.fixture(scope="module")
def other() -> Iterator[Other]:
    other = Other()
    yield other
    other.close()


@pytest.fixture(scope="module")
def content() -> Bytes:
    return np.repeat(np.arange(NBYTES // PAGE) * 7 % 256, PAGE).astype(np.uint8)


@pytest.fixture(scope="module", params=["one thread", "three threads", "two nodes"])
def pool(request: pytest.FixtureRequest) -> ThreadPool:
    cores = sorted(os.sched_getaffinity(0))
    nodes = {0: cores[:1], 7: cores[-1:]} if request.param == "two nodes" else None
    return ThreadPool(1 if request.param == "one thread" else 3, nodes=nodes)


def run(pool: ThreadPool, pid: int, direction: str, dst: object, src: object, n: object) -> Report:
    columns = (np.asarray(column, dtype=np.uint64) for column in np.broadcast_arrays(dst, src, n))
    descriptors = Descriptors.from_columns(*map(np.ascontiguousarray, columns))
    with Executor(process_backend(pool, pid, direction)) as executor:  # type: ignore[arg-type]
        return executor.run(descriptors, timeout_ms=60_000)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    count=st.integers(1, 3000),
    largest=st.sampled_from([1, 100, PAGE, 300_000]),
    seed=st.integers(0, 2**32),
)
def test_get_is_a_gather(
    pool: ThreadPool, other: Other, content: Bytes, count: int, largest: int, seed: int
) -> None:
    """Ranges are more than one call takes, larger than one piece, or have any alignment."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, largest + 1, count).astype(np.uint64)
    sizes = sizes[: max(1, int(np.searchsorted(np.cumsum(sizes), NBYTES)))]
    sources = rng.integers(0, NBYTES - sizes, dtype=np.uint64)
    targets = np.cumsum(sizes) - sizes
    local = np.zeros(int(sizes.sum()), dtype=np.uint8)
    base = np.uint64(other.base)
    report = run(pool, other.pid, "get", local.ctypes.data + targets, base + sources, sizes)
    assert (report.status, report.bytes_done) == (KVN_OK, local.nbytes), report.message
    expected = np.concatenate(
        [content[s : s + n] for s, n in zip(sources.tolist(), sizes.tolist(), strict=True)]
    )
    assert_same(local, expected)


@pytest.mark.parametrize("piece", [1, 777, PAGE, NBYTES // 4])
def test_put_is_a_scatter(pool: ThreadPool, other: Other, content: Bytes, piece: int) -> None:
    first, count = NBYTES // 2, min(2000, NBYTES // 4 // piece)
    fresh = np.random.default_rng(piece).integers(0, 256, count * piece, dtype=np.uint8)
    offsets = np.random.default_rng(1).permutation(count).astype(np.uint64) * piece
    starts = fresh.ctypes.data + np.arange(count, dtype=np.uint64) * piece
    report = run(pool, other.pid, "put", other.base + first + offsets, starts, piece)
    assert (report.status, report.bytes_done) == (KVN_OK, fresh.nbytes), report.message
    expected = np.empty_like(fresh)
    expected.reshape(count, piece)[offsets // piece] = fresh.reshape(count, piece)
    assert_same(other.read(first, fresh.nbytes), expected)
    rest = content[first : first + count * piece]  # restored for later tests
    run(pool, other.pid, "put", other.base + first, rest.ctypes.data, rest.nbytes)
    assert_same(other.read(0, NBYTES), content)


class TestTheDescriptorThatFails:
    """Reports that name the first failing descriptor and its side, and count the moved ones."""

    COUNT, BAD = 3000, 1234

    def transfer(
        self, pool: ThreadPool, other: Other, direction: str, **bad: int
    ) -> tuple[Report, Bytes]:
        local = np.full(self.COUNT * 100, 255, dtype=np.uint8)
        here = local.ctypes.data + np.arange(self.COUNT, dtype=np.uint64) * 100
        there = np.full(self.COUNT, other.base + 7 * PAGE, dtype=np.uint64)
        here[self.BAD], there[self.BAD] = (
            bad.get("here", here[self.BAD]),
            bad.get("there", there[self.BAD]),
        )
        dst, src = (here, there) if direction == "get" else (there, here)
        return run(pool, other.pid, direction, dst, src, 100), local

    def check(self, report: Report, local: Bytes, side: str, *, moved: int | None) -> None:
        assert report.status == KVN_UNMAPPED
        assert report.failed == self.BAD
        assert report.message.startswith(f"descriptor {self.BAD}: {side} memory")
        assert report.code == 14  # EFAULT
        doubtful = np.zeros(self.COUNT, dtype=bool)
        for first, last in report.unconfirmed:
            doubtful[first:last] = True
        assert doubtful[self.BAD]
        if moved is not None:
            assert (local.reshape(self.COUNT, 100)[~doubtful] == moved).all()

    @pytest.mark.parametrize("address", [PAGE, 2**47, 2**64 - 4096], ids=hex)
    def test_remote_source(self, pool: ThreadPool, other: Other, address: int) -> None:
        report, local = self.transfer(pool, other, "get", there=address)
        self.check(report, local, "remote", moved=49)
        assert "not mapped or not readable" in report.message
        assert hex(address) in report.message

    @pytest.mark.parametrize("address", [PAGE, 2**47, 2**64 - 4096], ids=hex)
    def test_local_destination(self, pool: ThreadPool, other: Other, address: int) -> None:
        report, local = self.transfer(pool, other, "get", here=address)
        self.check(report, local, "local", moved=49)
        assert "not mapped" in report.message

    def test_local_destination_that_is_read_only(self, pool: ThreadPool, other: Other) -> None:
        constant = mmap.mmap(-1, PAGE, prot=mmap.PROT_READ)
        address = np.frombuffer(constant, dtype=np.uint8).ctypes.data
        report, local = self.transfer(pool, other, "get", here=address)
        self.check(report, local, "local", moved=49)
        assert "not writable" in report.message

    def test_remote_destination_that_is_read_only(self, pool: ThreadPool, other: Other) -> None:
        before = other.read(7 * PAGE, 100)
        report, local = self.transfer(pool, other, "put", there=other.base + NBYTES)
        self.check(report, local, "remote", moved=None)
        assert "not mapped or not writable" in report.message
        run(pool, other.pid, "put", other.base + 7 * PAGE, before.ctypes.data, 100)

    def test_local_source(self, pool: ThreadPool, other: Other) -> None:
        before = other.read(7 * PAGE, 100)
        report, local = self.transfer(pool, other, "put", here=PAGE)
        self.check(report, local, "local", moved=None)
        run(pool, other.pid, "put", other.base + 7 * PAGE, before.ctypes.data, 100)

    def test_in_the_middle_of_a_large_one(self, other: Other, content: Bytes) -> None:
        """All bytes before the hole arrive, and the message names the hole's first byte."""
        local = np.zeros(NBYTES + 2 * PAGE, dtype=np.uint8)
        report = run(ThreadPool(1), other.pid, "get", local.ctypes.data, other.base, local.nbytes)
        assert (report.status, report.failed) == (KVN_UNMAPPED, 0)
        assert report.bytes_done == NBYTES + PAGE
        assert hex(other.base + NBYTES + PAGE) in report.message
        assert_same(local[:NBYTES], content)


@pytest.mark.parametrize("most", [500, 1000])
def test_a_failing_descriptor_is_named_by_its_index_in_the_batch(
    pool: ThreadPool, other: Other, most: int
) -> None:
    """Its index in the part of the batch that the executor submits is not used."""
    local = np.zeros(3000 * 100, dtype=np.uint8)
    sources = np.full(3000, other.base, dtype=np.uint64)
    sources[1234] = PAGE
    targets = local.ctypes.data + np.arange(3000, dtype=np.uint64) * 100
    descriptors = Descriptors.from_columns(targets, sources, np.full(3000, 100, np.uint64))
    with Executor(limit_batch(process_backend(pool, other.pid, "get"), most)) as executor:
        report = executor.run(descriptors, timeout_ms=60_000)
    assert (report.status, report.failed) == (KVN_UNMAPPED, 1234)
    assert report.message.startswith("descriptor 1234: remote memory")


def test_a_dead_process(pool: ThreadPool) -> None:
    other = Other()
    local = np.zeros(100, dtype=np.uint8)
    try:
        peer = Peer(other.pid)
        other.kill()
        for state in ("zombie", "reaped"):
            report = run(pool, other.pid, "get", local.ctypes.data, other.base, 100)
            assert (report.status, report.failed) == (KVN_PEER_GONE, 0), state
            assert f"process {other.pid} has exited" in report.message
            with pytest.raises(ProcessLookupError, match="has exited"):
                peer.probe(other.base)
            with pytest.raises(ProcessLookupError, match="has exited"):
                Peer(other.pid)
            other.process.wait()
    finally:
        other.close()


class TestDescriptors:
    """Descriptors that cannot be opened through /proc, such as those of exported GPU memory."""

    def test_a_taken_descriptor_is_of_the_same_file(self, other: Other) -> None:
        reader, writer = other.run("import os; result = pipe = os.pipe()")
        peer = Peer(other.pid)
        taken = peer.take_descriptor(reader)
        try:
            assert not os.get_inheritable(taken)
            other.run("os.write(pipe[1], b'over there')")
            assert os.read(taken, 100) == b"over there"
            other.run("for end in pipe: os.close(end)")
            assert os.read(taken, 100) == b""
        finally:
            os.close(taken)
        with pytest.raises(ValueError, match=f"pidfd_getfd of descriptor {writer} of process"):
            peer.take_descriptor(writer)
        with pytest.raises(ValueError, match="descriptor -1"):
            peer.take_descriptor(-1)
        peer.close()
        with pytest.raises(ValueError, match="the peer is closed"):
            peer.take_descriptor(reader)

    def test_a_descriptor_of_a_dead_process_is_refused(self) -> None:
        other = Other()
        try:
            peer = Peer(other.pid)
            other.kill()
            with pytest.raises(ProcessLookupError, match="has exited"):
                peer.take_descriptor(0)
        finally:
            other.close()


def test_a_process_can_be_its_own_peer(pool: ThreadPool) -> None:
    source, target = np.arange(100, dtype=np.uint8), np.zeros(100, dtype=np.uint8)
    report = run(pool, os.getpid(), "put", target.ctypes.data, source.ctypes.data, 100)
    assert report.status == KVN_OK
    assert_same(source, target)


@pytest.mark.parametrize(
    ("pid", "direction", "message"),
    [(0, "get", "pid is 0"), (-1, "put", "pid is -1"), (1, "both", "direction is 'both'")],
)
def test_wrong_arguments_are_refused(pid: int, direction: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        process_backend(ThreadPool(1), pid, direction)  # type: ignore[arg-type]


def words_of(*words: tuple[int, int]) -> bytes:
    return np.array(words, np.uint64).tobytes()


class TestPeer:
    def test_a_check_names_the_first_stale_slot(self) -> None:
        table = GenerationTable(8)
        held = [table.take() for _ in range(4)]
        words = words_of(*held)
        peer = Peer(os.getpid())
        peer.attach(table.fd, table.inode, 8)
        look = peer.check
        assert look(words) == -1
        table.release(*held[2])
        assert look(words) == 2
        table.take()
        assert look(words) == 2, "taken again, but by another registration"
        assert look(words[:32]) == -1
        assert look(words_of((7, 0))) == 0, "the generation of a free slot was never issued"
        deadline = time.monotonic_ns() + 10**12
        lasting = table.take(deadline_ns=deadline)
        assert look(words_of(lasting)) == -1
        table.renew(*lasting, 1)
        assert look(words_of(lasting)) == 0, "its deadline has passed"
        table.renew(*lasting, deadline)
        assert look(words_of(lasting)) == -1
        with pytest.raises(ValueError, match="not registered"):
            table.renew(lasting[0], lasting[1] + 2, deadline)
        for slot in (8, 2**32, 2**64 - 1):
            assert look(words_of(held[0], (slot, 0))) == 1
            assert look(words_of(held[0], (slot, 1))) == 1
        with pytest.raises(ValueError, match="words have 63 bytes; each has 16"):
            look(words[:-1])
        for wrong in (bytearray(words), memoryview(words), np.frombuffer(words, np.uint64), None):
            with pytest.raises(TypeError, match="words"):
                look(wrong)
        peer.close()
        peer.close()
        with pytest.raises(ValueError, match="closed"):
            look(words)

    def test_a_guarded_copy_runs_between_two_checks(self) -> None:
        """The copy moves all bytes or none, or reports that the memory was lost meanwhile."""
        table, peer = GenerationTable(2), Peer(os.getpid())
        peer.attach(table.fd, table.inode, 2)
        nbytes = 64 << 20
        source, target = np.full(nbytes, 7, np.uint8), np.zeros(nbytes, np.uint8)
        there, here = (np.array([side.ctypes.data], np.uint64) for side in (source, target))
        few, all_of_it = (
            Descriptors.from_columns(here, there, np.array([item], np.uint64))
            for item in (100, nbytes)
        )
        held, memory = table.take(), Revocable()
        assert peer.copy(few, words_of(held), memory) == "done"
        assert np.flatnonzero(target).tolist() == list(range(100))
        table.release(*held)
        assert peer.copy(all_of_it, words_of(held), memory) == "refused"
        assert np.count_nonzero(target) == 100
        # A deadline that passes while bytes move, because that takes several times as long.
        outcome = "refused"
        while outcome == "refused":  # this process was delayed before the first check
            held = table.take(deadline_ns=time.monotonic_ns() + 1_000_000)
            outcome = peer.copy(all_of_it, words_of(held), memory)
            table.release(*held)
        assert outcome == "lost"
        assert target.all()
        held = table.take()
        assert peer.copy(few, words_of(held), memory) == "done"
        revoke(memory, "it goes")
        target[:] = 0
        assert peer.copy(few, words_of(held), memory) == "refused"
        assert not target.any()
        with pytest.raises(TypeError, match="words"):
            peer.copy(few, bytearray(16), memory)
        peer.close()
        with pytest.raises(ValueError, match="closed"):
            peer.copy(few, words_of(held), memory)
        for item in (few, all_of_it):
            write_again(item)

    @pytest.mark.parametrize("bad", [0, 1, 63])
    def test_a_copy_by_address_is_refused_unless_every_byte_moves(self, bad: int) -> None:
        table, peer = GenerationTable(1), Peer(os.getpid())
        peer.attach(table.fd, table.inode, 1)
        words, memory = words_of(table.take()), Revocable()
        source, target = np.arange(65, dtype=np.uint64), np.zeros(65, np.uint64)
        there, here = (
            np.uint64(side.ctypes.data) + 8 * np.arange(65, dtype=np.uint64)
            for side in (source, target)
        )

        def copy(count: int) -> str:
            sizes = np.full(count, 8, np.uint64)
            moved = Descriptors.from_columns(here[:count], there[:count], sizes)
            outcome = peer.copy(moved, words, memory, by_address=True)
            write_again(moved)
            return outcome

        assert [copy(65), copy(64)] == ["refused", "done"]
        assert target.tolist() == [*range(64), 0]
        there[bad] = PAGE  # nothing is mapped there
        assert copy(64) == "refused"
        peer.close()

    def test_registrations_and_leases_have_slots_of_their_own(self) -> None:
        table = GenerationTable(2, 3)
        for is_lease, slots in ((False, {0, 1}), (True, {2, 3, 4})):
            held = [table.take(is_lease=is_lease) for _ in slots]
            assert {slot for slot, _ in held} == slots
            with pytest.raises(MemoryError, match=f"all {len(slots)} slots"):
                table.take(is_lease=is_lease)
            table.release(*held[0])
            assert table.take(is_lease=is_lease)[0] == held[0][0]

    @pytest.mark.parametrize("seed", range(5))
    def test_a_slot_has_nothing_of_its_previous_lease(self, seed: int) -> None:
        """After any takes, renewals and releases, each slot has its own deadline, or none."""
        random, slots = Random(seed), 3
        table, peer = GenerationTable(slots, slots), Peer(os.getpid())
        peer.attach(table.fd, table.inode, 2 * slots)
        passed, later = 1, time.monotonic_ns() + 3_600 * 10**9
        deadlines: dict[tuple[int, int], int] = {}
        ended: list[tuple[int, int]] = []
        for _ in range(300):
            deadline = random.choice((0, passed, later))
            is_lease, word = random.random() < 0.5, random.choice([*deadlines, None])
            if word is None or random.random() < 0.4:
                if sum((slot >= slots) is is_lease for slot, _ in deadlines) < slots:
                    deadlines[table.take(is_lease=is_lease, deadline_ns=deadline)] = deadline
            elif random.random() < 0.5:
                table.renew(*word, deadline)
                deadlines[word] = deadline
            else:
                table.release(*word)
                del deadlines[word]
                ended.append(word)
            live = {word for word, until in deadlines.items() if until != passed}
            words = [*deadlines, *ended]
            assert {word for word in words if peer.check(words_of(word)) == -1} == live
        peer.close()

    def test_generations_begin_again_after_the_last(self) -> None:
        """After 2**63 leases of a slot they wrap, to another odd number than the last."""
        table, peer = GenerationTable(1), Peer(os.getpid())
        peer.attach(table.fd, table.inode, 1)
        ctypes.c_uint64.from_address(table.address).value = 2**64 - 2
        last = table.take()
        assert last == (0, 2**64 - 1)
        assert peer.check(words_of(last)) == -1
        table.release(*last)
        assert peer.check(words_of(last)) == 0
        assert peer.check(words_of((0, 0))) == 0, "the generation was never issued"
        again = table.take()
        assert again[1] % 2 == 1
        assert peer.check(words_of(last)) == 0
        assert peer.check(words_of(again)) == -1

    def test_generations_of_each_table_begin_at_a_random_number(self) -> None:
        words = {GenerationTable(1).take() for _ in range(8)}
        assert len(words) == 8
        assert all(slot == 0 and generation < 2**48 for slot, generation in words)
        assert max(generation for _, generation in words) > 2**32

    def test_a_peer_holds_an_existing_pid(self) -> None:
        with pytest.raises(ProcessLookupError, match="has exited"):
            Peer(2**22 - 1)
        with pytest.raises(ValueError, match="pid is 0"):
            Peer(0)

    def test_only_one_generation_table(self) -> None:
        peer, table = Peer(os.getpid()), GenerationTable(8)
        with pytest.raises(ValueError, match="not attached"):
            peer.check(b"")
        peer.attach(table.fd, table.inode, 8)
        assert peer.check(b"") == -1
        with pytest.raises(ValueError, match="attached already"):
            peer.attach(table.fd, table.inode, 8)


def test_a_signal_to_this_process_does_not_count_as_death_of_the_peer() -> None:
    table, peer = GenerationTable(1), Peer(os.getpid())
    with signals_every(50e-6):
        peer.attach(table.fd, table.inode, table.num_slots)
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            assert peer.check(b"") == -1
    peer.close()


@contextmanager
def signals_every(seconds: float) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

"""The writer table: writers announce themselves, and a deregistration waits for them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from mmap import PAGESIZE, mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvnative._backend import (
    KVN_CANCELLED,
    KVN_FAILED,
    KVN_OK,
    KVN_PEER_GONE,
    KVN_UNMAPPED,
    Backend,
    NativeError,
    ThreadPool,
    host_backend,
)
from kvnative._executor import Executor
from kvnative._host import GenerationTable
from kvnative._lower import Descriptors, lower
from kvnative._report import Report
from kvnative._writers import Ticket, Writer, WriterTable
from tests.support.peer import EXECUTE_ANOTHER_PROGRAM
from tests.support.wrappers import delay, fail_at, hold, let_go, limit_bandwidth
from tests.transport.owner import Owner

NBYTES = 1 << 20
TICKETS = 62  # of an entry
FOREVER_MS = 1e9


def column(*numbers: int) -> NDArray[np.uint64]:
    return np.array(numbers, np.uint64)


def move(backend: Backend, src: int, dst: int, nbytes: int = NBYTES) -> Report:
    descriptors = lower(column(0), column(0), column(nbytes), column(src), column(dst))
    return Executor(backend).run(descriptors, 30_000)


def address_of(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


@dataclass
class Here:
    """An owner and a writer in this process, with one registration."""

    entries: int = 8
    pool: ThreadPool = field(default_factory=lambda: ThreadPool(2))

    def __post_init__(self) -> None:
        self.generations, self.table = GenerationTable(4), WriterTable(self.entries)
        self.slot, self.generation = self.generations.take()
        self.src = np.full(NBYTES, 7, np.uint8)
        self.dst = np.zeros(NBYTES, np.uint8)
        self.registered = column(self.slot, self.generation).tobytes()

    @property
    def facts(self) -> dict[str, int]:
        """What a writer is made with."""
        return {
            "generations_fd": self.generations.fd,
            "generations_inode": self.generations.inode,
            "num_slots": self.generations.num_slots,
            "table_fd": self.table.fd,
            "table_inode": self.table.inode,
            "num_entries": self.table.num_entries,
            "address": self.table.address,
        }

    def writer(self) -> Writer:
        return Writer(os.getpid(), **self.facts)

    def backend(self, kind: str) -> Backend:
        writer = self.writer()
        if kind == "around":
            return writer.around(host_backend(self.pool), self.registered)
        make = {"mapped": writer.mapped, "by_address": writer.by_address}[kind]
        return make(self.pool, self.registered)

    @property
    def sides(self) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        return column(address_of(self.src)), column(address_of(self.dst))

    def move(self, backend: Backend, nbytes: int = NBYTES) -> Report:
        return move(backend, address_of(self.src), address_of(self.dst), nbytes)

    def end(self) -> None:
        self.generations.release(self.slot, self.generation)


@pytest.fixture
def here() -> Here:
    return Here()


KINDS = ["mapped", "by_address", "around"]


@pytest.mark.parametrize("kind", KINDS)
class TestGuard:
    def test_registered_memory_is_written(self, here: Here, kind: str) -> None:
        report = here.move(here.backend(kind))
        assert report.status == KVN_OK, report
        assert (here.dst == 7).all()
        assert here.table.drain(0) == []

    def test_deregistered_memory_is_not_written(self, here: Here, kind: str) -> None:
        backend = here.backend(kind)
        here.end()
        report = here.move(backend)
        assert report.status == KVN_UNMAPPED
        assert "has deregistered the memory" in report.message
        assert not here.dst.any()
        assert here.table.drain(0) == []

    def test_each_of_several_registrations_counts(self, here: Here, kind: str) -> None:
        slot, generation = here.generations.take()
        here.registered += column(slot, generation).tobytes()
        backend = here.backend(kind)
        assert here.move(backend).status == KVN_OK
        here.generations.release(slot, generation)
        here.dst[:] = 0
        assert here.move(backend).status == KVN_UNMAPPED
        assert not here.dst.any()


def test_a_refused_batch_is_not_announced_any_more(here: Here) -> None:
    refusing = fail_at(host_backend(here.pool), 0, at_submit=True)
    backend = here.writer().around(refusing, here.registered)
    assert here.move(backend).status == KVN_FAILED
    assert here.table.drain(0) == []


def test_a_forked_child_refuses_writers_of_its_parent(here: Here) -> None:
    """Its pool has no threads there: nothing would move."""
    writer, inner = here.writer(), host_backend(here.pool)
    for call in (
        lambda: writer.around(inner, here.registered),
        lambda: writer.mapped(here.pool, here.registered),
        lambda: writer.by_address(here.pool, here.registered),
    ):
        child = os.fork()
        if child == 0:
            try:
                call()
            except NativeError:
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


class TestWait:
    def test_for_a_batch_that_is_being_written(self, here: Here) -> None:
        """Half a second of it: shorter waits time out, longer ones see it end."""
        slow = here.writer().around(limit_bandwidth(host_backend(here.pool), 2e6), here.registered)
        with ThreadPoolExecutor(1) as thread:
            call = thread.submit(here.move, slow)
            while not here.dst.any():
                assert not call.done(), call.result()
            here.end()
            (ticket,) = here.table.drain(0.01)
            assert ticket.pid == os.getpid()
            assert here.table.stands(ticket)
            (again,) = here.table.drain(60)  # it did not move on: it is not waited for twice
            assert again == ticket
            assert call.result().status == KVN_OK
            assert not here.table.stands(ticket)
            assert here.table.drain(0) == []

    def test_not_for_later_writes(self, here: Here) -> None:
        """Another registration is being written all the time, in pieces that overlap."""
        slot, generation = here.generations.take()
        writer = here.writer()
        other = writer.mapped(here.pool, column(slot, generation).tobytes())
        ended = False

        def write(dst: NDArray[np.uint8]) -> None:
            while not ended:
                assert move(other, address_of(here.src), address_of(dst)).status == KVN_OK

        targets = [np.zeros(NBYTES, np.uint8) for _ in range(3)]
        with ThreadPoolExecutor(3) as threads:
            calls = [threads.submit(write, target) for target in targets]
            while not all(target.any() for target in targets):
                assert not any(call.done() for call in calls)
            for _ in range(200):
                assert here.table.drain(20) == []
            ended = True
            for call in calls:
                call.result()

    def test_more_at_once_than_an_entry_has_tickets(self, here: Here) -> None:
        backend = here.backend("around")
        slow = here.writer().around(delay(host_backend(here.pool), 5), here.registered)
        with ThreadPoolExecutor(40) as threads:
            calls = [threads.submit(here.move, item, PAGESIZE) for item in (slow, backend) * 20]
            assert {call.result().status for call in calls} == {KVN_OK}
        assert here.table.drain(0) == []

    @pytest.mark.timeout(30)
    def test_batches_without_a_waiter(self, here: Here) -> None:
        """As of a device: their tickets stand until somebody asks, however long they are over."""
        executor = Executor(
            here.writer().around(delay(host_backend(here.pool), 5), here.registered)
        )
        made = [lower(*map(column, (0, 0, PAGESIZE)), *here.sides) for _ in range(40)]
        tasks = [executor.submit(item) for item in made]
        assert {task.wait(30_000).status for task in tasks} == {KVN_OK}
        assert here.table.drain(0) == []


class TestEndOfLeases:
    """Their words, and then the wait for those who write, in one call."""

    @pytest.fixture
    def generations(self) -> GenerationTable:
        return GenerationTable(1, 4)

    def test_those_that_have_not_ended_do(self, here: Here, generations: GenerationTable) -> None:
        leases = [generations.take(is_lease=True) for _ in range(3)]
        assert here.table.end_leases(generations, leases[:2], 0) == []
        again = generations.take(is_lease=True), generations.take(is_lease=True)
        assert here.table.end_leases(generations, [*leases, (99, 1), (1, 2**64 - 1)], 0) == []
        for lease in leases:
            with pytest.raises(ValueError, match="is not registered"):
                generations.release(*lease)
        for item in again:  # what has their slots since is not ended
            generations.release(*item)
        assert here.table.end_leases(generations, [], 0) == []

    def test_impossible_ends_of_leases_are_refused(
        self, here: Here, generations: GenerationTable
    ) -> None:
        lease = generations.take(is_lease=True)
        for wrong in ([(1, 2, 3)], [5], [(2**64, 1)], [(1, -1)]):
            with pytest.raises((TypeError, ValueError, OverflowError)):
                here.table.end_leases(generations, wrong, 0)  # type: ignore[arg-type]
        generations.close()
        with pytest.raises(ValueError, match="closed"):
            here.table.end_leases(generations, [lease], 0)

    @pytest.mark.parametrize("entries", [8, 64])
    def test_who_writes_is_waited_for(self, entries: int) -> None:
        """Whether a glance shows that nobody does, or there are too many entries for one."""
        here = Here(entries)
        writers = [here.writer() for _ in range(entries)]
        ended = here.generations.take()
        here.registered += column(*ended).tobytes()
        executor = Executor(writers[-1].around(delay(host_backend(here.pool), 5), here.registered))
        descriptors = lower(*map(column, (0, 0, NBYTES)), *here.sides)
        task = executor.submit(descriptors)  # its ticket stands until somebody asks
        with ThreadPoolExecutor(1) as thread:
            call = thread.submit(here.table.end_leases, here.generations, [ended], 60)
            assert task.wait(30_000).status == KVN_OK, "it was begun before"
            assert call.result() == []
        assert executor.run(descriptors, 30_000).status == KVN_UNMAPPED
        assert here.table.end_leases(here.generations, [ended], 0) == []

    def test_a_glance_forgives_who_was_late(self, here: Here) -> None:
        """Who did not move on is not waited for again, until nothing of it stands."""
        ended, writer, host = here.generations.take(), here.writer(), host_backend(here.pool)
        descriptors = lower(*map(column, (0, 0, NBYTES)), *here.sides)
        task = Executor(writer.around(delay(host, FOREVER_MS), here.registered)).submit(descriptors)
        for seconds in (0, 60):
            assert len(here.table.end_leases(here.generations, [ended], seconds)) == 1
        assert task.cancel().status == KVN_CANCELLED
        assert here.table.end_leases(here.generations, [ended], 0) == []
        held = hold(host)
        task = Executor(writer.around(held, here.registered)).submit(descriptors)
        with ThreadPoolExecutor(1) as thread:
            call = thread.submit(here.table.end_leases, here.generations, [ended], 60)
            while not call.running():
                assert not call.done(), call.result()
            let_go(held)
            assert task.wait(30_000).status == KVN_OK
            assert call.result() == []


class TestLies:
    """What another peer writes into the table, which all of them have."""

    @pytest.fixture
    def here(self) -> Here:
        return Here(4096)

    def fill(self, here: Here, ticket: int, entries: Iterable[int]) -> None:
        """Tickets of this process, which lives, wherever there can be one."""
        writer = here.writer()  # so that the first entry says how this process is called there
        with mmap(here.table.fd, 0) as file:
            words = np.frombuffer(file, np.uint64).reshape(-1, PAGESIZE // 8)
            process = int(words[1, 0])
            words[0, 0] = 2**64 - 1
            for entry in entries:
                words[1 + entry, 0] = process
                words[1 + entry, 2 : 2 + TICKETS] = ticket
            del words
        del writer

    @pytest.mark.parametrize("ticket", [2, 3], ids=["mapped", "by_address"])
    def test_a_lying_writer_delays_deregistration_only_to_its_deadline(
        self, here: Here, ticket: int
    ) -> None:
        """Its processor time, as a ratio to one look at each entry: a look at each ticket is 62."""
        self.fill(here, ticket, range(4096))
        begun = time.thread_time()
        for _ in range(4096):
            Path("/proc/self/stat").read_text()
        looked = time.thread_time()
        here.table.drain(0.1)
        assert time.thread_time() - looked < 20 * (looked - begun)

    @pytest.mark.timeout(30)
    def test_a_lying_writer_loses_only_its_own_transfer(self, here: Here) -> None:
        backend = here.backend("mapped")
        self.fill(here, 2, [0])
        report = here.move(backend)
        assert report.status == KVN_FAILED
        assert "as many announced writes of this link as fit" in report.message
        assert not here.dst.any()


class TestEntries:
    def test_each_writer_has_one_until_nothing_of_it_is_left(self) -> None:
        here = Here(entries=2)
        one, two = here.writer(), here.writer()
        with pytest.raises(MemoryError, match="all 2 entries of the writer table"):
            here.writer()
        backend = one.mapped(here.pool, here.registered)
        del one
        with pytest.raises(MemoryError):
            here.writer()
        assert here.move(backend).status == KVN_OK
        del backend
        here.writer()
        del two

    def test_those_of_forked_children_that_died_are_taken(self) -> None:
        here = Here(entries=2)
        for _ in range(2):
            child = os.fork()
            if child == 0:  # an entry of its own, never given back
                kept = here.writer()
                os._exit(0 if kept else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        writers = here.writer(), here.writer()
        with pytest.raises(MemoryError):
            here.writer()
        del writers

    def test_the_tickets_of_a_writer_that_died_are_not_the_next_ones(self) -> None:
        here = Here(entries=1)
        child = os.fork()
        if child == 0:
            kept = here.writer()
            with mmap(here.table.fd, 2 * PAGESIZE) as table:  # the header, then the entry
                tickets = np.frombuffer(table, np.uint64, 64, PAGESIZE)[2:]
                tickets[:] = 4  # all places: it died while it wrote
                del tickets
            os._exit(0 if kept else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        backend = here.backend("mapped")  # takes the same entry
        assert here.table.drain(0) == []
        assert here.move(backend).status == KVN_OK  # and finds a place in it

    def test_a_forked_child_does_not_give_it_back(self) -> None:
        here = Here(entries=1)
        writer = here.writer()
        child = os.fork()
        if child == 0:
            del writer
            os._exit(0)
        os.waitpid(child, 0)
        with pytest.raises(MemoryError):
            here.writer()
        del writer
        here.writer()

    @pytest.mark.parametrize("entries", [0, 2**16 + 1])
    def test_an_impossible_number_of_entries_is_refused(self, entries: int) -> None:
        with pytest.raises(ValueError, match=r"must be in \[1, 65536\]"):
            WriterTable(entries)

    def test_a_file_that_is_not_a_writer_table_is_refused(self, here: Here) -> None:
        table = here.table
        facts: dict[str, Any] = {
            "generations_fd": here.generations.fd,
            "generations_inode": here.generations.inode,
            "num_slots": here.generations.num_slots,
            "table_fd": table.fd,
            "table_inode": table.inode,
            "num_entries": table.num_entries,
            "address": table.address,
        }
        for wrong in ({"table_inode": 1}, {"num_entries": 9}, {"num_slots": 600}):
            with pytest.raises(ValueError, match="is not the memfd"):
                Writer(os.getpid(), **{**facts, **wrong})
        table.close()
        table.close()
        with pytest.raises(OSError, match=f"{facts['table_fd']}"):
            Writer(os.getpid(), **facts)


class TestWhatIsInTheTable:
    """Peers write there too, and may have died or be hostile."""

    @staticmethod
    def words(table: WriterTable) -> NDArray[np.uint64]:
        """A row for each page: the header, then the entries (process, closed, tickets...)."""
        return np.frombuffer(mmap(table.fd, 0), np.uint64).reshape(-1, PAGESIZE // 8)

    def test_an_earlier_process_of_the_pid_is_not_waited_for(self, here: Here) -> None:
        backend = here.backend("mapped")  # which holds the entry
        entry = self.words(here.table)[1]
        entry[2] = 2  # a ticket
        assert [item.pid for item in here.table.drain(0)] == [os.getpid()]
        entry[0] += 1 << 22  # the time at which its process started
        assert here.table.drain(0) == []
        assert entry[2] == 0
        del backend

    def test_more_entries_than_there_can_be_are_not_looked_at(self, here: Here) -> None:
        self.words(here.table)[0, 0] = 1 << 40
        assert here.table.drain(0) == []
        assert here.move(here.backend("mapped")).status == KVN_OK


# ---- another process ----


OFFER = """
    import ctypes
    from kvnative._host import GenerationTable
    from kvnative._writers import WriterTable
    generations, table = GenerationTable(4), WriterTable(4)
    slot, generation = generations.take()
    target = np.zeros(1 << 20, np.uint8)
    result = dict(
        generations_fd=generations.fd, generations_inode=generations.inode, num_slots=4,
        table_fd=table.fd, table_inode=table.inode, num_entries=4, address=table.address,
    ), slot, generation, target.__array_interface__["data"][0]
"""


@dataclass
class There:
    """An owner in another process, and what this one writes to it with."""

    owner: Owner

    def __post_init__(self) -> None:
        self.facts, slot, generation, self.target = self.owner.run(OFFER)
        self.pool = ThreadPool(1)
        self.registered = column(slot, generation).tobytes()
        self.src = np.full(NBYTES, 7, np.uint8)
        self.backend = self.writer().by_address(self.pool, self.registered)

    def writer(self) -> Writer:
        return Writer(self.owner.pid, **self.facts)

    def write(self) -> Report:
        return move(self.backend, address_of(self.src), self.target)


@pytest.fixture
def there(owner: Owner) -> There:
    return There(owner)


@pytest.fixture
def owner() -> Iterator[Owner]:
    owner = Owner()
    yield owner
    owner.close()


def test_by_address_into_another_process(there: There) -> None:
    assert there.write().status == KVN_OK
    assert there.owner.run("result = int((target == 7).sum())") == NBYTES


@pytest.mark.parametrize("side", ["local", "remote"])
@pytest.mark.parametrize(("count", "bad"), [(1, 0), (3, 0), (3, 1), (3, 2)])
def test_memory_that_is_not_mapped_ends_the_transfer_and_its_announcement(
    there: There, count: int, bad: int, side: str
) -> None:
    """The one descriptor is named; those before it have arrived."""
    nbytes = NBYTES // 4  # moved by the pool, so that a deadline may pass
    steps = nbytes * np.arange(count, dtype=np.uint64)
    src, dst = steps + np.uint64(address_of(there.src)), steps + np.uint64(there.target)
    (src if side == "local" else dst)[bad] = PAGESIZE
    descriptors = Descriptors.from_columns(dst, src, np.full(count, nbytes, np.uint64))
    # Not given up, which would wait for the piece: the end of the owner ends it in any case.
    report = Executor(there.backend).submit(descriptors).wait(10_000, give_up=False)
    assert (report.status, report.failed) == (KVN_UNMAPPED, bad)
    assert report.message.startswith(f"descriptor {bad}: {side} memory")
    arrived = f"result = target[: {bad * nbytes}].all(), table.drain(0)"
    assert there.owner.run(arrived) == (True, [])


# Another program under the same pid, that has memory at the very addresses: as without address
# space layout randomization.
OTHER_PROGRAM = """
import ctypes, sys
from mmap import PAGESIZE
from multiprocessing.connection import Connection
target, table = map(int, sys.argv[1:])
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
for address, nbytes in ((target & -PAGESIZE, (1 << 20) + PAGESIZE), (table, 5 * PAGESIZE)):
    found = libc.mmap(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), 3, 0x100022, -1, 0)
    assert found == address, ctypes.get_errno()
tests = Connection(0)
tests.send((True, None))
tests.recv()
written = sum(ctypes.string_at(target, 1 << 20)) + sum(ctypes.string_at(table, 5 * PAGESIZE))
tests.send((True, written))
tests.poll(None)
"""


def test_not_into_another_program_of_the_same_pid(there: There) -> None:
    arguments = ["-c", OTHER_PROGRAM, str(there.target), str(there.facts["address"])]
    there.owner.run(f"import os, sys; os.execv(sys.executable, [sys.executable, *{arguments}])")
    report = there.write()
    assert report.status == KVN_PEER_GONE
    assert "executes another program" in report.message
    assert there.owner.run("how much was written") == 0


def test_not_after_the_owner_has_died(there: There) -> None:
    there.owner.kill()
    assert there.write().status == KVN_PEER_GONE


# An entry that says what one says who was stopped, or killed, in the middle of a piece.
LEFT = """
    from mmap import PAGESIZE

    from kvnative._writers import Ticket

    def announce(entry, number):
        words = (ctypes.c_uint64 * 16).from_address(table.address + (entry + 1) * PAGESIZE)
        words[2] = number
"""


def test_a_late_writer_by_address_is_cut_off(there: There) -> None:
    """Its gate is closed: other writers go on, and its error says to link again."""
    other = there.writer().by_address(there.pool, there.registered)
    there.owner.run(LEFT, "result = announce(0, 3)")
    began = time.monotonic()
    assert there.owner.run("result = table.drain(0.2)") == []
    assert 0.2 <= time.monotonic() - began < 10
    report = there.write()
    assert report.status == KVN_PEER_GONE
    assert "link again" in report.message
    assert move(other, address_of(there.src), there.target).status == KVN_OK
    there.backend = there.writer().by_address(there.pool, there.registered)
    assert there.write().status == KVN_OK


def test_a_forked_writer_that_died_is_not_waited_for(there: There) -> None:
    child = os.fork()
    if child == 0:
        there.pool = ThreadPool(1)
        backend = there.writer().by_address(there.pool, there.registered)
        move(backend, address_of(there.src), there.target, 4096)
        os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    there.owner.run(LEFT, "result = announce(1, 4)")
    began = time.monotonic()
    assert there.owner.run("result = table.drain(60)") == []
    assert time.monotonic() - began < 10


def test_a_mapped_writer_that_is_late_is_named(there: There) -> None:
    (found,) = there.owner.run(LEFT, "announce(0, 4); result = table.drain(0.1)")
    assert found == Ticket(os.getpid(), 0, 0, 4)
    stands = "result = table.stands(found)"
    assert there.owner.run(stands, found=found) is True
    assert there.owner.run("announce(0, 0)", stands) is False


def test_a_mapped_writer_that_executes_another_program_writes_no_more(
    here: Here, owner: Owner
) -> None:
    """Its pid and its start stay: what it had mapped has gone all the same."""
    owner.run(f"""
        from kvnative._writers import Writer
        writer = Writer({os.getpid()}, **{here.facts})
    """)
    ticket = Ticket(owner.pid, 0, 0, 4)
    with mmap(here.table.fd, 0) as file:
        file[PAGESIZE + 16 : PAGESIZE + 24] = ticket.number.to_bytes(8, "little")
    assert here.table.stands(ticket)
    assert owner.run(EXECUTE_ANOTHER_PROGRAM) == "another"
    assert not here.table.stands(ticket)
    assert here.table.drain(60) == []  # nor is it found again

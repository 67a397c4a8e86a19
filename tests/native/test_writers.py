"""The writer table: writers announce themselves, and a deregistration waits for them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
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
    KVN_UNMAPPED,
    KVN_UNSUPPORTED,
    NativeError,
    host_backend,
)
from kvnative._executor import Executor
from kvnative._host import GenerationTable
from kvnative._lower import lower
from kvnative._writers import Writer, WriterTable
from tests.native.writers import NBYTES, Here, address_of, column, move
from tests.support.wrappers import delay, fail_at, hold, let_go, limit_bandwidth

TICKETS = 62  # per entry
FOREVER_MS = 1e9


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


def test_a_refused_batch_is_no_longer_announced(here: Here) -> None:
    refusing = fail_at(host_backend(here.pool), 0, at_submit=True)
    backend = here.writer().around(refusing, here.registered)
    assert here.move(backend).status == KVN_FAILED
    assert here.table.drain(0) == []


def test_no_stream_waits_for_an_announced_batch_of_the_host(here: Here) -> None:
    """A wrapper has only the calls of its inner backend."""
    held = hold(host_backend(here.pool))
    executor = Executor(here.writer().around(held, here.registered))
    task = executor.submit(lower(*map(column, (0, 0, NBYTES)), *here.sides))
    refusal = task.block_stream(0x10)
    assert refusal is not None
    assert refusal.status == KVN_UNSUPPORTED
    let_go(held)
    assert task.wait(30_000).status == KVN_OK


def test_a_forked_child_refuses_writers_of_its_parent(here: Here) -> None:
    """The pool has no threads in the child, so nothing would move."""
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
    def test_drain_waits_for_a_batch_in_flight(self, here: Here) -> None:
        """The batch takes half a second: shorter waits time out, longer ones see its end."""
        slow = here.writer().around(limit_bandwidth(host_backend(here.pool), 2e6), here.registered)
        with ThreadPoolExecutor(1) as thread:
            call = thread.submit(here.move, slow)
            while not here.dst.any():
                assert not call.done(), call.result()
            here.end()
            (ticket,) = here.table.drain(0.01)
            assert ticket.pid == os.getpid()
            assert here.table.stands(ticket)
            (again,) = here.table.drain(60)  # no progress: it is not waited for twice
            assert again == ticket
            assert call.result().status == KVN_OK
            assert not here.table.stands(ticket)
            assert here.table.drain(0) == []

    def test_drain_does_not_wait_for_later_writes(self, here: Here) -> None:
        """Another registration is written all the time, in pieces that overlap in time."""
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
        """Tickets of a device's batches stay until a poll, long after the batches have ended."""
        executor = Executor(
            here.writer().around(delay(host_backend(here.pool), 5), here.registered)
        )
        made = [lower(*map(column, (0, 0, PAGESIZE)), *here.sides) for _ in range(40)]
        tasks = [executor.submit(item) for item in made]
        assert {task.wait(30_000).status for task in tasks} == {KVN_OK}
        assert here.table.drain(0) == []


class TestEndOfLeases:
    """The end of leases: one call ends their words, and then waits for writers."""

    @pytest.fixture
    def generations(self) -> GenerationTable:
        return GenerationTable(1, 4)

    def test_leases_that_have_not_ended_end(self, here: Here, generations: GenerationTable) -> None:
        leases = [generations.take(is_lease=True) for _ in range(3)]
        assert here.table.end_leases(generations, leases[:2], 0) == []
        again = generations.take(is_lease=True), generations.take(is_lease=True)
        assert here.table.end_leases(generations, [*leases, (99, 1), (1, 2**64 - 1)], 0) == []
        for lease in leases:
            with pytest.raises(ValueError, match="is not registered"):
                generations.release(*lease)
        for item in again:  # new leases in their slots stay
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
    def test_writers_are_waited_for(self, entries: int) -> None:
        """Few entries are covered by one quick look, and 64 are too many for it."""
        here = Here(entries)
        writers = [here.writer() for _ in range(entries)]
        ended = here.generations.take()
        here.registered += column(*ended).tobytes()
        executor = Executor(writers[-1].around(delay(host_backend(here.pool), 5), here.registered))
        descriptors = lower(*map(column, (0, 0, NBYTES)), *here.sides)
        task = executor.submit(descriptors)  # its ticket stays until a poll
        with ThreadPoolExecutor(1) as thread:
            call = thread.submit(here.table.end_leases, here.generations, [ended], 60)
            assert task.wait(30_000).status == KVN_OK, "it was begun before"
            assert call.result() == []
        assert executor.run(descriptors, 30_000).status == KVN_UNMAPPED
        assert here.table.end_leases(here.generations, [ended], 0) == []

    def test_a_quick_look_forgives_a_late_writer(self, here: Here) -> None:
        """A writer without progress is not waited for again until its tickets are gone."""
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


class TestFalseEntries:
    """False entries of a peer in the table, which all peers have mapped."""

    @pytest.fixture
    def here(self) -> Here:
        return Here(4096)

    def fill(self, here: Here, ticket: int, entries: Iterable[int]) -> None:
        """Write tickets of this process, which is alive, into all places."""
        writer = here.writer()  # so that the first entry has the identity of this process
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
        """The processor time is compared with one look per entry; a look per ticket would be 62."""
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
    def test_each_writer_has_an_entry_until_its_last_backend_ends(self) -> None:
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

    def test_a_writer_in_an_entry_before_another_does_not_hide_it(self) -> None:
        """The entry was given back and is taken again, while the later one is in use."""
        here = Here(entries=3)
        held = hold(host_backend(here.pool))
        earlier = here.writer()
        executor = Executor(here.writer().around(held, here.registered))
        del earlier
        earlier = here.writer()
        task = executor.submit(lower(*map(column, (0, 0, NBYTES)), *here.sides))
        here.end()
        (ticket,) = here.table.drain(0)
        assert here.table.stands(ticket)
        let_go(held)
        assert task.wait(30_000).status == KVN_OK
        assert here.table.drain(0) == []
        del earlier

    def test_entries_of_dead_forked_children_are_taken(self) -> None:
        here = Here(entries=2)
        for _ in range(2):
            child = os.fork()
            if child == 0:  # takes its own entry, and never returns it
                kept = here.writer()
                os._exit(0 if kept else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        writers = here.writer(), here.writer()
        with pytest.raises(MemoryError):
            here.writer()
        del writers

    def test_the_tickets_of_a_dead_writer_do_not_count_for_the_next(self) -> None:
        here = Here(entries=1)
        child = os.fork()
        if child == 0:
            kept = here.writer()
            with mmap(here.table.fd, 2 * PAGESIZE) as table:  # the header, then the entry
                tickets = np.frombuffer(table, np.uint64, 64, PAGESIZE)[2:]
                tickets[:] = 4  # all places, as if the writer died while it wrote
                del tickets
            os._exit(0 if kept else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        backend = here.backend("mapped")  # takes the same entry
        assert here.table.drain(0) == []
        assert here.move(backend).status == KVN_OK  # and finds a free place

    def test_a_forked_child_does_not_return_the_entry(self) -> None:
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


class TestContent:
    """The content of the table, where peers write, too, which may be dead or hostile."""

    @staticmethod
    def words(table: WriterTable) -> NDArray[np.uint64]:
        """Return a row for each page: the header, then entries (process, closed, tickets...)."""
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

    def test_more_entries_than_possible_are_not_looked_at(self, here: Here) -> None:
        self.words(here.table)[0, 0] = 1 << 40
        assert here.table.drain(0) == []
        assert here.move(here.backend("mapped")).status == KVN_OK


# ---- another process ----

"""Writers of one process and the owner in another: killed, late, replaced, and cut off."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from mmap import PAGESIZE, mmap

import numpy as np
import pytest

from kvnative._backend import KVN_OK, KVN_PEER_GONE, KVN_UNMAPPED, ThreadPool
from kvnative._executor import Executor
from kvnative._lower import Descriptors
from kvnative._report import Report
from kvnative._writers import Ticket, Writer
from tests.native.writers import NBYTES, Here, address_of, column, move
from tests.support.peer import EXECUTE_ANOTHER_PROGRAM
from tests.transport.owner import Owner

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
    """An owner in another process, and the means to write to it from this one."""

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


def test_another_process_is_written_by_address(there: There) -> None:
    assert there.write().status == KVN_OK
    assert there.owner.run("result = int((target == 7).sum())") == NBYTES


@pytest.mark.parametrize("side", ["local", "remote"])
@pytest.mark.parametrize(("count", "bad"), [(1, 0), (3, 0), (3, 1), (3, 2)])
def test_memory_that_is_not_mapped_ends_the_transfer_and_its_announcement(
    there: There, count: int, bad: int, side: str
) -> None:
    """The failing descriptor is named, and earlier ones have arrived."""
    nbytes = NBYTES // 4  # moved by the pool, so that a deadline may pass
    steps = nbytes * np.arange(count, dtype=np.uint64)
    src, dst = steps + np.uint64(address_of(there.src)), steps + np.uint64(there.target)
    (src if side == "local" else dst)[bad] = PAGESIZE
    descriptors = Descriptors.from_columns(dst, src, np.full(count, nbytes, np.uint64))
    # Not by giving up, which would wait for the piece: the end of the owner ends it anyway.
    report = Executor(there.backend).submit(descriptors).wait(10_000, give_up=False)
    assert (report.status, report.failed) == (KVN_UNMAPPED, bad)
    assert report.message.startswith(f"descriptor {bad}: {side} memory")
    arrived = f"result = target[: {bad * nbytes}].all(), table.drain(0)"
    assert there.owner.run(arrived) == (True, [])


# Another program with the same pid and memory at the same addresses, as without address space
# layout randomization.
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


def test_another_program_with_the_same_pid_is_not_written(there: There) -> None:
    arguments = ["-c", OTHER_PROGRAM, str(there.target), str(there.facts["address"])]
    there.owner.run(f"import os, sys; os.execv(sys.executable, [sys.executable, *{arguments}])")
    report = there.write()
    assert report.status == KVN_PEER_GONE
    assert "executes another program" in report.message
    assert there.owner.run("how much was written") == 0


def test_a_dead_owner_is_not_written(there: There) -> None:
    there.owner.kill()
    assert there.write().status == KVN_PEER_GONE


# An entry like that of a process that was stopped or killed in the middle of a piece.
LEFT = """
    from mmap import PAGESIZE

    from kvnative._writers import Ticket

    def announce(entry, number):
        words = (ctypes.c_uint64 * 16).from_address(table.address + (entry + 1) * PAGESIZE)
        words[2] = number
"""


def test_a_late_writer_by_address_is_cut_off(there: There) -> None:
    """The writer's gate is closed. Other writers continue, and the error says to link again."""
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
    owner: Owner,
) -> None:
    """The pid and the start time stay the same, but its mappings are gone."""
    here = Here()
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
    assert here.table.drain(60) == []  # and the writer is not found again

"""Arenas: shared memory of a fixed size, which NumPy and a peer view without copying."""

from __future__ import annotations

import fcntl
import mmap
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvnative._host import Arena, GenerationTable, Pin
from tests.support.held import Held

PAGE = mmap.PAGESIZE
F_GET_SEALS = 1034
SHRINK, GROW, SEAL = 2, 4, 1


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    before = Held.now()
    yield
    before.check_nothing_new()


def resident(arena: Arena) -> int:
    """Return the bytes of the arena's mapping that are in the page table of this process."""
    smaps = Path("/proc/self/smaps").read_text()
    entry = re.search(rf"^{arena.address:08x}-.*?^Rss: +(\d+) kB", smaps, re.MULTILINE | re.DOTALL)
    assert entry is not None
    return int(entry[1]) * 1024


def imported(fd: int, nbytes: int, inode: int | None = None, *, writable: bool = True) -> Arena:
    """Map descriptor `fd` of this process as a peer would."""
    inode = os.fstat(fd).st_ino if inode is None else inode
    return Arena.of_peer(os.getpid(), fd, inode, nbytes, writable=writable)


def test_an_arena_is_zeroed_and_viewed_without_copying() -> None:
    with Arena(3 * PAGE + 5) as arena:
        array = np.frombuffer(arena, dtype=np.uint8)
        assert array.ctypes.data == arena.address
        assert array.nbytes == arena.nbytes == 3 * PAGE + 5
        assert array.flags.writeable
        assert not array.any()
        array[-1] = 9
        assert memoryview(arena)[-1] == 9
        del array


def test_a_second_mapping_is_the_same_memory() -> None:
    arena = Arena(PAGE)
    twin = imported(arena.fd, PAGE)
    assert twin.address != arena.address
    assert (twin.fd, twin.inode, twin.writable) == (-1, arena.inode, True)
    np.frombuffer(arena, dtype=np.uint8)[7] = 42
    assert memoryview(twin)[7] == 42
    arena.close()
    assert memoryview(twin)[7] == 42, "the peer's mapping keeps the memory"


def test_closing_waits_for_its_views() -> None:
    arena = Arena(PAGE)
    array = np.frombuffer(arena, dtype=np.uint8)
    with pytest.raises(BufferError, match="1 exported buffer"):
        arena.close()
    array[0] = 1  # still mapped
    del array
    arena.close()
    arena.close()
    assert arena.closed
    for use in (lambda: arena.address, lambda: arena.fd, lambda: memoryview(arena), arena.populate):
        with pytest.raises(ValueError, match="closed"):
            use()


def test_a_view_outlives_the_name() -> None:
    array = np.frombuffer(Arena(PAGE, name="kvplan-lives-on"), dtype=np.uint8)
    assert "kvplan-lives-on" in Path("/proc/self/maps").read_text()
    array[:] = 1
    assert array.sum() == PAGE
    del array
    assert "kvplan-lives-on" not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("nbytes", [0, -1, 2**63, 2**64])
def test_an_impossible_size_is_named(nbytes: int) -> None:
    with no_descriptor_left(), pytest.raises(ValueError, match=f"nbytes is {nbytes}"):
        Arena(nbytes)


def test_a_size_beyond_all_memory_is_a_memory_error() -> None:
    with no_descriptor_left(), pytest.raises(MemoryError, match=str(2**62)):
        Arena(2**62)


def test_prefault_makes_every_page_present() -> None:
    nbytes = 64 * PAGE
    with Arena(nbytes) as lazy, Arena(nbytes, prefault=True) as eager:
        assert resident(lazy) == 0
        assert resident(eager) == nbytes
        twin = imported(eager.fd, nbytes, writable=False)
        assert resident(twin) == 0
        twin.populate()
        assert resident(twin) == nbytes


def test_its_size_is_sealed() -> None:
    with Arena(2 * PAGE) as arena:
        seals = fcntl.fcntl(arena.fd, F_GET_SEALS)
        assert seals & (SHRINK | GROW | SEAL) == SHRINK | GROW | SEAL
        for nbytes in (0, PAGE, 3 * PAGE):
            with pytest.raises(PermissionError):
                os.ftruncate(arena.fd, nbytes)
        assert not os.get_inheritable(arena.fd)


def test_a_read_only_mapping_cannot_be_written() -> None:
    with Arena(PAGE) as arena, imported(arena.fd, PAGE, writable=False) as twin:
        assert not twin.writable
        assert memoryview(twin).readonly
        assert not np.frombuffer(twin, dtype=np.uint8).flags.writeable
        with pytest.raises(BufferError):
            Pin(twin, writable=True)


class TestImportRefuses:
    """Descriptors that peers claim to be arenas, which are checked before they are mapped."""

    @pytest.fixture(autouse=True)
    def _leaves_no_descriptor(self) -> Iterator[None]:
        with no_descriptor_left():
            yield

    @pytest.mark.parametrize("seals", [0, SHRINK, GROW, SHRINK | GROW])
    def test_a_memfd_that_can_still_change_its_size_is_refused(self, seals: int) -> None:
        fd = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, PAGE)
        fcntl.fcntl(fd, 1033, seals)  # F_ADD_SEALS
        with pytest.raises(ValueError, match="not sealed"):
            imported(fd, PAGE)
        os.close(fd)

    def test_a_memfd_of_another_size_is_refused(self) -> None:
        with Arena(2 * PAGE) as arena:
            for nbytes in (PAGE, 2 * PAGE - 1, 3 * PAGE):
                with pytest.raises(ValueError, match="size differs"):
                    imported(arena.fd, nbytes)

    def test_another_memfd_is_refused(self) -> None:
        with Arena(PAGE) as arena:
            other = Arena(PAGE)
            with pytest.raises(ValueError, match="inode differs"):
                imported(arena.fd, PAGE, other.inode)
            other.close()

    def test_a_pipe_is_refused_without_waiting_for_its_other_end(self) -> None:
        ends = os.pipe()
        with pytest.raises(ValueError, match="not a memfd"):
            imported(ends[0], PAGE)
        for end in ends:
            os.close(end)

    def test_a_device_is_refused(self) -> None:
        with Path("/dev/zero").open("rb") as device, pytest.raises(ValueError, match="not a memfd"):
            imported(device.fileno(), PAGE)

    def test_a_file_on_a_disk_or_tmpfs_is_refused(self) -> None:
        for folder in ("/dev/shm", "."):
            fd = os.open(folder, os.O_TMPFILE | os.O_RDWR)
            os.ftruncate(fd, PAGE)
            with pytest.raises(ValueError, match=r"not a memfd|not sealed"):
                imported(fd, PAGE)
            os.close(fd)

    def test_a_closed_descriptor_is_refused(self) -> None:
        with Arena(PAGE) as arena:
            fd, inode = arena.fd, arena.inode
        with pytest.raises(FileNotFoundError, match=f"/proc/{os.getpid()}/fd/{fd}"):
            imported(fd, PAGE, inode)

    def test_writing_to_a_sealed_memfd_is_refused(self) -> None:
        generations = GenerationTable(8)
        with pytest.raises(PermissionError):
            imported(generations.fd, 2 * 8 * 8 + 16, writable=True)
        imported(generations.fd, 2 * 8 * 8 + 16, writable=False).close()
        generations.close()


class TestBoard:
    def test_a_slot_never_has_one_generation_twice(self) -> None:
        generations = GenerationTable(2)
        seen = set()
        for _ in range(5):
            held = [generations.take(), generations.take()]
            assert {slot for slot, _ in held} == {0, 1}
            with pytest.raises(MemoryError, match="all 2 slots"):
                generations.take()
            for item in held:
                generations.release(*item)
            seen.update(held)
        assert len(seen) == 10

    def test_release_wants_the_present_generation(self) -> None:
        generations = GenerationTable(2)
        slot, generation = generations.take()
        for wrong in ((slot, generation + 2), (slot, generation + 1), (slot + 1, 0), (2, 1)):
            with pytest.raises(ValueError, match="not registered"):
                generations.release(*wrong)
        generations.release(slot, generation)
        with pytest.raises(ValueError, match="not registered"):
            generations.release(slot, generation)

    @pytest.mark.parametrize("num_slots", [0, 2**24 + 1])
    def test_its_size_has_bounds(self, num_slots: int) -> None:
        with pytest.raises(ValueError, match=f"num_slots is {num_slots}"):
            GenerationTable(num_slots)

    def test_a_closed_table_refuses_calls(self) -> None:
        generations = GenerationTable(2)
        slot, generation = generations.take()
        generations.close()
        generations.close()
        for use in (generations.take, lambda: generations.release(slot, generation)):
            with pytest.raises(ValueError, match="closed"):
                use()


class TestPin:
    def test_the_exporter_cannot_move(self) -> None:
        growing = bytearray(8)
        pin = Pin(growing, writable=True)
        assert (pin.nbytes, pin.writable) == (8, True)
        with pytest.raises(BufferError):
            growing.append(1)
        pin.release()
        pin.release()
        growing.append(1)

    def test_a_pin_is_of_the_array_itself(self) -> None:
        array = np.arange(12, dtype=np.float32).reshape(3, 4)
        for contiguous in (array, array.T):
            assert Pin(contiguous).address == array.ctypes.data
            assert Pin(contiguous).nbytes == 48

    def test_objects_that_cannot_be_pinned_are_refused(self) -> None:
        with pytest.raises((BufferError, ValueError), match="contiguous"):
            Pin(np.zeros((4, 4))[:, ::2])
        with pytest.raises(BufferError):
            Pin(b"constant", writable=True)
        with pytest.raises(TypeError):
            Pin(7)  # type: ignore[arg-type]

"""Ranges of an arena, each with its own registration, as in pools: a peer maps the arena once."""

from __future__ import annotations

import gc
import mmap
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from pathlib import Path
from queue import Queue
from threading import Barrier, Semaphore

import numpy as np
import pytest

import kvplan
from kvnative._backend import ThreadPool
from kvnative._host import Arena
from kvplan import CacheDesc, DataType, LLMException, LLMStatusCode, Rows, Transfer, Transfers
from kvplan.transport.host_memory import arena_of
from kvplan.transport.local import LocalTransport
from kvplan.transport.local.link import LocalPeerMemory
from kvplan.transport.local.memory import PeerArenas
from kvplan.transport.local.metadata import Metadata
from tests.support.refusals import refused
from tests.support.wrappers import limit_bandwidth
from tests.transport.owner import Owner
from tests.transport.owner_process import pattern

PART, PARTS = 16 * 4096, 8
DESC = CacheDesc(1, (16, 4096), DataType.DT_UINT8)
PLAN = kvplan.plan(Transfer(Rows(DESC, range(16)), Rows(DESC, range(16)[::-1])), local="dst")
FOUR = CacheDesc(4, (16, 4096), DataType.DT_UINT8)
FIRST_BLOCKS = kvplan.plan(Transfer(Rows(FOUR, [0]), Rows(FOUR, [0])), local="dst")

POOL = f"""
    arena = transport.allocate({PARTS * PART})
    memory = np.frombuffer(arena, dtype=np.uint8)
    memory[:] = pattern(1, memory.size)
    part = lambda i: memoryview(arena)[i * {PART} : (i + 1) * {PART}]
    registrations = [transport.register(part(i)) for i in range({PARTS})]
    result = arena.address
"""


@pytest.fixture
def owner(renewed_owner: Owner) -> Owner:
    return renewed_owner


class Pool:
    """An arena of an owner with a link to it; `part` finds ranges as an engine finds a cache."""

    def __init__(self, owner: Owner, transport: LocalTransport) -> None:
        self.owner = owner
        self.base: int = owner.run(POOL)
        self.link = transport.connect(self.metadata("[]"), timeout_ms=1000)

    def metadata(self, registrations: str) -> bytes:
        return bytes(self.owner.run(f"result = transport.metadata({registrations})"))

    def part(self, i: int, *, writable: bool = False) -> LocalPeerMemory:
        metadata = self.metadata(f"[registrations[{i}]]")
        address = self.base + i * PART
        return self.link.memory([address], PART, writable=writable, metadata=metadata)


@pytest.fixture
def pool(owner: Owner, transport: LocalTransport) -> Pool:
    return Pool(owner, transport)


def expected(i: int) -> np.ndarray:
    whole = pattern(1, PARTS * PART).reshape(PARTS, 16, 4096)
    return whole[i, ::-1].reshape(-1)


def pulled(memory: LocalPeerMemory) -> np.ndarray:
    local = np.zeros(PART, dtype=np.uint8)
    kvplan.execute(PLAN, memory, [local])
    return local


def mappings(inode: int) -> int:
    """Return the number of mappings of the file with that inode in this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(line.split()[4] == str(inode) for line in lines)


def test_tensors_of_several_arenas_in_any_order(owner: Owner, transport: LocalTransport) -> None:
    """Each tensor has metadata of its own; each is found in the mapping of its own arena."""
    bases: list[int] = owner.run(f"""
        arenas = [transport.allocate({PART}) for _ in range(4)]
        arenas.sort(key=lambda part: part.address)
        registrations = [transport.register(part) for part in arenas]
        for i, part in enumerate(arenas):
            np.frombuffer(part, np.uint8)[:] = i
        result = [part.address for part in arenas]
    """)
    one_by_one = [
        bytes(owner.run(f"result = transport.metadata([registrations[{i}]])")) for i in range(4)
    ]
    with transport.connect(one_by_one[0], timeout_ms=1000) as link:
        for order in permutations(range(4)):
            memory = link.memory(
                [bases[i] for i in order], PART, metadata=[one_by_one[i] for i in order]
            )
            assert memory.in_process
            local = [np.full(PART, 9, np.uint8) for _ in order]
            kvplan.execute(FIRST_BLOCKS, memory, local)
            assert [int(array[0]) for array in local] == [*order]


def check_does_not_exist(memory: LocalPeerMemory) -> None:
    with refused(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, "has deregistered"):
        pulled(memory)


def test_all_ranges_are_reached_by_one_mapping(pool: Pool) -> None:
    inode = pool.owner.run("result = arena.inode")
    memories = [pool.part(i) for i in range(PARTS)]
    for i, memory in enumerate(memories):
        np.testing.assert_array_equal(pulled(memory), expected(i))
    addresses = np.concatenate([memory.addresses for memory in memories])
    np.testing.assert_array_equal(np.diff(addresses), PART)
    assert mappings(inode) == 1


def test_a_write_to_one_part_leaves_the_others_alone(pool: Pool) -> None:
    source = pattern(2, PART)
    kvplan.execute(
        kvplan.plan(Transfer(Rows(DESC, range(16)), Rows(DESC, range(16))), local="src"),
        [source],
        pool.part(3, writable=True),
    )
    wanted = pattern(1, PARTS * PART)
    wanted[3 * PART : 4 * PART] = source
    assert pool.owner.run("result = memory.tobytes()") == wanted.tobytes()


def test_a_writable_part_maps_an_arena_again_that_was_mapped_read_only(pool: Pool) -> None:
    """An arena that was mapped for reading is mapped again for writing."""
    pool.owner.run(
        "transport.deregister(registrations[0])",
        "registrations[0] = transport.register(part(0), writable=False)",
    )
    read = pool.part(0)
    np.testing.assert_array_equal(pulled(read), expected(0))
    written = pool.part(3, writable=True)
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = [[int(part, 16) for part in line.split()[0].split("-")] for line in lines]
    address = int(written.addresses[0])
    modes = [
        line.split()[1]
        for (first, end), line in zip(ranges, lines, strict=True)
        if first <= address < end
    ]
    assert modes == ["rw-s"]  # otherwise the write below would end this process
    source = pattern(2, PART)
    kvplan.execute(
        kvplan.plan(Transfer(Rows(DESC, range(16)), Rows(DESC, range(16))), local="src"),
        [source],
        written,
    )
    code = f"result = memory[3 * {PART} : 4 * {PART}].tobytes()"
    assert pool.owner.run(code) == source.tobytes()
    np.testing.assert_array_equal(pulled(read), expected(0))


def test_a_freed_part_fails_and_the_others_continue(pool: Pool) -> None:
    first, second = pool.part(0), pool.part(1)
    metadata = pool.metadata("[registrations[0]]")
    pool.owner.run("transport.deregister(registrations[0])")
    check_does_not_exist(first)
    with pytest.raises(LLMException, match="has deregistered"):
        pool.link.memory([pool.base], PART, metadata=metadata)
    np.testing.assert_array_equal(pulled(second), expected(1))


def test_a_part_that_is_freed_and_reused_is_another_registration(pool: Pool) -> None:
    """The pool gives the same bytes to the next cache, but the metadata names the first one."""
    old = pool.part(0)
    pool.owner.run("""
        transport.deregister(registrations[0])
        registrations[0] = transport.register(part(0))
    """)
    check_does_not_exist(old)
    np.testing.assert_array_equal(pulled(pool.part(0)), expected(0))


def test_a_part_that_reuses_a_slot_is_another_registration() -> None:
    with LocalTransport(max_registrations=1) as transport:
        arena = transport.allocate(100)
        with transport.connect(transport.metadata()) as link:
            first = transport.register(arena)
            memory = link.memory([first.address], 100, metadata=transport.metadata([first]))
            transport.deregister(first)
            second = transport.register(arena)
            assert second.range.slot == first.range.slot
            transport.deregister(first)  # has ended: does not touch the second registration
            link.memory([second.address], 100, metadata=transport.metadata([second]))
            with pytest.raises(LLMException, match="has deregistered"):
                memory.check()


def test_a_part_that_is_freed_during_a_transfer_fails_it(pool: Pool) -> None:
    memory = pool.part(2)
    local = np.zeros(PART, dtype=np.uint8)
    with Transfers(1, wrap=lambda backend: limit_bandwidth(backend, PART / 0.2)) as slow:
        task = slow.submit(PLAN, memory, [local])
        pool.owner.run("transport.deregister(registrations[2])")
        with refused(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, "has deregistered"):
            task.wait(timeout_ms=30_000)


def test_no_success_has_the_bytes_of_a_later_cache(transport: LocalTransport) -> None:
    """A pool gives the same bytes to cache after cache, and each is freed while a peer pulls."""
    with LocalTransport() as other:
        part = np.frombuffer(other.allocate(2 * PART), np.uint8)[:PART]
        link = transport.connect(other.metadata(()))
        offers: Queue[tuple[int, bytes]] = Queue()
        begun = Semaphore(0)

        def own() -> None:
            for seed in range(200):
                part[:] = seed
                registration = other.register(part)
                offers.put((seed, other.metadata([registration])))
                assert begun.acquire(timeout=30)
                other.deregister(registration)

        wrong = 0
        with ThreadPoolExecutor(1) as threads:
            owning = threads.submit(own)
            for _ in range(200):
                seed, metadata = offers.get(timeout=30)
                memory = link.memory([part.ctypes.data], PART, metadata=metadata)
                begun.release()
                try:
                    local = pulled(memory)
                except LLMException as error:
                    wrong += error.status_code is not LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
                else:
                    wrong += bool((local != seed).any())
            owning.result()
    assert wrong == 0


def test_a_tensor_must_not_reach_into_the_next(pool: Pool) -> None:
    with refused(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, "not inside one range"):
        pool.link.memory([pool.base + 1], PART, metadata=pool.metadata("None"))


def test_the_mapping_of_a_pool_stays_while_its_caches_come_and_go(pool: Pool) -> None:
    inode = pool.owner.run("result = arena.inode")
    addresses = {int(pool.part(0).addresses[0]) for _ in range(50)}
    assert len(addresses) == 1
    assert mappings(inode) == 1
    pool.link.close()
    assert mappings(inode) == 0


def test_an_arena_mapped_after_close_goes_with_its_last_user(pool: Pool) -> None:
    inode = pool.owner.run("result = arena.inode")
    (part,) = Metadata.from_bytes(pool.metadata("[registrations[0]]")).ranges
    arenas = PeerArenas(pool.owner.pid, populate="off")
    arenas.close()
    mapped = arenas.hold(part)
    assert mappings(inode) == 1
    del mapped
    assert mappings(inode) == 0


def test_an_arena_that_is_offered_whole_goes_with_its_last_user(pool: Pool) -> None:
    address, inode = pool.owner.run("""
        single = transport.allocate(5000)
        registrations.append(transport.register(single))
        result = [single.address, single.inode]
    """)
    memory = pool.link.memory([address], 5000, metadata=pool.metadata("registrations[-1:]"))
    assert mappings(inode) == 1
    pool.owner.run("transport.deregister(registrations.pop()); del single")
    with pytest.raises(LLMException, match="has deregistered"):
        memory.check()
    assert mappings(inode) == 1
    del memory
    gc.collect()
    assert mappings(inode) == 0


def test_a_pool_that_its_owner_freed_is_unmapped_with_the_next(pool: Pool) -> None:
    inode = pool.owner.run("result = arena.inode")
    pool.part(0)
    assert mappings(inode) == 1
    pool.owner.run(
        "for registration in registrations: transport.deregister(registration)",
        "del arena, memory, registration, part",
    )
    assert mappings(inode) == 1
    pool.base = pool.owner.run(POOL)
    pool.part(0)
    assert mappings(inode) == 0


def test_concurrent_threads_share_the_mapping(pool: Pool) -> None:
    inode = pool.owner.run("result = arena.inode")
    metadata = pool.metadata("None")
    start = Barrier(8)

    def ask(i: int) -> LocalPeerMemory:
        start.wait(timeout=30)
        for _ in range(100):
            memory = pool.link.memory([pool.base + i * PART], PART, metadata=metadata)
        return memory

    with ThreadPoolExecutor(8) as threads:
        memories = list(threads.map(ask, range(8)))
    assert mappings(inode) == 1
    np.testing.assert_array_equal(pulled(memories[5]), expected(5))


def test_memory_is_quarantined_until_every_stopped_peer_goes_on(
    transport: LocalTransport,
) -> None:
    """The peers have announced writes and are stopped: the test sets their tickets itself."""
    arenas = [transport.allocate(mmap.PAGESIZE) for _ in range(2)]
    registrations = [transport.register(arena) for arena in arenas]
    other = transport.register(bytearray(1))
    metadata = transport.metadata()
    link = transport.connect(metadata)
    writing = link.memory([other.address], 1, writable=True)  # has an entry in the table
    table = np.frombuffer(mmap.mmap(Metadata.from_bytes(metadata).writers.fd, 0), np.uint64)
    tickets = table[mmap.PAGESIZE // 8 + 2 :]
    tickets[0] = 2
    transport.deregister(registrations.pop(0))
    tickets[1:3] = 4, 6
    transport.deregister(registrations.pop(0))
    tickets[1] = 0
    tickets[0] = 0
    deadline = time.monotonic() + 60
    while not closes(arenas[0]):
        assert time.monotonic() < deadline
    assert not closes(arenas[1])  # was checked together with the other
    tickets[2] = 0
    while not closes(arenas[1]):
        assert time.monotonic() < deadline
    del writing


def closes(arena: Arena) -> bool:
    try:
        arena.close()
    except BufferError:
        return False
    return True


class TestViews:
    """The forms of memory that count as a part of an arena."""

    @pytest.mark.parametrize(
        "form",
        [
            "arena",
            "memoryview(arena)[100:200]",
            "np.frombuffer(arena, np.uint8)[100:200]",
            "np.frombuffer(memoryview(arena)[8:], np.float32)[3:5]",
            "np.frombuffer(arena, np.uint8).reshape(16, -1)[2:4]",
            "memoryview(np.frombuffer(arena, np.uint8)[7:])",
        ],
    )
    def test_a_view_of_an_arena_is_part_of_it(
        self, owner: Owner, transport: LocalTransport, form: str
    ) -> None:
        address, nbytes = owner.run(f"""
            arena = transport.allocate(4096)
            registration = transport.register({form})
            result = [registration.address, registration.nbytes]
        """)
        with transport.connect(owner.metadata()) as link:
            memory = link.memory([address], nbytes)
            assert memory.backend(ThreadPool(1), "get", memory, None) is None

    @pytest.mark.parametrize("stride", [101, 150, 200], ids=["a byte", "a half", "all"])
    def test_memory_that_reaches_beyond_the_arena_is_not_part_of_it(
        self, transport: LocalTransport, stride: int
    ) -> None:
        """Memory that is mapped behind the arena, such as another arena, does not belong to it."""
        arenas = {arena.address: arena for arena in (transport.allocate(4096) for _ in range(100))}
        arena = next(arena for arena in arenas.values() if arena.address + 4096 in arenas)
        rows = np.frombuffer(arena, np.uint8)[-200:].reshape(2, 100)
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            rows.strides = (stride, 1)  # the base of the result of `as_strided` is not an array
        beyond = rows[1]
        assert arena_of(beyond) is arena
        assert beyond.ctypes.data + beyond.nbytes == arena.address + 4096 + stride - 100
        assert transport.register(beyond).range.arena is None


class TestMetadata:
    """`metadata(registrations)` and `memory(metadata=...)` accept only what belongs to them."""

    def test_only_registrations_of_this_transport_are_published(
        self, transport: LocalTransport
    ) -> None:
        ended = transport.register(bytearray(10))
        transport.deregister(ended)
        with LocalTransport() as other:
            for registration in (ended, other.register(bytearray(10))):
                with refused(LLMStatusCode.LLM_PARAM_INVALID, "not registered with this transport"):
                    transport.metadata([registration])
        with pytest.raises(TypeError, match="a range"):
            transport.metadata([range(3)])  # type: ignore[list-item]

    def test_metadata_of_another_peer_is_refused(self, pool: Pool) -> None:
        with LocalTransport() as other:
            registration = other.register(bytearray(10))
            with refused(LLMStatusCode.LLM_PARAM_INVALID, "another transport"):
                pool.link.memory([registration.address], 10, metadata=other.metadata())

    def test_metadata_of_a_call_does_not_change_the_links_own(self, pool: Pool) -> None:
        pool.part(0)
        assert pool.link.metadata.ranges == ()

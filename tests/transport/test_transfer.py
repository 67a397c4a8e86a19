"""Transfers between two processes, one of which only waits in a read on a pipe."""

from __future__ import annotations

import numpy as np
import pytest

import kvplan
from kvnative._backend import ThreadPool
from kvplan import CacheDesc, DataType, LLMStatusCode, Rows, Shard, Transfer
from kvplan.transport.local import LocalTransport
from kvplan.transport.local.link import LocalLink, LocalPeerMemory
from tests.support.refusals import refused
from tests.transport.owner import Owner
from tests.transport.owner_process import pattern

BLOCKS, BLOCK, TENSORS = 40, 3000, 3
TENSOR = BLOCKS * BLOCK
DESC = CacheDesc(TENSORS, (BLOCKS, BLOCK), DataType.DT_UINT8, shard=Shard(num_layers=TENSORS))
SRC, DST = [7, 8, 9, 30, 2, 39], [0, 20, 21, 22, 5, 39]

ARENA = f"""
    arena = transport.allocate({TENSORS * TENSOR})
    memory = np.frombuffer(arena, dtype=np.uint8)
    transport.register(arena)
"""
REGISTERED = f"""
    memory = np.zeros({TENSORS * TENSOR}, dtype=np.uint8)
    registration = transport.register(memory)
"""
# Half of the bytes in arenas and half in registered memory: both are reached by address.
MIXED = f"""
    arena = transport.allocate({TENSOR})
    first = np.frombuffer(arena, dtype=np.uint8)
    transport.register(first)
    rest = np.zeros({(TENSORS - 1) * TENSOR}, dtype=np.uint8)
    registration = transport.register(rest)
"""
FILL = f"memory[:] = pattern(1, {TENSORS * TENSOR}); result = memory.ctypes.data"


@pytest.fixture
def owner(renewed_owner: Owner) -> Owner:
    return renewed_owner


def tensors_of(
    link: LocalLink, base: int, *, writable: bool, metadata: bytes | None = None
) -> LocalPeerMemory:
    addresses = [base + i * TENSOR for i in range(TENSORS)]
    return link.memory(addresses, TENSOR, writable=writable, metadata=metadata)


def tensors(seed: int) -> list[np.ndarray]:
    return list(pattern(seed, TENSORS * TENSOR).reshape(TENSORS, TENSOR))


def after_transfer(src: list[np.ndarray], dst: list[np.ndarray]) -> list[np.ndarray]:
    """Return the destination after the transfer, computed by NumPy alone."""
    for s, d in zip(src, dst, strict=True):
        d.reshape(BLOCKS, BLOCK)[DST] = s.reshape(BLOCKS, BLOCK)[SRC]
    return dst


@pytest.mark.parametrize("setup", [ARENA, REGISTERED], ids=["arena", "registered"])
class TestOneKind:
    def test_a_pull_moves_the_bytes(
        self, owner: Owner, transport: LocalTransport, setup: str
    ) -> None:
        owner.run(setup)
        base = owner.run(FILL)
        with transport.connect(owner.metadata()) as link:
            local = tensors(2)
            plan = kvplan.plan(Transfer(Rows(DESC, SRC), Rows(DESC, DST)), local="dst")
            kvplan.execute(plan, tensors_of(link, base, writable=False), local)
        for found, expected in zip(local, after_transfer(tensors(1), tensors(2)), strict=True):
            np.testing.assert_array_equal(found, expected)

    def test_a_push_moves_the_bytes(
        self, owner: Owner, transport: LocalTransport, setup: str
    ) -> None:
        owner.run(setup)
        base = owner.run(FILL)
        with transport.connect(owner.metadata()) as link:
            plan = kvplan.plan(Transfer(Rows(DESC, SRC), Rows(DESC, DST)), local="src")
            kvplan.execute(plan, tensors(2), tensors_of(link, base, writable=True))
        expected = np.concatenate(after_transfer(tensors(2), tensors(1)))
        assert owner.run("result = memory.tobytes()") == expected.tobytes()

    def test_bytes_that_the_owner_writes_later_arrive(
        self, owner: Owner, transport: LocalTransport, setup: str
    ) -> None:
        owner.run(setup)
        base = owner.run(FILL)
        with transport.connect(owner.metadata()) as link:
            memory = tensors_of(link, base, writable=False)
            plan = kvplan.plan(Transfer(Rows(DESC, SRC), Rows(DESC, DST)), local="dst")
            for seed in (3, 4):
                owner.run(f"memory[:] = pattern({seed}, memory.size)")
                local = tensors(2)
                kvplan.execute(plan, memory, local)
                expected = after_transfer(tensors(seed), tensors(2))
                np.testing.assert_array_equal(local, expected)

    def test_a_stopped_owner_does_not_delay_a_transfer(
        self, owner: Owner, transport: LocalTransport, setup: str
    ) -> None:
        """The owner cannot execute any instruction, so the transfer is one-sided."""
        owner.run(setup)
        base = owner.run(FILL)
        with transport.connect(owner.metadata()) as link:
            owner.stop()
            local = tensors(2)
            memory = tensors_of(link, base, writable=True)
            kvplan.execute(
                kvplan.plan(Transfer(Rows(DESC, SRC), Rows(DESC, DST)), local="dst"), memory, local
            )
            np.testing.assert_array_equal(local, after_transfer(tensors(1), tensors(2)))
            kvplan.execute(
                kvplan.plan(Transfer(Rows(DESC, SRC), Rows(DESC, DST)), local="src"),
                tensors(3),
                memory,
            )
            owner.resume()
        expected = np.concatenate(after_transfer(tensors(3), tensors(1)))
        assert owner.run("result = memory.tobytes()") == expected.tobytes()


def test_arenas_need_no_system_call_and_registered_memory_does(
    owner: Owner, transport: LocalTransport
) -> None:
    pool = ThreadPool(1)
    bases = [owner.run(setup, "result = memory.ctypes.data") for setup in (ARENA, REGISTERED)]
    with transport.connect(owner.metadata()) as link:
        arena, registered = (tensors_of(link, base, writable=False) for base in bases)
        assert arena.backend(pool, "get", registered, None) is None
        backend = registered.backend(pool, "get", arena, None)
        assert backend is not None
        assert registered.backend(pool, "get", arena, None) is backend
        assert backend.name == "process"
        np.testing.assert_array_equal(registered.addresses[1:] - registered.addresses[:-1], TENSOR)
        assert registered.addresses[0] == bases[1]


@pytest.mark.parametrize("setup", [ARENA, REGISTERED], ids=["arena", "registered"])
def test_overlapping_local_tensors_are_refused_as_a_destination(
    owner: Owner, transport: LocalTransport, setup: str
) -> None:
    """The result would depend on the order, although the peer's tensors do not overlap."""
    owner.run(setup)
    base = owner.run(FILL)
    whole = np.zeros(TENSORS * TENSOR, dtype=np.uint8)
    local = [whole[at : at + TENSOR] for at in (0, 2 * BLOCK, TENSOR + 2 * BLOCK)]
    with transport.connect(owner.metadata()) as link:
        memory = tensors_of(link, base, writable=False)
        plan = kvplan.plan(Transfer(Rows(DESC, SRC), Rows(DESC, DST)), local="dst")
        with refused(LLMStatusCode.LLM_PARAM_INVALID, "dst tensors overlap in memory"):
            kvplan.execute(plan, memory, local)
    assert not whole.any()


def test_tensors_of_both_kinds_in_one_transfer(owner: Owner, transport: LocalTransport) -> None:
    addresses = owner.run(
        MIXED,
        f"""
    first[:] = pattern(1, {TENSORS * TENSOR})[:{TENSOR}]
    rest[:] = pattern(1, {TENSORS * TENSOR})[{TENSOR}:]
    result = [first.ctypes.data, rest.ctypes.data, rest.ctypes.data + {TENSOR}]
    """,
    )
    with transport.connect(owner.metadata()) as link:
        local = tensors(2)
        memory = link.memory(addresses, TENSOR)
        kvplan.execute(
            kvplan.plan(Transfer(Rows(DESC, SRC), Rows(DESC, DST)), local="dst"), memory, local
        )
        np.testing.assert_array_equal(local, after_transfer(tensors(1), tensors(2)))
        memory = link.memory(addresses, TENSOR, writable=True)
        kvplan.execute(
            kvplan.plan(Transfer(Rows(DESC, SRC), Rows(DESC, DST)), local="src"), tensors(3), memory
        )
    expected = after_transfer(tensors(3), tensors(1))
    found = owner.run("result = first.tobytes() + rest.tobytes()")
    assert found == np.concatenate(expected).tobytes()


def test_between_two_transports_of_one_process(transport: LocalTransport) -> None:
    with LocalTransport() as other:
        arena = other.allocate(TENSORS * TENSOR)
        other.register(arena)
        view = np.frombuffer(arena, dtype=np.uint8)
        view[:] = pattern(1, TENSORS * TENSOR)
        with transport.connect(other.metadata()) as link:
            local = tensors(2)
            plan = kvplan.plan(Transfer(Rows(DESC, SRC), Rows(DESC, DST)), local="dst")
            kvplan.execute(plan, tensors_of(link, arena.address, writable=False), local)
        np.testing.assert_array_equal(local, after_transfer(tensors(1), tensors(2)))


def test_an_arena_is_mapped_once(owner: Owner, transport: LocalTransport) -> None:
    base = owner.run(ARENA, "result = memory.ctypes.data")
    with transport.connect(owner.metadata()) as link:
        one = tensors_of(link, base, writable=False)
        two = tensors_of(link, base, writable=True)
        np.testing.assert_array_equal(one.addresses, two.addresses)


def test_each_tensor_in_an_arena_of_its_own(owner: Owner, transport: LocalTransport) -> None:
    addresses = owner.run(f"""
        arenas = [transport.allocate({TENSOR} + i) for i in range({TENSORS})]
        for i, arena in enumerate(arenas):
            np.frombuffer(arena, np.uint8)[i:] = pattern(5 + i, {TENSOR})
            transport.register(arena)
        result = [arena.address + i for i, arena in enumerate(arenas)]
    """)
    order = [2, 0, 1]
    with transport.connect(owner.metadata()) as link:
        local = tensors(2)
        memory = link.memory([addresses[i] for i in order], TENSOR)
        kvplan.execute(
            kvplan.plan(Transfer(Rows(DESC, SRC), Rows(DESC, DST)), local="dst"), memory, local
        )
    source = [pattern(5 + i, TENSOR) for i in order]
    np.testing.assert_array_equal(local, after_transfer(source, tensors(2)))


def test_memory_that_is_registered_after_linking_is_reached(
    owner: Owner, transport: LocalTransport
) -> None:
    with transport.connect(owner.metadata()) as link:
        base = owner.run(REGISTERED, "result = memory.ctypes.data")
        with refused(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, "registered: none"):
            tensors_of(link, base, writable=False)
        tensors_of(link, base, writable=True, metadata=owner.metadata()).check()
        owner.run("arena = transport.allocate(4096); transport.register(arena)")
        address = owner.run("result = arena.address")
        link.memory([address], 4096, metadata=owner.metadata()).check()


def test_populate_now_maps_the_pages_with_the_arena(owner: Owner) -> None:
    base = owner.run(f"""
        arena = transport.allocate({TENSORS * TENSOR}, prefault=True)
        result = transport.register(arena).address
    """)
    transport = LocalTransport(populate="now")
    with transport, transport.connect(owner.metadata()) as link:
        local = tensors(2)
        plan = kvplan.plan(Transfer(Rows(DESC, SRC), Rows(DESC, DST)), local="dst")
        kvplan.execute(plan, tensors_of(link, base, writable=False), local)
    zeros = [np.zeros(TENSOR, np.uint8)] * TENSORS
    np.testing.assert_array_equal(local, after_transfer(zeros, tensors(2)))

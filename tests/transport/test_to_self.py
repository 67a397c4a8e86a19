"""A link of a process to itself: the same bytes must not get a second, unrelated address."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest

import kvplan
from kvnative._backend import ThreadPool
from kvplan import CacheDesc, DataType, LLMException, LLMStatusCode, Rows, Transfer, Transfers
from kvplan.transport.local import LocalTransport
from tests.support.refusals import refused
from tests.support.wrappers import limit_bandwidth
from tests.transport.owner_process import pattern

BLOCKS, BLOCK = 8, 3000
DESC = CacheDesc(1, (BLOCKS, BLOCK), DataType.DT_UINT8)


def arena(transport: LocalTransport) -> np.ndarray:
    memory = np.frombuffer(transport.allocate(DESC.nbytes), dtype=np.uint8)
    transport.register(memory)
    return memory


def registered(transport: LocalTransport) -> np.ndarray:
    memory = np.zeros(DESC.nbytes, dtype=np.uint8)
    transport.register(memory)
    return memory


@pytest.mark.parametrize("make", [arena, registered])
class TestOverlap:
    def test_a_pull_from_memory_that_it_writes_is_refused(
        self, transport: LocalTransport, make: Callable[[LocalTransport], np.ndarray]
    ) -> None:
        memory = make(transport)
        memory[:] = pattern(1, DESC.nbytes)
        plan = kvplan.plan(Transfer(Rows(DESC, [0, 1]), Rows(DESC, [1, 2])), local="dst")
        with transport.connect(transport.metadata()) as link:
            source = link.memory([memory.ctypes.data], DESC.nbytes)
            with refused(LLMStatusCode.LLM_PARAM_INVALID, "src and dst overlap"):
                kvplan.execute(plan, source, [memory])
        np.testing.assert_array_equal(memory, pattern(1, DESC.nbytes))

    def test_a_push_to_memory_that_it_reads_is_refused(
        self, transport: LocalTransport, make: Callable[[LocalTransport], np.ndarray]
    ) -> None:
        memory = make(transport)
        plan = kvplan.plan(Transfer(Rows(DESC, [0, 1]), Rows(DESC, [1, 2])), local="src")
        with transport.connect(transport.metadata()) as link:
            target = link.memory([memory.ctypes.data], DESC.nbytes, writable=True)
            with pytest.raises(LLMException, match="src and dst overlap"):
                kvplan.execute(plan, [memory], target)

    def test_disjoint_blocks_are_copied(
        self, transport: LocalTransport, make: Callable[[LocalTransport], np.ndarray]
    ) -> None:
        memory = make(transport)
        memory[:] = pattern(1, DESC.nbytes)
        expected = pattern(1, DESC.nbytes).reshape(BLOCKS, BLOCK)
        expected[[6, 7]] = expected[[0, 1]]
        with transport.connect(transport.metadata()) as link:
            source = link.memory([memory.ctypes.data], DESC.nbytes)
            kvplan.execute(
                kvplan.plan(Transfer(Rows(DESC, [0, 1]), Rows(DESC, [6, 7])), local="dst"),
                source,
                [memory],
            )
        np.testing.assert_array_equal(memory.reshape(BLOCKS, BLOCK), expected)


class TestArenaPart:
    """Two engines in one process copy directly, and as safely as between two processes."""

    PLAN = kvplan.plan(
        Transfer(Rows(DESC, range(BLOCKS)), Rows(DESC, range(BLOCKS)[::-1])), local="dst"
    )

    def test_a_part_of_an_own_arena_is_copied_in_place(self, transport: LocalTransport) -> None:
        with LocalTransport() as other:
            arena = other.allocate(3 * DESC.nbytes)
            part = other.register(memoryview(arena)[DESC.nbytes : 2 * DESC.nbytes])
            view = np.frombuffer(arena, np.uint8)[DESC.nbytes : 2 * DESC.nbytes]
            view[:] = pattern(1, DESC.nbytes)
            link = transport.connect(other.metadata(()))
            memory = link.memory([part.address], DESC.nbytes, metadata=other.metadata([part]))
            assert memory.backend(ThreadPool(1), "get", memory, None) is None
            assert memory.addresses.tolist() == [part.address]
            local = np.zeros(DESC.nbytes, np.uint8)
            kvplan.execute(self.PLAN, memory, [local])
            np.testing.assert_array_equal(
                local.reshape(BLOCKS, BLOCK), pattern(1, DESC.nbytes).reshape(BLOCKS, BLOCK)[::-1]
            )
            other.deregister(part)
            with refused(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, "has deregistered"):
                kvplan.execute(self.PLAN, memory, [local])

    def test_a_released_part_stays_mapped_during_a_transfer(
        self, transport: LocalTransport
    ) -> None:
        arena = transport.allocate(2 * DESC.nbytes)
        part = transport.register(memoryview(arena)[DESC.nbytes :])
        link = transport.connect(transport.metadata())
        memory = link.memory([part.address], DESC.nbytes)
        local = np.zeros(DESC.nbytes, np.uint8)
        with Transfers(1, wrap=lambda backend: limit_bandwidth(backend, DESC.nbytes / 0.2)) as slow:
            task = slow.submit(self.PLAN, memory, [local])
            transport.deregister(part)
            with pytest.raises(BufferError):
                arena.close()
            del arena, part, memory
            gc.collect()
            with pytest.raises(LLMException, match="has deregistered"):
                task.wait(timeout_ms=30_000)

    def test_a_closed_part_is_deregistered(self, transport: LocalTransport) -> None:
        arena = transport.allocate(100)
        part = transport.register(memoryview(arena)[10:20])
        link = transport.connect(transport.metadata())
        transport.deregister(part)
        arena.close()
        with refused(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, "has deregistered"):
            link.memory([part.address], 10)

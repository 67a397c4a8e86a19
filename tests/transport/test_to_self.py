"""A link of a process to itself: the same bytes must not get a second, unrelated address."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import kvplan
from kvplan import CacheDesc, DataType, LLMException, LLMStatusCode
from kvplan.transport.local import LocalTransport
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
    def test_what_is_read_through_the_link_must_not_be_written(
        self, transport: LocalTransport, make: Callable[[LocalTransport], np.ndarray]
    ) -> None:
        memory = make(transport)
        memory[:] = pattern(1, DESC.nbytes)
        plan = kvplan.plan_pull_blocks(DESC, DESC, [0, 1], [1, 2])
        with transport.connect(transport.metadata()) as link:
            source = link.memory([memory.ctypes.data], DESC.nbytes)
            with pytest.raises(LLMException, match="src and dst overlap") as refused:
                kvplan.execute(plan, source, [memory])
        assert refused.value.status_code is LLMStatusCode.LLM_PARAM_INVALID
        np.testing.assert_array_equal(memory, pattern(1, DESC.nbytes))

    def test_what_is_written_through_the_link_must_not_be_read(
        self, transport: LocalTransport, make: Callable[[LocalTransport], np.ndarray]
    ) -> None:
        memory = make(transport)
        plan = kvplan.plan_push_blocks(DESC, DESC, [0, 1], [1, 2])
        with transport.connect(transport.metadata()) as link:
            target = link.memory([memory.ctypes.data], DESC.nbytes, writable=True)
            with pytest.raises(LLMException, match="src and dst overlap"):
                kvplan.execute(plan, [memory], target)

    def test_disjoint_blocks_are_fine(
        self, transport: LocalTransport, make: Callable[[LocalTransport], np.ndarray]
    ) -> None:
        memory = make(transport)
        memory[:] = pattern(1, DESC.nbytes)
        expected = pattern(1, DESC.nbytes).reshape(BLOCKS, BLOCK)
        expected[[6, 7]] = expected[[0, 1]]
        with transport.connect(transport.metadata()) as link:
            source = link.memory([memory.ctypes.data], DESC.nbytes)
            kvplan.execute(kvplan.plan_pull_blocks(DESC, DESC, [0, 1], [6, 7]), source, [memory])
        np.testing.assert_array_equal(memory.reshape(BLOCKS, BLOCK), expected)

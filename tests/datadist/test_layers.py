"""Pushes by layers between two processes: what arrives, in which order, and what is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from kvplan import (
    BlocksCacheKey,
    Cache,
    CacheIndex,
    CacheKey,
    KvCacheExtParam,
    LlmDataDist,
    LLMStatusCode,
    Rows,
    Transfer,
)
from tests.datadist.layers import (
    BLOCKS,
    BLOCKS_THERE,
    NUM_LAYERS,
    OFFER,
    SLOTS,
    SLOTS_THERE,
    fill,
    ready,
    there,
    wait_until,
)
from tests.datadist.machine import Machine
from tests.datadist.peer import Peer
from tests.support.refusals import refused


@pytest.fixture(autouse=True)
def offered(peer: Peer) -> None:
    peer.run(OFFER)


@pytest.fixture
def slots(user: LlmDataDist) -> Cache:
    return user.allocate_cache(SLOTS)


@pytest.fixture
def blocks(user: LlmDataDist) -> Cache:
    return user.allocate_blocks_cache(BLOCKS)


@pytest.mark.over_tcp
def test_each_layer_of_a_slot_arrives_when_it_is_ready(
    user: LlmDataDist, peer: Peer, slots: Cache
) -> None:
    arrays = user.arrays(slots)
    task = user.layered(Transfer(Rows(slots, slot=3), Rows(CacheIndex(1, SLOTS_THERE, 1))))
    assert task.layers == range(NUM_LAYERS)
    assert not there(peer, "cache").any()
    for layer in range(4):
        # Computed only now, so it cannot have moved before.
        for tensor in (2 * layer, 2 * layer + 1):
            arrays[tensor][3] = 100 + tensor
        task.ready(layer)
        wait_until(lambda layer=layer: layer in task.progress().done)  # type: ignore[misc]
        assert there(peer, "cache")[: 2 * layer + 2, 1, 0].tolist() == [
            100 + tensor for tensor in range(2 * layer + 2)
        ]
        assert task.progress().waiting == tuple(range(layer + 1, NUM_LAYERS))
    assert not task.done
    fill(user, slots)
    ready(task)
    task.wait()
    assert task.done
    arrived = there(peer, "cache")
    for tensor, array in enumerate(arrays):
        assert (arrived[tensor][1] == (100 + tensor if tensor < 8 else array[3])).all()
        assert not arrived[tensor][[0, 2, 3]].any()


@pytest.mark.parametrize(
    "key", [CacheIndex(1, BLOCKS_THERE), BlocksCacheKey(1, 5)], ids=["id", "key"]
)
def test_blocks_go_into_blocks(
    user: LlmDataDist, peer: Peer, blocks: Cache, key: CacheIndex | BlocksCacheKey
) -> None:
    arrays = fill(user, blocks)
    task = user.layered(Transfer(Rows(blocks, [2, 6, 3]), Rows(key, [4, 3, 0])))
    ready(task)
    task.wait()
    arrived = there(peer, "paged")
    for tensor, array in enumerate(arrays):
        assert (arrived[tensor][[4, 3, 0]] == array[[2, 6, 3]]).all()
        assert not arrived[tensor][[1, 2, 5, 6, 7]].any()


def test_a_slot_goes_into_blocks(user: LlmDataDist, peer: Peer, slots: Cache) -> None:
    arrays = fill(user, slots)
    task = user.layered(Transfer(Rows(slots, slot=2), Rows(BlocksCacheKey(1, 5), [5, 1, 2, 0])))
    ready(task)
    task.wait()
    arrived = there(peer, "paged")
    for tensor, array in enumerate(arrays):
        assert (arrived[tensor][[5, 1, 2, 0]].ravel() == array[2]).all()
        assert not arrived[tensor][[3, 4, 6, 7]].any()


def test_pushes_may_begin_at_a_later_layer(user: LlmDataDist, peer: Peer, slots: Cache) -> None:
    arrays = fill(user, slots)
    ext_param = KvCacheExtParam((10, 14), (20, 24))
    target = CacheIndex(1, SLOTS_THERE)
    with refused(LLMStatusCode.LLM_PARAM_INVALID, "must be the same layers"):
        user.layered(
            Transfer(Rows(slots), Rows(target), layers=ext_param)
        )  # both give the layers' numbers in the model
    task = user.layered(Transfer(Rows(slots), Rows(target), layers=ext_param, reinterpret=True))
    assert task.layers == range(10, 15)
    with refused(LLMStatusCode.LLM_PARAM_INVALID):
        task.ready(0)
    ready(task)
    task.wait()
    arrived = there(peer, "cache")
    for tensor in range(2 * NUM_LAYERS):
        expected = arrays[tensor - 20][0] if 40 <= tensor < 50 else 0
        assert (arrived[tensor][0] == expected).all()


def test_layers_are_ready_in_any_order_and_from_any_thread(
    user: LlmDataDist, peer: Peer, slots: Cache
) -> None:
    arrays = fill(user, slots)
    for slot, seed in enumerate((1, 2)):
        task = user.layered(
            Transfer(Rows(slots, slot=slot), Rows(CacheIndex(1, SLOTS_THERE, slot)))
        )
        order = [*task.layers] * 2  # twice is as good as once
        random.Random(seed).shuffle(order)
        with ThreadPoolExecutor(4) as threads:
            for future in [threads.submit(task.ready, layer) for layer in order]:
                future.result()
        task.wait()
        assert task.progress().done == tuple(task.layers)
    arrived = there(peer, "cache")
    for tensor, array in enumerate(arrays):
        assert (arrived[tensor][:2] == array[:2]).all()
    assert user.metrics()["operations"]["push_layers"]["statuses"] == {"LLM_SUCCESS": 2}


@pytest.mark.over_tcp
def test_many_tasks_at_once_end_in_any_order(user: LlmDataDist, peer: Peer, slots: Cache) -> None:
    """A task whose layers do not come delays no other task."""
    fill(user, slots)
    target = CacheIndex(1, SLOTS_THERE)
    first, *others = [user.layered(Transfer(Rows(slots), Rows(target))) for _ in range(5)]
    first.ready(0)
    for task in reversed(others):
        ready(task)
    del task, others  # whether or not a call waits
    wait_until(lambda: user.metrics()["in_flight"] == 1)
    user.submit(Transfer(Rows(slots), Rows(target))).wait()
    assert user.metrics()["operations"]["push_layers"]["statuses"] == {"LLM_SUCCESS": 4}
    assert not first.done
    ready(first)
    first.wait()


def test_the_plan_describes_the_whole_push(user: LlmDataDist, slots: Cache, blocks: Cache) -> None:
    index, paged = CacheIndex(1, SLOTS_THERE, 1), CacheIndex(1, BLOCKS_THERE)
    assert user.plan(Transfer(Rows(slots), Rows(index)), by_layer=True) == user.plan(
        Transfer(Rows(slots), Rows(index))
    )
    tables = ([0, 1], [2, 3])
    plan = user.plan(Transfer(Rows(blocks, tables[0]), Rows(paged, tables[1])), by_layer=True)
    assert plan == user.plan(Transfer(Rows(blocks, tables[0]), Rows(paged, tables[1])))
    assert user.plan(Transfer(Rows(slots), Rows(paged, [7, 1])), by_layer=True).kind == "C2B"
    task = user.layered(Transfer(Rows(blocks, tables[0]), Rows(paged, tables[1])))
    assert task.plan == plan
    task.cancel()


def test_a_local_cache_may_be_given_by_addresses(
    user: LlmDataDist, peer: Peer, machine: Machine
) -> None:
    arrays = [machine.zeros(SLOTS.shape, np.int32) for _ in range(SLOTS.num_tensors)]
    for number, array in enumerate(arrays):
        array[:] = 7 + number
    source = Cache(SLOTS, -1, machine.addresses(arrays))
    task = user.layered(Transfer(Rows(source), Rows(CacheIndex(1, SLOTS_THERE))))
    ready(task)
    task.wait()
    assert there(peer, "cache")[:, 0, 5].tolist() == [7 + n for n in range(SLOTS.num_tensors)]


INVALID, NOT_EXIST = LLMStatusCode.LLM_PARAM_INVALID, LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
THERE, PAGED_THERE = CacheIndex(1, SLOTS_THERE), CacheIndex(1, BLOCKS_THERE)
REFUSALS: dict[str, tuple[LLMStatusCode, Callable[[LlmDataDist, Cache, Cache], object]]] = {
    "own cluster": (
        INVALID,
        lambda engine, slots, blocks: engine.layered(Transfer(Rows(slots), Rows(CacheIndex(2, 1)))),
    ),
    "not linked": (
        LLMStatusCode.LLM_NOT_YET_LINK,
        lambda engine, slots, blocks: engine.layered(Transfer(Rows(slots), Rows(CacheIndex(3, 1)))),
    ),
    "no such local cache": (
        NOT_EXIST,
        lambda engine, slots, blocks: engine.layered(Transfer(Rows(Cache(SLOTS, 99)), Rows(THERE))),
    ),
    "no such remote cache": (
        NOT_EXIST,
        lambda engine, slots, blocks: engine.layered(
            Transfer(Rows(slots), Rows(CacheIndex(1, 99)))
        ),
    ),
    "no such remote key": (
        NOT_EXIST,
        lambda engine, slots, blocks: engine.layered(
            Transfer(Rows(blocks, [0]), Rows(BlocksCacheKey(1, 6), [0]))
        ),
    ),
    "source blocks alone": (
        INVALID,
        lambda engine, slots, blocks: engine.layered(Transfer(Rows(blocks, [0]), Rows(THERE))),
    ),
    "a paged source without blocks": (
        INVALID,
        lambda engine, slots, blocks: engine.layered(Transfer(Rows(blocks), Rows(THERE))),
    ),
    "a paged source without source blocks": (
        INVALID,
        lambda engine, slots, blocks: engine.layered(
            Transfer(Rows(blocks), Rows(PAGED_THERE, [0]))
        ),
    ),
    "a slot into a paged cache without blocks": (
        INVALID,
        lambda engine, slots, blocks: engine.layered(
            Transfer(Rows(slots), Rows(BlocksCacheKey(1, 5)))
        ),
    ),
    "blocks of a contiguous cache there": (
        INVALID,
        lambda engine, slots, blocks: engine.layered(Transfer(Rows(blocks, [0]), Rows(THERE, [0]))),
    ),
    "a destination block that is named twice": (
        INVALID,
        lambda engine, slots, blocks: engine.layered(
            Transfer(Rows(slots), Rows(PAGED_THERE, [1] * 9))
        ),
    ),
    "blocks of unequal number": (
        INVALID,
        lambda engine, slots, blocks: engine.layered(
            Transfer(Rows(blocks, [0]), Rows(PAGED_THERE, [0, 1]))
        ),
    ),
    "a slot of a paged source": (
        INVALID,
        lambda engine, slots, blocks: engine.layered(
            Transfer(Rows(blocks, [0], slot=1), Rows(PAGED_THERE, [0]))
        ),
    ),
    "a slot beyond the source": (
        INVALID,
        lambda engine, slots, blocks: engine.layered(Transfer(Rows(slots, slot=4), Rows(THERE))),
    ),
    "a slot beyond the destination": (
        NOT_EXIST,
        lambda engine, slots, blocks: engine.layered(
            Transfer(Rows(slots), Rows(CacheIndex(1, SLOTS_THERE, 4)))
        ),
    ),
    "a layer beyond the source": (
        INVALID,
        lambda engine, slots, blocks: engine.layered(
            Transfer(Rows(slots), Rows(THERE), layers=KvCacheExtParam((30, 30), (0, 0)))
        ),
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_impossible_pushes_are_refused(
    user: LlmDataDist, slots: Cache, blocks: Cache, name: str
) -> None:
    status, call = REFUSALS[name]
    with refused(status):
        call(user, slots, blocks)
    assert user.metrics()["in_flight"] == 0
    assert user.metrics()["operations"]["push_layers"]["statuses"] == {status.name: 1}


def test_a_missing_block_table_is_named(user: LlmDataDist, slots: Cache, blocks: Cache) -> None:
    for call, missing in (
        (lambda: user.layered(Transfer(Rows(blocks), Rows(THERE))), "src.blocks"),
        (lambda: user.layered(Transfer(Rows(blocks), Rows(PAGED_THERE, [0]))), "src.blocks"),
        (lambda: user.layered(Transfer(Rows(slots), Rows(BlocksCacheKey(1, 5)))), "dst.blocks"),
    ):
        with refused(INVALID) as error:
            call()
        assert f"is a paged cache; {missing} must name blocks of it" in str(error.value)


WRONG_TYPES: dict[str, Callable[[Any, Cache, Cache], object]] = {
    "destination": lambda engine, slots, blocks: engine.layered(
        Transfer(Rows(slots), Rows((1, 1)))
    ),
    "destination by request": lambda engine, slots, blocks: engine.layered(
        Transfer(Rows(slots), Rows(CacheKey(1, 1)))
    ),
    "source": lambda engine, slots, blocks: engine.layered(Transfer(Rows(1), Rows(THERE))),
    "slot": lambda engine, slots, blocks: engine.layered(
        Transfer(Rows(slots, slot="0"), Rows(THERE))
    ),
    "blocks": lambda engine, slots, blocks: engine.layered(
        Transfer(Rows(slots), Rows(PAGED_THERE, 3))
    ),
    "layers": lambda engine, slots, blocks: engine.layered(
        Transfer(Rows(slots), Rows(THERE), layers={})
    ),
}


@pytest.mark.parametrize("name", WRONG_TYPES)
def test_arguments_of_another_type_are_refused(
    user: LlmDataDist, slots: Cache, blocks: Cache, name: str
) -> None:
    with pytest.raises(TypeError):
        WRONG_TYPES[name](user, slots, blocks)
    assert user.metrics()["in_flight"] == 0

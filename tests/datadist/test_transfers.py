"""Pulls and pushes between two processes: the moved bytes, and the consumed requests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvplan import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheIndex,
    CacheKey,
    DataType,
    KvCacheExtParam,
    LlmDataDist,
    LLMStatusCode,
    Placement,
    Rows,
    Transfer,
)
from tests.datadist.machine import Machine
from tests.datadist.offered import BLOCKS, CACHE, PAGED, SLOTS
from tests.datadist.peer import Peer
from tests.support.refusals import refused

pytestmark = pytest.mark.usefixtures("offered")


def theirs(desc: CacheDesc) -> list[NDArray[Any]]:
    size = int(np.prod(desc.shape))
    return [np.arange(size).reshape(desc.shape) + 10000 * number for number in range(4)]


def test_a_slot_is_pulled(user: LlmDataDist, slots: Cache) -> None:
    user.pull_cache(CacheIndex(1, CACHE, 2), slots, 1)
    for mine, there in zip(user.arrays(slots), theirs(SLOTS), strict=True):
        assert (mine[1] == there[2]).all()
        assert not mine[[0, 2, 3]].any()


@pytest.mark.over_tcp
def test_part_of_a_slot_is_pulled(user: LlmDataDist, slots: Cache) -> None:
    user.pull_cache(CacheIndex(1, CACHE), slots, size=12)
    assert user.arrays(slots)[3][0, :4].tolist() == [30000, 30001, 30002, 0]


def test_a_pull_begins_at_its_offsets(user: LlmDataDist, slots: Cache) -> None:
    src = CacheIndex(1, CACHE, 1)
    user.pull_cache(src, slots, 2, 12, src_offset=8, dst_offset=20)
    expected = np.zeros((4, 64), dtype=np.int32)
    expected[2, 5:8] = theirs(SLOTS)[3][1, 2:5]
    assert (user.arrays(slots)[3] == expected).all()
    user.submit(
        Transfer(Rows(src), Rows(slots, slot=2, offset=32))
    ).wait()  # from there to the end of the local row
    expected[2, 8:] = theirs(SLOTS)[3][1, :56]
    assert (user.arrays(slots)[3] == expected).all()
    planned = user.plan(Transfer(Rows(src, offset=4), Rows(slots, slot=2, offset=8)))
    assert planned.part.nbytes_per_tensor == 256 - 8
    for wrong in ({"src_offset": -4}, {"dst_offset": 256}, {"src_offset": 4}):
        with refused(LLMStatusCode.LLM_PARAM_INVALID):
            user.pull_cache(src, slots, **wrong)


@pytest.mark.over_tcp
def test_layers_are_pulled(user: LlmDataDist, slots: Cache) -> None:
    user.pull_cache(CacheIndex(1, CACHE), slots, layers=KvCacheExtParam((1, 1), (0, 0)))
    mine, there = user.arrays(slots), theirs(SLOTS)
    assert (mine[0][0] == there[2][0]).all()
    assert (mine[1][0] == there[3][0]).all()
    assert not mine[2].any()


def test_a_local_cache_made_by_hand_has_the_description_of_its_id(
    user: LlmDataDist, slots: Cache
) -> None:
    with refused("LLM_PARAM_INVALID", "dst=.* of this engine has cache_desc="):
        user.pull_cache(CacheIndex(1, CACHE), Cache(CacheDesc(1, (1,), DataType.DT_INT8), 1))
    user.pull_cache(CacheIndex(1, CACHE), Cache(SLOTS, 1))
    assert (user.arrays(slots)[0][0] == theirs(SLOTS)[0][0]).all()


def test_a_local_cache_may_be_given_by_addresses(user: LlmDataDist, machine: Machine) -> None:
    arrays = [machine.zeros(SLOTS.shape, np.int32) for _ in range(4)]
    user.pull_cache(CacheIndex(1, CACHE), Cache(SLOTS, -1, machine.addresses(arrays)))
    assert (arrays[3][0] == theirs(SLOTS)[3][0]).all()


@pytest.mark.over_tcp
@pytest.mark.parametrize("key", [CacheIndex(1, PAGED), BlocksCacheKey(1, 5)], ids=["id", "key"])
def test_blocks_are_pulled(
    user: LlmDataDist, blocks: Cache, key: CacheIndex | BlocksCacheKey
) -> None:
    user.pull_blocks(key, blocks, [7, 0, 3], [1, 2, 0])
    for mine, there in zip(user.arrays(blocks), theirs(BLOCKS), strict=True):
        assert (mine[[1, 2, 0]] == there[[7, 0, 3]]).all()
        assert not mine[3:].any()


@pytest.mark.parametrize("count", [1, 3, 5, 27])
def test_caches_of_any_number_of_tensors_are_pulled_and_pushed(
    user: LlmDataDist, peer: Peer, count: int
) -> None:
    """Without a layer range it does not matter which tensors belong to one layer."""
    slots, blocks = (CacheDesc(count, (4, 8), DataType.DT_INT32) for _ in range(2))
    own, own_blocks = user.allocate_cache(slots), user.allocate_blocks_cache(blocks)
    for number, array in enumerate(user.arrays(own) + user.arrays(own_blocks)):
        array[0] = number + 1
    there = peer.run(
        "some = datadist.allocate_cache(slots), datadist.allocate_blocks_cache(slots)\n"
        "result = [cache.cache_id for cache in some]",
        slots=slots,
    )
    user.push_cache(own, CacheIndex(1, there[0], 2))
    user.push_blocks(own_blocks, CacheIndex(1, there[1]), [0], [1])
    user.pull_cache(CacheIndex(1, there[0], 2), own, 1)
    user.pull_blocks(CacheIndex(1, there[1]), own_blocks, [1], [2])
    assert [int(item[1, 7]) for item in user.arrays(own)] == [*range(1, count + 1)]
    assert [int(item[2, 7]) for item in user.arrays(own_blocks)] == [
        *range(count + 1, 2 * count + 1)
    ]


@pytest.mark.over_tcp
@pytest.mark.parametrize("key", [CacheIndex(1, CACHE, 2), CacheKey(1, 72)], ids=["id", "key"])
def test_a_slot_is_pulled_into_blocks(
    user: LlmDataDist, blocks: Cache, key: CacheIndex | CacheKey
) -> None:
    user.pull_blocks(key, blocks, None, [5, 1, 2, 0])
    for mine, there in zip(user.arrays(blocks), theirs(SLOTS), strict=True):
        assert (mine[[5, 1, 2, 0]].ravel() == there[2]).all()


@pytest.mark.over_tcp
def test_a_slot_is_pushed(user: LlmDataDist, peer: Peer, slots: Cache) -> None:
    for number, array in enumerate(user.arrays(slots)):
        array[3] = number - 5
    user.push_cache(slots, CacheIndex(1, CACHE, 1), 3)
    there = np.array(peer.run("result = [array.tolist() for array in datadist.arrays(cache)]"))
    for number, expected in enumerate(theirs(SLOTS)):
        assert (there[number][1] == number - 5).all()
        assert (there[number][[0, 2, 3]] == expected[[0, 2, 3]]).all()


@pytest.mark.over_tcp
@pytest.mark.parametrize("key", [CacheIndex(1, PAGED), BlocksCacheKey(1, 5)], ids=["id", "key"])
def test_blocks_are_pushed(
    user: LlmDataDist, peer: Peer, blocks: Cache, key: CacheIndex | BlocksCacheKey
) -> None:
    for array in user.arrays(blocks):
        array[:] = np.arange(8)[:, None] - 100
    user.push_blocks(blocks, key, [2, 6], [4, 3])
    there = np.array(peer.run("result = [array.tolist() for array in datadist.arrays(paged)]"))
    for number, expected in enumerate(theirs(BLOCKS)):
        expected[4], expected[3] = -98, -94
        assert (there[number] == expected).all()


@pytest.mark.over_tcp
def test_a_push_of_blocks_is_submitted(user: LlmDataDist, peer: Peer, blocks: Cache) -> None:
    for array in user.arrays(blocks):
        array[:] = -7
    transfer = Transfer(Rows(blocks, [2, 6]), Rows(CacheIndex(1, PAGED), [4, 3]))
    task = user.submit(transfer)
    task.wait()
    assert task.plan == user.plan(transfer)
    there = np.array(peer.run("result = [array.tolist() for array in datadist.arrays(paged)]"))
    for number, expected in enumerate(theirs(BLOCKS)):
        expected[[4, 3]] = -7
        assert (there[number] == expected).all()


@pytest.mark.over_tcp
def test_registered_memory_is_pulled_and_pushed(
    user: LlmDataDist, peer: Peer, machine: Machine
) -> None:
    peer.run(
        """
        arrays = [zeros((4, 64), np.int32) for _ in range(4)]
        for array in arrays:
            array[:] = 9
        result = datadist.register_cache(slots, addresses(arrays)).cache_id
        """
    )
    mine = [machine.zeros(SLOTS.shape, np.int32) for _ in range(4)]
    cache = user.register_cache(SLOTS, machine.addresses(mine))
    user.pull_cache(CacheIndex(1, 3), cache)
    assert all((item[0] == 9).all() for item in mine)
    mine[2][1] = 4
    user.push_cache(cache, CacheIndex(1, 3, 1), 1)
    assert peer.run("result = [int(array[1, 5]) for array in arrays]") == [0, 0, 4, 0]


@pytest.mark.over_tcp
def test_a_request_is_consumed_by_its_pull_and_an_index_never(
    user: LlmDataDist, slots: Cache
) -> None:
    user.pull_cache(CacheKey(1, 71), slots)
    assert (user.arrays(slots)[0][0] == theirs(SLOTS)[0][1]).all()
    with refused(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST):
        user.pull_cache(CacheKey(1, 71), slots)
    user.pull_cache(CacheIndex(1, CACHE, 1), slots)


def test_pulls_of_layers_consume_a_request_together(user: LlmDataDist, slots: Cache) -> None:
    for layer in (0, 1):
        ext_param = KvCacheExtParam((layer, layer), (layer, layer))
        user.pull_cache(CacheKey(1, 71), slots, layers=ext_param)
    with refused(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST):
        user.pull_cache(CacheKey(1, 71), slots)


def test_the_layers_of_the_source_consume_a_request_wherever_they_go(
    user: LlmDataDist, slots: Cache
) -> None:
    for request, src, dst in ((71, 0, 1), (71, 1, 1), (72, 0, 0), (72, 0, 1)):
        ext_param = KvCacheExtParam((src, src), (dst, dst))
        user.pull_cache(CacheKey(1, request), slots, layers=ext_param)
    with refused(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST):
        user.pull_cache(CacheKey(1, 71), slots)
    user.pull_cache(CacheKey(1, 72), slots)  # its layer 1 was not pulled


@pytest.mark.parametrize(
    ("src", "dst", "add_up"),
    [
        (((2, 2, 4, 1, 8), "slot kv token head dim"), ((2, 4, 1, 8), "slot token head dim"), True),
        (((2, 2, 4, 8), "slot layer token dim"), ((2, 4, 8), "slot token dim"), False),
    ],
)
def test_pieces_of_tensors_consume_a_request_once_all_tensors_are_whole(
    user: LlmDataDist, peer: Peer, src: Any, dst: Any, add_up: bool
) -> None:
    """Keys and values, or several layers, in one tensor of the source move as pieces of it."""
    descs = [
        CacheDesc(count, shape, DataType.DT_INT8, kv_tensor_format=layout)
        for count, (shape, layout) in ((2 if add_up else 1, src), (4 if add_up else 2, dst))
    ]
    peer.run("datadist.allocate_cache(desc, [CacheKey(0, 91)])", desc=descs[0])
    cache, key = user.allocate_cache(descs[1]), CacheKey(1, 91)
    for layer in (0, 1):
        user.pull_cache(key, cache, layers=KvCacheExtParam((layer, layer), (layer, layer)))
    if not add_up:  # each pull brought a half of the tensor
        user.pull_cache(key, cache)
    with refused(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST):
        user.pull_cache(key, cache)


def test_neither_a_plan_nor_a_refused_pull_consumes_a_request(
    user: LlmDataDist, slots: Cache
) -> None:
    user.plan(Transfer(Rows(CacheKey(1, 71)), Rows(slots)))
    with refused(LLMStatusCode.LLM_PARAM_INVALID):
        user.pull_cache(CacheKey(1, 71), slots, size=9999)
    user.pull_cache(CacheKey(1, 71), slots)


def test_a_prefix_is_not_consumed(user: LlmDataDist, peer: Peer, slots: Cache) -> None:
    peer.run("prefix = datadist.allocate_cache(slots, [CacheKey(0, prefix_id=3)])")
    for content in (3, 4):
        peer.run(f"datadist.arrays(prefix)[1][0] = {content}")
        user.pull_cache(CacheKey(1, prefix_id=3), slots)
        assert (user.arrays(slots)[1][0] == content).all()


@pytest.mark.over_tcp
def test_a_cache_made_after_linking_is_pulled_and_a_freed_one_is_not(
    user: LlmDataDist, peer: Peer, slots: Cache
) -> None:
    peer.run("later = datadist.allocate_cache(slots)\ndatadist.arrays(later)[1][:] = 8")
    user.pull_cache(CacheIndex(1, 3), slots)
    assert (user.arrays(slots)[1][0] == 8).all()
    peer.run("datadist.deallocate_cache(later)")
    with refused(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST):
        user.pull_cache(CacheIndex(1, 3), slots)


@pytest.mark.over_tcp
def test_a_key_names_the_newest_cache_that_has_it(
    user: LlmDataDist, peer: Peer, blocks: Cache
) -> None:
    """The next pull may come before the update about the freed cache and its successor."""
    key = BlocksCacheKey(1, 5)
    user.pull_blocks(key, blocks, [1], [1])
    for value in range(20):
        peer.run(
            """
            datadist.deallocate_cache(paged)
            paged = datadist.allocate_blocks_cache(blocks, BlocksCacheKey(0, 5))
            datadist.arrays(paged)[3][:] = value
            """,
            value=value,
        )
        user.pull_blocks(key, blocks, [1], [1])
        assert (user.arrays(blocks)[3][1] == value).all()


def test_a_plan_describes_the_operation(user: LlmDataDist, slots: Cache) -> None:
    seen = []
    user.on_plan(seen.append)
    plan = user.plan(Transfer(Rows(CacheIndex(1, CACHE, 2)), Rows(slots, slot=1)))
    assert plan.explain().startswith("pull_cache  C2C   cache 1 of cluster 1 -> cache 1 ")
    assert not seen
    user.pull_cache(CacheIndex(1, CACHE, 2), slots, 1)
    assert [item.plan for item in seen] == [plan]
    assert plan.part.src.count == 4


PULL, PUSH = "pull", "push"


def test_bytes_move_between_host_and_device_caches(user: LlmDataDist, peer: Peer) -> None:
    host = CacheDesc(4, (4, 64), DataType.DT_INT32, Placement.HOST)
    target = user.allocate_cache(host)
    user.pull_cache(CacheIndex(1, CACHE), target)
    assert (user.arrays(target)[0][0] == theirs(SLOTS)[0][0]).all()

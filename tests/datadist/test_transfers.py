"""Pull and push between two processes: what arrives, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
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
    LLMException,
    LlmRole,
    LLMStatusCode,
    Placement,
    Rows,
    Transfer,
)
from tests.datadist.machine import Machine
from tests.datadist.peer import Peer
from tests.support.refusals import refused

SLOTS = CacheDesc(4, (4, 64), DataType.DT_INT32)  # 2 layers, 4 slots of 256 bytes
BLOCKS = CacheDesc(4, (8, 16), DataType.DT_INT32)  # 2 layers, 8 blocks of 64 bytes

# The peer's tensor t holds t * 10000, t * 10000 + 1, ...
OFFER = """
slots, blocks = (CacheDesc(4, shape, DataType.DT_INT32) for shape in ((4, 64), (8, 16)))
cache = datadist.allocate_cache(slots, [CacheKey(0, 70 + row) for row in range(4)])
paged = datadist.allocate_blocks_cache(blocks, BlocksCacheKey(0, 5))
for held in (cache, paged):
    for number, array in enumerate(datadist.arrays(held)):
        array[:] = np.arange(array.size).reshape(array.shape) + 10000 * number
"""
CACHE, PAGED = 1, 2  # the ids there


@pytest.fixture(autouse=True)
def offered(peer: Peer) -> None:
    peer.run(OFFER)


@pytest.fixture
def slots(user: LlmDataDist) -> Cache:
    return user.allocate_cache(SLOTS)


@pytest.fixture
def blocks(user: LlmDataDist) -> Cache:
    return user.allocate_blocks_cache(BLOCKS)


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
    ).wait()  # all of the local row, from there
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


FOREIGN: dict[str, Callable[[LlmDataDist, Cache, Cache], object]] = {
    "pull": lambda engine, slots, paged: engine.pull_cache(CacheIndex(1, CACHE), slots),
    "pull of blocks": lambda engine, slots, paged: engine.pull_blocks(
        CacheIndex(1, PAGED), paged, [0], [1]
    ),
    "submitted pull": lambda engine, slots, paged: engine.submit(
        Transfer(Rows(CacheIndex(1, PAGED), [0]), Rows(paged, [1]))
    ),
    "push": lambda engine, slots, paged: engine.push_cache(slots, CacheIndex(1, CACHE)),
    "push of blocks": lambda engine, slots, paged: engine.push_blocks(
        paged, CacheIndex(1, PAGED), [0], [1]
    ),
    "layers": lambda engine, slots, paged: engine.layered(
        Transfer(Rows(slots), Rows(CacheIndex(1, CACHE)))
    ),
    "groups": lambda engine, slots, paged: engine.run(
        {"kv": Transfer(Rows(CacheIndex(1, PAGED), [0]), Rows(paged, [1]))}
    ),
    "gather": lambda engine, slots, paged: engine.run(
        Transfer([Rows(CacheIndex(1, PAGED), [0])], Rows(paged, [1]))
    ),
    "copy": lambda engine, slots, paged: engine.copy_cache(slots, slots, 0, 1),
    "copy of blocks": lambda engine, slots, paged: engine.copy_blocks(paged, {0: [1]}),
    "swap": lambda given, slots, paged: given.swap_blocks(
        paged, Cache(replace(BLOCKS, placement=Placement.HOST), 3), {0: 1}
    ),
    "arrays": lambda end, slots, paged: end.arrays(slots),
    "read": lambda end, slots, paged: end.arrays(slots, copy=True),
    "write": lambda given, slots, paged: given.write_cache(slots, []),
    "fingerprint": lambda given, slots, paged: given.fingerprint(paged),
    "lease": lambda given, slots, paged: given.lease_blocks(paged, [0]),
    "deallocate": lambda given, slots, paged: given.deallocate_cache(slots),
}


def test_a_cache_of_another_engine_is_refused(
    user: LlmDataDist, slots: Cache, blocks: Cache
) -> None:
    """Ids start at 1 in each engine: the cache of that id here is not touched."""
    with LlmDataDist(9, LlmRole.MIX) as other:
        other.initialize()
        foreign = other.allocate_cache(SLOTS), other.allocate_blocks_cache(BLOCKS)
        assert [cache.cache_id for cache in foreign] == [slots.cache_id, blocks.cache_id]
        for call in FOREIGN.values():
            with refused("LLM_KV_CACHE_NOT_EXIST", "was made by another engine"):
                call(user, *foreign)
    assert not any(value.any() for value in (*user.arrays(slots), *user.arrays(blocks)))


def test_addresses_will_do_for_a_local_cache(user: LlmDataDist, machine: Machine) -> None:
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
    """No layer range is given, so it does not matter which tensors are one layer."""
    slots, blocks = (CacheDesc(count, (4, 8), DataType.DT_INT32) for _ in range(2))
    own, own_blocks = user.allocate_cache(slots), user.allocate_blocks_cache(blocks)
    for number, array in enumerate(user.arrays(own) + user.arrays(own_blocks)):
        array[0] = number + 1
    there = peer.run(
        "some = datadist.allocate_cache(slots), datadist.allocate_blocks_cache(slots)\n"
        "result = [it.cache_id for it in some]",
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
    there = np.array(peer.run("result = [it.tolist() for it in datadist.arrays(cache)]"))
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
    there = np.array(peer.run("result = [it.tolist() for it in datadist.arrays(paged)]"))
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
    there = np.array(peer.run("result = [it.tolist() for it in datadist.arrays(paged)]"))
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
    assert peer.run("result = [int(it[1, 5]) for it in arrays]") == [0, 0, 4, 0]


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
    user.pull_cache(CacheKey(1, 72), slots)  # of which layer 1 was not pulled


def test_neither_a_plan_nor_a_refused_pull_consumes_a_request(
    user: LlmDataDist, slots: Cache
) -> None:
    user.plan(Transfer(Rows(CacheKey(1, 71)), Rows(slots)))
    with refused(LLMStatusCode.LLM_PARAM_INVALID):
        user.pull_cache(CacheKey(1, 71), slots, size=9999)
    user.pull_cache(CacheKey(1, 71), slots)


@pytest.mark.parametrize("key", [CacheKey(1), CacheKey(1, 1, 0, 1)], ids=["neither", "both"])
def test_the_argument_is_named_that_must_be_a_request_or_a_prefix(
    user: LlmDataDist, slots: Cache, key: CacheKey
) -> None:
    with refused(LLMStatusCode.LLM_PARAM_INVALID) as error:
        user.pull_cache(key, slots)
    assert f"={key} must name either a request (req_id) or a prefix" in str(error.value)


def test_a_prefix_stays(user: LlmDataDist, peer: Peer, slots: Cache) -> None:
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
def test_a_key_is_of_the_newest_cache_that_has_it(
    user: LlmDataDist, peer: Peer, blocks: Cache
) -> None:
    """The update on what is freed and what comes in its place may be later than the next pull."""
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


def test_a_plan_says_what_an_operation_does(user: LlmDataDist, slots: Cache) -> None:
    seen = []
    user.on_plan(seen.append)
    plan = user.plan(Transfer(Rows(CacheIndex(1, CACHE, 2)), Rows(slots, slot=1)))
    assert plan.explain().startswith("pull_cache  C2C   cache 1 of cluster 1 -> cache 1 ")
    assert not seen
    user.pull_cache(CacheIndex(1, CACHE, 2), slots, 1)
    assert [item.plan for item in seen] == [plan]
    assert plan.part.src.count == 4


PULL, PUSH = "pull", "push"
REFUSALS: dict[str, tuple[LLMStatusCode, Callable[[LlmDataDist, Cache, Cache], object]]] = {
    "own cluster": (
        LLMStatusCode.LLM_PARAM_INVALID,
        lambda engine, slots, blocks: engine.pull_cache(CacheIndex(2, 1), slots),
    ),
    "not linked": (
        LLMStatusCode.LLM_NOT_YET_LINK,
        lambda engine, slots, blocks: engine.pull_cache(CacheIndex(3, 1), slots),
    ),
    "no such local cache": (
        LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
        lambda engine, slots, blocks: engine.pull_cache(CacheIndex(1, CACHE), Cache(SLOTS, 99)),
    ),
    "no such remote cache": (
        LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
        lambda engine, slots, blocks: engine.pull_cache(CacheIndex(1, 99), slots),
    ),
    "no such remote blocks key": (
        LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
        lambda engine, slots, blocks: engine.pull_blocks(BlocksCacheKey(1, 6), blocks, [0], [0]),
    ),
    "no such remote key": (
        LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
        lambda engine, slots, blocks: engine.pull_cache(CacheKey(1, 999), slots),
    ),
    "remote slot beyond the cache": (
        LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
        lambda engine, slots, blocks: engine.pull_cache(CacheIndex(1, CACHE, 4), slots),
    ),
    "remote slot beyond the cache, pushed": (
        LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
        lambda engine, slots, blocks: engine.push_cache(slots, CacheIndex(1, CACHE, 4)),
    ),
    "remote layer beyond the cache": (
        LLMStatusCode.LLM_PARAM_INVALID,
        lambda engine, slots, blocks: engine.pull_cache(
            CacheIndex(1, CACHE), slots, layers=KvCacheExtParam((2, 2), (0, 0))
        ),
    ),
    "local slot beyond the cache": (
        LLMStatusCode.LLM_PARAM_INVALID,
        lambda engine, slots, blocks: engine.pull_cache(CacheIndex(1, CACHE), slots, 4),
    ),
    "size of no bytes": (
        LLMStatusCode.LLM_PARAM_INVALID,
        lambda engine, slots, blocks: engine.pull_cache(CacheIndex(1, CACHE), slots, size=0),
    ),
    "paged into slots": (
        LLMStatusCode.LLM_PARAM_INVALID,
        lambda engine, slots, blocks: engine.pull_cache(CacheIndex(1, PAGED), slots),
    ),
    "slot into paged by pull_cache": (
        LLMStatusCode.LLM_PARAM_INVALID,
        lambda engine, slots, blocks: engine.pull_cache(CacheIndex(1, CACHE), blocks),
    ),
    "blocks into slots": (
        LLMStatusCode.LLM_PARAM_INVALID,
        lambda engine, slots, blocks: engine.pull_blocks(CacheIndex(1, PAGED), slots, [0], [0]),
    ),
    "blocks of a contiguous cache": (
        LLMStatusCode.LLM_PARAM_INVALID,
        lambda engine, slots, blocks: engine.pull_blocks(CacheIndex(1, CACHE), blocks, [0], [0]),
    ),
    "no blocks of a paged cache": (
        LLMStatusCode.LLM_PARAM_INVALID,
        lambda engine, slots, blocks: engine.pull_blocks(BlocksCacheKey(1, 5), blocks, [], [0]),
    ),
    "blocks of unequal number": (
        LLMStatusCode.LLM_PARAM_INVALID,
        lambda engine, slots, blocks: engine.pull_blocks(CacheIndex(1, PAGED), blocks, [0], [0, 1]),
    ),
    "a key of neither": (
        LLMStatusCode.LLM_PARAM_INVALID,
        lambda engine, slots, blocks: engine.pull_cache(CacheKey(1), slots),
    ),
    "a key of both": (
        LLMStatusCode.LLM_PARAM_INVALID,
        lambda engine, slots, blocks: engine.pull_cache(CacheKey(1, 1, 0, 1), slots),
    ),
    "push of no bytes": (
        LLMStatusCode.LLM_PARAM_INVALID,
        lambda engine, slots, blocks: engine.push_cache(slots, CacheIndex(1, CACHE), size=0),
    ),
    "push of no blocks": (
        LLMStatusCode.LLM_PARAM_INVALID,
        lambda engine, slots, blocks: engine.push_blocks(blocks, CacheIndex(1, PAGED), [], [0]),
    ),
    "push of slots as blocks": (
        LLMStatusCode.LLM_PARAM_INVALID,
        lambda engine, slots, blocks: engine.push_blocks(slots, CacheIndex(1, PAGED), [0], [0]),
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_is_refused(
    user: LlmDataDist, slots: Cache, blocks: Cache, name: str
) -> None:
    status, call = REFUSALS[name]
    with refused(status):
        call(user, slots, blocks)
    assert user.metrics()["in_flight"] == 0


def test_the_call_for_the_other_kind_of_cache_is_named(
    user: LlmDataDist, slots: Cache, blocks: Cache
) -> None:
    invalid = LLMStatusCode.LLM_PARAM_INVALID
    with refused(invalid) as error:
        user.pull_cache(CacheIndex(1, CACHE), blocks)
    assert "is a paged cache; pull_cache needs a contiguous one; pull_blocks takes" in str(
        error.value
    )
    with refused(invalid) as error:
        user.pull_cache(CacheIndex(1, PAGED), slots)
    assert "is a paged cache; pull_cache needs a contiguous one; pull_blocks takes" in str(
        error.value
    )
    with refused(invalid) as error:
        user.push_blocks(slots, CacheIndex(1, PAGED), [0], [0])
    assert "contiguous cache; push_blocks needs a paged one, or no src_blocks" in str(error.value)
    with refused(invalid) as error:
        user.pull_blocks(CacheIndex(1, CACHE), blocks, [0], [0])
    assert "needs a paged one, or no src_blocks: then a slot is moved" in str(error.value)


def test_arguments_in_the_wrong_order_are_called_by_their_names(
    user: LlmDataDist, slots: Cache
) -> None:
    with pytest.raises(TypeError, match=r"^dst=.* must be Cache, not CacheKeyByIdAndIndex"):
        user.pull_cache(slots, CacheIndex(1, CACHE))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^src=.* must be Cache, not CacheKeyByIdAndIndex"):
        user.push_cache(CacheIndex(1, CACHE), slots)  # type: ignore[arg-type]


WRONG_TYPES: dict[str, Callable[[Any, Cache, Cache], object]] = {
    "index": lambda engine, slots, blocks: engine.pull_cache((1, 1), slots),
    "cache": lambda engine, slots, blocks: engine.pull_cache(CacheIndex(1, CACHE), 1),
    "push by request": lambda engine, slots, blocks: engine.push_cache(slots, CacheKey(1, 71)),
    "push blocks by request": lambda engine, slots, blocks: engine.push_blocks(
        blocks, CacheKey(1, 71), [0], [0]
    ),
    "block table": lambda engine, slots, blocks: engine.pull_blocks(
        CacheIndex(1, PAGED), blocks, 3, [0]
    ),
    "slot": lambda engine, slots, blocks: engine.pull_cache(CacheIndex(1, CACHE), slots, "0"),
    "size": lambda engine, slots, blocks: engine.push_cache(slots, CacheIndex(1, CACHE), size=None),
    "layers": lambda engine, slots, blocks: engine.pull_cache(
        CacheIndex(1, CACHE), slots, layers={}
    ),
}


@pytest.mark.parametrize("name", WRONG_TYPES)
def test_arguments_of_another_type_are_refused(
    user: LlmDataDist, slots: Cache, blocks: Cache, name: str
) -> None:
    with pytest.raises(TypeError):
        WRONG_TYPES[name](user, slots, blocks)
    assert user.metrics()["in_flight"] == 0


def test_caches_of_host_and_device_meet(user: LlmDataDist, peer: Peer) -> None:
    host = CacheDesc(4, (4, 64), DataType.DT_INT32, Placement.HOST)
    target = user.allocate_cache(host)
    user.pull_cache(CacheIndex(1, CACHE), target)
    assert (user.arrays(target)[0][0] == theirs(SLOTS)[0][0]).all()


def test_an_error_names_the_parameter_or_the_field_that_is_wrong(
    user: LlmDataDist, slots: Cache, blocks: Cache
) -> None:
    """A method of the interface has parameters, a `Transfer` has fields."""
    paged, slot = CacheIndex(1, PAGED), CacheIndex(1, CACHE)
    for text, call in (
        (r"src_blocks\[1\]=8 is", lambda: user.pull_blocks(paged, blocks, [0, 8], [1, 2])),
        (r"dst_blocks\[1\]=8 is", lambda: user.push_blocks(blocks, paged, [0, 1], [2, 8])),
        ("src_token='1' must", lambda: user.pull_blocks(paged, blocks, [0], [1], src_token="1")),
        ("^dst_batch_index=4 is", lambda: user.pull_cache(slot, slots, 4)),
        ("^src_batch_index=4 is", lambda: user.push_cache(slots, slot, 4)),
        ("^size=257: .* from src_offset=0", lambda: user.pull_cache(slot, slots, size=257)),
        ("^size=8: .* from offset=250", lambda: user.copy_cache(slots, slots, 0, 1, 250, 8)),
        (r"^blocks\.sources\[0\]=9 is", lambda: user.copy_blocks(blocks, {9: [1]})),
        (
            r"^blocks\.destinations\[1\]=1 is already blocks\.destinations\[0\]",
            lambda: user.copy_blocks(blocks, [(0, 1), (2, 1)]),
        ),
        (
            r"^src\.blocks\[1\]=8 is",
            lambda: user.run(Transfer(Rows(paged, [0, 8]), Rows(blocks, [1, 2]))),
        ),
        ("^dst.slot=4 is", lambda: user.run(Transfer(Rows(slot), Rows(slots, slot=4)))),
        (
            "^nbytes=257: .* from src.offset=0",
            lambda: user.submit(Transfer(Rows(slot), Rows(slots), nbytes=257)),
        ),
    ):
        with pytest.raises((TypeError, LLMException), match=text):
            call()

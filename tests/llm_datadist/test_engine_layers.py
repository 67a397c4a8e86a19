"""transfer_cache_async between processes: bytes that arrive, their order, and refusals."""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import numpy as np
import pytest

import kvplan
from kvplan.llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheKeyByIdAndIndex,
    CacheTask,
    LLMDataDist,
    LLMStatusCode,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from kvplan.llm_datadist.v2.cache_manager import CacheManager
from kvplan.llm_datadist.v2.layer_transfer import Destination
from tests.llm_datadist.conftest import MakeDataDist, MakePeer
from tests.llm_datadist.contents import clear
from tests.llm_datadist.descs import HOST, desc
from tests.llm_datadist.layers import NBYTES, ROW, Computing, Destinations
from tests.llm_datadist.peer import REMOTE, REQUEST, link
from tests.support.refusals import refused

SUCCESS = LLMStatusCode.LLM_SUCCESS
PARAM_INVALID = LLMStatusCode.LLM_PARAM_INVALID
NOT_YET_LINK = LLMStatusCode.LLM_NOT_YET_LINK
NOT_EXIST = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
LAYERS = 4


@pytest.fixture(params=[True, False], ids=["remote", "request"])
def remote(request: Any) -> bool:
    """True if both ends are in remote mode."""
    return bool(request.param)


@pytest.fixture
def datadist(make_datadist: MakeDataDist, remote: bool) -> LLMDataDist:
    return make_datadist(**(REMOTE if remote else REQUEST))


@pytest.fixture
def manager(datadist: LLMDataDist) -> CacheManager:
    return datadist.cache_manager


@pytest.fixture
def make_destinations(
    make_peer: MakePeer, datadist: LLMDataDist, remote: bool
) -> Callable[[int], Destinations]:
    """A function that makes linked destinations, each in a process of its own."""

    def make(cluster_id: int) -> Destinations:
        peer = make_peer(cluster_id, "DECODER", **(REMOTE if remote else REQUEST))
        link(datadist, peer)
        return Destinations(peer, remote=remote, layers=LAYERS)

    return make


@pytest.fixture
def destinations(make_destinations: Callable[[int], Destinations]) -> Destinations:
    return make_destinations(1)


@pytest.fixture
def slots(manager: CacheManager) -> Cache:
    cache = manager.allocate_cache(desc(2 * LAYERS))
    clear(cache)
    return cache


@pytest.fixture
def blocks(manager: CacheManager) -> Cache:
    cache = manager.allocate_blocks_cache(desc(2 * LAYERS, 6))
    clear(cache)
    return cache


def ends(task: CacheTask, *expected: LLMStatusCode) -> None:
    """Wait for a task, and check its outcome."""
    assert task.get_results() == list(expected)
    failures = [item for item in expected if item != SUCCESS]
    assert task.synchronize() == (failures[0] if failures else SUCCESS)


def test_slot_to_slot(manager: CacheManager, destinations: Destinations, slots: Cache) -> None:
    model = Computing(slots)
    ends(manager.transfer_cache_async(slots, model, [destinations.slot(row=2)]), SUCCESS)
    assert model.calls == [(layer, None) for layer in range(LAYERS)]
    found = destinations.bytes_of("cache")
    assert (found[:, ROW] == model.expected(2)).all()
    assert not found[:, :ROW].any()


def test_blocks_to_blocks(manager: CacheManager, destinations: Destinations, blocks: Cache) -> None:
    model = Computing(blocks)
    task = manager.transfer_cache_async(
        src_cache=blocks,
        layer_synchronizer=model,
        transfer_configs=(destinations.blocks(),),
        src_block_indices=(5, 0, 2, 1),
        dst_block_indices=[7, 1, 2, 1],  # block 1 comes twice: the last source wins
        dst_block_memory_size=NBYTES,
    )
    ends(task, SUCCESS)
    found = destinations.bytes_of("paged")
    assert (found[:, [7, 1, 2]] == model.expected([5, 1, 2])).all()
    assert not found[:, [0, 3, 4, 5, 6]].any()


def test_slot_to_blocks(manager: CacheManager, destinations: Destinations, slots: Cache) -> None:
    model = Computing(slots)
    config = destinations.blocks(small=True)
    ends(manager.transfer_cache_async(slots, model, [config], None, [6, 0, 3], 12), SUCCESS)
    found = destinations.bytes_of("small")
    expected = model.expected(0)
    assert (found[:, [6, 0]].reshape(2 * LAYERS, -1) == expected[:, :24]).all()
    assert (found[:, 3, :8] == expected[:, 24:]).all()
    assert not found[:, 3, 8:].any()
    assert not found[:, [1, 2, 4, 5, 7]].any()


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        (range(1, 3), range(2)),
        (range(1, 3), range(1, 3)),
        (range(3, 4), range(1)),
        (range(1), range(3, 4)),
    ],
)
def test_layers_may_begin_after_0(
    manager: CacheManager, destinations: Destinations, slots: Cache, src: range, dst: range
) -> None:
    model = Computing(slots)
    ends(manager.transfer_cache_async(slots, model, [destinations.slot(src, dst)]), SUCCESS)
    assert model.layers == list(src)
    found = destinations.bytes_of("cache")
    moved = found[2 * dst.start : 2 * dst.stop, ROW]
    assert (moved == model.expected()[2 * src.start : 2 * src.stop]).all()
    assert moved.any(axis=1).all()
    found[2 * dst.start : 2 * dst.stop, ROW] = 0
    assert not found.any()


def test_several_destinations_and_each_layer_once(
    manager: CacheManager, make_destinations: Callable[[int], Destinations], slots: Cache
) -> None:
    one, two = make_destinations(1), make_destinations(3)
    model = Computing(slots)
    configs = [
        one.slot(range(2, 4), row=1),
        two.slot(range(1), range(3, 4), row=2),
        two.slot(range(2, 3)),
        one.slot(range(3, 4), range(1), row=3),
    ]
    ends(manager.transfer_cache_async(slots, model, configs), *[SUCCESS] * 4)
    assert model.layers == [0, 2, 3]
    found = one.bytes_of("cache")[:, ROW]
    assert (found[4:] == model.expected(1)[4:]).all()
    assert (found[:2] == model.expected(3)[6:]).all()
    assert not found[2:4].any()
    found = two.bytes_of("cache")[:, ROW]
    assert (found[6:] == model.expected(2)[:2]).all()
    assert (found[4:6] == model.expected(0)[4:6]).all()
    assert not found[:4].any()


def test_a_layer_moves_as_soon_as_it_is_ready(
    manager: CacheManager, destinations: Destinations, slots: Cache
) -> None:
    seen = []

    def wait_for_earlier_layers() -> bool:
        # The earlier layers were ready, so they must arrive before this one is.
        while not (found := destinations.bytes_of("cache")[:, ROW])[3].any():
            pass
        seen.append(found.any(axis=1).tolist())
        return True

    model = Computing(slots, {2: wait_for_earlier_layers})
    ends(manager.transfer_cache_async(slots, model, [destinations.slot()]), SUCCESS)
    assert seen == [[True] * 4 + [False] * 4]


def test_configs_are_only_read_and_only_at_the_call(
    manager: CacheManager, destinations: Destinations, slots: Cache
) -> None:
    config = destinations.slot(range(1, 3), range(1, 3), row=1)
    before, given = repr(config), dict(vars(config))
    addresses = list(getattr(config, "dst_addrs", []))

    def change() -> bool:
        config.src_layer_range = range(3, 4)
        config.src_batch_index = 3
        if isinstance(config, TransferConfig):
            config.dst_addrs.clear()
        return True

    model = Computing(slots)
    ends(manager.transfer_cache_async(slots, model, [config]), SUCCESS)
    assert repr(config) == before
    assert vars(config) == given
    model = Computing(slots, {1: change})
    ends(manager.transfer_cache_async(slots, model, [config]), SUCCESS)
    assert model.layers == [1, 2]
    assert addresses == [] or config.dst_addrs == []


def test_missing_layer_ranges_have_defaults(
    manager: CacheManager, destinations: Destinations, slots: Cache, remote: bool
) -> None:
    config = destinations.slot()
    if remote:
        config.src_layer_range = config.dst_layer_range = None
    ends(manager.transfer_cache_async(slots, Computing(slots), [config]), SUCCESS)
    assert config.src_layer_range is None
    assert destinations.bytes_of("cache")[:, ROW].any(axis=1).all()
    if remote:
        config.src_layer_range = range(1, 2)  # and to the same layer of the destination
        clear_destinations = "clear(cache)"
        destinations.peer.run(clear_destinations)
        ends(manager.transfer_cache_async(slots, Computing(slots), [config]), SUCCESS)
        found = destinations.bytes_of("cache")[:, ROW].any(axis=1).tolist()
        assert found == [False, False, True, True, False, False, False, False]


def test_a_row_of_a_paged_cache_without_tables(
    manager: CacheManager, destinations: Destinations, blocks: Cache, remote: bool
) -> None:
    model = Computing(blocks)
    ends(manager.transfer_cache_async(blocks, model, [destinations.blocks()]), SUCCESS)
    found = destinations.bytes_of("paged")
    assert (found[:, 0] == model.expected(0)).all()
    assert not found[:, 1:].any()
    if remote:
        key = CacheKeyByIdAndIndex(1, 2, 6)
        config = TransferWithCacheKeyConfig(key, range(LAYERS), range(LAYERS), 4)
        ends(manager.transfer_cache_async(blocks, model, [config]), SUCCESS)
        assert (destinations.bytes_of("paged")[:, 6] == model.expected(4)).all()


def test_no_destination_needs_no_layer(manager: CacheManager, slots: Cache) -> None:
    model = Computing(slots)
    ends(manager.transfer_cache_async(slots, model, []))
    assert model.calls == []


def test_a_task_may_be_dropped_and_several_threads_may_wait(
    manager: CacheManager, destinations: Destinations, slots: Cache
) -> None:
    model = Computing(slots, {1: lambda: bool(gc.collect() + 1)})
    manager.transfer_cache_async(slots, model, [destinations.slot(row=1)])
    task = manager.transfer_cache_async(slots, Computing(slots), [destinations.slot(row=1)])
    with ThreadPoolExecutor(8) as pool:
        results = pool.map(lambda _: task.synchronize(), range(8))
    assert list(results) == [SUCCESS] * 8
    found = destinations.bytes_of("cache")[:, ROW]
    assert (found == model.expected(1)).all()


def test_an_unreachable_destination_is_reported_and_stops_no_other(
    manager: CacheManager, destinations: Destinations, slots: Cache, remote: bool
) -> None:
    layers = range(LAYERS)
    wrong: list[Any]
    if remote:
        wrong = [
            TransferWithCacheKeyConfig(CacheKeyByIdAndIndex(9, 1), layers, layers),
            TransferWithCacheKeyConfig(CacheKeyByIdAndIndex(1, 77), layers, layers),
            TransferWithCacheKeyConfig(CacheKeyByIdAndIndex(1, 1), layers, range(1, 5)),
            TransferWithCacheKeyConfig(BlocksCacheKey(1), layers, layers),
            TransferWithCacheKeyConfig(CacheKeyByIdAndIndex(2, 1), layers, layers),
        ]
    else:
        nowhere = list(range(8, 8 + 2 * LAYERS))
        wrong = [
            TransferConfig(9, nowhere),
            TransferConfig(1, nowhere),
            TransferConfig(2, nowhere),
        ]
    expected = [NOT_YET_LINK, NOT_EXIST] + [PARAM_INVALID] * (len(wrong) - 2)
    model = Computing(slots)
    task = manager.transfer_cache_async(slots, model, [*wrong, destinations.slot()])
    ends(task, *expected, SUCCESS)
    assert (destinations.bytes_of("cache")[:, ROW] == model.expected()).all()
    again = Computing(slots)
    ends(manager.transfer_cache_async(slots, again, wrong), *expected)
    assert again.calls == []


def test_a_block_size_other_than_the_destinations_is_refused(
    manager: CacheManager, destinations: Destinations, slots: Cache, blocks: Cache, remote: bool
) -> None:
    model = Computing(blocks)
    config = destinations.blocks()
    ends(manager.transfer_cache_async(blocks, model, [config], [0], [0], 16), PARAM_INVALID)
    assert model.calls == []
    assert not destinations.bytes_of("paged").any()
    if remote:  # in request mode only the caller knows the destination
        model = Computing(slots)
        ends(manager.transfer_cache_async(slots, model, [config], None, [0], 16), PARAM_INVALID)
        assert not destinations.bytes_of("paged").any()


def test_invalid_arguments_are_refused(
    manager: CacheManager, destinations: Destinations, slots: Cache, blocks: Cache, remote: bool
) -> None:
    model = Computing(slots)
    start = manager.transfer_cache_async
    good = [destinations.slot()]
    with refused("LLM_PARAM_INVALID"):
        start(manager.allocate_cache(desc(placement=HOST)), model, good)
    with refused("LLM_PARAM_INVALID"):
        start(manager.allocate_cache(desc(3)), model, good)
    with refused("LLM_PARAM_INVALID"):
        start(slots, model, good, [0], [0])
    with refused("LLM_PARAM_INVALID"):
        start(slots, model, good, None, [0])
    with refused("LLM_PARAM_INVALID", "dst_block_memory_size must be given to push a slot"):
        start(slots, model, good, None, [0], 0)
    for cache in (slots, blocks):
        with refused("LLM_PARAM_INVALID", "size=32 must be 0 without dst_block_indices"):
            start(cache, model, good, None, None, 32)
    with refused("LLM_PARAM_INVALID"):
        start(blocks, model, good, [0], None)
    with refused("LLM_PARAM_INVALID"):
        start(blocks, model, good, [0], [0, 1])
    with refused("LLM_PARAM_INVALID"):
        start(blocks, model, good, None, [0], 32)
    with refused("LLM_PARAM_INVALID"):
        start(blocks, model, [destinations.blocks(row=1 if not remote else 0)], [0], [])
    with refused("LLM_PARAM_INVALID"):
        start(slots, model, [destinations.slot(range(2, LAYERS + 1), range(3))])
    beyond = destinations.slot()
    beyond.src_batch_index = 4
    with refused("LLM_PARAM_INVALID", "src_batch_index=4 is out of range"):
        start(slots, model, [*good, beyond])
    with refused("LLM_PARAM_INVALID", "src_block_indices holds 99"):
        start(blocks, model, [destinations.blocks()], [0, 99], [0, 1])
    wrong: Any
    for wrong in (
        (None, model, good),
        ("cache", model, good),
        (slots, None, good),
        (slots, lambda layer, timeout: True, good),
        (slots, model, None),
        (slots, model, good[0]),
        (slots, model, [None]),
        (slots, model, good, ["0"], [0]),
        (blocks, model, good, 0, [0]),
        (slots, model, good, None, [0], "32"),
    ):
        with pytest.raises(TypeError):
            start(*wrong)
    other: Any = (
        TransferConfig(1, [1] * 2 * LAYERS)
        if remote
        else TransferWithCacheKeyConfig(CacheKeyByIdAndIndex(1, 1), range(1), range(1))
    )
    with pytest.raises(TypeError):
        start(slots, model, [*good, other])
    with pytest.raises(ValueError, match="dst_block_memory_size"):
        start(slots, model, good, None, [0], -1)
    with pytest.raises(ValueError, match="dst_block_indices"):
        start(blocks, model, good, [0], [-1])
    if remote:
        config = destinations.slot()
        config.cache_key = None  # as the official class allows
        with pytest.raises(TypeError, match="cache_key"):
            start(slots, model, [config])
        config = destinations.slot()
        config.dst_layer_range = range(1)
        with refused("LLM_PARAM_INVALID"):
            start(slots, model, [config])
    else:
        addresses = destinations.slot().dst_addrs
        with refused("LLM_PARAM_INVALID"):
            start(slots, model, [TransferConfig(1, addresses[:-1])])
        with refused("LLM_PARAM_INVALID"):
            start(slots, model, [TransferConfig(1, addresses, range(1))])
        with refused("LLM_PARAM_INVALID"):
            start(blocks, model, [TransferConfig(1, addresses, None, 1)], [0], [0])
    assert model.calls == []
    assert not destinations.bytes_of("cache").any()


def test_timeouts_of_another_type(
    manager: CacheManager, destinations: Destinations, slots: Cache
) -> None:
    task = manager.transfer_cache_async(slots, Computing(slots), [destinations.slot()])
    for call in (task.synchronize, task.get_results):
        for wrong, error in (
            ("1", TypeError),
            (1.5, TypeError),
            (-1, ValueError),
            (2**32, ValueError),
        ):
            with pytest.raises(error):
                call(wrong)  # type: ignore[operator]
    assert task.synchronize(timeout_in_millis=60_000) == SUCCESS
    assert task.get_results(timeout_in_millis=0) == [SUCCESS]


def test_a_limited_wait_does_not_wait_for_the_verification(
    caplog: pytest.LogCaptureFixture,
) -> None:
    arrays = [np.zeros(8, np.uint8) for _ in range(2)]
    cache = kvplan.CacheDesc(1, (1, 8), kvplan.DataType.DT_UINT8)
    plan = kvplan.plan(kvplan.Transfer(kvplan.Rows(cache, [0]), kvplan.Rows(cache, [0])))
    is_verified = Event()

    def verify(_error: object) -> None:
        assert is_verified.wait(60)
        raise kvplan.LLMException("other bytes", status_code=LLMStatusCode.LLM_FAILED)

    with kvplan.Transfers(1) as transfers:
        task = transfers.layered(plan, arrays[:1], arrays[1:], verify)
        task.settles_aside = True  # as the engine sets it
        destination = Destination("cluster 1", task)
        destination.ready(0)
        assert destination.ended
        try:
            assert destination.status(0) is None
            destination.finish(0)
            assert not caplog.messages
        finally:
            is_verified.set()
        assert destination.status(None) == LLMStatusCode.LLM_FAILED
        destination.finish(0)
        assert caplog.messages == ["cluster 1: other bytes (LLM_FAILED)"]

"""Version 1: KvCacheManager between two engines, in the roles that it knows."""

from __future__ import annotations

import gc
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvplan.llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    KvCache,
    KvCacheManager,
    LayerSynchronizer,
    LLMClusterInfo,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
    Placement,
    Tensor,
    TransferConfig,
    permit_several_engines,
)
from kvplan.llm_datadist.v1.kv_cache_manager import kv_cache_of
from tests.support.refusals import refused

INVALID = LLMStatusCode.LLM_PARAM_INVALID
NOT_EXIST = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
SUCCESS = LLMStatusCode.LLM_SUCCESS
PROMPT, DECODER = 1, 2  # the clusters

SLOTS = CacheDesc(4, [4, 16], DataType.DT_INT32)  # 2 layers, 4 slots of 64 bytes
BLOCKS = CacheDesc(4, [8, 16], DataType.DT_INT32)  # 2 layers, 8 blocks of 64 bytes
ON_HOST = CacheDesc(4, [8, 16], DataType.DT_INT32, Placement.HOST)
PADDING = CacheKey(0, 2**64 - 1)


@pytest.fixture(autouse=True)
def _several_engines() -> Iterator[None]:
    permit_several_engines()
    yield
    permit_several_engines(False)


@pytest.fixture
def address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def prompt(address: str) -> Iterator[LLMDataDist]:
    datadist = LLMDataDist(LLMRole.PROMPT, PROMPT)
    datadist.init({"llm.listenIpInfo": address, "llm.SyncKvCacheWaitTime": "20000"})
    yield datadist
    datadist.finalize()


@pytest.fixture
def decoder(prompt: LLMDataDist, address: str) -> Iterator[LLMDataDist]:
    datadist = LLMDataDist(LLMRole.DECODER, DECODER)
    datadist.init({"llm.SyncKvCacheWaitTime": "20000"})
    cluster = LLMClusterInfo()
    cluster.remote_cluster_id = PROMPT
    ip, _, port = address.partition(":")
    cluster.append_remote_ip_info(ip, int(port))
    assert datadist.link_clusters([cluster], 20000) == (SUCCESS, [SUCCESS])
    yield datadist
    datadist.finalize()


@pytest.fixture
def src(prompt: LLMDataDist) -> KvCacheManager:
    return prompt.kv_cache_manager


@pytest.fixture
def dst(decoder: LLMDataDist) -> KvCacheManager:
    return decoder.kv_cache_manager


def arrays(manager: KvCacheManager, cache: KvCache) -> list[NDArray[Any]]:
    """The memory of each tensor."""
    num_tensors = cache.cache_desc.num_tensors
    return [manager.get_cache_tensors(cache, it)[0].numpy() for it in range(num_tensors)]


def filled(manager: KvCacheManager, cache: KvCache) -> list[NDArray[Any]]:
    """Give every element of the cache another value; return copies of its tensors."""
    for number, array in enumerate(arrays(manager, cache)):
        array[:] = np.arange(array.size).reshape(array.shape) + 10000 * (number + 1)
    return [array.copy() for array in arrays(manager, cache)]


class Synchronizer(LayerSynchronizer):
    def __init__(self, answer: Callable[[int], bool] = lambda layer: True) -> None:
        self.answer = answer
        self.asked: list[int] = []

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        self.asked.append(layer_index)
        return self.answer(layer_index)


def test_a_request_is_pulled_and_its_key_is_gone(src: KvCacheManager, dst: KvCacheManager) -> None:
    keys = [PADDING, CacheKey(0, 7), CacheKey(prompt_cluster_id=0, req_id=8)]
    cache = src.allocate_cache(SLOTS, keys)
    theirs = filled(src, cache)
    src.deallocate_cache(cache)  # the keys hold it
    assert cache.per_device_tensor_addrs == []
    mine = dst.allocate_cache(SLOTS)
    dst.pull_cache(CacheKey(PROMPT, 8), mine, 3)
    for there, here in zip(theirs, arrays(dst, mine), strict=True):
        assert (here[3] == there[2]).all()
        assert not here[:3].any()
    with refused(NOT_EXIST):
        dst.pull_cache(CacheKey(PROMPT, 8), mine)
    src.remove_cache_key(CacheKey(0, 7))
    src.remove_cache_key(CacheKey(0, 7))
    with refused(NOT_EXIST):
        dst.pull_cache(CacheKey(PROMPT, 7), mine)


def test_of_equal_keys_the_last_counts(src: KvCacheManager, dst: KvCacheManager) -> None:
    cache = src.allocate_cache(SLOTS, [CacheKey(0, 7), CacheKey(0, 8), CacheKey(0, 7)])
    theirs = filled(src, cache)
    mine = dst.allocate_cache(SLOTS)
    dst.pull_cache(CacheKey(PROMPT, 7), mine)
    assert (arrays(dst, mine)[3][0] == theirs[3][2]).all()
    with refused(INVALID):  # taken
        src.allocate_cache(SLOTS, [CacheKey(0, 8)])
    with refused(INVALID):
        src.allocate_cache(SLOTS, [CacheKey(0, it) for it in range(20, 25)])


def test_layers_and_offsets_of_a_slot_are_pulled(src: KvCacheManager, dst: KvCacheManager) -> None:
    cache = src.allocate_cache(SLOTS)
    theirs = filled(src, cache)
    assert cache.cache_id == 1
    mine = dst.allocate_cache(SLOTS)
    key = CacheKeyByIdAndIndex(PROMPT, 1, 3)
    layers = {"src_layer_range": range(1, 2), "dst_layer_range": range(1)}
    dst.pull_cache(key, mine, 1, 8, src_cache_offset=4, dst_cache_offset=12, **layers)
    expected = np.zeros((4, 16), np.int32)
    expected[1, 3:5] = theirs[3][3, 1:3]
    assert (arrays(dst, mine)[1] == expected).all()
    assert not arrays(dst, mine)[3].any()
    dst.pull_cache(key, mine, 1, dst_cache_offset=8)
    assert (arrays(dst, mine)[3][1, 2:] == theirs[3][3, :14]).all()
    with refused(INVALID):
        dst.pull_cache(key, mine, src_cache_offset=-1)
    with refused(INVALID):
        dst.pull_cache(key, mine, size=64, dst_cache_offset=4)
    with refused(INVALID):
        dst.pull_cache(key, mine, size=0)
    with refused(INVALID):
        dst.pull_cache(key, mine, tensor_num_per_layer=0)


@pytest.mark.parametrize("count", [1, 3, 5, 27])
def test_any_number_of_tensors_is_pulled(
    src: KvCacheManager, dst: KvCacheManager, count: int
) -> None:
    desc = CacheDesc(count, [4, 16], DataType.DT_INT32)
    cache, mine = src.allocate_cache(desc), dst.allocate_cache(desc)
    theirs = filled(src, cache)
    dst.pull_cache(CacheKeyByIdAndIndex(PROMPT, cache.cache_id, 3), mine)
    for there, here in zip(theirs, arrays(dst, mine), strict=True):
        assert (here[0] == there[3]).all()


def test_blocks_are_pulled(src: KvCacheManager, dst: KvCacheManager) -> None:
    cache = src.allocate_blocks_cache(BLOCKS, BlocksCacheKey(prompt_cluster_id=0, model_id=3))
    theirs = filled(src, cache)
    mine = dst.allocate_blocks_cache(BLOCKS)
    dst.pull_blocks(BlocksCacheKey(PROMPT, 3), mine, [6, 1, 2], [0, 4, 4])
    for there, here in zip(theirs, arrays(dst, mine), strict=True):
        assert (here[[0, 4]] == there[[6, 2]]).all()
        assert not here[[1, 2, 3, 5, 6, 7]].any()
    with refused(INVALID):
        dst.pull_blocks(BlocksCacheKey(PROMPT, 3), mine, [], [])
    with refused(INVALID):
        dst.pull_blocks(BlocksCacheKey(PROMPT, 3), mine, [1], [1, 2])
    with refused(NOT_EXIST):
        dst.pull_blocks(BlocksCacheKey(PROMPT, 4), mine, [1], [1])


def test_a_tensor_of_a_cache_is_its_memory(dst: KvCacheManager) -> None:
    cache = dst.allocate_cache(CacheDesc(2, [2, 3], DataType.DT_BF16))
    (tensor,) = dst.get_cache_tensors(cache, 1)
    memory = dst._engine.arrays(kv_cache_of("cache", cache))[1]
    memory[1] = [0x3F80, 0xC040, 0x4000]
    assert tensor.numpy().tolist() == [[0, 0, 0], [1, -3, 2]]
    assert Tensor(tensor).numpy(copy=True).dtype == np.float32
    dst.deallocate_cache(cache)
    assert tensor.numpy()[1, 0] == 1  # it holds the memory
    with refused(NOT_EXIST):
        dst.get_cache_tensors(cache)


def test_copies_and_swaps(dst: KvCacheManager) -> None:
    slots = dst.allocate_cache(SLOTS)
    values = filled(dst, slots)
    other = dst.allocate_cache(SLOTS)
    dst.copy_cache(other, slots, 1, 2, offset=8, size=4)
    expected = np.zeros((4, 16), np.int32)
    expected[1, 2] = values[2][2, 2]
    assert (arrays(dst, other)[2] == expected).all()
    dst.copy_cache(dst=other, src=slots, req_id=5)
    assert (arrays(dst, other)[0][0] == values[0][0]).all()
    with refused(INVALID):
        dst.copy_cache(other, slots, size=0)

    blocks = dst.allocate_blocks_cache(BLOCKS)
    values = filled(dst, blocks)
    dst.copy_blocks(blocks, {0: [5, 6], 1: [7]})
    assert (arrays(dst, blocks)[3][[5, 6, 7]] == values[3][[0, 0, 1]]).all()
    dst.copy_blocks(blocks, {})

    memory = np.zeros((4, 8, 16), np.int32)
    for addresses in ([it.ctypes.data for it in memory], [[it.ctypes.data for it in memory]]):
        host = KvCache.create_cpu_cache(ON_HOST, addresses)
        memory[:] = 0
        dst.swap_blocks(blocks, host, {2: 0, 3: 4})
        assert (memory[:, [0, 4]] == [it[[2, 3]] for it in values]).all()
        assert not memory[:, [1, 2, 3, 5, 6, 7]].any()
    memory[:, 1] = 9
    dst.swap_blocks(src=host, dst=blocks, src_to_dst={1: 3})
    assert all((it[3] == 9).all() for it in arrays(dst, blocks))
    with refused(INVALID):
        dst.swap_blocks(blocks, blocks, {1: 3})
    two_devices = KvCache.create_cpu_cache(ON_HOST, [[it.ctypes.data for it in memory]] * 2)
    with refused(INVALID):
        dst.swap_blocks(two_devices, blocks, {1: 3})
    for refuse in (lambda: dst.copy_blocks(host, {1: [2]}), lambda: dst.deallocate_cache(host)):
        with refused(INVALID):
            refuse()


def test_layers_are_pushed_to_addresses(src: KvCacheManager, dst: KvCacheManager) -> None:
    cache = src.allocate_cache(SLOTS)
    theirs = filled(src, cache)
    mine = dst.allocate_cache(SLOTS)
    (addresses,) = mine.per_device_tensor_addrs
    synchronizer = Synchronizer()
    task = src.transfer_cache_async(
        cache, synchronizer, [TransferConfig(DECODER, addresses[2:], range(1, 2), 3)]
    )
    assert task.synchronize(20000) is SUCCESS
    assert task.get_results() == [SUCCESS]
    assert synchronizer.asked == [1]
    assert (arrays(dst, mine)[3][0] == theirs[3][3]).all()
    assert not arrays(dst, mine)[1].any()


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "blocks"])
def test_blocks_are_pushed_of_a_contiguous_cache_too(
    paged: bool, src: KvCacheManager, dst: KvCacheManager
) -> None:
    cache = (src.allocate_blocks_cache if paged else src.allocate_cache)(SLOTS)
    theirs = filled(src, cache)
    mine = (dst.allocate_blocks_cache if paged else dst.allocate_cache)(SLOTS)
    config = TransferConfig(DECODER, mine.per_device_tensor_addrs[0])
    task = src.transfer_cache_async(cache, Synchronizer(), (config,), [0, 1, 2, 3], [3, 2, 1, 0])
    assert task.synchronize(20000) is SUCCESS
    for there, here in zip(theirs, arrays(dst, mine), strict=True):
        assert (here == there[::-1]).all()


def test_a_source_freed_while_its_blocks_are_pushed_is_held(
    src: KvCacheManager, dst: KvCacheManager
) -> None:
    cache = src.allocate_cache(SLOTS)
    theirs = filled(src, cache)
    mine = dst.allocate_cache(SLOTS)
    go_on = threading.Event()
    config = TransferConfig(DECODER, mine.per_device_tensor_addrs[0])
    task = src.transfer_cache_async(
        cache, Synchronizer(lambda _: go_on.wait(20)), [config], [0], [2]
    )
    assert task.synchronize(0) is LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT
    assert task.get_results(1) == [LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT]
    src.deallocate_cache(cache)
    go_on.set()
    assert task.synchronize(20000) is SUCCESS
    assert (arrays(dst, mine)[3][2] == theirs[3][0]).all()


def test_a_layer_that_does_not_come_is_reported(src: KvCacheManager, dst: KvCacheManager) -> None:
    cache = src.allocate_cache(SLOTS)
    mine = dst.allocate_cache(SLOTS)
    config = TransferConfig(DECODER, mine.per_device_tensor_addrs[0])
    task = src.transfer_cache_async(cache, Synchronizer(lambda layer: layer == 0), [config])
    assert task.get_results(20000) == [INVALID]
    with refused(INVALID):
        src.transfer_cache_async(cache, Synchronizer(), [config], [0], [1, 2])
    with pytest.raises(TypeError):
        src.transfer_cache_async(cache, None, [config])  # type: ignore[arg-type]


def test_roles_are_kept(src: KvCacheManager, dst: KvCacheManager) -> None:
    for_prompt: list[Callable[[], object]] = [
        lambda: dst.allocate_cache(SLOTS, [CacheKey(0, 1)]),
        lambda: dst.allocate_blocks_cache(BLOCKS, BlocksCacheKey(0)),
        lambda: dst.remove_cache_key(CacheKey(0, 1)),
        lambda: dst.transfer_cache_async(dst.allocate_cache(SLOTS), Synchronizer(), []),
    ]
    for_decoder: list[Callable[[], object]] = [
        lambda: src.pull_cache(CacheKey(DECODER, 1), src.allocate_cache(SLOTS)),
        lambda: src.pull_blocks(BlocksCacheKey(2), src.allocate_blocks_cache(BLOCKS), [1], [1]),
    ]
    for call in for_prompt + for_decoder:
        with refused(INVALID):
            call()


def test_a_switched_role_counts(decoder: LLMDataDist, address: str) -> None:
    manager = decoder.kv_cache_manager
    cluster = LLMClusterInfo()
    cluster.remote_cluster_id = PROMPT
    assert decoder.unlink_clusters([cluster], 20000) == (SUCCESS, [SUCCESS])
    decoder.switch_role(LLMRole.PROMPT, {"llm.listenIpInfo": "127.0.0.1:0"})
    assert manager.allocate_cache(SLOTS, [CacheKey(0, 1)]).cache_id == 1


@pytest.mark.parametrize(
    ("status", "call"),
    [
        (INVALID, lambda it: it.allocate_cache(ON_HOST)),
        (INVALID, lambda it: it.allocate_cache(CacheDesc(0, [1], DataType.DT_INT8))),
        (INVALID, lambda it: it.get_cache_tensors(it.allocate_cache(SLOTS), 4)),
        (INVALID, lambda it: it.get_cache_tensors(it.allocate_cache(SLOTS), -1)),
        (INVALID, lambda it: it.pull_cache(CacheKey(1, 2, 0, 3), it.allocate_cache(SLOTS))),
        (INVALID, lambda it: it.pull_cache(CacheKey(1, 2**64 - 1), it.allocate_cache(SLOTS))),
        (INVALID, lambda it: it.pull_cache(CacheKey(1, 2), it.allocate_blocks_cache(SLOTS))),
        (
            LLMStatusCode.LLM_NOT_YET_LINK,
            lambda it: it.pull_cache(CacheKey(9, 2), it.allocate_cache(SLOTS)),
        ),
    ],
)
def test_what_cannot_be_is_refused(
    status: LLMStatusCode, call: Callable[[KvCacheManager], object], dst: KvCacheManager
) -> None:
    with refused(status):
        call(dst)


@pytest.mark.parametrize(
    "call",
    [
        lambda it: it.allocate_cache(None),
        lambda it: it.allocate_cache(SLOTS, [1]),
        lambda it: it.allocate_blocks_cache(SLOTS, CacheKey(0, 1)),
        lambda it: it.deallocate_cache(1),
        lambda it: it.get_cache_tensors(it.allocate_cache(SLOTS), "0"),
        lambda it: it.pull_cache(BlocksCacheKey(1), it.allocate_cache(SLOTS)),
        lambda it: it.pull_cache(CacheKey(1, 1), None),
        lambda it: it.pull_cache(CacheKey(1, 1), it.allocate_cache(SLOTS), src_cache_offset="1"),
        lambda it: it.pull_blocks(CacheKey(1, 1), it.allocate_blocks_cache(SLOTS), [1], [1]),
        lambda it: it.pull_blocks(BlocksCacheKey(1), it.allocate_blocks_cache(SLOTS), (1,), [1]),
        lambda it: it.copy_cache(it.allocate_cache(SLOTS), None),
        lambda it: it.copy_blocks(it.allocate_blocks_cache(SLOTS), [1]),
        lambda it: it.swap_blocks(it.allocate_blocks_cache(SLOTS), SLOTS, {1: 1}),
    ],
)
def test_arguments_of_another_type_are_refused(
    call: Callable[[KvCacheManager], object], dst: KvCacheManager
) -> None:
    with pytest.raises(TypeError):
        call(dst)


def test_a_cache_that_nobody_holds_is_freed(prompt: LLMDataDist, src: KvCacheManager) -> None:
    pool = 5 * 4 * 256
    prompt.finalize()
    prompt.init({"ge.flowGraphMemMaxSize": str(pool)})
    manager = prompt.kv_cache_manager
    caches = [manager.allocate_cache(SLOTS, [CacheKey(0, it)]) for it in range(4)]
    caches.append(manager.allocate_blocks_cache(SLOTS))
    out = LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY
    with refused(out):
        manager.allocate_cache(SLOTS)
    with refused(out):
        manager.allocate_blocks_cache(SLOTS)
    del caches
    gc.collect()
    manager.allocate_cache(SLOTS)  # where the paged one was: the others have keys
    with refused(out):
        manager.allocate_cache(BLOCKS)
    manager.remove_cache_key(CacheKey(0, 2))
    held = manager.allocate_cache(SLOTS)
    assert held.cache_id > 0


def test_threads_that_allocate_at_once_get_no_more_than_the_pool(prompt: LLMDataDist) -> None:
    prompt.finalize()
    prompt.init({"ge.flowGraphMemMaxSize": str(3 * 4 * 256)})
    manager = prompt.kv_cache_manager
    begun = threading.Barrier(8)
    made: list[KvCache] = []

    def allocate() -> None:
        begun.wait()
        with suppress(LLMException):
            while True:
                made.append(manager.allocate_cache(SLOTS))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(20):
            threads = [threading.Thread(target=allocate) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(made) == 3
            while made:
                manager.deallocate_cache(made.pop())
    finally:
        sys.setswitchinterval(interval)


def test_memory_that_there_is_not_at_all_is_the_devices(dst: KvCacheManager) -> None:
    endless = CacheDesc(2, [1, 2**50], DataType.DT_INT8)
    with refused(LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY):
        dst.allocate_cache(endless)


def test_after_finalize_nothing_is_taken(decoder: LLMDataDist, dst: KvCacheManager) -> None:
    cache = dst.allocate_cache(SLOTS)
    assert dst.is_initialized()
    decoder.finalize()
    assert not dst.is_initialized()
    with refused(LLMStatusCode.LLM_ENGINE_FINALIZED):
        dst.allocate_cache(SLOTS)
    with refused(LLMStatusCode.LLM_ENGINE_FINALIZED):
        dst.deallocate_cache(cache)
    with pytest.raises(RuntimeError):
        _ = decoder.kv_cache_manager
    assert "cache_id" in repr(cache)  # its end, now, concerns no manager

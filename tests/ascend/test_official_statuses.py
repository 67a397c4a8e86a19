"""Statuses that the official names report when a device fails."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvplan.llm_datadist import (
    BlocksCacheKey,
    Cache,
    LayerSynchronizer,
    LLMDataDist,
    LLMStatusCode,
    Placement,
    TransferWithCacheKeyConfig,
)
from tests.ascend.simulator import Controls
from tests.llm_datadist.conftest import MakeDataDist, MakePeer, idle_peers, make_datadist, make_peer
from tests.llm_datadist.descs import desc
from tests.llm_datadist.peer import REMOTE, link
from tests.support.refusals import refused

__all__ = ["idle_peers", "make_datadist", "make_peer"]  # here these make the official objects

BLOCKS = [0, 2, 5]
DEVICE = {**REMOTE, "kvplan.accelerator": "ascend"}
SOON = {"llm.SyncKvCacheWaitTime": "2000"}  # also of calls that succeed
THEIRS = BlocksCacheKey(1)
S = LLMStatusCode

FAULTS = {
    "=1": S.LLM_PARAM_INVALID,
    "=5": S.LLM_FEATURE_NOT_ENABLED,
    "=24": S.LLM_DEVICE_OUT_OF_MEMORY,
    "=sync:507053": S.LLM_DEVICE_MEM_ERROR,
    "=sync:507057": S.LLM_SUSPECT_REMOTE_ERROR,
    "=hang": S.LLM_TIMEOUT,
    "=4": S.LLM_FAILED,
}


class AllComputed(LayerSynchronizer):
    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return True


@pytest.fixture
def datadist(
    simulator: Controls, make_peer: MakePeer, make_datadist: MakeDataDist
) -> Iterator[LLMDataDist]:
    """An engine linked with a peer that has a paged cache; each is on a device of its own."""
    peer = make_peer(**DEVICE, **{"llm.DeviceId": "1"})
    peer.run("paged = manager.allocate_blocks_cache(desc(6, 8), BlocksCacheKey(99))")
    datadist = make_datadist(**DEVICE, **SOON, **{"llm.DeviceId": "2"})
    link(datadist, peer)
    return datadist


@pytest.fixture
def cache(datadist: LLMDataDist) -> Cache:
    cache = datadist.cache_manager.allocate_blocks_cache(desc(6, 8))
    datadist.cache_manager.push_blocks(THEIRS, cache, src_blocks=[1], dst_blocks=[1])
    return cache


def test_a_failed_push_has_the_official_status(
    simulator: Controls, datadist: LLMDataDist, cache: Cache
) -> None:
    manager = datadist.cache_manager
    for fault, status in FAULTS.items():
        simulator.add_fault(f"HcclBatchPut:1{fault}")
        while simulator.faults_left():  # on a busy machine the time may be over before the batch
            with refused(status):
                manager.push_blocks(THEIRS, cache, src_blocks=BLOCKS, dst_blocks=BLOCKS)
        manager.push_blocks(THEIRS, cache, src_blocks=BLOCKS, dst_blocks=BLOCKS)


@pytest.mark.parametrize(("fault", "timeout_ms"), [("=sync:507053", 30_000), ("=hang", 300)])
def test_a_failed_push_by_layers_has_the_official_status(
    simulator: Controls, datadist: LLMDataDist, cache: Cache, fault: str, timeout_ms: int
) -> None:
    simulator.add_fault(f"HcclBatchPut:1{fault}")
    every = range(3)
    configs = [TransferWithCacheKeyConfig(THEIRS, src_layer_range=every, dst_layer_range=every)]
    manager = datadist.cache_manager
    task = manager.transfer_cache_async(cache, AllComputed(), configs, BLOCKS, BLOCKS)
    assert task.synchronize(timeout_in_millis=timeout_ms) == FAULTS[fault]


def test_a_failed_swap_has_the_official_status(
    simulator: Controls, datadist: LLMDataDist, cache: Cache
) -> None:
    manager = datadist.cache_manager
    host = manager.allocate_blocks_cache(desc(6, 8, placement=Placement.HOST))
    for fault in ("=507053", "=sync:507054"):
        simulator.add_fault(f"aclrtMemcpyBatchAsync:1{fault}")
        with refused(S.LLM_DEVICE_MEM_ERROR):
            manager.swap_blocks(cache, host, {0: 1})
        manager.swap_blocks(cache, host, {0: 1})

"""Engines on CUDA devices: within one process, and with a peer's over TCP."""

from __future__ import annotations

import numpy as np
import pytest

from kvplan import (
    BlocksCacheKey,
    CacheDesc,
    CacheIndex,
    DataType,
    LlmDataDist,
    LlmRole,
    Options,
    Placement,
    PoolConfig,
)
from tests.cuda_sim.cuda_library import Cuda
from tests.cuda_sim.simulator import CudaControls
from tests.datadist.machine import Machine
from tests.datadist.peer import Peer
from tests.device.engines import DEVICE, HOST, contents, engine_on, filled, same
from tests.support.refusals import refused

OF_PEER = "CacheDesc(3, (8, 96), DataType.DT_UINT16, shard=kvplan.Shard(num_layers=3))"


@pytest.fixture
def shared(peer: Peer) -> str:
    """A cache of the peer's, on its device, and what is in it."""
    peer.run(f"""
        cache = datadist.allocate_blocks_cache({OF_PEER}, BlocksCacheKey(1))
        for number, it in enumerate(datadist.arrays(cache)):
            it[:] = np.arange(8 * 96, dtype=np.uint16).reshape(8, 96) + number
    """)
    return "cache"


class TestPeers:
    """Each end copies between its device and the buffers of the connection."""

    def test_blocks_go_both_ways(
        self, machine: Machine, user: LlmDataDist, peer: Peer, shared: str
    ) -> None:
        cache = user.allocate_blocks_cache(DEVICE)
        user.pull_blocks(BlocksCacheKey(1), cache, [0, 1, 5], [7, 2, 0])
        rows = np.arange(8 * 96, dtype=np.uint16).reshape(8, 96)
        for number, it in enumerate(user.read_cache(cache)):
            assert np.array_equal(it[[7, 2, 0]], rows[[0, 1, 5]] + number)
        user.write_cache(cache, contents(1))
        user.push_blocks(cache, BlocksCacheKey(1), [3, 4], [6, 0])
        found = peer.run("result = [it[[6, 0]].tolist() for it in datadist.arrays(cache)]")
        assert found == [it[[3, 4]].tolist() for it in contents(1)]

    def test_host_memory_at_one_end(
        self, machine: Machine, user: LlmDataDist, peer: Peer, shared: str
    ) -> None:
        cache = user.allocate_blocks_cache(HOST)
        user.pull_blocks(BlocksCacheKey(1), cache, [0], [1])
        assert user.arrays(cache)[2][1, 0] == 2

    def test_a_cache_that_the_peer_frees_is_gone(
        self, machine: Machine, user: LlmDataDist, peer: Peer, shared: str
    ) -> None:
        cache = user.allocate_blocks_cache(DEVICE)
        user.pull_blocks(BlocksCacheKey(1), cache, [0], [0])
        peer.run("datadist.deallocate_cache(cache)")
        with refused("LLM_KV_CACHE_NOT_EXIST", ""):
            user.pull_blocks(BlocksCacheKey(1), cache, [0], [0])


def test_two_engines_of_one_process(
    machine: Machine, pair: tuple[LlmDataDist, LlmDataDist]
) -> None:
    owner, user = pair
    there = owner.allocate_cache(DEVICE)
    owner.write_cache(there, contents(1))
    here = user.allocate_cache(DEVICE)
    user.pull_cache(CacheIndex(1, there.cache_id, 2), here, 5)
    assert all(
        np.array_equal(mine[5], theirs[2])
        for mine, theirs in zip(user.read_cache(here), contents(1), strict=True)
    )


def test_a_context_of_its_own(cuda_simulator: CudaControls) -> None:
    """What kvplan allocates works as before; the program's memory is refused, by name."""
    program = Cuda()
    program.ok("cuInit", 0)
    program.primary(3)
    theirs = program.made("cuMemAlloc_v2", DEVICE.nbytes)
    with engine_on(cuda_simulator, cuda_context="own") as datadist:
        device = filled(datadist, DEVICE, 1, paged=True)
        host = filled(datadist, HOST, 2, paged=True)
        datadist.swap_blocks(device, host, {0: 1, 3: 2})
        assert np.array_equal(datadist.arrays(host)[0][1], contents(1)[0][0])
        with refused(
            "LLM_PARAM_INVALID", "memory of another context in this process.*not of device 3"
        ):
            datadist.register_cache(
                CacheDesc(1, (8, 96), DataType.DT_UINT16, Placement.DEVICE), [theirs]
            )
    program.ok("cuMemFree_v2", theirs)
    program.ok("cuDevicePrimaryCtxRelease_v2", 3)
    program.ok("cuCtxSetCurrent", None)
    assert cuda_simulator.contexts() == 0


def test_contexts_of_one_device_are_two_devices(cuda_simulator: CudaControls) -> None:
    with (
        engine_on(cuda_simulator, cluster_id=1) as primary,
        LlmDataDist(2, LlmRole.MIX) as own,
    ):
        own.initialize(
            Options(accelerator="cuda", device_id=3, cuda_context="own", transport="local")
        )
        assert primary.device is not None
        assert own.device is not None
        assert primary.device.native is not own.device.native


def test_nothing_is_left_of_pools(cuda_simulator: CudaControls) -> None:
    pools = {"mem_pool_config": PoolConfig(1 << 20), "host_mem_pool_config": PoolConfig(1 << 20)}
    with engine_on(cuda_simulator, **pools) as datadist:
        device, host = (filled(datadist, it, 1, paged=True) for it in (DEVICE, HOST))
        datadist.swap_blocks(host, device, {row: row for row in range(8)})
        assert same(datadist.read_cache(device), contents(1))
    assert cuda_simulator.contexts() == 0


def test_a_device_that_is_not_there(cuda_simulator: CudaControls) -> None:
    with refused(
        "LLM_FEATURE_NOT_ENABLED", r"accelerator='cuda': device_id=8 is out of range \[0, 8\)"
    ):
        LlmDataDist(1, LlmRole.MIX).initialize(Options(accelerator="cuda", device_id=8))

"""Engines on CUDA devices: within one process, and with a peer by local or over TCP."""

from __future__ import annotations

import gc
import os
from itertools import permutations

import numpy as np
import pytest

from kvplan import (
    AddressRanges,
    BlockLease,
    BlocksCacheKey,
    CacheDesc,
    CacheIndex,
    ClusterInfo,
    DataType,
    LlmDataDist,
    LlmRole,
    Options,
    Placement,
    PoolConfig,
    Shard,
)
from tests.ascend.simulator import Log
from tests.cuda.side import pattern
from tests.cuda_sim.cuda_library import Cuda
from tests.cuda_sim.simulator import CudaControls
from tests.datadist.conftest import MakeEngine
from tests.datadist.layers import wait_until
from tests.datadist.machine import Machine
from tests.datadist.peer import Peer
from tests.device.engines import DEVICE, HOST, contents, engine_on, filled, same
from tests.support.refusals import refused

OF_PEER = "CacheDesc(3, (8, 96), DataType.DT_UINT16, shard=kvplan.Shard(num_layers=3))"


@pytest.fixture
def shared(peer: Peer) -> str:
    """A cache of the peer on its device, and the cache's content."""
    peer.run(f"""
        cache = datadist.allocate_blocks_cache({OF_PEER}, BlocksCacheKey(1))
        for number, it in enumerate(datadist.arrays(cache)):
            it[:] = np.arange(8 * 96, dtype=np.uint16).reshape(8, 96) + number
    """)
    return "cache"


BOTH = pytest.mark.parametrize("machine", ["cuda", "cuda_tcp"], indirect=True)


@BOTH
class TestPeers:
    """By local, this side's device copies; over TCP, both ends copy to buffers."""

    def test_blocks_go_both_ways(
        self, machine: Machine, user: LlmDataDist, peer: Peer, shared: str
    ) -> None:
        cache = user.allocate_blocks_cache(DEVICE)
        user.pull_blocks(BlocksCacheKey(1), cache, [0, 1, 5], [7, 2, 0])
        rows = np.arange(8 * 96, dtype=np.uint16).reshape(8, 96)
        for number, array in enumerate(user.arrays(cache, copy=True)):
            assert np.array_equal(array[[7, 2, 0]], rows[[0, 1, 5]] + number)
        user.write_cache(cache, contents(1))
        user.push_blocks(cache, BlocksCacheKey(1), [3, 4], [6, 0])
        found = peer.run("result = [array[[6, 0]].tolist() for array in datadist.arrays(cache)]")
        assert found == [content[[3, 4]].tolist() for content in contents(1)]

    @pytest.mark.parametrize("first", [HOST, DEVICE], ids=["host first", "device first"])
    def test_host_and_device_memory_of_one_end_take_turns(
        self, machine: Machine, user: LlmDataDist, peer: Peer, shared: str, first: CacheDesc
    ) -> None:
        """Facts that are kept about the peer's memory for one kind do not hold for the other."""
        caches = [
            user.allocate_blocks_cache(desc)
            for desc in (first, HOST if first is DEVICE else DEVICE, first)
        ]
        for row, cache in enumerate(caches):
            user.pull_blocks(BlocksCacheKey(1), cache, [row], [4])
            assert user.arrays(cache, copy=True)[2][4, 0] == 96 * row + 2
            user.push_blocks(cache, BlocksCacheKey(1), [4], [row + 4])
        assert peer.run("result = datadist.arrays(cache)[2][4:7, 0].tolist()") == [2, 98, 194]

    def test_a_cache_that_the_peer_has_freed_is_refused(
        self, machine: Machine, user: LlmDataDist, peer: Peer, shared: str
    ) -> None:
        cache = user.allocate_blocks_cache(DEVICE)
        user.pull_blocks(BlocksCacheKey(1), cache, [0], [0])
        peer.run("datadist.deallocate_cache(cache)")
        with refused("LLM_KV_CACHE_NOT_EXIST"):
            user.pull_blocks(BlocksCacheKey(1), cache, [0], [0])

    def test_the_link_has_the_transport_of_the_machine(
        self, machine: Machine, user: LlmDataDist
    ) -> None:
        assert [link.transport for link in user.links()] == [machine.transport]


@pytest.mark.parametrize("machine", ["cuda_tcp"], indirect=True)
def test_a_transfer_over_tcp_that_cannot_pin_memory_is_refused(
    machine: Machine,
    user: LlmDataDist,
    peer: Peer,
    shared: str,
    cuda_simulator: CudaControls,
) -> None:
    cache = user.allocate_blocks_cache(DEVICE)
    cuda_simulator.add_fault("cuMemHostAlloc:1=2")
    with refused("LLM_DEVICE_OUT_OF_MEMORY", "transfers over the link to .*cuMemHostAlloc: 2"):
        user.pull_blocks(BlocksCacheKey(1), cache, [0], [1])
    user.pull_blocks(BlocksCacheKey(1), cache, [0], [1])
    assert user.arrays(cache, copy=True)[2][1, 0] == 2


class TestOneHost:
    """Properties of transport local only."""

    def test_two_engines_of_one_gpu_share_memory(
        self, machine: Machine, make_engine: MakeEngine, peer: Peer, shared: str
    ) -> None:
        user = make_engine(9)  # 9 is 1 modulo the number of devices
        user.link_clusters([ClusterInfo(1, peer.address)]).raise_for_status()
        cache = user.allocate_blocks_cache(DEVICE)
        user.pull_blocks(BlocksCacheKey(1), cache, [0, 5], [2, 1])
        rows = np.arange(8 * 96, dtype=np.uint16).reshape(8, 96)
        assert np.array_equal(user.arrays(cache, copy=True)[1][[2, 1]], rows[[0, 5]] + 1)

    def test_memory_that_peers_cannot_map_is_usable_locally(
        self, machine: Machine, user: LlmDataDist, peer: Peer
    ) -> None:
        """The engine uses such memory, and tells the peer why it cannot map it."""
        peer.run("""
            from tests.cuda.side import Side
            side = Side(1)
            address = side.expandable()
            of_it = CacheDesc(1, (8, 96), DataType.DT_UINT16, shard=kvplan.Shard(num_layers=1))
            cache = datadist.register_blocks_cache(of_it, [address], BlocksCacheKey(1, 2))
        """)
        one = CacheDesc(1, (8, 96), DataType.DT_UINT16, shard=Shard(num_layers=1))
        cache = user.allocate_blocks_cache(one)
        with refused(
            "LLM_FEATURE_NOT_ENABLED", "in device memory, which transport local does not reach"
        ):
            user.pull_blocks(BlocksCacheKey(1, 2), cache, [0], [0])
        user.deallocate_cache(cache)  # the peer maps the memory when the cache is announced
        peer.run("""
            datadist.unregister_cache(cache.cache_id)
            side.free_expandable(address)
            assert (left := side.close()) == {}, left
            del side
        """)

    def test_memory_in_pieces_is_pulled(
        self, machine: Machine, user: LlmDataDist, peer: Peer
    ) -> None:
        """The pieces are like torch's expandable segments; the last block lies in two of them."""
        peer.run("""
            from tests.cuda.side import GRANULE, Side
            side = Side(1)
            address = side.expandable([True] * 3)
            of_it = CacheDesc(1, (3, 3 << 18), DataType.DT_UINT16, shard=kvplan.Shard(num_layers=1))
            begin = address + GRANULE - (3 << 18)
            cache = datadist.register_blocks_cache(of_it, [begin], BlocksCacheKey(1, 2))
            rows = np.arange(3 * (3 << 18), dtype=np.uint16)
            side.program.ok("cuMemcpyHtoD_v2", begin, rows.ctypes.data, rows.nbytes)
        """)
        desc = CacheDesc(1, (3, 3 << 18), DataType.DT_UINT16, shard=Shard(num_layers=1))
        cache = user.allocate_blocks_cache(desc)
        user.pull_blocks(BlocksCacheKey(1, 2), cache, [0, 1, 2], [2, 0, 1])
        rows = np.arange(3 * (3 << 18), dtype=np.uint16).reshape(3, 3 << 18)
        assert np.array_equal(user.arrays(cache, copy=True)[0][[2, 0, 1]], rows)
        user.deallocate_cache(cache)
        peer.run("""
            datadist.unregister_cache(cache.cache_id)
            side.free_expandable(address, 3)
            assert (left := side.close()) == {}, left
            del side
        """)

    def test_ranges_of_separate_allocations_are_pulled(
        self, machine: Machine, user: LlmDataDist, peer: Peer
    ) -> None:
        """Each tensor is an allocation of its own, as in torch, and is mapped elsewhere."""
        nbytes, at, size = 8 * 96 * 2, 100, 50
        theirs = peer.run("""
            from tests.cuda.side import Side
            side = Side(1)
            addresses, apart = [], []
            for seed in range(3):
                addresses.append(side.allocate("program", seed, 8 * 96 * 2))
                apart.append(side.allocate("program", 9, (1 + seed) << 21))
            of_it = CacheDesc(3, (8, 96), DataType.DT_UINT16, shard=kvplan.Shard(num_layers=3))
            cache = datadist.register_blocks_cache(of_it, addresses)
            result = addresses
        """)
        cache = user.allocate_blocks_cache(HOST)
        ours = cache.tensor_addrs
        for order in permutations(range(3)):
            user.write_cache(cache, [np.zeros((8, 96), np.uint16)] * 3)
            remote = [theirs[tensor] + at for tensor in order]
            user.run(AddressRanges(1, [address + at for address in ours], remote, [size] * 3))
            for array, seed in zip(user.arrays(cache), order, strict=True):
                found = array.reshape(-1).view(np.uint8)
                assert found[at : at + size].tolist() == pattern(seed, nbytes)[at:][:size].tolist()
        peer.run("""
            datadist.unregister_cache(cache.cache_id)
        """)
        user.deallocate_cache(cache)
        peer.run("""
            for address in [*addresses, *apart]:
                side.free(address)
            side.end()
            del side
        """)

    def test_unregistered_memory_of_the_program_is_unmapped_by_peers(
        self, machine: Machine, user: LlmDataDist, peer: Peer, sim_log: Log
    ) -> None:
        """The peer releases memory when it knows that the cache is gone.

        Then the owner can free it.
        """
        peer.run("""
            from tests.cuda.side import Side
            side = Side(1)
            address = side.allocate("program", 1, 8 * 96 * 2)
            of_it = CacheDesc(1, (8, 96), DataType.DT_UINT16, shard=kvplan.Shard(num_layers=1))
            cache = datadist.register_blocks_cache(of_it, [address], BlocksCacheKey(1, 2))
        """)
        one = CacheDesc(1, (8, 96), DataType.DT_UINT16, shard=Shard(num_layers=1))
        cache = user.allocate_blocks_cache(one)
        user.pull_blocks(BlocksCacheKey(1, 2), cache, [3], [0])
        assert user.arrays(cache, copy=True)[0][0].tobytes() == pattern(1, 1536)[576:768].tobytes()
        assert len(sim_log.calls("cuIpcOpenMemHandle_v2")) == 1
        peer.run("datadist.unregister_cache(cache.cache_id)")
        wait_until(lambda: bool(sim_log.calls("cuIpcCloseMemHandle")))
        peer.run("""
            side.free(address)
            side.end()
            del side
        """)

    def test_freed_memory_of_the_peer_is_unmapped(
        self, machine: Machine, sim_log: Log, user: LlmDataDist, peer: Peer, shared: str
    ) -> None:
        """The device can reuse the memory once no process has it mapped.

        The log begins before `shared`, whose memory is mapped when the user hears of it.
        """
        cache = user.allocate_blocks_cache(DEVICE)
        user.pull_blocks(BlocksCacheKey(1), cache, [0], [0])
        assert len(sim_log.calls("cuMemImportFromShareableHandle", pid=os.getpid())) == 1
        before = len(sim_log.calls("cuMemUnmap", pid=os.getpid()))
        peer.run("datadist.deallocate_cache(cache)")
        wait_until(lambda: len(sim_log.calls("cuMemUnmap", pid=os.getpid())) > before)

    def test_a_released_lease_is_refused(
        self, machine: Machine, user: LlmDataDist, peer: Peer, shared: str
    ) -> None:
        blob = peer.run("lease = datadist.lease_blocks(cache, [0, 1]); result = lease.to_bytes()")
        cache, lease = user.allocate_blocks_cache(DEVICE), BlockLease.from_bytes(blob)
        user.pull_blocks(lease, cache, None, [3, 4])
        user.push_blocks(cache, lease, [3, 4])
        peer.run("datadist.release(lease)")
        with refused("LLM_KV_CACHE_NOT_EXIST", "was released"):
            user.pull_blocks(lease, cache, None, [3, 4])
        with refused("LLM_KV_CACHE_NOT_EXIST", "was released"):
            user.push_blocks(cache, lease, [3, 4])

    def test_pools_are_mapped_once(
        self, machine: Machine, make_engine: MakeEngine, peer: Peer, sim_log: Log
    ) -> None:
        """Reusing a freed part of a pool needs no second mapping."""
        peer.run(
            """
            datadist.finalize()
            datadist = LlmDataDist(1, LlmRole.PROMPT)
            datadist.initialize({"llm.ListenIpInfo": "127.0.0.1:0", "llm.MemPoolConfig": pool})
        """,
            pool='{"memory_size": 4194304}',
        )
        peer.address = peer.run("result = datadist.listen_address")
        user = make_engine(2)
        user.link_clusters([ClusterInfo(1, peer.address)]).raise_for_status()
        cache = user.allocate_blocks_cache(DEVICE)
        for key in (1, 2):
            peer.run(f"cache = datadist.allocate_blocks_cache({OF_PEER}, BlocksCacheKey(1, {key}))")
            user.pull_blocks(BlocksCacheKey(1, key), cache, [0], [0])
            peer.run("datadist.deallocate_cache(cache)")
        assert len(sim_log.calls("cuMemImportFromShareableHandle", pid=os.getpid())) == 1


def test_two_engines_of_one_process_exchange_blocks(
    machine: Machine, pair: tuple[LlmDataDist, LlmDataDist]
) -> None:
    owner, user = pair
    there = owner.allocate_cache(DEVICE)
    owner.write_cache(there, contents(1))
    here = user.allocate_cache(DEVICE)
    user.pull_cache(CacheIndex(1, there.cache_id, 2), here, 5)
    assert all(
        np.array_equal(mine[5], theirs[2])
        for mine, theirs in zip(user.arrays(here, copy=True), contents(1), strict=True)
    )


def test_engines_work_in_a_context_of_their_own(cuda_simulator: CudaControls) -> None:
    """Memory of kvplan works as before; the program's memory is refused."""
    before = cuda_simulator.contexts()
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
            "LLM_PARAM_INVALID",
            "memory of another context in this process.*needs memory of device 3",
        ):
            datadist.register_cache(
                CacheDesc(1, (8, 96), DataType.DT_UINT16, Placement.DEVICE), [theirs]
            )
        program.ok("cuMemFree_v2", theirs)
    program.ok("cuDevicePrimaryCtxRelease_v2", 3)
    program.ok("cuCtxSetCurrent", None)
    assert cuda_simulator.contexts() <= before


def test_options_limit_the_resources_of_copies(cuda_simulator: CudaControls, sim_log: Log) -> None:
    """A copy and its return use one block of the kernel and no batch call of the driver."""
    with engine_on(cuda_simulator, cuda_batch_calls=False, cuda_copy_blocks=1) as datadist:
        assert datadist.device is not None
        assert "batch call" not in str(datadist.device.describe()["copies"])
        device = filled(datadist, DEVICE, 1, paged=True)
        host = datadist.allocate_blocks_cache(HOST)
        sim_log.restart()
        datadist.swap_blocks(device, host, {0: 1, 3: 2})
        assert np.array_equal(datadist.arrays(host)[0][1], contents(1)[0][0])
        launches = sim_log.calls("cuLaunchKernel")
        assert launches
        assert {launch.fields["blocks"] for launch in launches} == {1}
        assert not any(sim_log.counts("cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2").values())


def test_two_contexts_of_one_device_are_two_devices(cuda_simulator: CudaControls) -> None:
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


def test_pools_are_freed_with_their_engine(cuda_simulator: CudaControls) -> None:
    pools = {"mem_pool_config": PoolConfig(1 << 20), "host_mem_pool_config": PoolConfig(1 << 20)}
    before = cuda_simulator.contexts()
    with engine_on(cuda_simulator, **pools) as datadist:
        device, host = (filled(datadist, item, 1, paged=True) for item in (DEVICE, HOST))
        datadist.swap_blocks(host, device, {row: row for row in range(8)})
        assert same(datadist.arrays(device, copy=True), contents(1))
    gc.collect()
    assert cuda_simulator.contexts() <= before


def test_an_unknown_device_is_refused(cuda_simulator: CudaControls) -> None:
    with refused(
        "LLM_FEATURE_NOT_ENABLED", r"accelerator='cuda': device_id=8 is out of range \[0, 8\)"
    ):
        LlmDataDist(1, LlmRole.MIX).initialize(Options(accelerator="cuda", device_id=8))

"""Memory that a program frees while it is registered is refused, even if its address is reused."""

from __future__ import annotations

import ctypes
import gc
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest

import kvplan
from kvnative._cuda import CudaLibrary
from kvplan import (
    BlocksCacheKey,
    CacheDesc,
    ClusterInfo,
    DataType,
    LlmDataDist,
    LlmRole,
    Options,
    Placement,
    Rows,
    Transfer,
)
from kvplan.device.choice import open_accelerator
from kvplan.device.cuda import CudaDevice
from kvplan.device.memory import DeviceMemory
from tests.cuda_sim.cuda_library import Access, Allocation, Cuda, Location
from tests.cuda_sim.simulator import CudaControls
from tests.device.engines import engine_on
from tests.support.refusals import refused

GRANULE = 2 << 20
NUM_DEVICE = 3
ONE = CacheDesc(1, (8, GRANULE // 8), DataType.DT_UINT8, Placement.DEVICE)
HOST = CacheDesc(1, (8, GRANULE // 8), DataType.DT_UINT8, Placement.HOST)
SMALL = CacheDesc(1, (4096, GRANULE // 4096), DataType.DT_UINT8, Placement.DEVICE)
OTHER = "was freed, and other memory has its addresses now: unregister a cache"


class Program:
    """Memory of cuMemAlloc and cuMemMap that is freed and allocated again at one address."""

    def __init__(self, simulator: CudaControls) -> None:
        self.cuda = Cuda()
        self._simulator = simulator
        self.cuda.ok("cuInit", 0)
        self.cuda.primary(NUM_DEVICE)
        simulator.set("cuda_reuse", 1)

    def allocate(self) -> int:
        return self.cuda.made("cuMemAlloc_v2", GRANULE)

    def free(self, address: int) -> None:
        self.cuda.ok("cuMemFree_v2", address)

    def reserve(self) -> int:
        return self.cuda.made("cuMemAddressReserve", GRANULE, 0, 0, 0)

    def map(self, address: int) -> None:
        """Map new memory at an address, as vLLM does when it wakes up from sleep mode."""
        where = Location(1, NUM_DEVICE)
        wanted = Allocation(type=1, handle_types=0, location=where)
        handle = self.cuda.made("cuMemCreate", GRANULE, ctypes.byref(wanted), 0)
        self.cuda.ok("cuMemMap", address, GRANULE, 0, handle, 0)
        self.cuda.ok("cuMemRelease", handle)
        access = Access(location=where, flags=3)
        self.cuda.ok("cuMemSetAccess", address, GRANULE, ctypes.byref(access), 1)

    def unmap(self, address: int) -> None:
        self.cuda.ok("cuMemUnmap", address, GRANULE)

    def close(self) -> None:
        self._simulator.set("cuda_reuse", 0)
        self.cuda.ok("cuDevicePrimaryCtxRelease_v2", NUM_DEVICE)
        self.cuda.ok("cuCtxSetCurrent", None)


@pytest.fixture
def program(cuda_simulator: CudaControls) -> Iterator[Program]:
    program = Program(cuda_simulator)
    yield program
    program.close()


@pytest.fixture
def engine(cuda_simulator: CudaControls, program: Program) -> Iterator[LlmDataDist]:
    with engine_on(cuda_simulator, NUM_DEVICE) as engine:
        yield engine


@pytest.mark.parametrize("is_mapped", [False, True], ids=["cuMemAlloc", "cuMemMap"])
@pytest.mark.parametrize("desc", [ONE, SMALL], ids=["batch", "kernel"])
def test_memory_that_replaced_a_freed_tensor_is_not_copied(
    engine: LlmDataDist, program: Program, desc: CacheDesc, is_mapped: bool
) -> None:
    address = program.reserve() if is_mapped else program.allocate()
    if is_mapped:
        program.map(address)
    cache = engine.register_blocks_cache(desc, [address])
    host = engine.allocate_blocks_cache(replace(desc, placement=Placement.HOST))
    engine.swap_blocks(cache, host, {0: 1})
    if is_mapped:
        program.unmap(address)
    else:
        program.free(address)
    with refused("LLM_KV_CACHE_NOT_EXIST", "are not, or not all, memory of the device"):
        engine.swap_blocks(cache, host, {0: 1})
    if is_mapped:
        program.map(address)
    else:
        assert program.allocate() == address
    for _ in range(2):
        with refused("LLM_KV_CACHE_NOT_EXIST", OTHER):
            engine.swap_blocks(cache, host, {0: 1})
        with refused("LLM_KV_CACHE_NOT_EXIST", OTHER):
            engine.swap_blocks(host, cache, {1: 0})
    engine.unregister_cache(cache.cache_id)
    again = engine.register_blocks_cache(desc, [address])
    engine.swap_blocks(again, host, {0: 1})
    engine.unregister_cache(again.cache_id)
    if is_mapped:
        program.unmap(address)
        program.cuda.ok("cuMemAddressFree", address, GRANULE)
    else:
        program.free(address)


def test_memory_that_replaced_a_freed_tensor_is_not_read_or_written(
    engine: LlmDataDist, program: Program
) -> None:
    address = program.allocate()
    cache = engine.register_blocks_cache(ONE, [address])
    engine.write_cache(cache, [np.ones(ONE.shape, np.uint8)])
    program.free(address)
    assert program.allocate() == address
    with refused("LLM_KV_CACHE_NOT_EXIST", "not the memory that was registered there"):
        engine.arrays(cache, copy=True)
    with refused("LLM_KV_CACHE_NOT_EXIST", OTHER):
        engine.write_cache(cache, [np.ones(ONE.shape, np.uint8)])
    engine.unregister_cache(cache.cache_id)
    program.free(address)


def test_memory_that_replaced_a_freed_tensor_is_not_copied_to_pageable_memory(
    engine: LlmDataDist, program: Program
) -> None:
    address = program.allocate()
    cache = engine.register_blocks_cache(ONE, [address])
    host = engine.register_blocks_cache(HOST, [np.zeros(HOST.shape, np.uint8)])
    engine.swap_blocks(cache, host, {0: 1})
    program.free(address)
    assert program.allocate() == address
    with refused("LLM_KV_CACHE_NOT_EXIST", OTHER):
        engine.swap_blocks(cache, host, {0: 1})
    engine.unregister_cache(cache.cache_id)
    program.free(address)


def test_memory_that_replaced_a_freed_tensor_is_not_sent_to_a_peer(
    cuda_simulator: CudaControls, program: Program
) -> None:
    with (
        engine_on(
            cuda_simulator, NUM_DEVICE, transport="tcp", listen_ip_info="127.0.0.1:0"
        ) as owner,
        LlmDataDist(5, LlmRole.MIX) as peer,
    ):
        peer.initialize(Options(accelerator="none", transport="tcp"))
        assert owner.listen_address is not None
        peer.link_clusters([ClusterInfo(2, owner.listen_address)]).raise_for_status()
        address = program.allocate()
        cache = owner.register_blocks_cache(ONE, [address], BlocksCacheKey(2, 1))
        here = peer.allocate_blocks_cache(HOST)
        peer.pull_blocks(BlocksCacheKey(2, 1), here, [0], [0])
        program.free(address)
        assert program.allocate() == address
        for _ in range(2):
            with refused("LLM_KV_CACHE_NOT_EXIST", "has it registered, but not mapped"):
                peer.pull_blocks(BlocksCacheKey(2, 1), here, [0], [0])
            with refused("LLM_KV_CACHE_NOT_EXIST", "has it registered, but not mapped"):
                peer.push_blocks(here, BlocksCacheKey(2, 1), [0], [0])
        owner.unregister_cache(cache.cache_id)
        program.free(address)


def test_a_cache_that_is_registered_at_freed_addresses_is_usable(
    engine: LlmDataDist, program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    """The earlier registration was not ended by the program; the new one ends it."""
    address = program.allocate()
    old = engine.register_blocks_cache(ONE, [address], BlocksCacheKey(2, 1))
    program.free(address)
    assert program.allocate() == address
    with caplog.at_level(logging.WARNING, "kvplan"):
        new = engine.register_blocks_cache(ONE, [address], BlocksCacheKey(2, 2))
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("device=3 memory of 1 registered caches was freed without unregister")
    host = engine.allocate_blocks_cache(HOST)
    engine.swap_blocks(new, host, {0: 1})
    with refused("LLM_KV_CACHE_NOT_EXIST", OTHER):
        engine.swap_blocks(old, host, {0: 1})
    engine.swap_blocks(new, host, {0: 1})
    engine.unregister_cache(old.cache_id)
    engine.swap_blocks(new, host, {0: 1})
    engine.unregister_cache(new.cache_id)
    program.free(address)


def test_memory_that_kvplan_allocates_at_freed_addresses_is_usable(
    engine: LlmDataDist, program: Program
) -> None:
    address = program.allocate()
    cache = engine.register_blocks_cache(ONE, [address])
    program.free(address)
    mine = engine.allocate_blocks_cache(ONE)
    assert mine.tensor_addrs == (address,)
    host = engine.allocate_blocks_cache(HOST)
    engine.swap_blocks(mine, host, {0: 1})
    engine.unregister_cache(cache.cache_id)


def test_freed_addresses_without_registration_are_refused(
    engine: LlmDataDist, program: Program
) -> None:
    """Unregistered addresses are looked up for each transfer."""
    address = program.allocate()
    host = engine.allocate_blocks_cache(HOST)
    cache = engine.register_blocks_cache(ONE, [address])
    engine.swap_blocks(host, cache, {0: 1})
    engine.unregister_cache(cache.cache_id)
    program.free(address)
    gc.collect()
    assert program.allocate() == address
    device = engine.device
    assert device is not None
    memory = kvplan.device.memory.DeviceMemory.from_addresses(device, ONE, [address])
    memory.check()
    program.free(address)
    with refused("LLM_PARAM_INVALID", "needs memory of device 3"):
        memory.check()


@pytest.mark.parametrize("replaced", [[True], [False, True], [True, False, False]])
def test_each_of_several_watches_is_checked(
    cuda_simulator: CudaControls, replaced: list[bool]
) -> None:
    """Groups of tensors that were registered one by one have such watches."""

    class Watched(NamedTuple):
        is_replaced: bool

    device = open_accelerator("cuda", NUM_DEVICE)
    assert device is not None

    def memory(*watches: Watched) -> DeviceMemory:
        columns = (np.array([item], np.uint64) for item in (GRANULE, GRANULE))
        return DeviceMemory(device, *columns, writable=True, owner="said", watches=watches)

    memory().check()
    memory(*[Watched(False)] * len(replaced)).check()
    with refused("LLM_KV_CACHE_NOT_EXIST", OTHER):
        memory(*map(Watched, replaced)).check()
    device.close()


@pytest.mark.parametrize(
    ("number", "context", "sides"),
    [
        (NUM_DEVICE, "own", "both sides are on device 3, in different contexts"),
        (4, "primary", "one side is on device 3 and the other on device 4"),
    ],
)
def test_memory_of_another_device_or_context_is_not_copied(
    cuda_simulator: CudaControls, number: int, context: str, sides: str
) -> None:
    devices = CudaDevice(NUM_DEVICE), CudaDevice(number, CudaLibrary.load(context=context))
    src, dst = (
        DeviceMemory(
            device,
            np.array([GRANULE], np.uint64),
            np.array([GRANULE], np.uint64),
            writable=True,
            owner="the test",
        )
        for device in devices
    )
    copy = kvplan.plan(Transfer(Rows(ONE, [1]), Rows(ONE, [2])))
    with refused("LLM_FEATURE_NOT_ENABLED", sides):
        kvplan.execute(copy, src, dst)
    for device in devices:
        device.close()


def test_the_size_of_memory_is_that_of_all_tensors(cuda_simulator: CudaControls) -> None:
    device = CudaDevice(NUM_DEVICE)
    columns = (np.array(item, np.uint64) for item in ([64, 512], [8, 40]))
    memory = DeviceMemory(device, *columns, writable=True, owner="the test")
    assert repr(memory) == f"<DeviceMemory 2 tensors, 48 bytes: {device!r}>"
    device.close()

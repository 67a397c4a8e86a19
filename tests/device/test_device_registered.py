"""Device memory of a program: kvplan checks that it lies where the placement says."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvplan import Cache, CacheDesc, DataType, LlmDataDist, Placement, Rows, Transfer
from kvplan.device.device import Device
from tests.ascend.simulator import Controls
from tests.device.compute import compute_on
from tests.device.engines import (
    DEVICE,
    HOST,
    ROWS,
    contents,
    desc,
    engine_on,
    filled,
    kind_of,
    same,
)
from tests.support.foreign import GpuTensor, TorchTensor
from tests.support.refusals import refused

Allocate = Callable[..., list[int]]


@pytest.fixture
def datadist(simulator: Controls) -> Iterator[LlmDataDist]:
    with engine_on(simulator) as made:
        yield made
        del made


@pytest.fixture
def allocate(simulator: Controls, datadist: LlmDataDist) -> Iterator[Allocate]:
    """A function that allocates tensors as a framework would, and returns their addresses."""
    devices: list[Device] = []
    buffers: list[Any] = []

    def make(of: CacheDesc = DEVICE, device_id: int = 3) -> list[int]:
        devices.append(kind_of(simulator).device(device_id))
        buffers.append(devices[-1].allocate(of.nbytes))
        start = buffers[-1].address
        return [start + number * of.tensor_nbytes for number in range(of.num_tensors)]

    make.free = buffers.clear  # type: ignore[attr-defined]
    yield make
    buffers.clear()
    for device in devices:
        device.close()
    devices.clear()
    gc.collect()


def test_memory_is_registered_by_the_addresses_of_its_tensors(
    allocate: Allocate, datadist: LlmDataDist
) -> None:
    addresses = allocate()
    cache = datadist.register_blocks_cache(DEVICE, addresses)
    assert cache.tensor_addrs == tuple(addresses)
    datadist.write_cache(cache, contents(1))
    host = datadist.allocate_blocks_cache(HOST)
    datadist.swap_blocks(cache, host, {row: row for row in range(ROWS)})
    assert same(datadist.arrays(host, copy=True), contents(1))
    datadist.unregister_cache(cache.cache_id)
    assert datadist.device is not None
    datadist.device.read(addresses[0], bytearray(10))  # the memory still belongs to the program


def test_a_cache_without_an_id_is_used_by_its_addresses(
    allocate: Allocate, datadist: LlmDataDist
) -> None:
    ad_hoc = Cache(DEVICE, tensor_addrs=tuple(allocate()))
    arrays = contents(1)
    host = Cache(HOST, tensor_addrs=tuple(array.ctypes.data for array in arrays))
    datadist.swap_blocks(host, ad_hoc, {row: ROWS - 1 - row for row in range(ROWS)})
    assert same(datadist.arrays(ad_hoc, copy=True), [array[::-1] for array in arrays])
    datadist.copy_blocks(ad_hoc, {0: [1]})
    datadist.copy_cache(ad_hoc, ad_hoc, 0, 2)
    found = datadist.arrays(ad_hoc, copy=True)
    assert all(
        np.array_equal(entry[0], entry[1]) and np.array_equal(entry[0], entry[2]) for entry in found
    )


def test_access_to_freed_memory_is_refused(
    allocate: Allocate, datadist: LlmDataDist, simulator: Controls
) -> None:
    addresses = allocate()
    ad_hoc = Cache(DEVICE, tensor_addrs=tuple(addresses))
    registered = datadist.register_cache(DEVICE, addresses)
    allocate.free()  # type: ignore[attr-defined]
    with refused("LLM_PARAM_INVALID", "tensor 0|address"):
        datadist.arrays(ad_hoc, copy=True)
    with refused("LLM_PARAM_INVALID", "tensor 0|address"):
        datadist.copy_cache(ad_hoc, ad_hoc, 0, 1)
    # Registered addresses are not checked again; the device reports the error.
    with refused(kind_of(simulator).gone, kind_of(simulator).refusal):
        datadist.arrays(registered, copy=True)


def test_no_bytes_move_after_unregistering(
    allocate: Allocate, datadist: LlmDataDist, simulator: Controls
) -> None:
    """Transfers that wait for compute would otherwise write after the memory has a new owner."""
    addresses = allocate()
    cache = datadist.register_blocks_cache(DEVICE, addresses)
    datadist.write_cache(cache, contents(1))
    host = filled(datadist, HOST, 2, paged=True)
    compute = compute_on(simulator)
    compute.hold()
    tasks = [
        datadist.submit(Transfer(Rows(cache, [0]), Rows(cache, [5])), after=compute.event()),
        datadist.submit(Transfer(Rows(host, [0]), Rows(cache, [3])), after=compute.event()),
        datadist.submit(Transfer(Rows(cache, [0]), Rows(host, [3])), after=compute.event()),
    ]
    goes_on = datadist.submit(Transfer(Rows(host, [0]), Rows(host, [5])), after=compute.event())
    datadist.unregister_cache(cache.cache_id)
    for task in tasks:
        assert task.done
        why = rf"this engine has unregistered cache {cache.cache_id} meanwhile; 3 of 3 desc"
        with refused("LLM_KV_CACHE_NOT_EXIST", why):
            task.wait()
    compute.release()
    compute.wait()
    goes_on.wait()
    again = datadist.register_blocks_cache(DEVICE, addresses)
    assert same(datadist.arrays(again, copy=True), contents(1))
    expected = contents(2, HOST)
    for array in expected:
        array[5] = array[0]
    assert same(datadist.arrays(host, copy=True), expected)
    datadist.unregister_cache(again.cache_id)
    compute.close()


class TestTensors:
    """Stand-ins for tensors of a framework, over memory of the simulated device."""

    @pytest.fixture
    def own(self, simulator: Controls) -> str:
        """The name of the engine's device in torch."""
        return f"{kind_of(simulator).device.tensor_kind}:3"

    @staticmethod
    def on(device: str, addresses: list[int]) -> list[TorchTensor]:
        shown = np.zeros(DEVICE.shape, np.uint16)
        return [TorchTensor(shown, None, device, address) for address in addresses]

    def test_tensors_are_registered_and_kept_alive(
        self, own: str, allocate: Allocate, datadist: LlmDataDist
    ) -> None:
        addresses = allocate()
        tensors = self.on(own, addresses)
        desc = CacheDesc.from_tensors(tensors, None, shard=DEVICE.shard)
        assert desc.placement is Placement.DEVICE
        cache = datadist.register_blocks_cache(desc, tensors)
        assert cache.tensor_addrs == tuple(addresses)
        held = weakref.ref(tensors[0])
        del tensors
        assert held() is not None
        datadist.write_cache(cache, contents(1))
        assert same(datadist.arrays(cache, copy=True), contents(1))
        datadist.unregister_cache(cache.cache_id)
        gc.collect()
        assert held() is None

    def test_tensors_of_a_dlpack_extension_are_registered(
        self, allocate: Allocate, datadist: LlmDataDist
    ) -> None:
        shown = np.zeros(DEVICE.shape, np.uint16)
        tensors = [GpuTensor(shown, item, device=(12, 3)) for item in allocate()]
        cache = datadist.register_blocks_cache(DEVICE, tensors)
        datadist.write_cache(cache, contents(1))
        assert same(datadist.arrays(cache, copy=True), contents(1))

    @pytest.mark.parametrize("only", ["all", "the first"])
    def test_read_only_tensors_are_not_written(
        self, allocate: Allocate, datadist: LlmDataDist, only: str
    ) -> None:
        shown = np.zeros(DEVICE.shape, np.uint16)
        tensors = [
            GpuTensor(shown, item, device=(12, 3), read_only=only == "all" or number == 0)
            for number, item in enumerate(allocate())
        ]
        cache = datadist.register_blocks_cache(DEVICE, tensors)
        with refused("LLM_PARAM_INVALID", "read-only arrays"):
            datadist.write_cache(cache, contents(1))

    def test_tensors_on_another_device_are_refused(
        self, own: str, allocate: Allocate, datadist: LlmDataDist
    ) -> None:
        addresses = allocate()
        for device in (own.replace("3", "4"), "xpu:3"):
            with refused("LLM_PARAM_INVALID", rf"is on device {device}, but .*on device {own} \("):
                datadist.register_cache(DEVICE, self.on(device, addresses))
        with refused("LLM_PARAM_INVALID", rf"\[0\] is on device {own}; .*as placement=HOST says"):
            datadist.register_cache(HOST, self.on(own, addresses))
        arrays = contents(1)
        with refused("LLM_PARAM_INVALID", "is host memory"):
            datadist.register_cache(DEVICE, self.on(own, [array.ctypes.data for array in arrays]))
        with refused("LLM_PARAM_INVALID", r"memory of another device \(5\)"):
            datadist.register_cache(DEVICE, self.on(own, allocate(device_id=5)))
        with refused("LLM_PARAM_INVALID", "cache_desc says DT_UINT16 of shape"):
            wider = np.zeros(DEVICE.shape, np.uint32)
            datadist.register_cache(
                DEVICE, [TorchTensor(wider, None, own, address) for address in addresses]
            )
        assert datadist.caches() == []


class TestRefused:
    def test_host_memory_with_device_placement_is_refused(self, datadist: LlmDataDist) -> None:
        arrays = contents(1)
        with refused(
            "LLM_PARAM_INVALID",
            "tensor 0 has 1536 bytes at 0x.*is host memory.*needs memory of device 3.*accelerator",
        ):
            datadist.register_cache(DEVICE, [array.ctypes.data for array in arrays])
        with refused(
            "LLM_PARAM_INVALID",
            r"tensors\[0\] is a ndarray; .*tensors on device 3.*placement=HOST",
        ):
            datadist.register_cache(DEVICE, arrays)
        pinned = datadist.allocate_cache(HOST)
        with refused("LLM_PARAM_INVALID", "is pinned host memory"):
            datadist.register_cache(DEVICE, pinned.tensor_addrs)
        with refused("LLM_PARAM_INVALID", "is host memory"):
            datadist.copy_cache(
                Cache(DEVICE, -1, tuple(array.ctypes.data for array in arrays)), pinned
            )

    def test_device_memory_with_host_placement_is_refused(
        self, allocate: Allocate, datadist: LlmDataDist
    ) -> None:
        addresses = allocate()
        with refused("LLM_PARAM_INVALID", "tensor 0 at 0x.*memory of device 3, but placement=HOST"):
            datadist.register_cache(HOST, addresses)
        with refused("LLM_PARAM_INVALID", "but placement=HOST needs host memory"):
            datadist.arrays(Cache(HOST, -1, tuple(addresses)), copy=True)

    def test_memory_of_another_device_is_refused(
        self, allocate: Allocate, datadist: LlmDataDist
    ) -> None:
        with refused(
            "LLM_PARAM_INVALID", r"memory of another device \(5\), but .* needs memory of device 3"
        ):
            datadist.register_cache(DEVICE, allocate(device_id=5))

    def test_a_range_beyond_its_allocation_is_refused(
        self, allocate: Allocate, datadist: LlmDataDist
    ) -> None:
        beyond = CacheDesc(1, (1 << 20,), DataType.DT_INT64)
        with refused("LLM_PARAM_INVALID", "tensor 0|address"):
            datadist.register_cache(beyond, allocate()[:1])

    def test_invalid_addresses_are_refused(self, datadist: LlmDataDist) -> None:
        with refused("LLM_PARAM_INVALID", r"tensors\[1\]=0"):
            datadist.register_cache(DEVICE, [1, 0, 2])
        with refused("LLM_PARAM_INVALID", "tensor 0|address"):
            datadist.register_cache(DEVICE, [1 << 40, 2 << 40, 3 << 40])
        assert datadist.caches() == []


def test_a_read_only_cache_is_not_written(allocate: Allocate, datadist: LlmDataDist) -> None:
    registry = datadist._running().registry
    cache = registry.register(DEVICE, allocate(), paged=False, writable=False).cache
    with refused("LLM_PARAM_INVALID", "read-only"):
        datadist.copy_cache(cache, cache, 0, 1)
    with refused("LLM_PARAM_INVALID", "writable=False"):
        datadist.write_cache(cache, contents(1))


def test_arrays_are_registered_as_host_memory(datadist: LlmDataDist) -> None:
    arrays = contents(1)
    host = datadist.register_blocks_cache(HOST, arrays)
    device = datadist.allocate_blocks_cache(desc(Placement.DEVICE))
    datadist.swap_blocks(host, device, {2: 3})
    assert np.array_equal(datadist.arrays(device, copy=True)[1][3], arrays[1][2])

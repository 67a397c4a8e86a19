"""Engines on a simulated device, whose memory tests see through the simulator."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from kvplan import Cache, LlmDataDist, Options, Transfers
from kvplan.device.ascend import AscendDevice
from kvplan.device.device import Device
from kvplan.device.memory import DeviceMemory
from kvplan.engine.memory import tensor_arrays
from tests.ascend.simulator import controls
from tests.support.holding import LetGo
from tests.support.over_tcp import FIELDS

NUM_DEVICES = 8


class OnDevice(LlmDataDist):
    """Engines on a device each, which has the number of their cluster."""

    accelerator = "ascend"

    def initialize(self, options: Options | Mapping[str, str] | None = None) -> None:
        given = Options.of(options)
        device_id = self.cluster_id % NUM_DEVICES
        super().initialize(replace(given, accelerator=self.accelerator, device_id=device_id))

    def allocate_cache(self, *arguments: Any) -> Cache:
        return self._cleared(super().allocate_cache(*arguments))

    def allocate_blocks_cache(self, *arguments: Any) -> Cache:
        return self._cleared(super().allocate_blocks_cache(*arguments))

    def _cleared(self, cache: Cache) -> Cache:
        """Zero new memory, because device memory has any content at first."""
        memory = self._running().registry.resolve(cache).memory
        if isinstance(memory, DeviceMemory):
            for address in cache.tensor_addrs:
                memory.device.write(address, bytes(cache.cache_desc.tensor_nbytes))
        return cache

    def arrays(self, cache: Cache, *, copy: bool = False) -> list[NDArray[Any]]:
        """Return views of the tensors, as a program on the device sees them, or copies."""
        entry = self._running().registry.resolve(cache)
        if copy or not entry.memory.on_device:
            return super().arrays(cache, copy=copy)
        return tensor_arrays(entry.cache.cache_desc, DeviceView(entry.memory))


class OnDeviceOverTcp(OnDevice):
    """Engines on a device each, always linked over TCP."""

    def initialize(self, options: Options | Mapping[str, str] | None = None) -> None:
        super().initialize(replace(Options.of(options), **FIELDS))


class DeviceView:
    """An array interface of device memory in this process, which keeps the memory alive."""

    writable = True

    def __init__(self, memory: Any) -> None:
        self.memory = memory
        views = [controls().host_view(address) for address in memory.addresses.tolist()]
        self.addresses = np.array(views, np.uint64)


class DeviceTensor:
    """A program's own memory on a device, like torch_npu's, which NumPy views as an array.

    Args:
        device: the device of the memory, which this object closes.
        shape, dtype: of the array, which keeps this object alive.
    """

    def __init__(self, device: Device, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._device = device
        self._buffer = self._device.allocate(int(np.prod(shape)) * dtype.itemsize)
        self.address: int = self._buffer.address
        self.__array_interface__ = {
            "version": 3,
            "data": (controls().host_view(self.address), False),
            "shape": shape,
            "typestr": dtype.str,
        }

    def __del__(self) -> None:
        del self._buffer
        self._device.close()


class SimulatedAscend:
    """Devices of the simulator, which hold the caches."""

    name = "ascend"
    transport = "hccl"
    engine: type[LlmDataDist] = OnDevice
    device: type[Device] = AscendDevice

    def __init__(self, cluster_id: int) -> None:
        self._device_id = cluster_id % NUM_DEVICES

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Return an array on the device of this machine's cluster."""
        array = np.asarray(DeviceTensor(self.device(self._device_id), shape, np.dtype(dtype)))
        array[...] = 0
        return array

    def addresses(self, arrays: Iterable[NDArray[Any]]) -> list[int]:
        return [array.base.address for array in arrays]

    @contextmanager
    def held_transfers(self) -> Iterator[tuple[Transfers, LetGo]]:
        """Make each step of a stream slow, so the peer's generation table is read afterwards."""
        controls().set("latency_us", 100_000)
        try:
            with Transfers(1) as transfers:
                yield transfers, lambda: None
        finally:
            controls().set("latency_us", 0)

    def left(self) -> dict[str, int]:
        return controls().left()


class SimulatedAscendOverTcp(SimulatedAscend):
    """Devices whose engines are linked as if HCCL did not reach the other host."""

    name = "ascend_tcp"
    transport = "tcp"
    engine = OnDeviceOverTcp

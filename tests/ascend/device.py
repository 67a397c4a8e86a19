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
    """Engines on a device each, numbered like their clusters."""

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
        """Memory of the host is 0 at first, that of a device holds anything."""
        memory = self._running().registry.resolve(cache).memory
        if isinstance(memory, DeviceMemory):
            for address in cache.tensor_addrs:
                memory.device.write(address, bytes(cache.cache_desc.tensor_nbytes))
        return cache

    def arrays(self, cache: Cache, *, copy: bool = False) -> list[NDArray[Any]]:
        """Return a view of each tensor, as what computes on the device has one, or copies."""
        entry = self._running().registry.resolve(cache)
        if copy or not entry.memory.on_device:
            return super().arrays(cache, copy=copy)
        return tensor_arrays(entry.cache.cache_desc, Seen(entry.memory))


class OnDeviceOverTcp(OnDevice):
    """The same, linked over TCP, whatever else would do."""

    def initialize(self, options: Options | Mapping[str, str] | None = None) -> None:
        super().initialize(replace(Options.of(options), **FIELDS))


class Seen:
    """Device memory, where this process can see it; keeps it like an array."""

    writable = True

    def __init__(self, memory: Any) -> None:
        self.memory = memory
        views = [controls().host_view(address) for address in memory.addresses.tolist()]
        self.addresses = np.array(views, np.uint64)


class DeviceTensor:
    """Memory of a program's own on a device, as torch_npu would have it; NumPy sees it as an array.

    Args:
        device: where, which this closes.
        shape, dtype: of the array, which keeps this.
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
    """Devices that the simulator stands in for; caches lie in their memory."""

    name = "ascend"
    transport = "hccl"
    engine: type[LlmDataDist] = OnDevice
    device: type[Device] = AscendDevice

    def __init__(self, cluster_id: int) -> None:
        self._device_id = cluster_id % NUM_DEVICES

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Return an array on the device of the cluster whose machine this is."""
        array = np.asarray(DeviceTensor(self.device(self._device_id), shape, np.dtype(dtype)))
        array[...] = 0
        return array

    def addresses(self, arrays: Iterable[NDArray[Any]]) -> list[int]:
        return [array.base.address for array in arrays]

    @contextmanager
    def held_transfers(self) -> Iterator[tuple[Transfers, LetGo]]:
        """Each step of a stream takes its time: the peer's generation table is read after it."""
        controls().set("latency_us", 100_000)
        try:
            with Transfers(1) as transfers:
                yield transfers, lambda: None
        finally:
            controls().set("latency_us", 0)

    def left(self) -> dict[str, int]:
        return controls().left()


class SimulatedAscendOverTcp(SimulatedAscend):
    """Its engines are linked as if they were on two hosts that HCCL does not reach."""

    name = "ascend_tcp"
    transport = "tcp"
    engine = OnDeviceOverTcp

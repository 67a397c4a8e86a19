"""A program beside kvplan in the same process, which allocates like a framework."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import DTypeLike, NDArray

from benchmarks.gpu_driver import Driver
from kvplan.device.cuda import CudaDevice


class Program:
    """Memory of cuMemAlloc in the device's primary context, until `close`."""

    def __init__(self, device_id: int = 0) -> None:
        self._device = CudaDevice(device_id)
        self.driver = Driver(self._device.native.library.path, device_id)
        self._allocated: set[int] = set()

    def allocate(self, count: int, nbytes: int) -> list[int]:
        """Return the addresses of new allocations."""
        self.driver.use()
        addresses = [self.driver.allocate(nbytes) for _ in range(count)]
        self._allocated.update(addresses)
        return addresses

    def free(self, addresses: Sequence[int]) -> None:
        self.driver.use()
        for address in addresses:
            self._allocated.remove(address)
            self.driver.free(address)

    def write(self, addresses: Sequence[int], arrays: NDArray[np.generic]) -> None:
        """Write an array to each address."""
        self.driver.use()
        for address, array in zip(addresses, arrays, strict=True):
            self.driver.write(address, np.ascontiguousarray(array).reshape(-1).view(np.uint8))

    def read(
        self, addresses: Sequence[int], shape: tuple[int, ...], dtype: DTypeLike
    ) -> NDArray[np.generic]:
        """Return the content of all addresses as one array."""
        self.driver.use()
        found = np.empty(shape, dtype)
        for address, array in zip(addresses, found, strict=True):
            self.driver.read(address, array.reshape(-1).view(np.uint8))
        return found

    def close(self) -> None:
        self.free(list(self._allocated))
        self.driver.close()
        self._device.close()

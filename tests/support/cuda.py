"""Memory of a CUDA GPU for tests, by calls of the driver, without a framework."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


@cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    device, context = ctypes.c_int(), ctypes.c_void_p()
    for rc in (
        driver.cuInit(0),
        driver.cuDeviceGet(ctypes.byref(device), 0),
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
        driver.cuCtxSetCurrent(context),
    ):
        if rc != 0:
            raise OSError(f"libcuda.so.1 says {rc}")
    return driver


def missing_gpu() -> str:
    """Return the reason why no GPU can be used; empty if one can."""
    try:
        _driver()
    except OSError as error:
        return f"no CUDA GPU: {error}"
    return ""


class CudaMemory:
    """Tensors of one size in memory of the first GPU, as a side of a transfer."""

    in_process = True
    on_device = True
    writable = True

    def __init__(self, num_tensors: int, tensor_nbytes: int) -> None:
        self.size = num_tensors * tensor_nbytes
        address = ctypes.c_uint64()
        _check(_driver().cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(self.size)))
        self.address = address.value
        self.addresses = np.arange(num_tensors, dtype=np.uint64) * np.uint64(tensor_nbytes)
        self.addresses += np.uint64(self.address)
        self.nbytes = np.full(num_tensors, tensor_nbytes, np.uint64)

    def write(self, array: Bytes) -> None:
        there, here = ctypes.c_uint64(self.address), ctypes.c_void_p(array.ctypes.data)
        _check(_driver().cuMemcpyHtoD_v2(there, here, ctypes.c_size_t(array.nbytes)))

    def read(self) -> Bytes:
        array = np.empty(self.size, np.uint8)
        there, here = ctypes.c_uint64(self.address), ctypes.c_void_p(array.ctypes.data)
        _check(_driver().cuMemcpyDtoH_v2(here, there, ctypes.c_size_t(self.size)))
        return array

    def free(self) -> None:
        _check(_driver().cuMemFree_v2(ctypes.c_uint64(self.address)))

    def backend(self, *others: Any) -> None:
        """Return None: the peer's memory chooses the backend."""

    def check(self, tensors: range | None = None) -> None:
        """Do nothing: the test holds the memory."""


def _check(rc: int) -> None:
    assert rc == 0, f"libcuda.so.1 says {rc}"

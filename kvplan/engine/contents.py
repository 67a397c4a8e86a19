"""What is in a cache, copied out and in: wherever the cache is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvplan.device.memory import DeviceMemory
from kvplan.engine.arrays import tensor_arrays, tensor_form
from kvplan.engine.cache_memory import CacheMemory
from kvplan.status import invalid
from kvplan.types import CacheDesc


def read_tensors(desc: CacheDesc, memory: CacheMemory) -> list[NDArray[Any]]:
    """Return a copy of each tensor, of the form that `tensor_arrays` has.

    Raises:
        LLMException: the memory is not what it was, or what its device says.
    """
    memory.check()
    if not isinstance(memory, DeviceMemory):
        return [it.copy() for it in tensor_arrays(desc, memory)]
    shape, dtype = tensor_form(desc)
    copies = [np.empty(shape, dtype) for _ in range(desc.num_tensors)]
    for address, copy in zip(memory.addresses.tolist(), copies, strict=True):
        memory.device.read(address, copy.data)
    return copies


def write_tensors(desc: CacheDesc, memory: CacheMemory, arrays: Sequence[Any]) -> None:
    """Put an array into each tensor; all are looked at before the first is written.

    Raises:
        TypeError: no sequence of arrays.
        LLMException: LLM_PARAM_INVALID: another number, shape or width of elements, or memory that
            must not be written; the memory is not what it was, or what its device says.
    """
    memory.check()
    given = _checked(desc, arrays)
    if not memory.writable:
        raise invalid("the cache was registered with writable=False, or of read-only arrays")
    if isinstance(memory, DeviceMemory):
        for address, array in zip(memory.addresses.tolist(), given, strict=True):
            memory.device.write(address, array.data)
        return
    for tensor, array in zip(tensor_arrays(desc, memory), given, strict=True):
        tensor[...] = array.view(tensor.dtype)


def _checked(desc: CacheDesc, arrays: Sequence[Any]) -> list[NDArray[Any]]:
    if isinstance(arrays, str | bytes) or not isinstance(arrays, Sequence | np.ndarray):
        raise TypeError(f"arrays must be a sequence of arrays, not {type(arrays).__name__}")
    if len(arrays) != desc.num_tensors:
        raise invalid(
            f"arrays has {len(arrays)} elements; num_tensors={desc.num_tensors} are needed"
        )
    shape, dtype = tensor_form(desc)
    given = [np.asarray(it) for it in arrays]
    for position, it in enumerate(given):
        if it.shape != shape or it.dtype.itemsize != dtype.itemsize or it.dtype.hasobject:
            raise invalid(
                f"arrays[{position}] is of shape {it.shape} and {it.dtype}; the cache's tensors "
                f"are of shape {shape} and {dtype}, or another type of {dtype.itemsize} bytes"
            )
    return [np.ascontiguousarray(it) for it in given]

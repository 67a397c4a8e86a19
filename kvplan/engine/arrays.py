"""NumPy arrays over the tensors of a cache, and copies of what is in them, wherever it is."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvplan.device.memory import DeviceMemory
from kvplan.execution.memory import check_lent, using
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.tensors.form import array_form
from kvplan.types import CacheDesc

if TYPE_CHECKING:
    from kvplan.engine.memory import CacheMemory
    from kvplan.execution import HostMemory


def tensor_arrays(desc: CacheDesc, memory: CacheMemory) -> list[NDArray[Any]]:
    """Return an array over each tensor, which keeps the memory as long as it lives.

    Its shape is the cache's; for packed elements a row is flat, of whole bytes.

    Raises:
        LLMException: LLM_FEATURE_NOT_ENABLED: it is on a device.
    """
    if isinstance(memory, DeviceMemory):
        raise LLMException(
            f"the cache is in memory of device {memory.device.id}, which no array can show; "
            "arrays(cache, copy=True) and write_cache copy it",
            status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
        )
    shape, dtype = array_form(desc)
    return [
        np.asarray(_Tensor(memory, address, shape, dtype)) for address in memory.addresses.tolist()
    ]


class _Tensor:
    """What NumPy asks for memory; the array that it makes refers to this, and so to the memory."""

    def __init__(
        self, memory: HostMemory, address: int, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        self.memory = memory
        self.__array_interface__ = {
            "version": 3,
            "data": (address, not memory.writable),
            "shape": shape,
            "typestr": dtype.str,
        }


def read_tensors(desc: CacheDesc, memory: CacheMemory) -> list[NDArray[Any]]:
    """Return a copy of each tensor, of the form that `tensor_arrays` has.

    Raises:
        LLMException: the memory is not what it was, or what its device says.
    """
    memory.check()
    shape, dtype = array_form(desc)
    copies = [np.empty(shape, dtype) for _ in range(desc.num_tensors)]
    with using(memory):
        if isinstance(memory, DeviceMemory):
            for address, copy in zip(memory.addresses.tolist(), copies, strict=True):
                check_lent(memory)
                memory.device.read(address, copy.data)
        else:
            for tensor, copy in zip(tensor_arrays(desc, memory), copies, strict=True):
                check_lent(memory)
                copy[...] = tensor
    return copies


def block_checksum(tensors: Sequence[NDArray[Any]], axis: int, block: int) -> str:
    """BLAKE2b-64 of the bytes that a block, or slot, has in each tensor; `axis` counts them."""
    total = blake2b(digest_size=8)
    for it in tensors:
        row = np.ascontiguousarray(np.moveaxis(it, axis, 0)[block])
        total.update(row.reshape(-1).view(np.uint8).data)
    return total.hexdigest()


def write_tensors(
    desc: CacheDesc, memory: CacheMemory, arrays: Sequence[Any] | NDArray[Any]
) -> None:
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
    with using(memory):
        if isinstance(memory, DeviceMemory):
            for address, array in zip(memory.addresses.tolist(), given, strict=True):
                check_lent(memory)
                memory.device.write(address, array.data)
        else:
            for tensor, array in zip(tensor_arrays(desc, memory), given, strict=True):
                check_lent(memory)
                tensor[...] = array.view(tensor.dtype)


def _checked(desc: CacheDesc, arrays: Sequence[Any] | NDArray[Any]) -> list[NDArray[Any]]:
    if isinstance(arrays, str | bytes) or not isinstance(arrays, Sequence | np.ndarray):
        raise TypeError(f"arrays must be a sequence of arrays, not {type(arrays).__name__}")
    if len(arrays) != desc.num_tensors:
        raise invalid(
            f"arrays has {len(arrays)} elements; num_tensors={desc.num_tensors} are needed"
        )
    shape, dtype = array_form(desc)
    given = [np.asarray(it) for it in arrays]
    for position, it in enumerate(given):
        if it.shape != shape or it.dtype.itemsize != dtype.itemsize or it.dtype.hasobject:
            raise invalid(
                f"arrays[{position}] is of shape {it.shape} and {it.dtype}; the cache's tensors "
                f"are of shape {shape} and {dtype}, or another type of {dtype.itemsize} bytes"
            )
    return [np.ascontiguousarray(it) for it in given]

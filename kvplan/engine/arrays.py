"""NumPy arrays over the tensors of a cache, and copies of what is in them, wherever it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvplan.device.memory import DeviceMemory
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.types import CacheDesc, DataType

if TYPE_CHECKING:
    from kvplan.engine.memory import CacheMemory
    from kvplan.execution import HostMemory

_TWINS: dict[DataType, np.dtype[Any]] = {
    DataType[f"DT_{name}"]: np.dtype(twin)
    for name, twin in {
        "FLOAT": np.float32,
        "FLOAT16": np.float16,
        "DOUBLE": np.float64,
        "INT8": np.int8,
        "INT16": np.int16,
        "INT32": np.int32,
        "INT64": np.int64,
        "UINT8": np.uint8,
        "UINT16": np.uint16,
        "UINT32": np.uint32,
        "UINT64": np.uint64,
        "BOOL": np.bool_,
        "COMPLEX64": np.complex64,
        "COMPLEX128": np.complex128,
        "QINT8": np.int8,
        "QINT16": np.int16,
        "QINT32": np.int32,
        "QUINT8": np.uint8,
        "QUINT16": np.uint16,
    }.items()
}


def numpy_dtype(data_type: DataType) -> np.dtype[Any]:
    """NumPy's type for the elements; without a twin: the unsigned integer of that width.

    Elements of less than a byte are packed: their type is uint8, of which a row has fewer.

    Raises:
        LLMException: LLM_PARAM_INVALID: elements without a width.
    """
    return _TWINS.get(data_type) or np.dtype(f"u{max(data_type.bits // 8, 1)}")


def tensor_form(desc: CacheDesc) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """The shape and type of an array over a tensor; of packed elements a row is of whole bytes."""
    shape = desc.shape
    if desc.data_type.bits % 8:
        shape = (*shape[: desc.batch_dim_index + 1], desc.stride)
    return shape, numpy_dtype(desc.data_type)


def tensor_arrays(desc: CacheDesc, memory: CacheMemory) -> list[NDArray[Any]]:
    """Return an array over each tensor, which keeps the memory as long as it lives.

    Its shape is the cache's; for packed elements a row is flat, of whole bytes.

    Raises:
        LLMException: LLM_FEATURE_NOT_ENABLED: it is on a device.
    """
    if isinstance(memory, DeviceMemory):
        raise LLMException(
            f"the cache is in memory of device {memory.device.id}, which no array can show; "
            "read_cache and write_cache copy it",
            status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
        )
    shape, dtype = tensor_form(desc)
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

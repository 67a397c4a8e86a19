"""NumPy arrays over the tensors of a cache: views, no copies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvplan.device.memory import DeviceMemory
from kvplan.status import LLMException, LLMStatusCode
from kvplan.types import CacheDesc, DataType

if TYPE_CHECKING:
    from kvplan.engine.cache_memory import CacheMemory
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

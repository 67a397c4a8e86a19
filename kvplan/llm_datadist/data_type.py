"""Element types of a cache, and their NumPy types."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from typing import Any

import numpy as np

from kvplan.status import LLMException
from kvplan.types import DataType as EngineDataType
from kvplan.validation import INT64_MAX

_STRING_BITS = 128  # header of a string: address and length


class DataType(Enum):
    """The type of the elements of a cache."""

    DT_FLOAT = int(EngineDataType.DT_FLOAT)
    DT_FLOAT16 = int(EngineDataType.DT_FLOAT16)
    DT_BF16 = int(EngineDataType.DT_BF16)
    DT_INT8 = int(EngineDataType.DT_INT8)
    DT_INT16 = int(EngineDataType.DT_INT16)
    DT_UINT16 = int(EngineDataType.DT_UINT16)
    DT_UINT8 = int(EngineDataType.DT_UINT8)
    DT_INT32 = int(EngineDataType.DT_INT32)
    DT_INT64 = int(EngineDataType.DT_INT64)
    DT_UINT32 = int(EngineDataType.DT_UINT32)
    DT_UINT64 = int(EngineDataType.DT_UINT64)
    DT_BOOL = int(EngineDataType.DT_BOOL)
    DT_DOUBLE = int(EngineDataType.DT_DOUBLE)
    DT_STRING = int(EngineDataType.DT_STRING)


python_dtype_2_dwrapper_dtype = {data_type: data_type.value for data_type in DataType}
"""The number of each type."""

dtype_to_np_dtype: dict[DataType, type[np.generic]] = {
    DataType.DT_FLOAT: np.float32,
    DataType.DT_FLOAT16: np.float16,
    DataType.DT_BF16: np.float16,  # has the same width; NumPy has no bfloat16
    DataType.DT_INT8: np.int8,
    DataType.DT_INT16: np.int16,
    DataType.DT_UINT16: np.uint16,
    DataType.DT_UINT8: np.uint8,
    DataType.DT_INT32: np.int32,
    DataType.DT_INT64: np.int64,
    DataType.DT_UINT32: np.uint32,
    DataType.DT_UINT64: np.uint64,
    DataType.DT_BOOL: np.bool_,
    DataType.DT_DOUBLE: np.double,
    DataType.DT_STRING: np.bytes_,
}

valid_np_dtypes = list(dtype_to_np_dtype.values())

np_dtype_to_dtype: dict[np.dtype[Any], DataType] = {
    np.dtype(np_dtype): data_type
    for data_type, np_dtype in dtype_to_np_dtype.items()
    if data_type is not DataType.DT_BF16
}


def get_python_dtype_from_wrapper_dtype(wrapper_dtype: int) -> DataType:
    """Return the type that has this number in the original's wrapper.

    Raises:
        ValueError: unknown number.
    """
    return DataType(wrapper_dtype)


def calc_tensor_size(shape: Sequence[int], data_type: int) -> int:
    """Return the bytes of a tensor; -1 if it has no size.

    Args:
        shape: dimensions, each > 0.
        data_type: number of the element type.
    """
    try:
        kind = EngineDataType(data_type)
        bits = _STRING_BITS if kind is EngineDataType.DT_STRING else kind.bits
    except (ValueError, LLMException):
        return -1
    if any(length < 1 for length in shape):
        return -1
    nbytes = -(-math.prod(shape) * bits // 8)
    return nbytes if nbytes <= INT64_MAX else -1

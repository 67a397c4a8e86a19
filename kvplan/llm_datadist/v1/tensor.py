"""Tensor and TensorDesc of version 1: an array with the original's name for its element type."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvplan.llm_datadist.data_type import DataType
from kvplan.llm_datadist.utils.utils import check_isinstance

_BY_NUMPY = {
    np.dtype(numpy_type): DataType[f"DT_{name}"]
    for name, numpy_type in {
        "FLOAT": np.float32,
        "FLOAT16": np.float16,
        "INT8": np.int8,
        "INT16": np.int16,
        "UINT16": np.uint16,
        "UINT8": np.uint8,
        "INT32": np.int32,
        "INT64": np.int64,
        "UINT32": np.uint32,
        "UINT64": np.uint64,
        "BOOL": np.bool_,
        "DOUBLE": np.float64,
    }.items()
}
# NumPy has no bfloat16: its 16 bits come in an array of that width.
_NUMPY_OF = {data_type: dtype for dtype, data_type in _BY_NUMPY.items()} | {
    DataType.DT_BF16: np.dtype(np.float16)
}


class TensorDesc:
    """The element type and shape of a tensor.

    Args:
        dtype: type of an element.
        shape: the dimensions.

    Raises:
        TypeError: an argument of another type.
    """

    def __init__(self, dtype: DataType, shape: list[int] | tuple[int, ...]) -> None:
        check_isinstance("dtype", dtype, DataType, allow_none=False)
        check_isinstance("shape", shape, [list, tuple], int, allow_none=False)
        self._dtype = dtype
        self._shape = list(shape)

    @property
    def dtype(self) -> DataType:
        """As given."""
        return self._dtype

    @property
    def shape(self) -> list[int]:
        """As given, as a list."""
        return self._shape

    def __repr__(self) -> str:
        return f"TensorDesc(dtype={self._dtype}, shape={self._shape})"


class Tensor:
    """An array, or a tensor of a cache (`KvCacheManager.get_cache_tensors`).

    Args:
        data: what it holds a copy of: an array, C-contiguous, or another Tensor.
        tensor_desc: must fit the array; None: as the array is. For DT_BF16 the array is of float16,
            whose bits are taken.

    Raises:
        TypeError: an argument of another type.
        RuntimeError: an array that does not fit tensor_desc, is not contiguous, or whose elements
            have no data type here.
    """

    def __init__(self, data: NDArray[Any] | Tensor, tensor_desc: TensorDesc | None = None) -> None:
        check_isinstance("data", data, [np.ndarray, Tensor], allow_none=False)
        check_isinstance("tensor_desc", tensor_desc, TensorDesc)
        self._tensor_desc: TensorDesc
        self._array: NDArray[Any]
        if isinstance(data, Tensor):
            self._tensor_desc, self._array = data._tensor_desc, data._array.copy()
        else:
            self._tensor_desc, self._array = _fitting(data, tensor_desc), data.copy()

    @classmethod
    def _over(cls, array: NDArray[Any], data_type: DataType) -> Tensor:
        """Make one over memory that it does not own; nothing is copied."""
        tensor = cls.__new__(cls)
        tensor._tensor_desc, tensor._array = TensorDesc(data_type, array.shape), array
        return tensor

    def numpy(self, copy: bool = False) -> NDArray[Any]:
        """Return its elements; those of DT_BF16 as float32, which always is a copy.

        Args:
            copy: False: the tensor's own memory, which a tensor of text cannot return.

        Raises:
            TypeError: copy is not a bool.
            RuntimeError: text, without copy.
        """
        check_isinstance("copy", copy, bool, allow_none=False)
        if self._tensor_desc.dtype is DataType.DT_BF16:
            bits = self._array.view(np.uint16).astype(np.uint32)
            return np.left_shift(bits, 16).view(np.float32)
        if self._tensor_desc.dtype is DataType.DT_STRING and not copy:
            raise RuntimeError("copy=False: the memory of a tensor of text is not accessible")
        return self._array.copy() if copy else self._array

    def __repr__(self) -> str:
        return f"Tensor({self.numpy(copy=True)}, tensor_desc={self._tensor_desc})"


def _fitting(array: NDArray[Any], desc: TensorDesc | None) -> TensorDesc:
    if not array.flags.c_contiguous:
        raise RuntimeError("data must be C-contiguous")
    is_text = array.dtype.kind in "US"
    own = DataType.DT_STRING if is_text else _BY_NUMPY.get(array.dtype)
    if desc is None:
        if own is None:
            known = ", ".join(map(str, _BY_NUMPY))
            raise RuntimeError(f"data of {array.dtype}: must be one of {known}, or text")
        return TensorDesc(own, array.shape)
    if list(array.shape) != desc.shape:
        raise RuntimeError(f"data of shape {list(array.shape)}: tensor_desc says {desc.shape}")
    if own is not desc.dtype and _NUMPY_OF.get(desc.dtype) != array.dtype:
        raise RuntimeError(f"data of {array.dtype}: tensor_desc says {desc.dtype}")
    return desc

"""The form of tensors: shape, strides, type and address, for tensors of any library.

The form is read from NumPy's interface, the buffer protocol, DLPack, the attributes of a torch
tensor, or the CUDA array interface.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from operator import index
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvplan.status import LLMException, invalid
from kvplan.tensors.dlpack import TensorDevice, read_dlpack
from kvplan.types import CacheDesc, DataType
from kvplan.validation import UINT64_MAX, shown

# Types with a twin in NumPy. QINT8 and similar types are integers to NumPy.
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

# Names in NumPy, ml_dtypes and torch. Types of less than a byte match only if they are packed.
_TYPES = {
    twin.name: data_type
    for data_type, twin in _TWINS.items()
    if not data_type.name.startswith("DT_Q")
} | {
    "bfloat16": DataType.DT_BF16,
    "complex32": DataType.DT_COMPLEX32,
    "float8_e4m3fn": DataType.DT_FLOAT8_E4M3FN,
    "float8_e5m2": DataType.DT_FLOAT8_E5M2,
    "float8_e8m0fnu": DataType.DT_FLOAT8_E8M0,
    "float6_e2m3fn": DataType.DT_FLOAT6_E2M3,
    "float6_e3m2fn": DataType.DT_FLOAT6_E3M2,
    "float4_e2m1fn": DataType.DT_FLOAT4_E2M1,
    "int4": DataType.DT_INT4,
    "int2": DataType.DT_INT2,
    "uint2": DataType.DT_UINT2,
    "uint1": DataType.DT_UINT1,
}

_BYTES = ("uint8", "int8")


@dataclass
class TensorForm:
    """The form of a tensor.

    Attributes:
        name: the argument, for messages.
        shape: the lengths of the dimensions.
        strides: the strides in elements.
        bits: the bits of an element.
        dtype: the data type of its library, or a name.
        address: the address of the first element.
        read_only: True if the memory must not be written.
        device: the device of the memory; None: host memory.
        owner: keeps the memory alive.
    """

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    bits: int
    dtype: object
    address: int
    read_only: bool
    device: TensorDevice | None
    owner: object

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return -(-math.prod(self.shape) * self.bits // 8)

    @property
    def span_nbytes(self) -> int:
        """Bytes from the first element to the last, including gaps."""
        steps = zip(self.shape, self.strides, strict=True)
        return -(-(1 + sum((length - 1) * stride for length, stride in steps)) * self.bits // 8)

    @cached_property
    def dtype_name(self) -> str:
        """The name of the type in NumPy or ml_dtypes, if they have the type."""
        if isinstance(self.dtype, np.dtype):
            return self.dtype.name if self.dtype.isnative else str(self.dtype)
        return str(self.dtype).removeprefix("torch.")

    @cached_property
    def data_type(self) -> DataType | None:
        """The type of the elements; None: unknown by this name and width."""
        found = _TYPES.get(self.dtype_name)
        return found if found is not None and found.bits == self.bits else None

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The dimensions in the order of memory, outermost first."""
        dims = range(len(self.shape))
        # Strides of dimensions of length 1 are never used, and may be anything.
        ordered = sorted(
            (dim for dim in dims if self.shape[dim] != 1), key=lambda dim: -self.strides[dim]
        )
        if ordered == sorted(ordered):
            return tuple(dims)
        return tuple(sorted(dims, key=lambda dim: -self.strides[dim]))

    @cached_property
    def memory_shape(self) -> tuple[int, ...]:
        """The lengths of the dimensions in the order of memory."""
        return tuple(self.shape[dim] for dim in self.order)

    def gap(self, rows: int) -> tuple[int, int] | None:
        """Return the innermost dimension with gaps or overlaps, and its stride without them.

        Gaps between the elements of dimension `rows` are allowed. None: neither is found.
        """
        dense = 1
        for dim in reversed(self.order):
            if self.shape[dim] == 1:
                continue
            if self.strides[dim] != dense and (dim != rows or self.strides[dim] < dense):
                return dim, dense
            dense = self.shape[dim] * self.strides[dim]
        return None

    def row_stride(self, rows: int) -> int | None:
        """Return the stride of dimension `rows` in bytes; None if its length is 1."""
        return None if self.shape[rows] == 1 else self.strides[rows] * self.bits // 8

    @property
    def is_contiguous(self) -> bool:
        """True if the tensor lies in memory in the order of its dimensions, without gaps."""
        dense = 1
        for length, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if length != 1 and stride != dense:
                return False
            dense *= length
        return True

    @property
    def is_raw(self) -> bool:
        """True if the tensor is flat, of bytes or untyped elements."""
        return len(self.shape) == 1 and (self.dtype_name in _BYTES or self._is_untyped)

    def may_be(self, data_type: DataType) -> bool:
        """Return True if elements can be of a type: by name, as NumPy's stand-in, or untyped."""
        if self.data_type is data_type:
            return True
        if data_type.bits % 8:
            return self.dtype_name == "uint8"
        twin = numpy_dtype(data_type)
        return self.bits == data_type.bits and (self.dtype_name == twin.name or self._is_untyped)

    @property
    def _is_untyped(self) -> bool:
        dtype = self.dtype  # extensions such as bfloat16 have a type of their own
        return (
            isinstance(dtype, np.dtype)
            and dtype.type in (np.void, np.bytes_)
            and dtype.fields is None
        )

    def __str__(self) -> str:
        """Return `int16 of shape (3, 5)`, with strides if the tensor is not C-contiguous."""
        strides = ""
        if not self.is_contiguous:
            strides = f" and strides {self.strides} (in elements)"
        return f"{self.dtype_name} of shape {self.shape}{strides}"


def numpy_dtype(data_type: DataType) -> np.dtype[Any]:
    """Return NumPy's type for the elements, or the unsigned integer of that width.

    Elements of less than a byte are packed into uint8.
    """
    return _TWINS.get(data_type) or np.dtype(f"u{max(data_type.bits // 8, 1)}")


def array_form(desc: CacheDesc) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return shape and type of an array over a tensor; rows of packed elements are whole bytes."""
    shape = desc.shape
    if desc.data_type.bits % 8:
        shape = (*shape[: desc.batch_dim_index + 1], desc.row_nbytes)
    return shape, numpy_dtype(desc.data_type)


def read_form(name: str, given: Any) -> TensorForm:
    """Return the form of the tensor `given`; the form keeps the tensor alive."""
    if isinstance(given, np.ndarray):
        return _of_array(name, given)
    if all(callable(getattr(given, name, None)) for name in ("data_ptr", "stride", "element_size")):
        return _of_torch(name, given)
    if hasattr(given, "__dlpack__"):
        exported = read_dlpack(name, given)
        return TensorForm(
            name,
            exported.shape,
            exported.strides,
            exported.bits,
            exported.dtype,
            exported.address,
            exported.read_only,
            exported.device,
            exported.capsule,
        )
    try:
        is_cuda_array = hasattr(given, "__cuda_array_interface__")
    except Exception as error:  # a property may raise anything
        raise _withheld(name, given, error) from error
    if is_cuda_array:
        return _of_cuda_array(name, given)
    try:
        known = hasattr(given, "__array_interface__")
        array = np.asarray(given if known else memoryview(given))
    except TypeError:
        raise TypeError(
            f"{name} must be an array (NumPy, torch, DLPack, CUDA array interface or buffer "
            f"protocol), not {type(given).__name__}"
        ) from None
    except (AttributeError, BufferError, OverflowError, RuntimeError, ValueError) as error:
        raise _withheld(name, given, error) from error
    return _of_array(name, array)


def _withheld(name: str, given: Any, error: Exception) -> LLMException:
    return invalid(f"{name}: {type(given).__name__} does not export its memory: {error}")


def _of_array(name: str, array: NDArray[Any]) -> TensorForm:
    dtype = array.dtype
    _check_no_objects(name, dtype)
    return TensorForm(
        name,
        array.shape,
        _in_elements(name, array.shape, array.strides, dtype.itemsize),
        8 * dtype.itemsize,
        dtype,
        array.__array_interface__["data"][0],
        not array.flags.writeable,
        None,
        array,
    )


def _check_no_objects(name: str, dtype: np.dtype[Any]) -> None:
    if dtype.hasobject:
        raise TypeError(
            f"{name} has dtype {dtype}: references to Python objects, whose bytes cannot be copied"
        )


def _in_elements(
    name: str, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int
) -> tuple[int, ...]:
    """Convert strides in bytes to strides in elements."""
    width = max(itemsize, 1)
    for length, stride in zip(shape, strides, strict=True):
        if stride % width and length > 1:
            raise invalid(
                f"{name} of shape {shape} has strides {strides} in bytes, and elements of {width}; "
                "contiguous memory is needed, such as a copy of it"
            )
    return tuple([stride // width for stride in strides])


def _of_torch(name: str, given: Any) -> TensorForm:
    try:
        address, width = index(given.data_ptr()), index(given.element_size())
        shape, strides = tuple(map(index, given.shape)), tuple(map(index, given.stride()))
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:  # sparse, or a fake
        raise _withheld(name, given, error) from error
    if len(shape) != len(strides) or width < 0 or not 0 <= address <= UINT64_MAX:
        raise invalid(
            f"{name}: {type(given).__name__} has shape {shape}, strides {strides}, elements of "
            f"{width} bytes and address {address}, which is not valid"
        )
    where = str(getattr(given, "device", "cpu"))
    kind, _, number = where.partition(":")
    device = TensorDevice(kind, int(number) if number.isdecimal() else None, f"device {where}")
    return TensorForm(
        name,
        shape,
        strides,
        8 * width,
        getattr(given, "dtype", None),
        address,
        False,
        None if kind == "cpu" else device,
        given,
    )


_CUDA_ARRAY_VERSIONS = (2, 3)
"""Versions of the CUDA array interface: 3 adds `stream` to 2."""


def _of_cuda_array(name: str, given: Any) -> TensorForm:
    """Read the form of an array without DLPack, such as numba's, by the CUDA array interface.

    Its `stream` is ignored: only code that reads the array's bytes must wait for that stream.
    """
    try:
        interface = dict(given.__cuda_array_interface__)
    except Exception as error:
        raise _withheld(name, given, error) from error
    field = "version"
    try:
        version, mask = index(interface[field]), interface.get("mask")
        field = "typestr"
        dtype = np.dtype(interface[field])
        field = "data"
        address, read_only = index(interface[field][0] or 0), bool(interface[field][1])
        field = "shape"
        shape = tuple(map(index, interface[field]))
        field = "strides"
        strides = interface.get(field)
        steps = None if strides is None else tuple(map(index, strides))
    except (IndexError, KeyError, TypeError, ValueError) as error:
        has = f"{field}={shown(interface[field])}" if field in interface else f"no {field}"
        raise invalid(
            f"{name}: {type(given).__name__} says {has} in its CUDA array interface, which cannot "
            "be read"
        ) from error
    if version not in _CUDA_ARRAY_VERSIONS:
        raise invalid(
            f"{name} speaks version {version} of the CUDA array interface; kvplan reads "
            f"{' and '.join(map(str, _CUDA_ARRAY_VERSIONS))}"
        )
    if mask is not None:
        raise invalid(f"{name} has a mask, which a cache cannot have")
    _check_no_objects(name, dtype)
    if steps is None:
        steps = tuple(dtype.itemsize * math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    if len(shape) != len(steps) or min(shape, default=0) < 0 or not 0 <= address <= UINT64_MAX:
        raise invalid(
            f"{name}: {type(given).__name__} has shape {shape}, strides {steps} in bytes and "
            f"address {address}, which is not valid"
        )
    return TensorForm(
        name,
        shape,
        _in_elements(name, shape, steps, dtype.itemsize),
        8 * dtype.itemsize,
        dtype,
        address,
        read_only,
        TensorDevice("cuda", None, "a CUDA device"),
        given,
    )

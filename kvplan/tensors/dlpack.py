"""DLPack: the memory of another library's tensor, without that library.

NumPy reads DLPack too, but without bfloat16 and devices, and treats the unversioned capsules of
older libraries as read-only. This module reads only the form and the address of a tensor, and
therefore asks the library not to synchronize.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any, NamedTuple

from kvplan.status import invalid
from kvplan.types import MAX_DIMS
from kvplan.validation import UINT64_MAX


class _Tensor(ctypes.Structure):
    """DLTensor of dlpack.h."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Versioned(ctypes.Structure):
    """DLManagedTensorVersioned; the unversioned one begins with its DLTensor."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


class TensorDevice(NamedTuple):
    """The device of a tensor, as reported by its library.

    Attributes:
        kind: the kind of device, such as "cuda" or "npu"; empty: unknown.
        number: the number of the device in its library; None: unknown.
        text: the device, for messages.
    """

    kind: str
    number: int | None
    text: str


class Exported(NamedTuple):
    """A tensor as its library exports it.

    Attributes:
        capsule: keeps the memory alive.
        address: the address of the first element.
        shape: the lengths of the dimensions.
        strides: the strides in elements.
        bits: the bits of an element.
        dtype: the name of the type in NumPy or ml_dtypes; another text if they lack the type.
        read_only: True if the memory must not be written.
        device: the device of the memory; None: host memory.
    """

    capsule: object
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    bits: int
    dtype: str
    read_only: bool
    device: TensorDevice | None


_MAX_VERSION = (1, 0)
_READ_ONLY = 1
_PADDED = 4
"""Flag: elements of less than a byte are not packed."""

_ADDRESSABLE = (1, 3, 11)
"""Device types of host memory: CPU, and pinned for CUDA or ROCm."""

_DEVICES = {2: "cuda", 10: "rocm"}
_MANAGED = 13
_EXTENSION = 12  # a device of any library; torch_npu's tensors have it

_STREAMS = (2, 10, 13)
"""Device types whose libraries accept `stream=-1`: no synchronization."""

# By DLDataTypeCode: names of types to which the width is appended.
_NUMBERS = {0: "int", 1: "uint", 2: "float", 5: "complex"}
_TYPES = {
    (4, 16): "bfloat16",
    (6, 8): "bool",
    (10, 8): "float8_e4m3fn",
    (12, 8): "float8_e5m2",
    (14, 8): "float8_e8m0fnu",
    (15, 6): "float6_e2m3fn",
    (16, 6): "float6_e3m2fn",
    (17, 4): "float4_e2m1fn",
}

_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.argtypes = [ctypes.py_object, ctypes.c_char_p]
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.argtypes, _pointer.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p


def read_dlpack(name: str, given: Any) -> Exported:
    """Read the tensor `given` by its `__dlpack__`, without a copy."""
    capsule = _capsule(name, given)
    flags = 0  # libraries without versions hand out writable memory only
    if _is_valid(capsule, b"dltensor_versioned"):
        versioned = _Versioned.from_address(_pointer(capsule, b"dltensor_versioned"))
        if versioned.major != _MAX_VERSION[0]:
            raise invalid(f"{name} speaks DLPack {versioned.major}; kvplan reads version 1")
        flags, tensor = versioned.flags, versioned.tensor
    elif _is_valid(capsule, b"dltensor"):
        tensor = _Tensor.from_address(_pointer(capsule, b"dltensor"))
    else:
        raise invalid(f"{name}: __dlpack__ returned {capsule!r}, which is not a DLPack capsule")
    if not 0 <= tensor.ndim <= MAX_DIMS or (tensor.ndim and not tensor.shape):
        raise invalid(
            f"{name} has {tensor.ndim} dimensions{'' if tensor.shape else ' and no shape'} by "
            f"DLPack; allowed are [0, {MAX_DIMS}]"
        )
    shape = tuple(tensor.shape[: tensor.ndim]) if tensor.ndim else ()
    if min(shape, default=0) < 0:
        raise invalid(f"{name} has shape {shape} by DLPack; lengths are in [0, 2**63)")
    strides = tensor.strides[: tensor.ndim] if tensor.strides else _c_strides(shape)
    if not tensor.data:
        address = 0  # the offset is ignored
    elif (address := tensor.data + tensor.byte_offset) > UINT64_MAX:
        raise invalid(f"{name} has byte_offset={tensor.byte_offset}, beyond all addresses")
    bits = 8 if flags & _PADDED and tensor.bits < 8 else tensor.bits
    return Exported(
        capsule,
        address,
        shape,
        tuple(strides),
        bits * tensor.lanes,
        _type_name(tensor.code, tensor.bits, tensor.lanes),
        bool(flags & _READ_ONLY),
        None
        if tensor.device_type in _ADDRESSABLE
        else _device(tensor.device_type, tensor.device_id),
    )


def _device(device_type: int, number: int) -> TensorDevice:
    if (kind := _DEVICES.get(device_type)) is not None:
        return TensorDevice(kind, number, f"device {kind}:{number}")
    if device_type == _MANAGED:
        return TensorDevice("cuda managed", None, "managed memory of CUDA")
    if device_type == _EXTENSION:
        return TensorDevice("", number, f"device {number} of an extension (DLPack 12)")
    return TensorDevice(f"DLPack {device_type}", number, f"DLPack device {device_type}")


def _type_name(code: int, bits: int, lanes: int) -> str:
    name = _TYPES.get((code, bits))
    if name is None and code in _NUMBERS:
        name = f"{_NUMBERS[code]}{bits}"
    if name is None or lanes != 1:
        return f"DLPack type {code} of {bits} bits x {lanes}"
    return name


def _capsule(name: str, given: Any) -> object:
    try:
        stream = _stream(given)
        try:
            return given.__dlpack__(**stream, max_version=_MAX_VERSION)
        except TypeError:  # an older library does not know max_version
            return given.__dlpack__(**stream)
    except Exception as error:  # a library may raise anything
        raise invalid(
            f"{name}: {type(given).__name__} does not export its memory: {error}"
        ) from error


def _stream(given: Any) -> dict[str, int]:
    """Return the arguments of `__dlpack__` that keep the library from synchronizing.

    On a host only None is allowed, the default. On a device, None orders the library's stream
    before the default stream, and -1 leaves synchronization to the consumer.
    """
    where = getattr(given, "__dlpack_device__", None)
    if where is None or where()[0] not in _STREAMS:
        return {}
    # JAX would pass -1 to the driver as a stream; without a number, JAX orders nothing.
    if type(given).__module__.partition(".")[0] in ("jax", "jaxlib"):
        return {}
    return {"stream": -1}


def _c_strides(shape: tuple[int, ...]) -> list[int]:
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]

"""DLPack: the memory of another library's tensor, without that library.

NumPy reads DLPack too, but knows no bfloat16, and takes what older libraries offer (unversioned
capsules) for read-only. Bytes are all that is needed here.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvplan.status import invalid


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


_MAX_VERSION = (1, 0)
_READ_ONLY = 1
_ADDRESSABLE = {1: "CPU", 3: "pinned for CUDA", 11: "pinned for ROCm"}

_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.argtypes = [ctypes.py_object, ctypes.c_char_p]
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.argtypes, _pointer.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p


class _Exported:
    """A tensor's bytes as NumPy takes them; holds the capsule, and with it the memory."""

    def __init__(self, capsule: object, address: int, nbytes: int, read_only: bool) -> None:
        self._capsule = capsule
        self.__array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, read_only),
        }


def from_dlpack(name: str, given: Any) -> NDArray[np.uint8]:
    """Return the bytes of `given`, which has `__dlpack__`, without copying; they hold it.

    Raises:
        LLMException: LLM_PARAM_INVALID, naming `name`: its library does not hand it out, it is not
            in host memory, not C-contiguous, or empty.
    """
    capsule = _capsule(name, given)
    read_only = False  # libraries without versions hand out writable memory only
    if _is_valid(capsule, b"dltensor_versioned"):
        versioned = _Versioned.from_address(_pointer(capsule, b"dltensor_versioned"))
        if versioned.major != _MAX_VERSION[0]:
            raise invalid(f"{name} speaks DLPack {versioned.major}; kvplan reads version 1")
        read_only, tensor = bool(versioned.flags & _READ_ONLY), versioned.tensor
    elif _is_valid(capsule, b"dltensor"):
        tensor = _Tensor.from_address(_pointer(capsule, b"dltensor"))
    else:
        raise invalid(f"{name}: __dlpack__ gave {capsule!r}, which is no DLPack capsule")
    if tensor.device_type not in _ADDRESSABLE:
        raise invalid(
            f"{name} is on DLPack device {tensor.device_type}; it must be in host memory: one of "
            f"{_ADDRESSABLE}"
        )
    shape = tensor.shape[: tensor.ndim]
    strides = tensor.strides[: tensor.ndim] if tensor.strides else _c_strides(shape)
    nbytes = -(-math.prod(shape) * tensor.bits * tensor.lanes // 8)
    check_contiguous(name, shape, strides, nbytes)
    return np.asarray(_Exported(capsule, tensor.data + tensor.byte_offset, nbytes, read_only))


def check_contiguous(name: str, shape: Sequence[int], strides: Sequence[int], nbytes: int) -> None:
    """Refuse an array that is empty, or not C-contiguous; strides are in elements.

    Raises:
        LLMException: LLM_PARAM_INVALID, naming the permutation that would be C-contiguous.
    """
    if nbytes == 0:
        raise invalid(f"{name} of shape {tuple(shape)} is empty")
    if _is_contiguous(shape, strides):
        return
    # Stable: of equal strides one is of a dimension of length 1, which may stand anywhere.
    order = sorted(range(len(shape)), key=lambda dim: -strides[dim])
    turned = [shape[dim] for dim in order]
    remedy = "contiguous memory is needed, such as a copy of it"
    if _is_contiguous(turned, [strides[dim] for dim in order]):
        axes = ", ".join(map(str, order))
        remedy = (
            f"permuted by ({axes}) it is, of shape {tuple(turned)}: give that (transpose of "
            "NumPy, permute of torch), with a cache_desc of that shape"
        )
    raise invalid(
        f"{name} of shape {tuple(shape)} and strides {tuple(strides)} (in elements) is not "
        f"C-contiguous; {remedy}"
    )


def _is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    # The stride of a dimension of length 1 is never used, and may be anything.
    return all(
        length == 1 or stride == expected
        for length, stride, expected in zip(shape, strides, _c_strides(shape), strict=True)
    )


def _capsule(name: str, given: Any) -> object:
    try:
        try:
            return given.__dlpack__(max_version=_MAX_VERSION)
        except TypeError:  # it does not know that argument
            return given.__dlpack__()
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise invalid(
            f"{name}: {type(given).__name__} does not hand out its memory: {error}"
        ) from error


def _c_strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]

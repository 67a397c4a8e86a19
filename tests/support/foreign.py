"""Stand-ins for tensors of libraries that are not installed here."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from kvplan.tensors import dlpack


class _Name:
    """An object that prints like torch's dtypes and devices."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


class TorchTensor:
    """A stand-in for `torch.Tensor` with the attributes that kvplan reads.

    Args:
        array: its memory.
        dtype: torch's name of the type; None: NumPy's.
        address: address of the memory; None: the array's.
    """

    def __init__(
        self,
        array: np.ndarray,
        dtype: str | None = None,
        device: str = "cpu",
        address: int | None = None,
    ) -> None:
        self.array = array
        self.address = array.ctypes.data if address is None else address
        self.shape = array.shape  # torch.Size is a tuple
        self.dtype = _Name(f"torch.{dtype or array.dtype.name}")
        self.device = _Name(device)

    def data_ptr(self) -> int:
        return self.address

    def stride(self) -> tuple[int, ...]:
        return tuple(item // self.array.itemsize for item in self.array.strides)

    def element_size(self) -> int:
        return self.array.itemsize

    def permute(self, *dims: int) -> TorchTensor:
        name = self.dtype.text.removeprefix("torch.")
        return TorchTensor(self.array.transpose(dims), name, self.device.text)

    def __dlpack__(self, **_: Any) -> object:
        raise RuntimeError("Can't export tensors that require gradient, use tensor.detach()")


def exported_by_numpy(
    array: np.ndarray, max_version: tuple[int, int] | None
) -> tuple[object, ctypes.Structure, dlpack._Tensor]:
    """Return a DLPack capsule of an array, its content, and the tensor in the content.

    NumPy before 2.1 refuses `max_version`, as libraries from before DLPack 1.0 do.
    """
    if max_version is None:
        capsule = array.__dlpack__()
        tensor = dlpack._Tensor.from_address(dlpack._pointer(capsule, b"dltensor"))
        return capsule, tensor, tensor
    capsule = array.__dlpack__(max_version=max_version)
    address = dlpack._pointer(capsule, b"dltensor_versioned")
    versioned = dlpack._Versioned.from_address(address)
    return capsule, versioned, versioned.tensor


class DLPackTensor:
    """A tensor of a library that supports DLPack 1.0, over memory of NumPy.

    Args:
        code: code of its type in dlpack.h; None: NumPy's.
    """

    def __init__(self, array: np.ndarray, *, code: int | None = None, device: int = 1) -> None:
        self.array = array
        self.code = code
        self.device = device

    def __dlpack__(self, *, max_version: tuple[int, int] | None = None) -> object:
        capsule, _, exported = exported_by_numpy(self.array, max_version)
        if self.code is not None:
            exported.code = self.code
        exported.device_type = self.device
        self.change(exported)
        return capsule

    def change(self, exported: dlpack._Tensor) -> None:
        """Do nothing; subclasses change fields of the exported tensor."""


class GpuTensor:
    """A tensor of a library that has GPUs and supports DLPack, over memory outside of NumPy.

    It is as strict as the array API demands: `stream` is only for devices that have streams.

    Args:
        array: its shape and type; the memory of the array is never used.
        address: address of its memory; None: the array's.
        device: type and number, as in dlpack.h.
        read_only: True if it is exported as read-only.
    """

    def __init__(
        self,
        array: np.ndarray,
        address: int | None = None,
        *,
        device: tuple[int, int] = (2, 0),
        code: int | None = None,
        read_only: bool = False,
    ) -> None:
        if read_only and np.lib.NumpyVersion(np.__version__) < "2.1.0":
            pytest.skip("capsules without a version, as of NumPy before 2.1, cannot be read-only")
        self.array = array
        self.address = array.ctypes.data if address is None else address
        self.device, self.code, self.read_only = device, code, read_only
        self.streams: list[int | None] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(
        self, *, stream: int | None = None, max_version: tuple[int, int] | None = None
    ) -> object:
        if stream is not None and self.device[0] not in (2, 10, 13):
            raise BufferError("stream must be None: this is not a device with streams")
        capsule, exported, tensor = exported_by_numpy(self.array, max_version)
        self.streams.append(stream)
        if self.read_only:
            exported.flags |= dlpack._READ_ONLY
        tensor.data, tensor.byte_offset = self.address, 0
        tensor.device_type, tensor.device_id = self.device
        if self.code is not None:
            tensor.code = self.code
        return capsule


class CudaArray:
    """An array with only `__cuda_array_interface__`, like numba's.

    Args:
        array: its shape and type; the memory of the array is never used.
        address: address of its memory; None: the array's.
        changes: changed fields of the interface.
    """

    def __init__(self, array: np.ndarray, address: int | None = None, **changes: Any) -> None:
        self.array = array
        said = {
            "version": 3,
            "shape": array.shape,
            "typestr": array.dtype.str,
            "data": (array.ctypes.data if address is None else address, False),
            "strides": None if array.flags.c_contiguous else array.strides,
            "stream": 1,
            **changes,
        }
        self.__cuda_array_interface__ = said


class InterfaceOnly:
    """An object with only `__array_interface__`."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.__array_interface__ = array.__array_interface__


def as_buffer(array: np.ndarray) -> Any:
    """Return the memory of an array of float32 as a ctypes array of the same shape."""
    kind: Any = ctypes.c_float
    for length in reversed(array.shape):
        kind = kind * length
    return kind.from_buffer(array)

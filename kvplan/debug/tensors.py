"""The bytes of the compared tensors, and when two cells are equal."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvplan.planning.part import Part
from kvplan.planning.texts import plural
from kvplan.status import invalid
from kvplan.tensors.form import read_form
from kvplan.types import DataType

Bytes = NDArray[np.uint8]
Same = Callable[[Bytes, Bytes], NDArray[np.bool_]]

CHUNK: Final = 16 << 20
"""Bytes of a tensor that are compared at once."""

_FLOATS: Final = {
    DataType.DT_FLOAT16: "<f2",
    DataType.DT_BF16: "<u2",  # the upper half of a float
    DataType.DT_FLOAT: "<f4",
    DataType.DT_DOUBLE: "<f8",
}


def tensors_of(name: str, given: Any, parts: Sequence[Part], side: str) -> list[Bytes]:
    """Return the bytes of each tensor; refuse tensors of another size than the plan's."""
    if isinstance(given, np.ndarray) or not isinstance(given, Sequence):
        raise TypeError(f"{name}={type(given).__name__} must be a sequence of tensors")
    sizes = [
        cache.tensor_nbytes
        for part in parts
        for cache in [getattr(part, side)]
        for _ in range(cache.num_tensors)
    ]
    if len(given) != len(sizes):
        raise invalid(f"{name} has {plural(len(given), 'tensor')}; the plan needs {len(sizes)}")
    found = []
    for position, (tensor, nbytes) in enumerate(zip(given, sizes, strict=True)):
        array = _bytes_of(f"{name}[{position}]", tensor, nbytes)
        if array.nbytes != nbytes:
            raise invalid(
                f"{name}[{position}] has {array.nbytes} bytes; the plan's tensors have {nbytes}"
            )
        found.append(array)
    return found


def _bytes_of(name: str, tensor: Any, nbytes: int) -> Bytes:
    """Return the bytes of a tensor, and those between its rows if the plan has them so."""
    form = read_form(name, tensor)
    if form.device is not None:
        raise invalid(f"{name} is on {form.device.text}; copy it to the host first")
    if form.nbytes == 0:
        return np.empty(0, np.uint8)
    in_order = form.order == (*range(len(form.shape)),)
    if not (form.is_contiguous or (in_order and form.span_nbytes == nbytes)):
        if isinstance(tensor, np.ndarray):
            return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
        raise invalid(f"{name} is not contiguous: strides {form.strides} of shape {form.shape}")
    memory: Any = (ctypes.c_uint8 * form.span_nbytes).from_address(form.address)
    memory.owner = form.owner  # for as long as the array lives
    array: Bytes = np.frombuffer(memory, np.uint8)
    return array


def _same_bits(a: Bytes, b: Bytes) -> NDArray[np.bool_]:
    word = f"u{math.gcd(a.shape[1], 8)}"  # a few words are faster than many bytes
    left, right = a.view(word), b.view(word)
    return np.asarray(left[:, 0] == right[:, 0] if left.shape[1] == 1 else (left == right).all(1))


def comparison(part: Part, atol: float) -> Same:
    """Return a function that tells which cells, of shape (n, bytes), are equal: (n,)."""
    if not atol:
        return _same_bits
    data_type = part.dst.data_type
    if data_type not in _FLOATS:
        name = "opaque rows" if data_type is None else data_type.name
        allowed = ", ".join(dtype.name for dtype in _FLOATS)
        raise invalid(f"atol={atol} must be 0 for {name}; other values are for {allowed}")

    def values(cells: Bytes) -> NDArray[np.float64]:
        raw = np.ascontiguousarray(cells).view(_FLOATS[data_type])
        if data_type is DataType.DT_BF16:
            raw = (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return raw.astype(np.float64)

    def same(a: Bytes, b: Bytes) -> NDArray[np.bool_]:
        left, right = values(a), values(b)
        with np.errstate(invalid="ignore"):
            close = (left == right) | (np.abs(left - right) <= atol)
        return np.asarray((close | (np.isnan(left) & np.isnan(right))).all(axis=1))

    return same

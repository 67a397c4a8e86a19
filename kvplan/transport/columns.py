"""Tensors that a caller names by addresses and sizes, as columns of 64 bits."""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING

import numpy as np

from kvplan.status import invalid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Column = NDArray[np.uint64]


def sized_tensors(
    addresses: Sequence[int] | Column, nbytes: int | Sequence[int] | Column
) -> tuple[Column, Column]:
    """The address and the size of each tensor, in fresh columns.

    Raises:
        LLMException: LLM_PARAM_INVALID: no tensor, another number of sizes than one or as many, or
            a number of more than 64 bits.
        TypeError: not whole numbers.
    """
    starts = _uint64("addresses", addresses)
    sizes = _uint64("nbytes", [nbytes] if isinstance(nbytes, int) else nbytes)
    if not starts.size or sizes.size not in (1, starts.size):
        raise invalid(
            f"addresses are {starts.size} and nbytes {sizes.size}; at least one address is "
            "needed, and one nbytes for each or one for all"
        )
    return starts, np.broadcast_to(sizes, starts.shape).copy()


def _uint64(name: str, values: Sequence[int] | Column) -> Column:
    """A fresh column; what is no whole number of 64 bits is refused and not rounded."""
    if isinstance(values, np.ndarray) and values.dtype.kind not in "iu":
        raise TypeError(f"{name} has dtype {values.dtype}; it must be of whole numbers")
    numbers = values.ravel().tolist() if isinstance(values, np.ndarray) else list(values)
    for number in numbers:
        if not 0 <= index(number) < 2**64:
            raise invalid(f"{name} holds {number}; it must be in [0, 2**64)")
    return np.array(numbers, dtype=np.uint64)

"""How large a tensor is."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvplan.status import LLMException
from kvplan.types import DataType
from kvplan.validation import INT64_MAX

_STRING_BITS = 128  # the header of a string: where it is, and how long


def calc_tensor_size(shape: Sequence[int], data_type: int) -> int:
    """Return the bytes of a tensor; -1 where it has no size.

    Args:
        shape: its dimensions, each > 0.
        data_type: the number of its type.
    """
    try:
        kind = DataType(data_type)
        bits = _STRING_BITS if kind is DataType.DT_STRING else kind.bits
    except (ValueError, LLMException):
        return -1
    if any(length < 1 for length in shape):
        return -1
    nbytes = -(-math.prod(shape) * bits // 8)
    return nbytes if nbytes <= INT64_MAX else -1

"""The oracle: a plan, executed by NumPy one run at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvplan.planning.plan import PlacedPart, Plan
from kvplan.planning.side import Side
from kvplan.status import invalid
from kvplan.validation import check_type


def execute(plan: Plan, src: Sequence[NDArray[Any]], dst: Sequence[NDArray[Any]]) -> None:
    """Execute `plan` from `src` to `dst`, each with one C-contiguous array for each tensor.

    The arrays of several parts follow each other. Errors are raised before the first byte is
    copied.

    Args:
        plan: the plan to execute.
        src, dst: the arrays of both sides.

    Raises:
        TypeError: `plan` is not a Plan, or an element is not a NumPy array.
        LLMException: LLM_PARAM_INVALID: arrays that do not fit the plan's sides (number, bytes,
            contiguity, writability).
    """
    placed = [*check_type("plan", plan, Plan).placed()]
    for name, arrays in (("src", src), ("dst", dst)):
        needed = sum(getattr(placed_part.part, name).num_tensors for placed_part in placed)
        if len(arrays) != needed:
            raise invalid(f"{name} has {len(arrays)} arrays; the plan needs {needed}")
    for copy in [_copying(placed_part, src, dst) for placed_part in placed]:
        copy()


def _copying(
    placed: PlacedPart, src: Sequence[NDArray[Any]], dst: Sequence[NDArray[Any]]
) -> Callable[[], None]:
    """Check the arrays of one part; return the function that copies."""
    part, _, src_first, dst_first = placed
    src_bytes = _as_bytes("src", src, src_first, part.src)
    dst_bytes = _as_bytes("dst", dst, dst_first, part.dst)
    pairs = [part.pair(index) for index in range(part.num_tensor_pairs)]
    for _, (tensor, _) in pairs:
        if not dst_bytes[tensor].flags.writeable:
            raise invalid(f"dst[{dst_first + tensor}] is read-only")
    runs = [*part.segments.expanded()]

    def copy() -> None:
        for (src_tensor, src_start), (dst_tensor, dst_start) in pairs:
            source, target = src_bytes[src_tensor][src_start:], dst_bytes[dst_tensor][dst_start:]
            for src_offset, dst_offset, nbytes in runs:
                target[dst_offset : dst_offset + nbytes] = source[src_offset : src_offset + nbytes]

    return copy


def _as_bytes(
    name: str, arrays: Sequence[NDArray[Any]], first: int, side: Side
) -> list[NDArray[np.uint8]]:
    """Return the bytes of the tensors of one part, which begin at `first` in `arrays`."""
    nbytes, views = side.tensor_nbytes, []
    for position, array in enumerate(arrays[first : first + side.num_tensors], first):
        check_type(f"{name}[{position}]", array, np.ndarray)
        if array.nbytes != nbytes or not array.flags.c_contiguous:
            raise invalid(
                f"{name}[{position}] has {array.nbytes} bytes"
                f"{'' if array.flags.c_contiguous else ', not contiguous'}; the plan needs "
                f"{nbytes} contiguous bytes"
            )
        views.append(array.reshape(-1).view(np.uint8))
    return views

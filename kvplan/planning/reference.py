"""The oracle: what a plan means, executed by NumPy, one segment at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvplan.planning.groups import AnyPlan, GroupPlan, Part
from kvplan.planning.plan import Plan
from kvplan.status import invalid
from kvplan.validation import check_type


def execute(plan: AnyPlan, src: Sequence[NDArray[Any]], dst: Sequence[NDArray[Any]]) -> None:
    """Copy what `plan` says from `src` to `dst`: one C-contiguous array for each tensor.

    Of a `GroupPlan` the arrays of all groups, one group after another. An error is raised before a
    byte is copied.

    Raises:
        TypeError: an element that is not a NumPy array.
        LLMException: LLM_PARAM_INVALID if the arrays do not fit the plan's sides (number, bytes,
            contiguity, writability).
    """
    parts = [*plan.parts()] if isinstance(plan, GroupPlan) else [Part("", plan, 0, 0, 0)]
    for name, arrays in (("src", src), ("dst", dst)):
        needed = sum(getattr(it.plan, name).num_tensors for it in parts)
        if len(arrays) != needed:
            raise invalid(f"{name} has {len(arrays)} arrays; the plan needs {needed}")
    for copy in [_copying(it.plan, src[it.src_tensor :], dst[it.dst_tensor :]) for it in parts]:
        copy()


def _copying(
    plan: Plan, src: Sequence[NDArray[Any]], dst: Sequence[NDArray[Any]]
) -> Callable[[], None]:
    """Check what one plan is to be executed with; returns what copies."""
    src_bytes = _as_bytes("src", src, plan.src.num_tensors, plan.src.tensor_nbytes)
    dst_bytes = _as_bytes("dst", dst, plan.dst.num_tensors, plan.dst.tensor_nbytes)
    pairs = [*zip(*(_located(plan, it) for it in ("src", "dst")), strict=True)]
    for _, (tensor, _) in pairs:
        if not dst_bytes[tensor].flags.writeable:
            raise invalid(f"dst[{tensor}] is read-only")
    runs = [*plan.segments.expanded()]

    def copy() -> None:
        for (src_tensor, src_start), (dst_tensor, dst_start) in pairs:
            source, target = src_bytes[src_tensor][src_start:], dst_bytes[dst_tensor][dst_start:]
            for src_offset, dst_offset, nbytes in runs:
                target[dst_offset : dst_offset + nbytes] = source[src_offset : src_offset + nbytes]

    return copy


def _located(plan: Plan, name: str) -> list[tuple[int, int]]:
    """The tensor of each view of a side, and the byte of it where the view begins."""
    side, views = getattr(plan, name), getattr(plan, f"{name}_tensors")
    if not plan.split:
        return [(tensor, 0) for tensor in views]
    tensors, starts = side.locate(views, plan.split, plan.tensors_per_layer)
    return [*zip(tensors.tolist(), starts.tolist(), strict=True)]


def _as_bytes(
    name: str, arrays: Sequence[NDArray[Any]], num_tensors: int, nbytes: int
) -> list[NDArray[np.uint8]]:
    views = []
    for position, array in enumerate(arrays[:num_tensors]):
        check_type(f"{name}[{position}]", array, np.ndarray)
        if array.nbytes != nbytes or not array.flags.c_contiguous:
            raise invalid(
                f"{name}[{position}] has {array.nbytes} bytes"
                f"{'' if array.flags.c_contiguous else ', not contiguous'}; the plan needs "
                f"{nbytes} contiguous bytes"
            )
        views.append(array.reshape(-1).view(np.uint8))
    return views

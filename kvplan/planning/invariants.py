"""Contract 1, checked: every byte in bounds on both sides, no destination byte written twice."""

from __future__ import annotations

import numpy as np

from kvplan.planning.layout import Side
from kvplan.planning.plan import Kind, Operation, Plan
from kvplan.planning.segments import Coalesce, Column
from kvplan.status import invalid
from kvplan.validation import INT64_MAX, UINT32_MAX

KINDS: dict[Operation, tuple[Kind, ...]] = {
    "pull_cache": ("C2C",),
    "pull_blocks": ("C2B", "B2B"),
    "push_cache": ("C2C",),
    "push_blocks": ("C2B", "B2B"),
    "copy_cache": ("C2C",),
    "copy_blocks": ("B2B",),
    "swap_blocks": ("B2B",),
}


def check_invariants(plan: Plan) -> None:
    """Check a plan that was not made by the planner (read from a file, or built by hand).

    Raises:
        LLMException: LLM_PARAM_INVALID naming the first segment or tensor that breaks a rule.
    """
    segments, t = plan.segments, plan.tensors_per_layer
    if len(segments) == 0 or not segments.nbytes.all():
        raise invalid("segments: a plan has at least one, and none of 0 bytes")
    least = len(segments)
    if plan.num_slices < least or (plan.coalesce is Coalesce.NONE and plan.num_slices != least):
        raise invalid(
            f"num_slices={plan.num_slices} of {least} segments, coalesce={plan.coalesce}: slices "
            "are merged, never cut"
        )
    letters = "2".join("B" if side.paged else "C" for side in (plan.src, plan.dst))
    if plan.kind != letters or plan.kind not in KINDS[plan.operation]:
        raise invalid(
            f"kind={plan.kind} of operation={plan.operation} between {plan.src.row}s and "
            f"{plan.dst.row}s must be {letters} and one of {KINDS[plan.operation]}"
        )
    for name, side, offsets, tensors in (
        ("src", plan.src, segments.src_offsets, plan.src_tensors),
        ("dst", plan.dst, segments.dst_offsets, plan.dst_tensors),
    ):
        if not 1 <= side.tensor_nbytes <= INT64_MAX or not 1 <= side.num_tensors <= UINT32_MAX:
            raise invalid(
                f"{name}: {side.num_tensors} tensors of {side.tensor_nbytes} bytes are out of "
                f"range [1, {UINT32_MAX}] and [1, {INT64_MAX}]"
            )
        _check_bounds(name, side, offsets, segments.nbytes)
        if not tensors or tensors.step != 1 or tensors.start < 0 or tensors.stop > side.num_tensors:
            raise invalid(
                f"{name}_tensors={tensors} must be a non-empty range of step 1 in "
                f"[0, {side.num_tensors})"
            )
        if tensors.start % t or (tensors.stop % t and tensors.stop != side.num_tensors):
            raise invalid(f"{name}_tensors={tensors} must hold whole layers of {t} tensors")
    if len(plan.src_tensors) != len(plan.dst_tensors):
        raise invalid(
            f"src_tensors={plan.src_tensors} and dst_tensors={plan.dst_tensors} must be of equal "
            "length"
        )
    if (overlap := first_overlap(segments.dst_offsets, segments.nbytes)) is not None:
        raise invalid(
            f"segments {overlap[0]} and {overlap[1]} write the same destination bytes, from "
            f"dst offset {int(segments.dst_offsets[overlap[1]])}"
        )


def first_overlap(starts: Column, nbytes: Column) -> tuple[int, int] | None:
    """Return the indices of two ranges [start, start + nbytes) that share a byte, or None."""
    order = np.argsort(starts, kind="stable")
    starts = starts[order]
    ends = starts + nbytes[order]
    clashes = np.flatnonzero(ends[:-1] > starts[1:])
    if not len(clashes):
        return None
    return int(order[clashes[0]]), int(order[clashes[0] + 1])


def _check_bounds(name: str, side: Side, offsets: Column, nbytes: Column) -> None:
    limit = np.uint64(side.tensor_nbytes)
    # Written so that no sum can wrap around.
    outside = np.flatnonzero((nbytes > limit) | (offsets > limit - np.minimum(nbytes, limit)))
    if len(outside):
        i = int(outside[0])
        raise invalid(
            f"segment {i}: {name} bytes [{int(offsets[i])}, {int(offsets[i]) + int(nbytes[i])}) "
            f"are outside the tensor's [0, {side.tensor_nbytes})"
        )

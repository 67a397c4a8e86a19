"""Binding: a plan's sides meet addresses, and what no plan can know is checked."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvnative._extents import extents_clash, first_below
from kvnative._lower import Descriptors, lower
from kvplan.execution.memory import Addresses, TensorMemory
from kvplan.planning.plan import Plan
from kvplan.planning.segments import first_overlap
from kvplan.status import invalid

_NONE = np.empty(0, dtype=np.uint64)


def bind(plan: Plan, src: TensorMemory, dst: TensorMemory, *, one_space: bool) -> Descriptors:
    """Return the descriptors of `plan` between two memories.

    Args:
        one_space: both sides' addresses are of this process, so they can be compared.

    Raises:
        LLMException: LLM_PARAM_INVALID if a memory does not fit its side, cannot be written, or if
            ranges of it overlap so that the result would depend on the order of the copies.
    """
    src_nbytes, dst_nbytes = plan.src.tensor_nbytes, plan.dst.tensor_nbytes
    _check_fits("src", plan.src.num_tensors, src_nbytes, src)
    _check_fits("dst", plan.dst.num_tensors, dst_nbytes, dst)
    if not dst.writable:
        raise invalid("dst is read-only")
    src_bases = src.addresses[plan.src_tensors.start : plan.src_tensors.stop]
    dst_bases = dst.addresses[plan.dst_tensors.start : plan.dst_tensors.stop]
    segments = plan.segments
    descriptors = lower(
        segments.src_offsets, segments.dst_offsets, segments.nbytes, src_bases, dst_bases
    )
    # Whether whole tensors overlap: cheap, and almost always the end of it.
    read = src_bases if one_space else _NONE
    if extents_clash(dst_bases, dst_nbytes, read, src_nbytes):
        _check_order_free(plan, descriptors, one_space)
    return descriptors


def _check_fits(name: str, tensors: int, needed: int, memory: TensorMemory) -> None:
    if len(memory.addresses) != tensors:
        raise invalid(f"{name} has {len(memory.addresses)} tensors; the plan needs {tensors}")
    if (short := first_below(memory.nbytes, needed)) >= 0:
        raise invalid(
            f"{name} tensor {short} has {int(memory.nbytes[short])} bytes; the plan needs {needed}"
        )


def _check_order_free(plan: Plan, descriptors: Descriptors, one_space: bool) -> None:
    """Refuse descriptors whose result would depend on their order. Expanded: rare and exact."""
    src, dst, nbytes = descriptors.src, descriptors.dst, descriptors.nbytes
    if (clash := first_overlap(dst, nbytes)) is not None:
        first, second = sorted(clash)
        raise invalid(
            f"dst tensors overlap in memory: {plan.origin(first)} and {plan.origin(second)} write "
            "the same bytes"
        )
    if not one_space:
        return
    # A copy onto itself changes nothing, so it neither spoils a reader nor is spoilt.
    writers = np.flatnonzero(src != dst)
    if not len(writers):
        return
    writers = writers[np.argsort(dst[writers])]
    starts, ends = dst[writers], dst[writers] + nbytes[writers]
    reader = _first_overlapped(src, src + nbytes, starts, ends)
    if reader is not None:
        writer = int(writers[np.searchsorted(ends, src[reader], side="right")])
        raise invalid(
            f"src and dst overlap in memory: {plan.origin(writer)} writes what "
            f"{plan.origin(reader)} reads; the result would depend on the order"
        )


def _first_overlapped(
    starts: Addresses, ends: Addresses, written_starts: Addresses, written_ends: Addresses
) -> int | None:
    """Index of the first range that overlaps one of the sorted, disjoint written ranges."""
    after = np.searchsorted(written_ends, starts, side="right")
    inside: NDArray[np.bool_] = after < len(written_starts)
    inside[inside] = written_starts[after[inside]] < ends[inside]
    found = np.flatnonzero(inside)
    return int(found[0]) if len(found) else None

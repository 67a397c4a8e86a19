"""Binding: the descriptors of a plan between two memories.

The result does not depend on the order of the copies. This module must not submit transfers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np

from kvnative._extents import first_below
from kvnative._lower import Descriptors, lower
from kvplan.execution.memory import Addresses
from kvplan.execution.rows import tensors_clash, view_addresses
from kvplan.planning.part import Part
from kvplan.planning.plan import PlacedPart, Plan
from kvplan.planning.segments import first_overlap, first_overlapped
from kvplan.status import LLMException, invalid

_NONE = np.empty(0, dtype=np.uint64)


class Bindable(Protocol):
    """The part of `TensorMemory` that binding reads."""

    @property
    def addresses(self) -> Addresses:
        """See `TensorMemory`."""

    @property
    def nbytes(self) -> Addresses:
        """See `TensorMemory`."""

    @property
    def writable(self) -> bool:
        """See `TensorMemory`."""


def bind(plan: Plan, src: Bindable, dst: Bindable, *, one_space: bool) -> Descriptors:
    """Return the descriptors of `plan` between two memories; `one_space`: both are of one process.

    Raises:
        LLMException: LLM_PARAM_INVALID if a memory does not fit its side, cannot be written, or if
            ranges of it overlap so that the result would depend on the order of the copies.
    """
    if len(plan.parts) > 1:
        return _bind_parts(plan, src, dst, one_space)
    return _bind_part(plan.parts[0], src, dst, one_space)


def _bind_part(part: Part, src: Bindable, dst: Bindable, one_space: bool) -> Descriptors:
    """Return the descriptors of one part."""
    for name, side, memory in (("src", part.src, src), ("dst", part.dst, dst)):
        if len(memory.addresses) != side.num_tensors:
            raise invalid(
                f"{name} has {len(memory.addresses)} tensors; the plan needs {side.num_tensors}"
            )
        needed = side.tensor_nbytes
        if (short := first_below(memory.nbytes, needed)) >= 0:
            raise invalid(
                f"{name} tensor {short} has {int(memory.nbytes[short])} bytes; the plan needs "
                f"{needed}"
            )
    if not dst.writable:
        raise invalid("dst is read-only")
    read = src_bases = src.addresses[part.src_tensors.start : part.src_tensors.stop]
    written = dst_bases = dst.addresses[part.dst_tensors.start : part.dst_tensors.stop]
    if part.split:  # views are adjacent in a tensor
        views = part.split, part.tensors_per_layer
        read, src_bases, _ = view_addresses(part.src, src.addresses, part.src_tensors, *views)
        written, dst_bases, _ = view_addresses(part.dst, dst.addresses, part.dst_tensors, *views)
    segments = part.segments
    descriptors = lower(
        segments.src_offsets,
        segments.dst_offsets,
        segments.nbytes,
        src_bases,
        dst_bases,
        None,
        segments.repeats,
    )
    # Compare whole tensors first, which is cheap and almost always decides.
    if tensors_clash(part.dst, written, part.src, read if one_space else _NONE):
        check_order_free(part, descriptors, one_space)
    return descriptors


class _Tensors(NamedTuple):
    """Some of the tensors of a memory."""

    addresses: Addresses
    nbytes: Addresses
    writable: bool

    @classmethod
    def of(cls, memory: Bindable, first: int, count: int) -> _Tensors:
        part = slice(first, first + count)
        return cls(memory.addresses[part], memory.nbytes[part], memory.writable)


def _bind_parts(plan: Plan, src: Bindable, dst: Bindable, one_space: bool) -> Descriptors:
    """Return the descriptors of all parts, one part after the other, as one array."""
    placed = [*plan.placed()]
    for name, memory in (("src", src), ("dst", dst)):
        needed = sum(getattr(entry.part, name).num_tensors for entry in placed)
        if len(memory.addresses) != needed:
            raise invalid(
                f"{name} has {len(memory.addresses)} tensors; the parts of the plan need {needed}"
            )
    each = []
    for part, _, src_tensor, dst_tensor in placed:
        theirs = _Tensors.of(src, src_tensor, part.src.num_tensors)
        ours = _Tensors.of(dst, dst_tensor, part.dst.num_tensors)
        try:
            bound = _bind_part(part.labelled(""), theirs, ours, one_space)
        except LLMException as error:
            text = f"part {part.label}: {error.args[0]}"
            raise LLMException(text, status_code=error.status_code) from None
        each.append(bound)
    descriptors = Descriptors.joined(each)
    # As for one part, compare whole tensors before bytes.
    extents = written_extents(placed, dst.addresses, dst.nbytes)
    if extents is None or (
        one_space
        and first_overlapped(src.addresses, src.addresses + src.nbytes, *extents) is not None
    ):
        check_order_free(plan, descriptors, one_space)
    return descriptors


def written_extents(
    placed: Sequence[PlacedPart], addresses: Addresses, nbytes: Addresses
) -> tuple[Addresses, Addresses] | None:
    """Return first and last + 1 of the tensors that parts write to, ascending and disjoint.

    Several parts may write to a tensor, such as layers with and without a sliding window. Then
    their segments are compared, once for all tensors that the same parts share. None: some tensors
    overlap otherwise, or parts may write the same bytes.
    """
    order = np.argsort(addresses)
    starts, ends = addresses[order], addresses[order] + nbytes[order]
    if not (starts[1:] < ends[:-1]).any():
        return starts, ends
    writers: dict[int, list[int]] = {}
    sizes: dict[int, int] = {}
    for number, entry in enumerate(placed):
        if entry.part.split:
            return None
        first = entry.dst_tensor + entry.part.dst_tensors.start
        for address in addresses[first : first + entry.part.num_tensor_pairs].tolist():
            writers.setdefault(address, []).append(number)
            sizes[address] = max(sizes.get(address, 0), entry.part.dst.tensor_nbytes)
    if any(a + sizes[a] > b for a, b in pairwise(sorted(writers))):
        return None
    for together in {tuple(numbers) for numbers in writers.values() if len(numbers) > 1}:
        runs = [placed[number].part.segments.expanded() for number in together]
        columns = ([getattr(run, name) for run in runs] for name in ("dst_offsets", "nbytes"))
        if first_overlap(*map(np.concatenate, columns)) is not None:
            return None
    firsts = np.array(sorted(writers), dtype=np.uint64)
    lengths = np.array([sizes[address] for address in sorted(writers)], dtype=np.uint64)
    return firsts, firsts + lengths


def check_order_free(plan: Plan | Part, descriptors: Descriptors, one_space: bool) -> None:
    """Refuse descriptors whose result would depend on their order. It is slow and exact."""
    src, dst, nbytes = descriptors.src, descriptors.dst, descriptors.nbytes
    if (clash := first_overlap(dst, nbytes)) is not None:
        first, second = sorted(clash)
        raise invalid(
            f"dst tensors overlap in memory: {plan.origin(first)} and {plan.origin(second)} write "
            "the same bytes"
        )
    if not one_space:
        return
    # A copy onto itself changes nothing, so it cannot conflict.
    writers = np.flatnonzero(src != dst)
    if not len(writers):
        return
    writers = writers[np.argsort(dst[writers])]
    starts, ends = dst[writers], dst[writers] + nbytes[writers]
    reader = first_overlapped(src, src + nbytes, starts, ends)
    if reader is not None:
        writer = int(writers[np.searchsorted(ends, src[reader], side="right")])
        raise invalid(
            f"src and dst overlap in memory: {plan.origin(writer)} writes what "
            f"{plan.origin(reader)} reads; the result would depend on the order"
        )

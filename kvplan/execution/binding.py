"""Binding: turns a plan and two memories into descriptors that can be copied in any order.

This module must not submit transfers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np

from kvnative._extents import first_below
from kvnative._lower import Descriptors, lower
from kvplan.execution.memory import Addresses
from kvplan.execution.rows import are_apart, tensors_clash, view_addresses
from kvplan.planning.part import Part
from kvplan.planning.plan import Plan
from kvplan.planning.segments import first_overlap, first_overlapped
from kvplan.status import LLMException, invalid, within

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
    """Return the descriptors of `plan` between two memories; `one_space`: both in this process."""
    if len(plan.parts) > 1:
        return _bind_parts(plan, src, dst, one_space)
    return _bind_part(plan.parts[0], src, dst, one_space)


def _bind_part(part: Part, src: Bindable, dst: Bindable, one_space: bool) -> Descriptors:
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
    if part.split:  # compare tensors: views of one tensor would seem to clash
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
    """Consecutive tensors of a memory."""

    addresses: Addresses
    nbytes: Addresses
    writable: bool

    @classmethod
    def of(cls, memory: Bindable, first: int, count: int) -> _Tensors:
        part = slice(first, first + count)
        return cls(memory.addresses[part], memory.nbytes[part], memory.writable)


def _bind_parts(plan: Plan, src: Bindable, dst: Bindable, one_space: bool) -> Descriptors:
    """Bind each part, and return all descriptors, in order, as one array."""
    parts = plan.parts
    for name, memory in (("src", src), ("dst", dst)):
        needed = sum(getattr(part, name).num_tensors for part in parts)
        if len(memory.addresses) != needed:
            raise invalid(
                f"{name} has {len(memory.addresses)} tensors; the parts of the plan need {needed}"
            )
    bound_parts = []
    src_tensor = dst_tensor = 0
    for part in parts:
        theirs = _Tensors.of(src, src_tensor, part.src.num_tensors)
        ours = _Tensors.of(dst, dst_tensor, part.dst.num_tensors)
        src_tensor += part.src.num_tensors
        dst_tensor += part.dst.num_tensors
        try:
            bound = _bind_part(part.labelled(""), theirs, ours, one_space)
        except LLMException as error:
            raise within(f"part {part.label}", error) from None
        bound_parts.append(bound)
    return join(plan, bound_parts, src, dst, one_space=one_space)


def join(
    plan: Plan, bound: Sequence[Descriptors], src: Bindable, dst: Bindable, *, one_space: bool
) -> Descriptors:
    """Join the descriptors of all parts into one array; refuse parts whose order matters."""
    if len(bound) == 1:
        return bound[0]
    descriptors = Descriptors.joined(bound)
    # As for one part, compare whole tensors before bytes.
    if not parts_are_apart(plan.parts, src, dst, one_space=one_space) and not (
        _runs_are_apart(plan.parts, bound, src, dst, one_space=one_space)
    ):
        check_order_free(plan, descriptors, one_space)
    return descriptors


def parts_are_apart(
    parts: Sequence[Part], src: Bindable, dst: Bindable, *, one_space: bool
) -> bool:
    """Return True only if no rows of dst, with `one_space` also of src, share a byte."""
    addresses, sides = dst.addresses, [part.dst for part in parts]
    if one_space:
        addresses = np.concatenate((addresses, src.addresses))
        sides += [part.src for part in parts]
    return are_apart(addresses, sides, [side.num_tensors for side in sides])


def _runs_are_apart(
    parts: Sequence[Part],
    bound: Sequence[Descriptors],
    src: Bindable,
    dst: Bindable,
    *,
    one_space: bool,
) -> bool:
    """Return True if parts that share tensors write different bytes of them, and read none.

    Such parts may be layers with and without a sliding window. Their runs are compared once for all
    tensors that the same parts share. False: other overlaps, shared bytes, or parts with views.
    """
    writers: dict[int, list[int]] = {}
    sizes: dict[int, int] = {}
    runs: list[tuple[Addresses, Addresses]] = []
    first = 0
    for number, part in enumerate(parts):
        if part.split:
            return False
        own = dst.addresses[first + part.dst_tensors.start : first + part.dst_tensors.stop]
        first += part.dst.num_tensors
        # All tensors of a part are written in the same places.
        each = len(bound[number]) // len(own)
        runs.append((bound[number].dst[:each] - own[0], bound[number].nbytes[:each]))
        for address in own.tolist():
            writers.setdefault(address, []).append(number)
            sizes[address] = max(sizes.get(address, 0), part.dst.tensor_nbytes)
    if any(a + sizes[a] > b for a, b in pairwise(sorted(writers))):
        return False
    for together in {tuple(numbers) for numbers in writers.values() if len(numbers) > 1}:
        columns = map(np.concatenate, zip(*(runs[i] for i in together), strict=True))
        if first_overlap(*columns) is not None:
            return False
    firsts = np.array(sorted(writers), dtype=np.uint64)
    lasts = firsts + np.array([sizes[address] for address in sorted(writers)], dtype=np.uint64)
    reads = src.addresses, src.addresses + src.nbytes
    return not one_space or first_overlapped(*reads, firsts, lasts) is None


def check_order_free(plan: Plan | Part, descriptors: Descriptors, one_space: bool) -> None:
    """Refuse descriptors whose result depends on their order; exact, but slow."""
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
            f"src and dst overlap in memory: {plan.origin(writer)} writes bytes that "
            f"{plan.origin(reader)} reads; the result would depend on the order"
        )

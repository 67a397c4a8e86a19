"""The refusal of transfers whose result would depend on the order of their copies."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from kvplan.planning.segments import first_overlap, first_overlapped
from kvplan.status import invalid

if TYPE_CHECKING:
    from kvnative._lower import Descriptors
    from kvplan.execution.memory import Addresses
    from kvplan.planning.groups import AnyPlan, Part


def written_extents(
    parts: Sequence[Part], addresses: Addresses, nbytes: Addresses
) -> tuple[Addresses, Addresses] | None:
    """Return first and last + 1 of the tensors that groups write to, ascending and disjoint.

    Several groups may write to a tensor, such as layers with and without a sliding window. Then
    their segments are compared, once for all tensors that the same groups share. None: some tensors
    overlap otherwise, or groups may write the same bytes.
    """
    order = np.argsort(addresses)
    starts, ends = addresses[order], addresses[order] + nbytes[order]
    if not (starts[1:] < ends[:-1]).any():
        return starts, ends
    writers: dict[int, list[int]] = {}
    sizes: dict[int, int] = {}
    for number, part in enumerate(parts):
        if part.plan.split:
            return None
        first = part.dst_tensor + part.plan.dst_tensors.start
        for address in addresses[first : first + part.plan.num_tensor_pairs].tolist():
            writers.setdefault(address, []).append(number)
            sizes[address] = max(sizes.get(address, 0), part.plan.dst.tensor_nbytes)
    if any(a + sizes[a] > b for a, b in pairwise(sorted(writers))):
        return None
    for together in {tuple(it) for it in writers.values() if len(it) > 1}:
        runs = [parts[number].plan.segments.expanded() for number in together]
        columns = ([getattr(it, name) for it in runs] for name in ("dst_offsets", "nbytes"))
        if first_overlap(*map(np.concatenate, columns)) is not None:
            return None
    firsts = np.array(sorted(writers), dtype=np.uint64)
    lengths = np.array([sizes[it] for it in sorted(writers)], dtype=np.uint64)
    return firsts, firsts + lengths


def check_order_free(plan: AnyPlan, descriptors: Descriptors, one_space: bool) -> None:
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

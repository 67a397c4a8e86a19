"""What is odd in a plan, in sentences: what makes it slow, and what may be a mistake."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from kvplan.inspection.units import nbytes_text, plural

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvplan.planning.plan import Plan

TINY: Final = 2048
"""Bytes of a descriptor below which its fixed cost exceeds that of its bytes, over "local"."""


def oddities(plan: Plan) -> list[str]:
    """Return what is odd in `plan`, the gravest first. A stale lease is not: no plan knows it."""
    found = (_reinterpreted(plan), _read_twice(plan), _cut(plan), _tiny(plan), _apart(plan))
    return [it for several in found for it in several]


def _reinterpreted(plan: Plan) -> Iterator[str]:
    if plan.reinterpret:
        yield (
            "REINTERPRETED: the bytes are copied as they are, whatever the two sides say that they "
            f"mean: {plan.src} at the source, {plan.dst} at the destination."
        )


def _read_twice(plan: Plan) -> Iterator[str]:
    """A request has no block twice; a copy inside of a process may."""
    if plan.tables is None or plan.local == "both":
        return
    rows, counts = np.unique(plan.tables.src, return_counts=True)
    twice = np.flatnonzero(counts > 1)
    if len(twice):
        first = int(twice[0])
        more = f", and {len(twice) - 1:,} more are" if len(twice) > 1 else ""
        yield (
            f"Source {plan.src.row} {int(rows[first])} is read {int(counts[first])} times{more}: "
            "is the block table right?"
        )


def _cut(plan: Plan) -> Iterator[str]:
    """Rows that lie differently at the two ends are cut into runs."""
    segments = plan.segments
    if not segments.repeats:
        return
    runs = segments.runs()
    if not len(runs):
        return
    index = int(runs.argmax())
    nbytes = nbytes_text(int(segments.nbytes[index]))
    count = f"{int(runs[index]):,} runs of {nbytes}"
    if plan.src.layout == plan.dst.layout:
        yield f"Cut by head or token: each {plan.dst.row} is moved in {count}."
    else:
        yield (
            "Transposing: the axes lie in another order at the two ends, so that each "
            f"{plan.dst.row} is moved in {count}."
        )


def _tiny(plan: Plan) -> Iterator[str]:
    segments = plan.segments
    runs = segments.runs()
    tiny = int(runs[segments.nbytes < TINY].sum())
    if 2 * tiny > segments.num_runs and plan.num_descriptors > 1:
        yield (
            f"Tiny runs: {plural(tiny * plan.num_tensor_pairs, 'descriptor')} of less than "
            f"{nbytes_text(TINY)}, each of which costs more than its bytes do."
        )


def _apart(plan: Plan) -> Iterator[str]:
    """Rows without neighbours that would be adjacent on both sides."""
    tables, segments = plan.tables, plan.segments
    if segments.repeats or plan.split or tables is None or len(segments) < 2:
        return
    sizes = segments.nbytes[:-1]
    src, dst = np.diff(segments.src_offsets), np.diff(segments.dst_offsets)
    if unmerged := int(((src == sizes) & (dst == sizes)).sum()):
        yield (
            f"Not merged: {plural(unmerged, 'run')} could be one with the run before "
            f"(coalesce is {plan.coalesce.value})."
        )
        return
    if plan.src.stride != plan.dst.stride:
        return  # a run is no whole block where the blocks of one side are larger
    alone = int((segments.nbytes <= plan.dst.stride).sum())
    row, count = plan.dst.row, len(segments)
    if alone == count:
        yield (
            f"Scattered: each of the {count:,} {row}s is a run alone, as no two are neighbours at "
            "both ends."
        )
    elif alone:
        yield (
            f"Alone: {alone:,} of {count:,} runs {'is' if alone == 1 else 'are'} one {row}, which "
            "has no neighbour at both ends."
        )

"""What stands out in a plan, in sentences: what makes it slow, and what may be a mistake."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from kvplan.planning.part import Part
from kvplan.planning.texts import nbytes_text, plural

TINY: Final = 2048
"""Bytes of a descriptor below which its fixed cost exceeds that of its bytes, over "local"."""


def oddities(part: Part) -> list[str]:
    """Return what stands out, most severe first.

    Stale leases are not included: a plan does not contain them.
    """
    found = (_reinterpreted(part), _read_twice(part), _cut(part), _tiny(part), _apart(part))
    return [sentence for several in found for sentence in several]


def _reinterpreted(part: Part) -> Iterator[str]:
    if part.reinterpret:
        yield (
            "REINTERPRETED: the bytes are copied as they are, whatever the two sides say that they "
            f"mean: {part.src} at the source, {part.dst} at the destination."
        )


def _read_twice(part: Part) -> Iterator[str]:
    """Report source rows that a request reads twice; a copy inside of a process may do so."""
    if part.tables is None or part.local == "both":
        return
    rows, counts = np.unique(part.tables.src, return_counts=True)
    twice = np.flatnonzero(counts > 1)
    if len(twice):
        first = int(twice[0])
        more = f", and {len(twice) - 1:,} more are" if len(twice) > 1 else ""
        yield (
            f"Source {part.src.row} {int(rows[first])} is read {int(counts[first])} times{more}: "
            "is the block table right?"
        )


def _cut(part: Part) -> Iterator[str]:
    """Report rows that lie differently at the two ends and are cut into runs."""
    segments = part.segments
    if not segments.repeats:
        return
    runs = segments.runs()
    if not len(runs):
        return
    index = int(runs.argmax())
    nbytes = nbytes_text(int(segments.nbytes[index]))
    count = f"{int(runs[index]):,} runs of {nbytes}"
    if part.src.layout == part.dst.layout:
        yield f"Cut by head or token: each {part.dst.row} is moved in {count}."
    else:
        yield (
            "Transposing: the axes lie in another order at the two ends, so that each "
            f"{part.dst.row} is moved in {count}."
        )


def _tiny(part: Part) -> Iterator[str]:
    segments = part.segments
    runs = segments.runs()
    tiny = int(runs[segments.nbytes < TINY].sum())
    if 2 * tiny > segments.num_runs and part.num_descriptors > 1:
        yield (
            f"Tiny runs: {plural(tiny * part.num_tensor_pairs, 'descriptor')} of less than "
            f"{nbytes_text(TINY)}, each of which costs more than its bytes do."
        )


def _apart(part: Part) -> Iterator[str]:
    """Report rows without neighbours that are adjacent on both sides."""
    tables, segments = part.tables, part.segments
    if segments.repeats or part.split or tables is None or len(segments) < 2:
        return
    sizes = segments.nbytes[:-1]
    src, dst = np.diff(segments.src_offsets), np.diff(segments.dst_offsets)
    if unmerged := int(((src == sizes) & (dst == sizes)).sum()):
        yield (
            f"Not merged: {plural(unmerged, 'run')} could be one with the run before "
            f"(coalesce is {part.coalesce.value})."
        )
        return
    if part.src.row_nbytes != part.dst.row_nbytes:
        return  # larger blocks on one side: a run is a part of a block
    alone = int((segments.nbytes <= part.dst.row_nbytes).sum())
    row, count = part.dst.row, len(segments)
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

"""What a long list of segments comes to: runs, shifts, and how dense the blocks lie."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvplan.inspection.units import nbytes_text, plural, span

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvplan.planning.part import Part

    Rows = NDArray[np.int64]


class _Run(NamedTuple):
    """Runs of blocks that follow one another on both sides, in the order of the segments."""

    src: Rows
    dst: Rows
    blocks: Rows


def summary(part: Part) -> list[str]:
    """At most three lines on all segments of a tensor; at least one."""
    if (runs := _runs_of_blocks(part)) is None:
        return [_sizes(part), *_densities(part)]
    return [_lengths(part, runs), *_shifts(part, runs), *_densities(part)]


def blocks_of(part: Part) -> tuple[Rows, Rows] | None:
    """The block at src of each block at dst that is written, where whole blocks are moved."""
    if (runs := _runs_of_blocks(part)) is None:
        return None
    total = int(runs.blocks.sum())
    inside = np.arange(total) - np.repeat(np.cumsum(runs.blocks) - runs.blocks, runs.blocks)
    return np.repeat(runs.src, runs.blocks) + inside, np.repeat(runs.dst, runs.blocks) + inside


def _runs_of_blocks(part: Part) -> _Run | None:
    """The runs, where whole blocks are moved to whole blocks."""
    segments, stride = part.segments, part.dst.stride
    if (
        part.kind != "B2B"
        or not len(segments)
        or part.split
        or segments.repeats
        or part.src.stride != stride
    ):
        return None
    columns = [getattr(segments, name) for name in segments.columns()]
    if any(bool((column % np.uint64(stride)).any()) for column in columns):
        return None
    src, dst, blocks = ((column // np.uint64(stride)).astype(np.int64) for column in columns)
    follows = (src[1:] == src[:-1] + blocks[:-1]) & (dst[1:] == dst[:-1] + blocks[:-1])
    first = np.concatenate(([0], np.flatnonzero(~follows) + 1))
    return _Run(src[first], dst[first], np.add.reduceat(blocks, first))


def _lengths(part: Part, runs: _Run) -> str:
    """How long the runs are, and how many of one block alone."""
    blocks, word = runs.blocks, part.dst.row
    low, high = int(blocks.min()), int(blocks.max())
    count = plural(len(blocks), "run")
    if low == high:
        text = f"{count} of {plural(low, word)}{' each' if len(blocks) > 1 else ''}"
    else:
        alone = int(np.count_nonzero(blocks == 1))
        text = f"{count} of {low:,} to {high:,} {word}s, median {float(np.median(blocks)):,g}"
        text += f"; {alone:,} of one {word} alone"
    if len(blocks) != len(part.segments):
        text += f"; in {plural(len(part.segments), 'segment')}"
    return text


def _shifts(part: Part, runs: _Run) -> list[str]:
    """The longest runs and the most frequent shift."""
    src, dst, blocks = runs
    shifts = dst - src
    parts = []
    if int(blocks.max()) > 1:
        longest = np.argsort(-blocks, kind="stable")[:2].tolist()
        said = [
            f"{span((int(src[i]), int(src[i] + blocks[i]) - 1))} -> "
            f"{span((int(dst[i]), int(dst[i] + blocks[i]) - 1))} ({int(shifts[i]):+d})"
            for i in longest
            if blocks[i] > 1
        ]
        parts.append(f"longest {', '.join(said)}")
    values, inverse = np.unique(shifts, return_inverse=True)
    if len(blocks) > 1:
        moved = np.bincount(inverse, weights=blocks)
        most, total = int(moved.argmax()), int(blocks.sum())
        # One that is rare says nothing, and one of a single run was said.
        if moved[most] * 10 >= total and moved[most] > blocks.max():
            parts.append(
                f"shift {int(values[most]):+d} for {int(moved[most]):,} of "
                f"{plural(total, part.dst.row)}"
            )
        opposite = (np.diff(src) == blocks[:-1]) & (dst[1:] + blocks[1:] == dst[:-1])
        if (count := int(np.count_nonzero(opposite))) * 2 >= len(blocks) - 1:
            parts.append(f"{count:,} follow the one before in opposite order")
    return ["; ".join(parts)] if parts else []


def _sizes(part: Part) -> str:
    """How large the segments are, where they are no whole blocks."""
    nbytes = part.segments.nbytes * part.segments.runs()
    low, high = int(nbytes.min()), int(nbytes.max())
    count = plural(len(nbytes), "segment")
    if low == high:
        return f"{count} of {nbytes_text(low)} each"
    return f"{count} of {nbytes_text(low)} to {nbytes_text(high)}, median " + nbytes_text(
        int(np.median(nbytes))
    )


def _densities(part: Part) -> list[str]:
    """Which share of the rows between the first and the last is of the plan, on each side."""
    ends = part.segments.ends()
    said = []
    for name, starts, stops in (
        ("src", part.segments.src_offsets, ends[0]),
        ("dst", part.segments.dst_offsets, ends[1]),
    ):
        side = getattr(part, name)
        if not side.paged:
            continue
        rows, stride = np.uint64(side.count), np.uint64(side.stride)
        low = (starts // stride % rows).astype(np.int64)
        high = ((stops - np.uint64(1)) // stride % rows).astype(np.int64)
        # Repeats that reach from row to row may leave some out, and parts may lie around the end.
        if (part.segments.repeats and (low != high).any()) or (low > high).any():
            continue
        order = np.argsort(low)
        low, reach = low[order], np.maximum.accumulate(high[order])
        gaps = low[1:] - reach[:-1] - 1
        first, last = int(low[0]), int(reach[-1])
        between = last - first + 1
        used = between - int(gaps[gaps > 0].sum())
        share = f"{100 * used // between}%"
        said.append(f"{name} {used:,} of {side.row}s {span((first, last))} ({share})")
    return ["; ".join(said)] if said else []

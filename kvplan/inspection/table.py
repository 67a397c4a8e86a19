"""A plan as a table of its descriptors, line by line, and a summary of the lines left out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvplan.planning.contents import local_layers, model_note, model_text
from kvplan.planning.part import Part
from kvplan.planning.segments import Column
from kvplan.planning.side import Side
from kvplan.planning.texts import fit, nbytes_text, place, plural, shown_rows, span

Rows = NDArray[np.int64]

_CHUNK = 4096
"""Runs of which the texts are in memory."""

_COUNTED = 1 << 16
"""Runs of which the widths are counted at once."""

_Cells = tuple[str, ...]


def table_lines(part: Part, limit: int | None) -> Iterator[str]:
    """Yield a head and a line for each descriptor; more than `limit` are summarized."""
    table = _Table(part)
    head, tail = shown_rows(part.num_descriptors, limit)
    total = part.num_descriptors
    if head + tail == total:
        widths = table.all_widths()
        yield table.line(table.head, widths)
        yield from table.lines(0, total, widths)
        return
    above, below = table.cells(0, head), table.cells(total - tail, total)
    rows, last = [*above], [*below]
    widths = table.widths([*rows, *last])
    yield table.line(table.head, widths)
    for cells in rows:
        yield table.line(cells, widths)
    more = f"... {plural(total - head - tail, 'more descriptor')}"
    if not tail:
        yield more
        return
    pairs = part.num_tensor_pairs
    yield f"{more}. " + (f"In each of {pairs:,} tensors:" if pairs > 1 else "Of all:")
    yield from chain.from_iterable(fit(f"      {line}") for line in summary(part))
    for cells in last:
        yield table.line(cells, widths)


class _Table:
    """The columns of the table as text, made from one chunk of runs at a time."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self._sides = ("dst", "src") if part.local == "dst" else ("src", "dst")
        heads = self._sides if part.local == "both" else ("local", "remote")
        self._in_model = bool(model_note(part))  # a column more
        of_model = ("model",) if self._in_model else ()
        self.head = ("#", "layer", *of_model, "tensor", f"{part.dst.row}s", *heads, "nbytes")
        self._per_pair = part.segments.num_runs
        self._chunk: tuple[int, int, list[tuple[int, int, int, str]]] = (0, 0, [])

    def widths(self, rows: Iterable[_Cells]) -> list[int]:
        """Return the width of each column."""
        widths = [*map(len, self.head)]
        for cells in rows:
            widths = [max(cells) for cells in zip(widths, map(len, cells), strict=True)]
        return widths

    def all_widths(self) -> list[int]:
        """Return the width of each column in the table of all descriptors, without its texts.

        The run that is farthest at src, or at dst, has the longest texts. The width of the rows,
        which are two texts in one, is computed from their digits.
        """
        pairs, n = self.part.num_tensor_pairs, self._per_pair
        far, of_rows = [(-1, 0)] * 3, 0
        for start in range(0, n, _COUNTED):
            indices = np.arange(start, min(start + _COUNTED, n))
            src, dst, nbytes = self.part.segments.runs_at(indices)
            for column, values in enumerate((src, dst, nbytes)):
                at = int(values.argmax())
                far[column] = max(far[column], (int(values[at]), start + at))
            found = _place_widths(self.part.src, src, nbytes) + 1
            found += _place_widths(self.part.dst, dst, nbytes)
            of_rows = max(of_rows, int(found.max()))
        runs = {run for _, run in far}
        extremes = (pair * n + run for pair in range(pairs) for run in runs)
        last = self.cells(pairs * n - 1, pairs * n)
        widths = self.widths(
            chain(
                last,
                chain.from_iterable(
                    self.cells(descriptor, descriptor + 1) for descriptor in extremes
                ),
            )
        )
        rows = len(self.head) - 4
        widths[rows] = max(len(self.head[rows]), of_rows)
        return widths

    def lines(self, first: int, last: int, widths: list[int]) -> Iterator[str]:
        """Return the lines of some descriptors; numbers are right-aligned, places left-aligned."""
        return (self.line(cells, widths) for cells in self.cells(first, last))

    def line(self, cells: _Cells, widths: list[int]) -> str:
        """A row; numbers to the right, the places to the left."""
        to_left = len(cells) - 3, len(cells) - 2
        return "  ".join(
            cell.ljust(width) if column in to_left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()

    def cells(self, first: int, last: int) -> Iterator[_Cells]:
        """Yield the columns of the descriptors from `first` to before `last`."""
        part, n = self.part, self._per_pair
        while first < last:
            pair, run = divmod(first, n)
            stop = min(run - run % _CHUNK + _CHUNK, n, run + last - first)
            number = pair // part.tensors_per_layer
            layer = slice(number, number + 1)
            src_layers, dst_layers = (local_layers(part, side, layer) for side in ("src", "dst"))
            layers = f"{span(src_layers)}>{span(dst_layers)}"
            model = (model_text(part, layer),) if self._in_model else ()
            (src_tensor, src_start), (dst_tensor, dst_start) = part.pair(pair)
            tensors = f"{src_tensor}>{dst_tensor}"
            dst_first = self._sides[0] == "dst"
            for index, (src, dst, nbytes, rows) in enumerate(self._runs(run, stop), first):
                at_src = f"t{src_tensor}+{src_start + src:#x}"
                at_dst = f"t{dst_tensor}+{dst_start + dst:#x}"
                places = (at_dst, at_src) if dst_first else (at_src, at_dst)
                yield (str(index), layers, *model, tensors, rows, *places, str(nbytes))
            first += stop - run

    def _runs(self, first: int, last: int) -> list[tuple[int, int, int, str]]:
        """Return offsets, bytes and rows of some runs, kept for the next pair of tensors."""
        if self._chunk[:2] != (first, last):
            src_side, dst_side = self.part.src, self.part.dst
            runs = []
            columns = self.part.segments.runs_at(np.arange(first, last))
            for src, dst, nbytes in zip(*(column.tolist() for column in columns), strict=True):
                src_rows = place(src_side.rows(src, nbytes), src, src_side.stride)
                dst_rows = place(dst_side.rows(dst, nbytes), dst, dst_side.stride)
                runs.append((src, dst, nbytes, f"{src_rows}>{dst_rows}"))
            self._chunk = first, last, runs
        return self._chunk[2]


def _place_widths(side: Side, offsets: Column, nbytes: Column) -> Column:
    """Return the lengths of the texts of `place`."""
    one, stride = np.uint64(1), np.uint64(side.stride)
    period = stride * np.uint64(side.count)
    low, high = offsets % period // stride, (offsets + nbytes - one) % period // stride
    inside = offsets % stride
    return (
        _digits(low, 10)
        + np.where(high != low, one + _digits(high, 10), 0)
        + np.where(inside > 0, np.uint64(len("+0x")) + _digits(inside, 16), 0)
    ).astype(np.uint64)


def _digits(values: Column, base: int) -> Column:
    """Return the number of digits of each value."""
    count = np.ones(len(values), np.uint64)
    limit = base
    while limit <= int(values.max()):
        count += values >= np.uint64(limit)
        limit *= base
    return count


class _Run(NamedTuple):
    """Runs of blocks that follow one another on both sides, in the order of the segments."""

    src: Rows
    dst: Rows
    blocks: Rows


def summary(part: Part) -> list[str]:
    """Return one to three lines on all segments of a tensor."""
    if (runs := _runs_of_blocks(part)) is None:
        return [_sizes(part), *_densities(part)]
    return [_lengths(part, runs), *_shifts(part, runs), *_densities(part)]


def blocks_of(part: Part) -> tuple[Rows, Rows] | None:
    """Return source and destination of each written block, if whole blocks move."""
    if (runs := _runs_of_blocks(part)) is None:
        return None
    total = int(runs.blocks.sum())
    inside = np.arange(total) - np.repeat(np.cumsum(runs.blocks) - runs.blocks, runs.blocks)
    return np.repeat(runs.src, runs.blocks) + inside, np.repeat(runs.dst, runs.blocks) + inside


def _runs_of_blocks(part: Part) -> _Run | None:
    """Return the runs, if whole blocks move to whole blocks."""
    segments, nbytes = part.segments, part.dst.row_nbytes
    if (
        part.kind != "B2B"
        or not len(segments)
        or part.split
        or segments.repeats
        or part.src.row_nbytes != nbytes
    ):
        return None
    columns = [getattr(segments, name) for name in segments.columns()]
    steps = [*map(np.uint64, (part.src.stride, part.dst.stride, nbytes))]
    if any(bool((column % step).any()) for column, step in zip(columns, steps, strict=True)):
        return None
    src, dst, blocks = (
        (column // step).astype(np.int64) for column, step in zip(columns, steps, strict=True)
    )
    follows = (src[1:] == src[:-1] + blocks[:-1]) & (dst[1:] == dst[:-1] + blocks[:-1])
    first = np.concatenate(([0], np.flatnonzero(~follows) + 1))
    return _Run(src[first], dst[first], np.add.reduceat(blocks, first))


def _lengths(part: Part, runs: _Run) -> str:
    """Return how long the runs are, and how many have a single block."""
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
    """Return the longest runs and the most frequent shift."""
    src, dst, blocks = runs
    shifts = dst - src
    parts = []
    if int(blocks.max()) > 1:
        longest = np.argsort(-blocks, kind="stable")[:2].tolist()
        texts = [
            f"{span((int(src[i]), int(src[i] + blocks[i]) - 1))} -> "
            f"{span((int(dst[i]), int(dst[i] + blocks[i]) - 1))} ({int(shifts[i]):+d})"
            for i in longest
            if blocks[i] > 1
        ]
        parts.append(f"longest {', '.join(texts)}")
    values, inverse = np.unique(shifts, return_inverse=True)
    if len(blocks) > 1:
        moved = np.bincount(inverse, weights=blocks)
        most, total = int(moved.argmax()), int(blocks.sum())
        # Rare shifts do not matter, and the shift of a single run is above.
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
    """Return the sizes of segments that are not whole blocks."""
    nbytes = part.segments.nbytes * part.segments.runs()
    low, high = int(nbytes.min()), int(nbytes.max())
    count = plural(len(nbytes), "segment")
    if low == high:
        return f"{count} of {nbytes_text(low)} each"
    return f"{count} of {nbytes_text(low)} to {nbytes_text(high)}, median " + nbytes_text(
        int(np.median(nbytes))
    )


def _densities(part: Part) -> list[str]:
    """Return which share of the rows between first and last is in the plan, on each side."""
    ends = part.segments.ends()
    texts = []
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
        texts.append(f"{name} {used:,} of {side.row}s {span((first, last))} ({share})")
    return ["; ".join(texts)] if texts else []

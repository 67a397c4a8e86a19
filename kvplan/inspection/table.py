"""A plan as a table of its descriptors, line by line, and a summary of all its segments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvplan.planning.contents import local_layers, model_note, model_text
from kvplan.planning.part import Part
from kvplan.planning.texts import fit, nbytes_text, place, plural, shown_rows, span

Rows = NDArray[np.int64]

_CHUNK = 4096
"""Number of runs whose texts are made at once, and kept for the next pair of tensors."""

_Cells = tuple[str, ...]


def table_lines(part: Part, limit: int | None) -> Iterator[str]:
    """Yield a head, and a line for each descriptor; beyond `limit`, only the first and last."""
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
    yield from fit(f"      {summary(part)}")
    for cells in last:
        yield table.line(cells, widths)


class _Table:
    """The columns of the table as text, made from one chunk of runs at a time."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self._sides = ("dst", "src") if part.local == "dst" else ("src", "dst")
        heads = self._sides if part.local == "both" else ("local", "remote")
        self._in_model = bool(model_note(part))  # adds a column
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
        """Return the width of each column in the table of all descriptors.

        All pairs of tensors have the runs of the first one. Their texts are longest for the runs
        with the highest offset at src, at dst, and with the highest number.
        """
        pairs, n = self.part.num_tensor_pairs, self._per_pair
        src, dst, _ = self.part.segments.runs_at(np.arange(n))
        far = {int(src.argmax()), int(dst.argmax()), n - 1}
        others = (pair * n + run for pair in range(1, pairs) for run in far)
        return self.widths(
            chain(
                self.cells(0, n),
                chain.from_iterable(self.cells(index, index + 1) for index in others),
            )
        )

    def lines(self, first: int, last: int, widths: list[int]) -> Iterator[str]:
        """Return the lines of some descriptors."""
        return (self.line(cells, widths) for cells in self.cells(first, last))

    def line(self, cells: _Cells, widths: list[int]) -> str:
        """Return a row: numbers are right-aligned, places left-aligned."""
        to_left = len(cells) - 3, len(cells) - 2
        return "  ".join(
            cell.ljust(width) if column in to_left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()

    def cells(self, first: int, last: int) -> Iterator[_Cells]:
        """Yield the columns of the descriptors [first, last)."""
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


class _Run(NamedTuple):
    """Runs of blocks that follow one another on both sides, in the order of the segments."""

    src: Rows
    dst: Rows
    blocks: Rows


def summary(part: Part) -> str:
    """Return a line about all segments of a tensor."""
    runs = _runs_of_blocks(part)
    return _sizes(part) if runs is None else _lengths(part, runs.blocks)


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


def _lengths(part: Part, blocks: Rows) -> str:
    """Return text about the lengths of the runs."""
    word = part.dst.row
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

"""A plan as a table of its descriptors, line by line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from kvplan.inspection.contents import local_layers, model_note, model_text
from kvplan.inspection.summary import summary
from kvplan.inspection.units import fit, place, plural, shown_rows, span

if TYPE_CHECKING:
    from kvplan.planning.part import Part
    from kvplan.planning.segments import Column
    from kvplan.planning.side import Side

_CHUNK = 4096
"""Runs of which the texts are in memory."""

_COUNTED = 1 << 16
"""Runs of which the widths are counted at once."""

_Cells = tuple[str, ...]


def table_lines(part: Part, limit: int | None) -> Iterator[str]:
    """A head and a line for each descriptor; at most `limit`, and between them what is left out."""
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
    """Texts of the columns, a chunk of runs at a time."""

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
        """How wide each column is."""
        widths = [*map(len, self.head)]
        for cells in rows:
            widths = [max(it) for it in zip(widths, map(len, cells), strict=True)]
        return widths

    def all_widths(self) -> list[int]:
        """How wide each column is in the table of all descriptors, without making the texts.

        A pair's tensors have the longest names with the run that is farthest at src, and at dst;
        of the rows, which are two texts in one, the width is counted.
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
            chain(last, chain.from_iterable(self.cells(it, it + 1) for it in extremes))
        )
        rows = len(self.head) - 4
        widths[rows] = max(len(self.head[rows]), of_rows)
        return widths

    def lines(self, first: int, last: int, widths: list[int]) -> Iterator[str]:
        """The rows of some descriptors; numbers to the right, places to the left."""
        return (self.line(cells, widths) for cells in self.cells(first, last))

    def line(self, cells: _Cells, widths: list[int]) -> str:
        """A row; numbers to the right, the places to the left."""
        to_left = len(cells) - 3, len(cells) - 2
        return "  ".join(
            cell.ljust(width) if column in to_left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()

    def cells(self, first: int, last: int) -> Iterator[_Cells]:
        """The columns of the descriptors from `first` to before `last`."""
        part, n = self.part, self._per_pair
        while first < last:
            pair, run = divmod(first, n)
            stop = min(run - run % _CHUNK + _CHUNK, n, run + last - first)
            number = pair // part.tensors_per_layer
            layer = slice(number, number + 1)
            src_layers, dst_layers = (local_layers(part, it, layer) for it in ("src", "dst"))
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
        """Offsets, bytes and rows of some runs, kept for the next pair of tensors."""
        if self._chunk[:2] != (first, last):
            src_side, dst_side = self.part.src, self.part.dst
            runs = []
            columns = self.part.segments.runs_at(np.arange(first, last))
            for src, dst, nbytes in zip(*(it.tolist() for it in columns), strict=True):
                src_rows = place(src_side.rows(src, nbytes), src, src_side.stride)
                dst_rows = place(dst_side.rows(dst, nbytes), dst, dst_side.stride)
                runs.append((src, dst, nbytes, f"{src_rows}>{dst_rows}"))
            self._chunk = first, last, runs
        return self._chunk[2]


def _place_widths(side: Side, offsets: Column, nbytes: Column) -> Column:
    """How long the texts of `place` are."""
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
    """How many digits numbers have."""
    count = np.ones(len(values), np.uint64)
    limit = base
    while limit <= int(values.max()):
        count += values >= np.uint64(limit)
        limit *= base
    return count

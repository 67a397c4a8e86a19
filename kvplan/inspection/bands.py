"""The bands of a picture, which join pieces of rows at src with pieces of rows at dst.

All tensor pairs share the segments, so the bands of one layer are those of every layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvplan.planning.contents import RequestOrder, heads_of_runs, kv_of, reach_along
from kvplan.planning.part import Part
from kvplan.planning.side import Side
from kvplan.planning.texts import Span, nbytes_text, plural, spans_of, spans_text, to_text

Numbers = NDArray[np.int64]


class Places(NamedTuple):
    """The ends of bands on one side: rows, and pieces inside of the first and the last row."""

    first: Numbers
    last: Numbers
    begin: Numbers
    end: Numbers


class Bands:
    """All bands of a part, in the order of the block table, or of dst if that is unknown."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self._request = RequestOrder(part)
        segments = part.segments
        columns = [getattr(segments, name).astype(np.int64) for name in segments.columns()]
        ends = [column.astype(np.int64) for column in segments.ends()]
        src, src_parts = _places(part.src, columns[0], ends[0])
        dst, dst_parts = _places(part.dst, columns[1], ends[1])
        self.parts = src_parts, dst_parts  # pieces of a row
        entries = self._entries(dst)
        keys = (entries[0], dst.first, dst.begin, dst.last, dst.end, *src)
        self._order = np.lexsort(keys[::-1])
        changes = np.zeros(max(len(segments) - 1, 0), np.bool_)
        for key in keys:
            changes |= np.diff(key[self._order]) != 0
        self._starts = np.concatenate(([0], np.flatnonzero(changes) + 1))[: len(segments)]
        chosen = self._order[self._starts]
        self.src, self.dst = (Places(*(column[chosen] for column in side)) for side in (src, dst))
        self._entry_first, self._entry_last = (column[chosen] for column in entries)
        self._dst, self._nbytes, self._dst_end = columns[1], columns[2], ends[1]
        self._runs = segments.runs().astype(np.int64)
        self._held: dict[tuple[int, ...], tuple[Span | None, str]] = {}
        # "entry" of the block table, "token" of the request, or "" for a number
        self.labelled_by = self._labelled_by()

    def __len__(self) -> int:
        return len(self._starts)

    def label(self, band: int) -> str:
        """Return the text inside a box: entries, tokens, or the number of one of several bands."""
        if self.labelled_by == "entry":
            return _spans(self._positions(band))
        if self.labelled_by == "token":
            return _spans(self._tokens(band))
        return str(band) if len(self) > 1 else ""

    def text(self, bands: range) -> str:
        """Describe a mark in one line: one band, or neighbours that share the mark."""
        src, dst = self.part.src.row, self.part.dst.row
        rows = f"{_rows(src, self.src, bands)} → {_rows(dst, self.dst, bands)}"
        if len(bands) == 1:
            return "; ".join([rows, *self._facts(bands.start)])
        first, last = self._entry_first[bands.start : bands.stop], self._entry_last
        facts = [f"{plural(len(bands), 'run')}, from {rows}"]
        if len(first) and first.min() >= 0:
            entries = int(first.min()), int(last[bands.start : bands.stop].max())
            facts.append(self._of_table([entries]))
        return "; ".join(facts)

    def _facts(self, band: int) -> Iterable[str]:
        """Yield contents, place in the request and bytes of one band."""
        members = self._members(band)
        held = [self._held_by(int(segment)) for segment in members]
        heads = [name for name, _ in held if name is not None]
        if kv := "+".join(
            sorted({letter for _, names in held for letter in names.split("+") if names})
        ):
            yield kv
        if heads:
            yield spans_text("head", [(min(heads)[0], max(last for _, last in heads))])
        if tokens := self._tokens(band):
            yield spans_text("token", tokens)
        if entries := self._positions(band):
            yield self._of_table(entries)
        runs, sizes, pairs = self._runs[members], self._nbytes[members], self.part.num_tensor_pairs
        total, low, high = int((runs * sizes).sum()), int(sizes.min()), int(sizes.max())
        of = f" of {nbytes_text(low)}" if low == high else f" of {nbytes_text(low)} to "
        of = of if low == high else of + nbytes_text(high)
        count = int(runs.sum())
        text = f"{nbytes_text(total)} in {plural(count, 'descriptor')}{of if count > 1 else ''}"
        if pairs > 1:
            text += f", in each of {pairs:,} tensors: {nbytes_text(total * pairs)} in all"
        yield text

    def _members(self, band: int) -> Numbers:
        """Return the segments of a band."""
        stop = self._starts[band + 1] if band + 1 < len(self) else len(self._order)
        return self._order[self._starts[band] : stop]

    def _held_by(self, segment: int) -> tuple[Span | None, str]:
        """Return KV heads of a segment, and keys or values if both lie in one tensor.

        The contents repeat after a period, so few different segments are computed.
        """
        part, side = self.part, self.part.dst
        period = max(side.stride_of(axis) * side.extent(axis) for axis in ("head", "kv"))
        if side.stride > side.row_nbytes:
            period = max(period, side.stride)
        repeats = part.segments.repeats
        first, size = int(self._dst[segment]) % max(period, 1), int(self._nbytes[segment])
        counts = [int(repeat.counts[segment]) for repeat in repeats]
        key = first, size, *counts
        if key not in self._held:
            steps = [*zip(counts, (repeat.dst_stride for repeat in repeats), strict=True)]
            heads, kv = heads_of_runs(part, first, size, steps), ""
            if "kv" not in part.split and side.extent("kv") == 2:
                kv = kv_of(part, 0, first, first + size - 1 + reach_along(side, "kv", steps))
            self._held[key] = heads, kv
        return self._held[key]

    def _tokens(self, band: int) -> list[Span]:
        segment = self._order[self._starts[band]]
        return self._request.tokens(int(self._dst[segment]), int(self._dst_end[segment]) - 1)

    def _positions(self, band: int) -> list[Span]:
        """Return entries of the destination's block table."""
        rows = int(self.dst.first[band]), int(self.dst.last[band])
        return spans_of(self._request.entries(*rows))

    def _of_table(self, entries: list[Span]) -> str:
        assert self.part.tables is not None, "entries are of a block table"
        text = spans_text("entry", entries).replace("entrys", "entries")
        return f"{text} of {len(self.part.tables.dst):,} in the block table"

    def _entries(self, dst: Places) -> tuple[Numbers, Numbers]:
        """Return first and last entry of the block table for each segment; -1 if unknown."""
        tables = self.part.tables
        if tables is None or not len(tables.dst):
            return (none := np.full(len(dst.first), -1)), none
        order = np.argsort(tables.dst)
        rows = np.asarray(tables.dst)[order]
        low, high = np.searchsorted(rows, dst.first), np.searchsorted(rows, dst.last, "right")
        known = (high - low == dst.last - dst.first + 1) & (high > low)
        edges = np.stack((np.where(known, low, 0), np.where(known, high, 1)), axis=1).ravel()
        padded = np.append(order, 0)  # an edge may be the end
        first, last = (
            np.where(known, of.reduceat(padded, edges)[::2], -1) for of in (np.minimum, np.maximum)
        )
        return first, last

    def _labelled_by(self) -> str:
        first = self._entry_first
        if not len(self) or first.min() < 0:
            return ""
        if len(np.unique(first)) == len(first):
            return "entry"
        return "token" if self._tokens(0) else ""


def _places(side: Side, first: Numbers, stop: Numbers) -> tuple[Places, int]:
    """Return the ends of segments on a side, and the number of pieces of a row."""
    period, stride, tokens = side.count * side.stride, side.stride_of("token"), side.extent("token")
    rows = first % period // side.stride, (stop - 1) % period // side.stride
    if stride and tokens > 1:
        begin, last = (side.index_along("token", at) for at in (first, stop - 1))
        return Places(*rows, begin, last + 1), tokens
    begin, end = first % side.stride, (stop - 1) % side.stride + 1
    if stride or not side.rows_are_whole:
        return Places(*rows, np.zeros_like(first), np.ones_like(first)), 1
    step = int(np.gcd.reduce(np.concatenate((begin, end, [side.stride]))))
    return Places(*rows, begin // step, end // step), side.stride // step


def _rows(word: str, side: Places, bands: range) -> str:
    piece = slice(bands.start, bands.stop)
    first, last = int(side.first[piece].min()), int(side.last[piece].max())
    dash = " to " if len(bands) > 1 else "–"
    return f"{word} {first}" if first == last else f"{word}s {first}{dash}{last}"


def _spans(spans: list[Span]) -> str:
    shown = ", ".join(to_text(*ends).replace("..", "–") for ends in spans[:3])
    return shown + (", …" if len(spans) > 3 else "")

"""Search the expected content, and the source, for the first wrong bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvplan.debug.cells import CHUNK, Bytes, Cells, Coordinates, Offsets, Same
from kvplan.debug.difference import Wrong
from kvplan.planning.part import Part
from kvplan.planning.segments import Segments
from kvplan.planning.texts import spans_of, spans_text


@dataclass
class Search:
    """A search for the content of the first wrong cells: one row of a layer's keys or values."""

    part: Part
    dst: Coordinates
    unit: int
    expected: list[Bytes]
    found: list[Bytes]
    source: list[Bytes] | None
    same: Same
    tensor: int
    cells: Cells

    def describe(self, runs: Segments, places: list[tuple[int, int]]) -> Wrong:
        """Return the wrong bytes with all findings."""
        part, dst, cells = self.part, self.dst, self.cells
        first = int(np.lexsort((cells.head, cells.order))[0])
        cells = self.cells = cells.take([first, *(i for i in range(len(cells[0])) if i != first)])
        read = _read(part, runs, places, self.tensor, cells.offsets)
        descriptor, src_tensor = int(read.descriptors[0]), int(read.tensors[0])
        from_source = Coordinates(part, "src")
        src_row = part.src.rows(int(read.offsets[0]), 1)[0]
        as_planned = None
        if self.source is not None:
            here = self._bytes(self.found, self.tensor, cells.offsets)
            there = self._bytes(self.source, src_tensor, read.offsets)
            as_planned = bool(self.same(there, here).all())
        held = self._holds(as_planned)
        if not held and self.source is not None and not as_planned:
            held = self._holds_of_source(from_source, src_tensor, read.offsets)
        heads, tokens = cells.head + dst.first_head, cells.order
        return Wrong(
            dst.model_layer(int(cells.layer[0])),
            "KV"[int(cells.part[0])] if dst.has_kv else "",
            (int(heads.min()), int(heads.max())) if dst.has_heads else None,
            (int(tokens.min()), int(tokens.max())) if dst.knows_tokens else None,
            self.tensor,
            int(cells.row[0]),
            descriptor,
            src_tensor,
            src_row,
            tuple(from_source.entries.get(src_row, ())),
            held,
            as_planned,
        )

    def _bytes(self, tensors: list[Bytes], tensor: int, offsets: Offsets) -> Bytes:
        return np.asarray(tensors[tensor][offsets[:, None] + np.arange(self.unit)])

    def _holds(self, as_planned: bool | None) -> str:
        """Describe the bytes: all equal, or the place at the destination where they belong."""
        dst, side, cells = self.dst, self.dst.side, self.cells
        here = self._bytes(self.found, self.tensor, cells.offsets)
        if (here == here[0, 0]).all():
            value = int(here[0, 0])
            if value and here.size > 1:
                return f"{value:#04x} alone"
            if not value:
                return "zeros" if as_planned else "zeros, as if nothing was ever written there"
        for shift in self._request_shifts(here):
            orders = cells.order + shift
            tokens = (orders - dst.shift) % dst.tokens
            entries = (orders - dst.shift) // dst.tokens
            if entries.min() < 0 or entries.max() >= len(dst.rows):
                continue
            if orders.min() < dst.tokens_moved.start or orders.max() >= dst.tokens_moved.stop:
                continue  # in the blocks of the request, but not one of its tokens
            rows = dst.rows[entries]
            there = cells.offsets + (rows - cells.row) * side.stride
            there += (tokens - cells.token) * side.stride_of("token")
            if self._is(here, self.tensor, there):
                places = spans_text(side.row, spans_of(sorted({*rows.tolist()})))
                what = spans_text("token", [(int(orders.min()), int(orders.max()))])
                if not dst.knows_tokens:
                    return f"what is expected in {places}"
                return f"what is expected of {what}, in {places}"
        low, high = int(cells.head.min()), int(cells.head.max())
        shifts = range(-low, side.extent("head") - high) if "head" in dst.steps else ()
        for shift in shifts:
            there = cells.offsets + shift * side.stride_of("head")
            if shift and self._is(here, self.tensor, there):
                heads = low + shift + dst.first_head, high + shift + dst.first_head
                return f"what is expected of {spans_text('head', [heads])}"
        _, start = dst.tensor_of(int(cells.layer[0]), int(cells.part[0]))
        layers = side.num_tensors // dst.apart * side.extent("layer")
        for layer in range(layers):
            for piece in range(dst.parts):
                tensor, begins = dst.tensor_of(layer, piece)
                if begins != start and not {"layer", "kv"} <= dst.steps:
                    continue  # layers, or keys and values, share bytes of a tensor
                if self._is(here, tensor, cells.offsets + (begins - start)):
                    # Only keys and values have names among the tensors of a layer.
                    which = f", in dst tensor {tensor}" if dst.parts > 1 else ""
                    which = f" {'KV'[piece]}" if dst.has_kv else which
                    return f"what is expected of layer {dst.model_layer(layer)}{which}"
        return ""

    def _request_shifts(self, here: Bytes) -> list[int]:
        """Return up to 64 possible shifts of the first cell, in tokens or rows, smallest first."""
        dst, side, cells = self.dst, self.dst.side, self.cells
        if not len(dst.rows):
            return []
        # Without an axis of tokens, a row counts as one token.
        orders = np.arange(len(dst.rows) * dst.tokens)
        if "token" not in dst.steps:  # tokens share bytes: only other rows are searched
            orders = orders[orders % dst.tokens == cells.token[0]]
        rows, tokens = dst.rows[orders // dst.tokens], orders % dst.tokens
        there = cells.offsets[0] + (rows - cells.row[0]) * side.stride
        there += (tokens - cells.token[0]) * side.stride_of("token")
        alike = np.zeros(len(there), bool)
        step = max(CHUNK // self.unit, 1)
        for begin in range(0, len(there), step):
            piece = self._bytes(self.expected, self.tensor, there[begin : begin + step])
            alike[begin : begin + step] = self.same(piece, np.broadcast_to(here[0], piece.shape))
        shifts = orders[alike] + dst.shift - int(cells.order[0])
        return sorted((int(shift) for shift in shifts if shift), key=abs)[:64]

    def _is(self, here: Bytes, tensor: int, offsets: Offsets) -> bool:
        there = self._bytes(self.expected, tensor, offsets)
        return bool(self.same(there, here).all())

    def _holds_of_source(self, source: Coordinates, tensor: int, offsets: Offsets) -> str:
        """Describe another row of the source that has these bytes at the same places."""
        assert self.source is not None
        side = source.side
        own = offsets % (side.count * side.stride) // side.stride
        row = int(own[0])
        if (own != row).any():
            return ""
        here = self._bytes(self.found, self.tensor, self.cells.offsets)
        rows = np.array([other for other in range(side.count) if other != row], np.int64)
        there = offsets[0] + (rows - row) * side.stride
        step = max(CHUNK // self.unit, 1)
        for begin in range(0, len(there), step):
            piece = self._bytes(self.source, tensor, there[begin : begin + step])
            alike = self.same(piece, np.broadcast_to(here[0], piece.shape))
            for other in rows[begin : begin + step][alike].tolist():
                moved = self._bytes(self.source, tensor, offsets + (other - row) * side.stride)
                if self.same(moved, here).all():
                    known = source.entries.get(other)
                    which = f"src_{side.row}s[{known[0]}]" if known else "not of this request"
                    return f"what lies in {side.row} {other} at the source, {which}"
        return ""


class _Read(NamedTuple):
    """The sources of cells of a dst tensor; each column has one entry for each cell."""

    descriptors: Offsets
    tensors: Offsets
    offsets: Offsets


def _read(
    part: Part, runs: Segments, places: list[tuple[int, int]], tensor: int, offsets: Offsets
) -> _Read:
    """Return the descriptors that write the cells at `offsets` of a dst tensor, and the sources."""
    order = np.argsort(runs.dst_offsets)
    starts = runs.dst_offsets[order].astype(np.int64)
    ends = starts + runs.nbytes[order].astype(np.int64)
    found = _Read(*(np.full(len(offsets), -1, np.int64) for _ in range(3)))
    for pair, (written, start) in enumerate(places):
        if written != tensor:
            continue
        inside = offsets - start
        at = np.searchsorted(starts, inside, side="right") - 1
        hits = np.flatnonzero((at >= 0) & (inside < ends[at]))
        at = at[hits]
        run = order[at]
        (src_tensor, src_start), _ = part.pair(pair)
        found.descriptors[hits] = pair * len(runs) + run
        found.tensors[hits] = src_tensor
        found.offsets[hits] = (
            src_start + runs.src_offsets[run].astype(np.int64) + inside[hits] - starts[at]
        )
    assert (found.descriptors >= 0).all(), "a byte that the plan writes is in one of its runs"
    return found

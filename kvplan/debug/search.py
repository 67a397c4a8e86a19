"""Whose bytes are these? The cells that are wrong are looked for where they would be right."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvplan.debug.cells import Cells, Coordinates, Offsets, spans
from kvplan.debug.difference import Wrong
from kvplan.debug.tensors import CHUNK, Bytes, Same
from kvplan.inspection.contents import spans_text
from kvplan.planning.plan import Plan
from kvplan.planning.segments import Segments


@dataclass
class Search:
    """Whose bytes the first wrong cells are: those of one row, of one layer's keys or values."""

    plan: Plan
    dst: Coordinates
    unit: int
    expected: list[Bytes]
    found: list[Bytes]
    source: list[Bytes] | None
    same: Same
    tensor: int
    cells: Cells

    def describe(self, runs: Segments, places: list[tuple[int, int]]) -> Wrong:
        """Everything that is known of them."""
        plan, dst, cells = self.plan, self.dst, self.cells
        first = int(np.lexsort((cells.head, cells.order))[0])
        cells = self.cells = cells.take([first, *(i for i in range(len(cells[0])) if i != first)])
        at = int(cells.offsets[0])
        descriptor, src_tensor, src_offset = _writer(plan, runs, places, self.tensor, at)
        from_source = Coordinates(plan, "src")
        src_row = plan.src.rows(src_offset, 1)[0]
        as_planned = None
        held = self._holds()
        if self.source is not None:
            there = self.source[src_tensor][src_offset : src_offset + self.unit]
            here = self.found[self.tensor][at : at + self.unit]
            as_planned = bool(self.same(there[None], here[None])[0])
            held = held or self._holds_of_source(from_source, src_tensor, src_offset)
        heads, tokens = cells.head + dst.first_head, cells.order
        return Wrong(
            int(cells.layer[0]) + dst.first_layer,
            "KV"[int(cells.kv[0])] if dst.has_kv else "",
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

    def _holds(self) -> str:
        """What the destination should hold elsewhere, and has here."""
        dst, side, cells = self.dst, self.dst.side, self.cells
        here = self._bytes(self.found, self.tensor, cells.offsets)
        if (here == here[0, 0]).all():
            value = int(here[0, 0])
            return "zeros: nothing was ever written there" if not value else f"{value:#04x} alone"
        for shift in self._request_shifts(here):
            orders = cells.order + shift
            tokens = (orders - dst.shift) % dst.tokens
            entries = (orders - dst.shift) // dst.tokens
            if entries.min() < 0 or entries.max() >= len(dst.rows):
                continue
            rows = dst.rows[entries]
            there = cells.offsets + (rows - cells.row) * side.stride
            there += (tokens - cells.token) * side.stride_of("token")
            if self._is(here, self.tensor, there):
                places = spans_text(side.row, spans(sorted({*rows.tolist()})))
                what = spans_text("token", [(int(orders.min()), int(orders.max()))])
                if not dst.knows_tokens:
                    return f"what is expected in {places}"
                return f"what is expected of {what}, in {places}"
        low, high = int(cells.head.min()), int(cells.head.max())
        for shift in range(-low, side.extent("head") - high):  # none where there is no such axis
            there = cells.offsets + shift * side.stride_of("head")
            if shift and self._is(here, self.tensor, there):
                heads = low + shift + dst.first_head, high + shift + dst.first_head
                return f"what is expected of {spans_text('head', [heads])}"
        layer, kv = int(cells.layer[0]), int(cells.kv[0])
        _, start = dst.tensor_of(layer, kv)
        layers = side.num_tensors // dst.apart * side.extent("layer")
        for other_layer in range(layers):
            for other_kv in range(2 if dst.has_kv else 1):
                tensor, begins = dst.tensor_of(other_layer, other_kv)
                if self._is(here, tensor, cells.offsets + (begins - start)):
                    letter = f" {'KV'[other_kv]}" if dst.has_kv else ""
                    return f"what is expected of layer {other_layer + dst.first_layer}{letter}"
        return ""

    def _request_shifts(self, here: Bytes) -> list[int]:
        """By how many tokens (or rows) further in the request the first cell is found; near first.

        Shifts that no cell of the row has are left to `_holds`.
        """
        dst, side, cells = self.dst, self.dst.side, self.cells
        if not len(dst.rows):
            return []
        # Without an axis of tokens there is one of them in a row.
        orders = np.arange(len(dst.rows) * dst.tokens)
        rows, tokens = dst.rows[orders // dst.tokens], orders % dst.tokens
        there = cells.offsets[0] + (rows - cells.row[0]) * side.stride
        there += (tokens - cells.token[0]) * side.stride_of("token")
        alike = np.zeros(len(there), bool)
        step = max(CHUNK // self.unit, 1)
        for begin in range(0, len(there), step):
            part = self._bytes(self.expected, self.tensor, there[begin : begin + step])
            alike[begin : begin + step] = self.same(part, np.broadcast_to(here[0], part.shape))
        shifts = orders[alike] + dst.shift - int(cells.order[0])
        return sorted((int(it) for it in shifts if it), key=abs)[:64]

    def _is(self, here: Bytes, tensor: int, offsets: Offsets) -> bool:
        there = self._bytes(self.expected, tensor, offsets)
        return bool(self.same(there, here).all())

    def _holds_of_source(self, source: Coordinates, tensor: int, offset: int) -> str:
        """Whether another row of the source has these bytes, at the same place of the row."""
        assert self.source is not None
        side, row = source.side, source.side.rows(offset, 1)[0]
        here = self._bytes(self.found, self.tensor, self.cells.offsets[:1])
        rows = np.array([it for it in range(side.count) if it != row], np.int64)
        there = offset + (rows - row) * side.stride
        step = max(CHUNK // self.unit, 1)
        for begin in range(0, len(there), step):
            part = self._bytes(self.source, tensor, there[begin : begin + step])
            alike = np.flatnonzero(self.same(part, np.broadcast_to(here[0], part.shape)))
            if len(alike):
                other = int(rows[begin + int(alike[0])])
                known = source.entries.get(other)
                which = f"src_{side.row}s[{known[0]}]" if known else "not of this request"
                return f"what lies in {side.row} {other} at the source, {which}"
        return ""


def _writer(
    plan: Plan, runs: Segments, places: list[tuple[int, int]], tensor: int, offset: int
) -> tuple[int, int, int]:
    """The descriptor that writes a byte of a dst tensor; the tensor and the byte that it reads."""
    for pair, (written, start) in enumerate(places):
        inside = offset - start
        if written != tensor or inside < 0:
            continue
        hits = (runs.dst_offsets <= np.uint64(inside)) & (
            np.uint64(inside) < runs.dst_offsets + runs.nbytes
        )
        if not hits.any():
            continue
        run = int(np.argmax(hits))
        (src_tensor, src_start), _ = plan.pair(pair)
        moved = inside - int(runs.dst_offsets[run])
        src_offset = src_start + int(runs.src_offsets[run]) + moved
        return pair * len(runs) + run, src_tensor, src_offset
    raise AssertionError("a byte that the plan writes is in one of its runs")

"""The place of a part's bytes in the model: tokens, heads, layers, keys or values.

Layer numbers are local, counted from the first layer of the cache, unless the function's name has
`model`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvplan.layout import numbers_text
from kvplan.planning.part import Part
from kvplan.planning.side import NO_PERIOD, Side
from kvplan.planning.texts import (
    Origin,
    Span,
    nbytes_text,
    plural,
    span,
    spans_of,
    spans_text,
    to_text,
)
from kvplan.validation import check_index


def origin_of(part: Part, descriptor: int) -> Origin:
    """Return where a descriptor of a part came from; see `Part.origin`."""
    check_index("descriptor", descriptor, part.num_descriptors)
    pair, run = divmod(descriptor, part.segments.num_runs)
    src, dst, nbytes = part.run_at(run)
    last = dst + nbytes - 1
    (src_tensor, _), (dst_tensor, _) = part.pair(pair)
    layer = pair // part.tensors_per_layer
    piece = slice(layer, layer + 1)
    src_layers, dst_layers = (local_layers(part, side, piece) for side in ("src", "dst"))
    numbers = model_layers(part, src_layers, dst_layers)
    return Origin(
        src_layers[0],
        dst_layers[0],
        src_tensor,
        dst_tensor,
        part.src.rows(src, nbytes),
        part.dst.rows(dst, nbytes),
        part.src.row,
        part.dst.row,
        kv_of(part, part.dst_tensors[pair], dst, last),
        heads_of(part, dst, last),
        tuple(tokens_of(part, dst, last)),
        dst_layers[1] - dst_layers[0] + 1,
        None if numbers is None else numbers[0][0],
        part.label,
    )


def one_line(part: Part) -> str:
    """Return one line, such as `push_blocks B2B L4-5>0-1 x 3 blocks: 8 desc, 3.0 MiB`."""
    src, dst = (local_layers(part, side) for side in ("src", "dst"))
    layers = f"L{span(src)}" if src == dst else f"L{span(src)}>{span(dst)}"
    num_rows = rows_written(part)
    rows = plural(num_rows, part.dst.row)
    if (tokens := tokens_moved(part)) is not None:
        if part.tables is not None and part.kind == "B2B" and len(part.tables.src) != num_rows:
            rows = f"{len(part.tables.src)}>{rows}"
        rows = f"{plural(tokens, 'token')}, {rows}"
    return (
        f"{part.operation} {part.kind} {layers} x {rows}: "
        f"{part.num_descriptors} desc, {nbytes_text(part.nbytes)}"
    )


def rows_written(part: Part) -> int:
    """Return the number of destination rows; without block tables, of slices, or 1 for a slot."""
    if part.tables is not None:
        return len(part.tables.dst)
    return 1 if part.kind == "C2C" else part.num_slices


class RequestOrder:
    """The order of destination rows in the request, sorted once for many lookups."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self._by_row: NDArray[np.int64] | None = None
        if part.tables is not None:
            self._by_row = np.argsort(part.tables.dst)
            self._rows = part.tables.dst[self._by_row]

    def text(self, first: int, last: int) -> str:
        """Return the tokens at dst offsets `first` to `last`, or positions in the block tables.

        Positions stand for tokens if the layout names no tokens. Empty if neither is known.
        """
        part = self.part
        if part.dst.layout is not None and "token" in part.dst.layout.axes:
            return spans_text("token", self.tokens(first, last))
        if part.tables is None or len(part.tables.dst) == 1 or part.local == "both":
            return ""
        return spans_text("position", spans_of(self._entries_of(first, last)))

    def tokens(self, first: int, last: int) -> list[Span]:
        """Return the tokens at dst offsets `first` to `last`; see `tokens_of`."""
        if self.part.local == "both":
            return []
        return _tokens(self.part, self._entries_of(first, last), first, last)

    def _entries_of(self, first: int, last: int) -> NDArray[np.int64]:
        return self.entries(_row(self.part.dst, first), _row(self.part.dst, last))

    def entries(self, low: int, high: int) -> NDArray[np.int64]:
        """Return the entries of the block table for dst rows `low` to `high`, in row order.

        Empty if one of these rows is not in the table.
        """
        if self._by_row is None:
            return np.empty(0, np.int64)
        found = self._by_row[slice(*np.searchsorted(self._rows, [low, high + 1]))]
        return found if len(found) == high - low + 1 else found[:0]


def tokens_of(part: Part, first: int, last: int) -> list[Span]:
    """Return the tokens of the request at dst offsets `first` to `last`, as ranges.

    Tokens are counted from the request's first source block on, in the order of the block tables.
    Empty if they are unknown: no layout, no block tables, or a copy inside a process.
    """
    tables, dst = part.tables, part.dst
    if tables is None or part.local == "both":
        return []
    low, high = _row(dst, first), _row(dst, last)
    found = np.flatnonzero((tables.dst >= low) & (tables.dst <= high))
    if len(found) != high - low + 1:  # a row is not in the table, or is there twice
        return []
    return _tokens(part, found[np.argsort(tables.dst[found])], first, last)


def _tokens(part: Part, entries: NDArray[np.int64], first: int, last: int) -> list[Span]:
    """Return the tokens of entries of the block table, which are in the order of dst rows."""
    tables, dst = part.tables, part.dst
    if tables is None or dst.layout is None or "token" not in dst.layout.axes or not len(entries):
        return []
    size = dst.extent("token")
    begin, end = dst.index_along("token", first), dst.index_along("token", last) + 1 - size
    shift = tables.src_token - tables.dst_token
    spans = [(low * size + shift, (high + 1) * size - 1 + shift) for low, high in spans_of(entries)]
    spans[0] = spans[0][0] + begin, spans[0][1]
    spans[-1] = spans[-1][0], spans[-1][1] + end
    if not dst.has_all_tokens:
        # So far these are places in the block table, moved by `shift`.
        places = np.concatenate([np.arange(low, high + 1) for low, high in spans]) - shift
        if dst.spread.period == NO_PERIOD:  # the last row may have places beyond the stretch
            places = places[places < dst.spread.size]
        return spans_of(dst.spread.tokens(places) + shift)
    return spans


def heads_of(part: Part, first: int, last: int) -> Span | None:
    """Return the model's first and last KV head at dst offsets; None without an axis head."""
    dst = part.dst
    if dst.layout is None or "head" not in dst.layout.axes:
        return None
    begin = dst.shard.heads.start if dst.shard is not None and dst.shard.heads is not None else 0
    low, high = dst.index_along("head", first), dst.index_along("head", last)
    if low > high or _spans_axis(dst, "head", first, last):
        low, high = 0, dst.extent("head") - 1
    return begin + low, begin + high


def heads_of_runs(part: Part, first: int, nbytes: int, steps: list[Span]) -> Span | None:
    """Return `heads_of` for runs of `nbytes` from dst offset `first` on.

    `steps` has (count, bytes from one to the next at dst) for each level of repeats.
    """
    last = first + nbytes - 1 + reach_along(part.dst, "head", steps)
    return heads_of(part, first, last)


def reach_along(side: Side, axis: str, steps: list[Span]) -> int:
    """Return the extent, in bytes, of repeats that change the position along an axis."""
    around = max(side.stride_of(axis), 1) * side.extent(axis)  # bytes to the next equal position
    row = side.stride if side.is_inside(axis) else around
    return sum((count - 1) * step for count, step in steps if step % around and step % row)


def kv_of(part: Part, view: int, first: int, last: int) -> str:
    """Return "K", "V" or "K+V" for dst offsets of a view; empty if unknown."""
    dst = part.dst
    if dst.layout is None:
        return ""
    inside = "kv" in dst.layout.axes and "kv" not in part.split and dst.extent("kv") == 2
    if inside:
        low, high = dst.index_along("kv", first), dst.index_along("kv", last)
        whole = low != high or _spans_axis(dst, "kv", first, last)
        return "K+V" if whole else "KV"[low]
    if part.tensors_per_layer != 2 or "head" not in dst.layout.axes:
        return ""
    return "KV"[view % 2]


def local_layers(part: Part, name: str, piece: slice = slice(None)) -> Span:
    """Return the first and last local layer of a side for the part's layers in `piece`.

    A tensor that is moved whole may hold several layers.
    """
    layers = getattr(part, f"{name}_layers")[piece]
    inside = 1 if "layer" in part.split else getattr(part, name).extent("layer")
    return layers[0] * inside, layers[-1] * inside + inside - 1


def model_layers(part: Part, src: Span, dst: Span) -> tuple[Span, Span] | None:
    """Return the model's layer numbers on both sides; None if no shard names layers.

    Both sides have the same numbers, unless bytes are reinterpreted.
    """
    numbers = []
    for side, (first, last) in ((part.src, src), (part.dst, dst)):
        layers = side.numbered_layers(part.split, part.tensors_per_layer)
        if layers is not None:
            numbers.append((layers[first], layers[last]))
    return (numbers[0], numbers[-1]) if numbers else None


def model_text(part: Part, piece: slice = slice(None)) -> str:
    """Return the model's layer numbers, such as `16..31`; empty if no shard names layers."""
    src, dst = (local_layers(part, side, piece) for side in ("src", "dst"))
    numbers = model_layers(part, src, dst)
    if numbers is None:
        return ""
    src_text, dst_text = (_numbers_between(part, ends) for ends in numbers)
    return src_text if src_text == dst_text else f"{src_text} -> {dst_text}"


def _numbers_between(part: Part, ends: Span) -> str:
    """Return `2..5`, or `0, 6, 12` if a side has only these of the model's layers."""
    for side in (part.src, part.dst):
        layers = side.numbered_layers(part.split, part.tensors_per_layer)
        if isinstance(layers, tuple) and ends[0] in layers and ends[1] in layers:
            return numbers_text(layers[layers.index(ends[0]) : layers.index(ends[1]) + 1])
    return to_text(*ends)


def layers_text(part: Part, piece: slice) -> str:
    """Return `layer 4 -> 0` or `layers 1..3 -> 1..3`, with the model's numbers if they differ."""
    src, dst = (local_layers(part, side, piece) for side in ("src", "dst"))
    several = src[0] < src[1] or dst[0] < dst[1]
    text = " -> ".join(f"{a}..{b}" if several else f"{a}" for a, b in (src, dst))
    return f"layer{'s' if several else ''} {text}{model_note(part, piece)}"


def source_layers_text(part: Part, piece: slice) -> str:
    """Return `layer 4`, or `layers 0..3 (16..19 of the model)`."""
    first, last = local_layers(part, "src", piece)
    return f"layer{'s' if first < last else ''} {to_text(first, last)}{model_note(part, piece)}"


def model_note(part: Part, piece: slice = slice(None)) -> str:
    """Return ` (16..31 of the model)` if the local numbers differ, otherwise ""."""
    src, dst = (local_layers(part, side, piece) for side in ("src", "dst"))
    if model_layers(part, src, dst) in (None, (src, dst)):
        return ""
    return f" ({model_text(part, piece)} of the model)"


def tokens_moved(part: Part) -> int | None:
    """Return the number of tokens that move; None if they fill the destination rows."""
    tables, sides = part.tables, (part.src, part.dst)
    if tables is not None and not all(side.has_all_tokens for side in sides):
        if tables.num_tokens is None and part.src.meaning == part.dst.meaning:
            return None
        return tables.count_in_common(*sides)
    return tokens_spanned(part)


def tokens_spanned(part: Part) -> int | None:
    """Return `tokens_moved`, plus tokens in between that one of the sides does not hold."""
    tables = part.tables
    if tables is None or tables.num_tokens is not None:
        return None if tables is None else tables.num_tokens
    tokens = part.dst.extent("token")
    if part.kind != "B2B" or len(tables.src) == len(tables.dst) or tokens == 1:
        return None
    return len(tables.dst) * tokens - tables.dst_token


def _row(side: Side, offset: int) -> int:
    return side.rows(offset, 1)[0]


def _spans_axis(side: Side, axis: str, first: int, last: int) -> bool:
    """Return whether bytes from `first` to `last` cover the whole axis, or wrap around its end."""
    if side.is_inside(axis):
        if first // side.stride != last // side.stride:
            return True
        first, last = first % side.stride, last % side.stride
    stride = max(side.stride_of(axis), 1)
    return last // stride - first // stride >= side.extent(axis)

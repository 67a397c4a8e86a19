"""What the bytes of a plan are in the model: which tokens of the request, heads, keys or values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvplan.layout import numbers_text

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from kvplan.planning.part import Part
    from kvplan.planning.side import Side

Span = tuple[int, int]
"""First and last."""


class RequestOrder:
    """Where in the request the rows at dst are. Made once, where many are looked up."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self._by_row: NDArray[np.int64] | None = None
        if part.tables is not None:
            self._by_row = np.argsort(part.tables.dst)
            self._rows = part.tables.dst[self._by_row]

    def text(self, first: int, last: int) -> str:
        """Tokens of the request at dst offsets `first` to `last`; positions where none are named.

        A position is that of a block in the block tables. Empty: the plan does not know.
        """
        part = self.part
        if part.dst.layout is not None and "token" in part.dst.layout.axes:
            return spans_text("token", self.tokens(first, last))
        if part.tables is None or len(part.tables.dst) == 1 or part.local == "both":
            return ""
        return spans_text("position", spans_of(self._entries_of(first, last)))

    def tokens(self, first: int, last: int) -> list[Span]:
        """As `tokens_of`."""
        if self.part.local == "both":
            return []
        return _tokens(self.part, self._entries_of(first, last), first, last)

    def _entries_of(self, first: int, last: int) -> NDArray[np.int64]:
        return self.entries(_row(self.part.dst, first), _row(self.part.dst, last))

    def entries(self, low: int, high: int) -> NDArray[np.int64]:
        """Return the entries of the block table for dst rows `low` to `high`, in their order.

        Empty: a row is not of the request.
        """
        if self._by_row is None:
            return np.empty(0, np.int64)
        piece = slice(*np.searchsorted(self._rows, [low, high + 1]))
        found = self._by_row[piece]
        return found if len(found) == high - low + 1 else found[:0]


def tokens_of(part: Part, first: int, last: int) -> list[Span]:
    """Tokens of the request whose bytes are at dst offsets `first` to `last`, as ranges.

    They are counted in the order of the block tables, from the request's first block at src on.
    Empty: the plan does not know (no layout, no block tables, or a copy inside of a process).
    """
    tables, dst = part.tables, part.dst
    if tables is None or part.local == "both":
        return []
    low, high = _row(dst, first), _row(dst, last)
    found = np.flatnonzero((tables.dst >= low) & (tables.dst <= high))
    if len(found) != high - low + 1:  # a row that is not of the request, or twice
        return []
    return _tokens(part, found[np.argsort(tables.dst[found])], first, last)


def _tokens(part: Part, found: NDArray[np.int64], first: int, last: int) -> list[Span]:
    """The tokens of some rows, given by position in the block table in the order of dst."""
    tables, dst = part.tables, part.dst
    if tables is None or dst.layout is None or "token" not in dst.layout.axes or not len(found):
        return []
    size = dst.extent("token")
    begin, end = _index(dst, "token", first), _index(dst, "token", last) + 1 - size
    shift = tables.src_token - tables.dst_token
    spans = [(low * size + shift, (high + 1) * size - 1 + shift) for low, high in spans_of(found)]
    spans[0] = spans[0][0] + begin, spans[0][1]
    spans[-1] = spans[-1][0], spans[-1][1] + end
    if not dst.has_all_tokens:
        # The spans are of places in the block table, moved by `shift`.
        places = np.concatenate([np.arange(low, high + 1) for low, high in spans]) - shift
        return spans_of(dst.spread.tokens(places) + shift)
    return spans


def spans_of(numbers: ArrayLike) -> list[Span]:
    """First and last of each stretch of numbers of which each is the next."""
    found = np.asarray(numbers, np.int64)
    if not len(found):
        return []
    # A span ends where the next row is not the next of the request.
    ends = np.flatnonzero(np.diff(found) != 1)
    first = found[np.concatenate(([0], ends + 1))].tolist()
    last = found[np.concatenate((ends, [len(found) - 1]))].tolist()
    return [*zip(first, last, strict=True)]


def heads_of(part: Part, first: int, last: int) -> Span | None:
    """First and last KV head of the model between dst offsets; None: the layout has no heads."""
    dst = part.dst
    if dst.layout is None or "head" not in dst.layout.axes:
        return None
    begin = dst.shard.heads.start if dst.shard is not None and dst.shard.heads is not None else 0
    low, high = _index(dst, "head", first), _index(dst, "head", last)
    if low > high or _spans_more(dst, "head", first, last):
        low, high = 0, dst.extent("head") - 1
    return begin + low, begin + high


def heads_of_runs(part: Part, first: int, nbytes: int, steps: list[Span]) -> Span | None:
    """As `heads_of`, of the runs of a row: `nbytes` bytes from dst offset `first` on, repeated.

    Args:
        steps: of each level of repeats, how many and how many bytes apart at dst.
    """
    around = max(part.dst.stride_of("head"), 1) * part.dst.extent("head")  # to the same head again
    last = first + nbytes - 1 + sum((count - 1) * step for count, step in steps if step % around)
    return heads_of(part, first, last)


def kv_of(part: Part, view: int, first: int, last: int) -> str:
    """`K`, `V`, `K+V`, or nothing where the layout does not say, for a view and dst offsets."""
    dst = part.dst
    if dst.layout is None:
        return ""
    inside = "kv" in dst.layout.axes and "kv" not in part.split and dst.extent("kv") == 2
    if inside:
        low, high = _index(dst, "kv", first), _index(dst, "kv", last)
        whole = low != high or _spans_more(dst, "kv", first, last)
        return "K+V" if whole else "KV"[low]
    if part.tensors_per_layer != 2 or "head" not in dst.layout.axes:
        return ""
    return "KV"[view % 2]


def local_layers(part: Part, name: str, piece: slice = slice(None)) -> Span:
    """First and last layer of a side, counted from its own first, of a part of the plan's.

    Where tensors are moved whole, each may hold several.
    """
    layers = getattr(part, f"{name}_layers")[piece]
    inside = 1 if "layer" in part.split else getattr(part, name).extent("layer")
    return layers[0] * inside, layers[-1] * inside + inside - 1


def model_layers(part: Part, src: Span, dst: Span) -> tuple[Span, Span] | None:
    """The numbers that layers of both sides have in the model; None: no shard names layers.

    They are the same on both sides, unless bytes are reinterpreted.
    """
    numbers = []
    for side, (first, last) in ((part.src, src), (part.dst, dst)):
        layers = side.numbered_layers(part.split, part.tensors_per_layer)
        if layers is not None:
            numbers.append((layers[first], layers[last]))
    return (numbers[0], numbers[-1]) if numbers else None


def model_text(part: Part, piece: slice = slice(None)) -> str:
    """`16..31`: numbers in the model; nothing where no shard names layers."""
    numbers = model_layers(part, local_layers(part, "src", piece), local_layers(part, "dst", piece))
    if numbers is None:
        return ""
    src, dst = (_between(part, it) for it in numbers)
    return src if src == dst else f"{src} -> {dst}"


def _between(part: Part, ends: Span) -> str:
    """Numbers of the model from one to another, of those that a side has: `2..5`, or `0, 6, 12`."""
    for side in (part.src, part.dst):
        layers = side.numbered_layers(part.split, part.tensors_per_layer)
        if isinstance(layers, tuple) and ends[0] in layers and ends[1] in layers:
            return numbers_text(layers[layers.index(ends[0]) : layers.index(ends[1]) + 1])
    return to_text(*ends)


def layers_text(part: Part, piece: slice) -> str:
    """`layer 4 -> 0`, `layers 1..3 -> 1..3`, and their numbers in the model where these differ."""
    src, dst = (local_layers(part, it, piece) for it in ("src", "dst"))
    several = src[0] < src[1] or dst[0] < dst[1]
    text = " -> ".join("{}..{}".format(*it) if several else f"{it[0]}" for it in (src, dst))
    return f"layer{'s' if several else ''} {text}{model_note(part, piece)}"


def source_layers_text(part: Part, piece: slice) -> str:
    """`layer 4`, or `layers 0..3 (16..19 of the model)`."""
    first, last = local_layers(part, "src", piece)
    return f"layer{'s' if first < last else ''} {to_text(first, last)}{model_note(part, piece)}"


def model_note(part: Part, piece: slice = slice(None)) -> str:
    """` (16..31 of the model)` for layers that have another number on one of the sides."""
    src, dst = (local_layers(part, it, piece) for it in ("src", "dst"))
    if model_layers(part, src, dst) in (None, (src, dst)):
        return ""
    return f" ({model_text(part, piece)} of the model)"


def to_text(first: int, last: int) -> str:
    """`5`, or `5..9`."""
    return f"{first}" if first == last else f"{first}..{last}"


def tokens_moved(part: Part) -> int | None:
    """How many tokens of the request a plan moves, where that is not its destination's rows."""
    tables, sides = part.tables, (part.src, part.dst)
    if tables is not None and not all(it.has_all_tokens for it in sides):
        return None if part.src.meaning == part.dst.meaning else tables.count_in_common(*sides)
    return tokens_spanned(part)


def tokens_spanned(part: Part) -> int | None:
    """As `tokens_moved`, with tokens between them that one of the sides does not hold."""
    tables = part.tables
    if tables is None or tables.num_tokens is not None:
        return None if tables is None else tables.num_tokens
    tokens = part.dst.extent("token")
    if part.kind != "B2B" or len(tables.src) == len(tables.dst) or tokens == 1:
        return None
    return len(tables.dst) * tokens - tables.dst_token


def spans_text(word: str, spans: list[Span]) -> str:
    """`token 5`, `tokens 32..47`, or `tokens 16..31, 0..15` where they are not in order."""
    if not spans:
        return ""
    if len(spans) == 1 and spans[0][0] == spans[0][1]:
        return f"{word} {spans[0][0]}"
    shown = ", ".join(to_text(*it) for it in spans[:3])
    return f"{word}s {shown}{', ...' if len(spans) > 3 else ''}"


def _row(side: Side, offset: int) -> int:
    return side.rows(offset, 1)[0]


def _index(side: Side, axis: str, offset: int) -> int:
    """Where along an axis a byte of a tensor is."""
    return offset // max(side.stride_of(axis), 1) % side.extent(axis)


def _spans_more(side: Side, axis: str, first: int, last: int) -> bool:
    """Whether the bytes from `first` to `last` reach all along an axis, or around it."""
    stride = max(side.stride_of(axis), 1)
    return last // stride - first // stride >= side.extent(axis)

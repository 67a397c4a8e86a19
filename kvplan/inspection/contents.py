"""What the bytes of a plan are in the model: which tokens of the request, heads, keys or values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from kvplan.planning.plan import Plan
    from kvplan.planning.side import Side

Span = tuple[int, int]
"""First and last."""


def tokens_of(plan: Plan, first: int, last: int) -> list[Span]:
    """Tokens of the request whose bytes are at dst offsets `first` to `last`, as ranges.

    They are counted in the order of the block tables, from the request's first block at src on.
    Empty: the plan does not know (no layout, no block tables, or a copy inside of a process).
    """
    tables, dst = plan.tables, plan.dst
    if tables is None or plan.local == "both" or not dst.extent("token") > 1:
        return []
    size = dst.extent("token")
    rows = range(_row(dst, first), _row(dst, last) + 1)
    spans: list[Span] = []
    for row in rows:
        found = np.flatnonzero(tables.dst == row)
        if not len(found):
            return []
        begin = _index(dst, "token", first) if row == rows[0] else 0
        end = _index(dst, "token", last) if row == rows[-1] else size - 1
        shift = int(found[0]) * size - tables.dst_token + tables.src_token
        if spans and spans[-1][1] + 1 == begin + shift:
            spans[-1] = spans[-1][0], end + shift
        else:
            spans.append((begin + shift, end + shift))
    return spans


def heads_of(plan: Plan, first: int, last: int) -> Span | None:
    """First and last KV head of the model between dst offsets; None: the layout has no heads."""
    dst = plan.dst
    if dst.layout is None or "head" not in dst.layout.axes:
        return None
    begin = dst.shard.heads.start if dst.shard is not None and dst.shard.heads is not None else 0
    low, high = _index(dst, "head", first), _index(dst, "head", last)
    if low > high or _spans_more(dst, "head", first, last):
        low, high = 0, dst.extent("head") - 1
    return begin + low, begin + high


def heads_of_runs(plan: Plan, first: int, nbytes: int, steps: list[Span]) -> Span | None:
    """As `heads_of`, of the runs of a row: `nbytes` bytes from dst offset `first` on, repeated.

    Args:
        steps: of each level of repeats, how many and how many bytes apart at dst.
    """
    around = max(plan.dst.stride_of("head"), 1) * plan.dst.extent("head")  # to the same head again
    last = first + nbytes - 1 + sum((count - 1) * step for count, step in steps if step % around)
    return heads_of(plan, first, last)


def kv_of(plan: Plan, view: int, first: int, last: int) -> str:
    """`K`, `V`, `K+V`, or nothing where the layout does not say, for a view and dst offsets."""
    dst = plan.dst
    if dst.layout is None:
        return ""
    inside = "kv" in dst.layout.axes and "kv" not in plan.split and dst.extent("kv") == 2
    if inside:
        low, high = _index(dst, "kv", first), _index(dst, "kv", last)
        whole = low != high or _spans_more(dst, "kv", first, last)
        return "K+V" if whole else "KV"[low]
    if plan.tensors_per_layer != 2 or "head" not in dst.layout.axes:
        return ""
    return "KV"[view % 2]


def model_layer(side: Side, layer: int) -> int:
    """The number that a layer of a cache has in the model."""
    layers = side.shard.layers if side.shard is not None else None
    return layer + (layers.start if layers is not None else 0)


def spans_text(word: str, spans: list[Span]) -> str:
    """`token 5`, `tokens 32..47`, or `tokens 16..31, 0..15` where they are not in order."""
    if not spans:
        return ""
    if len(spans) == 1 and spans[0][0] == spans[0][1]:
        return f"{word} {spans[0][0]}"
    shown = ", ".join(f"{first}..{last}" for first, last in spans[:3])
    return f"{word}s {shown}{', ...' if len(spans) > 3 else ''}"


def _row(side: Side, offset: int) -> int:
    return side.rows(offset, 1)[0]


def _index(side: Side, axis: str, offset: int) -> int:
    """Where along an axis a byte of a tensor is."""
    return offset // max(side.stride_of(axis), 1) % side.extent(axis)


def _spans_more(side: Side, axis: str, first: int, last: int) -> bool:
    """Whether the bytes between reach all along an axis, or around it."""
    return last - first >= side.stride_of(axis) * side.extent(axis)

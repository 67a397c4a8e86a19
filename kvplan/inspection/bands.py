"""What a picture draws of a plan: its segments as bands between rows, in the order of the request.

Every tensor pair shares the segments, so the bands of one layer are those of all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from kvplan.inspection.contents import Span, heads_of_runs, kv_of, to_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvplan.planning.part import Part
    from kvplan.planning.side import Side

    Numbers = NDArray[np.int64]

MOST: Final = 16384
"""Bands of a plan. Where there are more, neighbours in the request's order are joined to one."""

SAME, OLD, NEW = range(3)
"""States of a band: of both plans that are compared (or of the only one), of the old, the new."""

_KV: Final = {"": 0, "K": 1, "V": 2, "K+V": 3}


class Bands(NamedTuple):
    """One entry a band, in the order of the request; counts are of one tensor pair.

    Attributes:
        src_first, src_last, dst_first, dst_last: rows, first and last.
        src_from, src_to, dst_from, dst_to: where in the first row the band begins, and where in the
            last one it ends, in parts of a row (`Drawn.parts`).
        entry_first, entry_last: of the destination's block table; -1: not known.
        token_first, token_last: of the request; -1: not known.
        head_first, head_last: KV heads of the model; -1: the layout has none.
        kv: 1 keys, 2 values, 3 both inside of one tensor, 0 not inside.
        runs, nbytes, least, most: descriptors, their bytes, and those of the smallest and largest.
        segments: how many of the plan's; more than one where they lie between the same rows.
        state: SAME, OLD or NEW.
    """

    src_first: Numbers
    src_last: Numbers
    dst_first: Numbers
    dst_last: Numbers
    src_from: Numbers
    src_to: Numbers
    dst_from: Numbers
    dst_to: Numbers
    entry_first: Numbers
    entry_last: Numbers
    token_first: Numbers
    token_last: Numbers
    head_first: Numbers
    head_last: Numbers
    kv: Numbers
    runs: Numbers
    nbytes: Numbers
    least: Numbers
    most: Numbers
    segments: Numbers
    state: Numbers


class Drawn(NamedTuple):
    """The bands of a plan, and what their numbers are of.

    Attributes:
        parts: of a row, at src and at dst, that `src_from` and the like count: tokens, or bytes.
        entries, tokens: in words, of the bands whose entries or tokens are no one span.
        joined: how many bands there would be, if they were not too many; 0: they are not joined.
        at: rows at src and at dst where a band that was joined is drawn, as its first one was.
    """

    bands: Bands
    parts: tuple[int, int]
    entries: dict[int, str]
    tokens: dict[int, str]
    joined: int = 0
    at: tuple[Numbers, Numbers] | None = None


_LEAST = frozenset(("src_first", "dst_first", "entry_first", "token_first", "head_first", "least"))
_MOST = frozenset(("src_last", "dst_last", "entry_last", "token_last", "head_last", "most"))
_SUMS = frozenset(("runs", "nbytes", "segments"))


def bands_of(plan: Part, state: NDArray[np.int64] | None = None, most: int = MOST) -> Drawn:
    """Return the bands of a plan.

    Args:
        state: of each segment; None: SAME.
        most: how many bands are too many.
    """
    segments = plan.segments
    src, dst, nbytes = (getattr(segments, it).astype(np.int64) for it in segments.columns())
    src_end, dst_end = (it.astype(np.int64) for it in segments.ends())
    runs = segments.runs().astype(np.int64)
    (src_first, src_last), (dst_first, dst_last) = (
        _rows(plan.src, src, src_end),
        _rows(plan.dst, dst, dst_end),
    )
    src_parts, src_from, src_to = _parts(plan.src, src, src_end)
    dst_parts, dst_from, dst_to = _parts(plan.dst, dst, dst_end)
    entries, tokens, entry_texts, token_texts = _order(plan, dst, dst_end, dst_first, dst_last)
    heads, kv = _contents(plan, dst, nbytes)
    bands = Bands(
        src_first, src_last, dst_first, dst_last,
        src_from, src_to, dst_from, dst_to,
        *entries, *tokens, heads[:, 0], heads[:, 1], kv,
        runs, nbytes * runs, nbytes, nbytes,
        np.ones(len(segments), np.int64),
        np.zeros(len(segments), np.int64) if state is None else state,
    )  # fmt: skip
    order = np.lexsort((bands.state, src, dst, bands.entry_first, bands.token_first))
    bands = Bands(*(it[order] for it in bands))
    starts = _starts(bands)
    joined, drawn_at = 0, None
    if len(starts) > most:
        joined = len(starts)
        changes = np.flatnonzero(np.diff(bands.state)) + 1  # a band has one state
        starts = np.union1d(starts[:: -(-joined // most)], changes)
        drawn_at = bands.src_first[starts], bands.dst_first[starts]
    merged = Bands(*(_reduced(name, it, starts) for name, it in bands._asdict().items()))
    if joined:
        merged = _between_whole_rows(merged, (src_parts, dst_parts))
    at = {int(segment): place for place, segment in enumerate(order[starts])}
    said = [
        {} if joined else {at[it]: text for it, text in texts.items() if it in at}
        for texts in (entry_texts, token_texts)
    ]
    return Drawn(merged, (src_parts, dst_parts), said[0], said[1], joined, drawn_at)


def _rows(side: Side, first: Numbers, end: Numbers) -> tuple[Numbers, Numbers]:
    """As `Side.rows`, of all segments; the last byte is that of the last run."""
    period = side.count * side.stride
    return first % period // side.stride, (end - 1) % period // side.stride


def _parts(side: Side, first: Numbers, end: Numbers) -> tuple[int, Numbers, Numbers]:
    """How many parts a row has, in which it begins, and before which it ends."""
    stride, tokens = side.stride_of("token"), side.extent("token")
    if stride and tokens > 1:
        return tokens, first // stride % tokens, (end - 1) // stride % tokens + 1
    begin, stop = first % side.stride, (end - 1) % side.stride + 1
    if stride or not side.rows_are_whole:
        return 1, np.zeros_like(first), np.ones_like(first)
    step = int(np.gcd.reduce(np.concatenate((begin, stop, [side.stride]))))
    return side.stride // step, begin // step, stop // step


def _order(
    plan: Part, first: Numbers, end: Numbers, low: Numbers, high: Numbers
) -> tuple[tuple[Numbers, Numbers], tuple[Numbers, Numbers], dict[int, str], dict[int, str]]:
    """Entries of the destination's table, and tokens, of each segment; see `tokens_of`.

    The texts are of those that are no one span.
    """
    unknown = np.full(len(first), -1)
    tables, dst = plan.tables, plan.dst
    if tables is None or not len(tables.dst):
        return (unknown, unknown), (unknown, unknown), {}, {}
    entry_of = np.argsort(tables.dst)
    rows = np.asarray(tables.dst)[entry_of]
    count = len(rows)
    begin = np.minimum(np.searchsorted(rows, low), count - 1)
    stop = np.minimum(np.searchsorted(rows, high), count - 1)
    known = (rows[begin] == low) & (rows[stop] == high) & (stop - begin == high - low)
    breaks = np.concatenate(([0], np.cumsum(np.diff(entry_of) != 1)))
    single = known & (breaks[begin] == breaks[stop])
    entries = [np.where(single, entry_of[it], -1) for it in (begin, stop)]
    size, has_tokens = dst.extent("token"), dst.layout is not None and "token" in dst.layout.axes
    has_tokens = has_tokens and dst.has_all_tokens  # otherwise no band is one span of tokens
    tokens = [unknown, unknown]
    stride = max(dst.stride_of("token"), 1)
    skipped, left = first // stride % size, size - 1 - (end - 1) // stride % size
    shift = tables.src_token - tables.dst_token
    if has_tokens and plan.local != "both":
        tokens = [
            np.where(single, entries[0] * size + shift + skipped, -1),
            np.where(single, (entries[1] + 1) * size - 1 + shift - left, -1),
        ]
    entry_texts, token_texts = {}, {}
    for index in np.flatnonzero(known & ~single).tolist():
        found = entry_of[begin[index] : stop[index] + 1]
        cuts = np.flatnonzero(np.diff(found) != 1)
        heads, tails = found[np.concatenate(([0], cuts + 1))], found[np.concatenate((cuts, [-1]))]
        entries[0][index], entries[1][index] = found.min(), found.max()
        entry_texts[index] = _spans(heads, tails)
        if tokens[0] is not unknown:
            firsts, lasts = heads * size + shift, (tails + 1) * size - 1 + shift
            firsts[0] += skipped[index]
            lasts[-1] -= left[index]
            tokens[0][index], tokens[1][index] = firsts.min(), lasts.max()
            token_texts[index] = _spans(firsts, lasts)
    return (entries[0], entries[1]), (tokens[0], tokens[1]), entry_texts, token_texts


def _spans(firsts: Numbers, lasts: Numbers) -> str:
    pairs = zip(firsts[:3].tolist(), lasts[:3].tolist(), strict=True)
    return ", ".join(to_text(*it) for it in pairs) + (", ..." if len(firsts) > 3 else "")


def _contents(plan: Part, dst: Numbers, nbytes: Numbers) -> tuple[Numbers, Numbers]:
    """Heads (first, last), and whether keys or values, of each segment.

    Both are the same a period further on, so that few different segments are looked at.
    """
    count, side = len(dst), plan.dst
    heads, kv = np.full((count, 2), -1), np.zeros(count, np.int64)
    inside = "kv" not in plan.split and side.extent("kv") == 2
    has_heads = side.layout is not None and "head" in side.layout.axes
    if not (inside or has_heads):
        return heads, kv
    period = max(side.stride_of(it) * side.extent(it) for it in ("head", "kv"))
    columns = [dst % period, nbytes, *(it.counts.astype(np.int64) for it in plan.segments.repeats)]
    found: dict[tuple[int, ...], tuple[int, int, int]] = {}
    strides = [it.dst_stride for it in plan.segments.repeats]
    keys = [*zip(*(it.tolist() for it in columns), strict=True)]
    for key in set(keys):
        first, size, *counts = key
        steps = [*zip(counts, strides, strict=True)]
        low, high = heads_of_runs(plan, first, size, steps) or (-1, -1)
        found[key] = low, high, _KV[_kv_of_runs(plan, first, size, steps)] if inside else 0
    values = np.array([found[it] for it in keys]).reshape(count, 3)
    return values[:, :2], values[:, 2]


def _kv_of_runs(plan: Part, first: int, nbytes: int, steps: Sequence[Span]) -> str:
    """As `kv_of`, of runs that repeat; see `heads_of_runs`."""
    around = max(plan.dst.stride_of("kv"), 1) * plan.dst.extent("kv")
    last = first + nbytes - 1 + sum((count - 1) * step for count, step in steps if step % around)
    return kv_of(plan, 0, first, last)


def _starts(bands: Bands) -> Numbers:
    """Where a band begins: segments between the same parts of the same rows are one."""
    places = (*bands[:8], bands.state)
    changes = np.zeros(max(len(bands.state) - 1, 0), np.bool_)
    for column in places:
        changes |= column[1:] != column[:-1]
    return np.concatenate(([0], np.flatnonzero(changes) + 1))[: len(bands.state)]


def _reduced(name: str, column: Numbers, starts: Numbers) -> Numbers:
    if len(starts) == len(column):
        return column
    if name in _LEAST:
        return np.minimum.reduceat(column, starts)
    if name in _MOST:
        return np.maximum.reduceat(column, starts)
    if name in _SUMS:
        return np.add.reduceat(column, starts)
    return np.bitwise_or.reduceat(column, starts) if name == "kv" else column[starts]


def _between_whole_rows(bands: Bands, parts: tuple[int, int]) -> Bands:
    """Bands that were joined have no parts of rows in common."""
    none = np.zeros_like(bands.state)
    return bands._replace(
        src_from=none, src_to=none + parts[0], dst_from=none, dst_to=none + parts[1]
    )

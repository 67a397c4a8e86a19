"""Compare and cut the rows of two sides: as bytes if they are alike, otherwise axis by axis.

Two caches of one model may differ in the order of axes, block size, heads, and whether keys and
values share a tensor. They share the intersection of their axes in the model's coordinates. Bytes
that are contiguous on both sides are one run.
"""

from __future__ import annotations

from typing import NamedTuple, NoReturn

import numpy as np

from kvplan.layout import Layers
from kvplan.planning.blocks import Indices
from kvplan.planning.segments import MAX_REPEATS, Coalesce, Repeat, Segments
from kvplan.planning.side import Side
from kvplan.planning.tokens import BlockTables, Mask, token_runs
from kvplan.status import LLMException, invalid

_MODEL_AXES = ("kv", "head", "dim", "group", "state")


class Cut(NamedTuple):
    """The intersection of two sides as segments.

    Attributes:
        segments: the segments of every pair of views.
        split: the axes along which tensors are split into views, for `Side.locate`.
        num_slices: runs before adjacent ones were merged.
    """

    segments: Segments
    split: tuple[str, ...]
    num_slices: int


class Share(NamedTuple):
    """The heads and tokens that move.

    Attributes:
        heads: the KV heads of the model; None: all that both sides have.
        tokens: a mask of the tokens that move; None: all that both sides have.
    """

    heads: range | None = None
    tokens: Mask | None = None


WHOLE_SHARE = Share()


class Level(NamedTuple):
    """An axis that both sides step along: number of steps, and bytes of a step on each side."""

    times: int
    src_stride: int
    dst_stride: int


class Common(NamedTuple):
    """Properties that the rows of two sides share, whatever tokens move.

    Attributes:
        src_start, dst_start: bytes of a token before the first one that both sides have.
        levels: the axes along which both sides step, except tokens.
        split: the axes along which tensors are split into views.
    """

    src_start: int
    dst_start: int
    levels: list[Level]
    split: list[str]


def rows_are_alike(source: Side, target: Side, *, chunked: bool, reinterpret: bool) -> bool:
    """Return whether rows hold the same bytes in the same order; False: cut them by axes.

    With `chunked`, rows may differ in their outermost axis, if that is tokens or unknown. With
    `reinterpret`, the meaning of bytes does not matter. LLM_PARAM_INVALID: the data types differ,
    or rows differ and no layout tells how.
    """
    a, b = source.meaning, target.meaning
    if not a or not b or reinterpret:
        return source.rows_are_whole and target.rows_are_whole
    if a == b and source.rows_are_whole:
        return True
    if source.data_type is not target.data_type:
        refuse_unlike("data type", source, target)
    if source.layout is not None and target.layout is not None:
        return (
            source.rows_are_whole
            and target.rows_are_whole
            and heads_of(source) == heads_of(target)
            and source.spread == target.spread
            and _layers_inside(source) == _layers_inside(target)
            and _row_signature(source, chunked) == _row_signature(target, chunked)
        )
    if source.layout is not target.layout or source.label != target.label:
        refuse_unlike("layout", source, target)
    if _row_signature(source, chunked, named=False) != _row_signature(target, chunked, named=False):
        refuse_unlike("shape of a row", source, target)
    return True


def rows_differ(source: Side, target: Side, *, chunked: bool) -> bool:
    """Return whether a copy of bytes changes their meaning; False if one meaning is unknown."""
    if source.meaning == target.meaning or not source.meaning or not target.meaning:
        return False
    if source.shard != target.shard:
        return True
    try:
        return not rows_are_alike(source, target, chunked=chunked, reinterpret=False)
    except LLMException:
        return True


def _layers_inside(side: Side) -> tuple[Layers, int | None] | None:
    """Return the model's layers that a row holds together; None if it has one, or unknown ones."""
    shard = side.shard
    if side.extent("layer") == 1 or shard is None or shard.layers is None:
        return None
    return shard.layers, shard.num_layers


def _row_signature(side: Side, chunked: bool, *, named: bool = True) -> tuple[object, ...]:
    shape: tuple[object, ...] = side.row_shape
    layout = side.layout
    names: tuple[str, ...] = ()
    if layout is not None and named:
        names = layout.axes[: layout.row_axis] + layout.axes[layout.row_axis + 1 :]
        if chunked and names[:1] == ("token",):
            shape = shape[1:]
    elif chunked:
        shape = shape[1:]
    return (*names, *shape)


def refuse_unlike(what: str, source: Side, target: Side) -> NoReturn:
    """Refuse two sides, with both in the message."""
    raise invalid(
        f"src and dst differ in {what}: src is {source}; dst is {target}. "
        "reinterpret=True copies the bytes as they are"
    )


def cut(
    source: Side,
    target: Side,
    tables: BlockTables,
    how: Coalesce,
    share: Share = WHOLE_SHARE,
) -> Cut:
    """Return the bytes that both sides have of the tokens in `tables`, limited to `share`.

    LLM_PARAM_INVALID: axes that cannot match (the message names them), no heads in common,
    different numbers of tokens, or tokens beyond a table.
    """
    src_start, dst_start, levels, split = in_common(source, target, share.heads)
    by_state = ["state" in side.layout.axes for side in (source, target) if side.layout is not None]
    if by_state[0] is not by_state[1]:
        refuse_unlike("axis state", source, target)
    src_offsets, dst_offsets, tokens = token_runs(source, target, tables, share.tokens)
    src_offsets += src_start
    dst_offsets += dst_start
    token_strides = source.stride_of("token"), target.stride_of("token")
    by_size: list[Segments] = []
    # Whole blocks first, then pieces with fewer tokens, which may have other runs.
    sizes = (
        np.flatnonzero(np.bincount(tokens))[::-1] if isinstance(tokens, np.ndarray) else [tokens]
    )
    for size in map(int, sizes):
        of_size = tokens == size if isinstance(tokens, np.ndarray) else slice(None)
        run, left = _fuse(source, target, [*levels, Level(size, *token_strides)])
        kv = None if by_size else kv_level(left, source, target)
        if kv is not None and len(left) > MAX_REPEATS:
            # Pairs of views are cheaper than rows of the table.
            levels.remove(kv)
            left.remove(kv)
            split.append("kv")
        by_size.append(_table(src_offsets[of_size], dst_offsets[of_size], run, left))
    segments = _joined(by_size, how)
    num_slices = sum(segments.num_runs for segments in by_size)
    return Cut(segments, tuple(split), num_slices)


def in_common(source: Side, target: Side, heads: range | None = None) -> Common:
    """Intersect the rows of both sides, limited to `heads` of the model, axis by axis.

    LLM_PARAM_INVALID: axes that cannot match (the message names them), or no heads in common.
    """
    for side, name in ((source, "src"), (target, "dst")):
        if side.layout is None:
            remedy = (
                "addresses have none: name the cache by BlocksCacheKey or CacheIndex"
                if side.data_type is None
                else "give its CacheDesc a kv_tensor_format such as 'block token head dim'"
            )
            raise invalid(
                f"{name} has no layout; tokens and unlike rows need one: {name} is {side}; {remedy}"
            )
    src_start = dst_start = 0
    levels: list[Level] = []
    split = []
    for axis in _MODEL_AXES:
        count, src_count, dst_count = 0, source.extent(axis), target.extent(axis)
        if axis == "head":
            count, src_first, dst_first = _heads_in_common(source, target, heads)
            src_start += src_first * source.stride_of(axis)
            dst_start += dst_first * target.stride_of(axis)
        elif axis == "kv" and (src_count == 1) is not (dst_count == 1):
            split.append(axis)  # one side has separate tensors for keys and values
            continue
        elif src_count != dst_count:
            refuse_unlike(f"axis {axis}", source, target)
        else:
            count = src_count
        levels.append(Level(count, source.stride_of(axis), target.stride_of(axis)))
    if source.extent("layer") > 1 or target.extent("layer") > 1:
        split.append("layer")
    return Common(src_start, dst_start, levels, split)


def _table(src: Indices, dst: Indices, run: int, levels: list[Level]) -> Segments:
    """Return a segment for each pair of offsets. Levels beyond `MAX_REPEATS` become segments."""
    while len(levels) > MAX_REPEATS:
        level = levels.pop(0)
        steps = np.arange(level.times, dtype=np.int64)
        src = (src[:, None] + steps * level.src_stride).ravel()
        dst = (dst[:, None] + steps * level.dst_stride).ravel()
    repeats = tuple(
        Repeat(np.full(len(src), level.times, np.uint64), level.src_stride, level.dst_stride)
        for level in levels
    )
    nbytes = np.full(len(src), run, np.uint64)
    return Segments.adopt(src.view(np.uint64), dst.view(np.uint64), nbytes, repeats)


def _joined(parts: list[Segments], how: Coalesce) -> Segments:
    """Join tables into one. Repeats that differ from those of the largest table are expanded."""
    largest = max(parts, key=len)
    repeats = list(largest.repeats)
    if len(parts) == 1:
        src, dst, nbytes = largest.src_offsets, largest.dst_offsets, largest.nbytes
    else:
        strides = [repeat[1:] for repeat in repeats]
        parts = [
            segments if [r[1:] for r in segments.repeats] == strides else segments.expanded()
            for segments in parts
        ]
        src, dst, nbytes = (
            np.concatenate([getattr(segments, name) for segments in parts])
            for name in Segments.columns()
        )
        for level, repeat in enumerate(repeats):
            counts = [
                segments.repeats[level].counts
                if segments.repeats
                else np.ones(len(segments), np.uint64)
                for segments in parts
            ]
            repeats[level] = repeat._replace(counts=np.concatenate(counts))
    if not repeats and how is Coalesce.SORTED and np.count_nonzero(src[1:] < src[:-1]):
        order = np.lexsort((dst, src))
        src, dst, nbytes = src[order], dst[order], nbytes[order]
    return Segments.adopt(src, dst, nbytes, tuple(repeats), merged=how is not Coalesce.NONE)


def heads_of(side: Side) -> tuple[range, int]:
    """Return the KV heads that a side has, and the number of heads of the model."""
    shard = side.shard
    if shard is None or shard.heads is None or shard.num_heads is None:
        own = side.extent("head")
        return range(own), own
    return shard.heads, shard.num_heads


def _heads_in_common(source: Side, target: Side, wanted: range | None) -> tuple[int, int, int]:
    """Return the number of common heads, and the position of the first on each side."""
    (src_heads, src_total), (dst_heads, dst_total) = heads_of(source), heads_of(target)
    if src_total != dst_total:
        refuse_unlike(
            f"axis head ({src_total} and {dst_total} KV heads in the model)", source, target
        )
    if wanted is None:
        wanted = range(src_total)
    first = max(src_heads.start, dst_heads.start, wanted.start)
    last = min(src_heads.stop, dst_heads.stop, wanted.stop)
    if first >= last:
        refuse_unlike("axis head, with no head in common", source, target)
    return last - first, first - src_heads.start, first - dst_heads.start


def _fuse(source: Side, target: Side, levels: list[Level]) -> tuple[int, list[Level]]:
    """Return the bytes that are contiguous on both sides, and the levels left, outermost first."""
    run, levels = elements(source, target, levels)
    while fused := [level for level in levels if level.src_stride == level.dst_stride == run]:
        run *= fused[0].times
        levels.remove(fused[0])
    left: list[Level] = []
    for inner in sorted(levels, key=lambda repeat: repeat.dst_stride, reverse=True):
        outer = left[-1] if left else Level(0, 0, 0)
        if outer[1:] == (inner.times * inner.src_stride, inner.times * inner.dst_stride):
            left[-1] = inner._replace(times=outer.times * inner.times)
        else:
            left.append(inner)
    return run, left


def elements(source: Side, target: Side, levels: list[Level]) -> tuple[int, list[Level]]:
    """Return the bytes that stay together in every request, and the levels outside them."""
    assert source.data_type is not None  # every layout has a data type
    bits = source.data_type.bits
    run = bits // 8
    levels = [level for level in levels if level.times > 1]
    if bits % 8:
        # Elements are packed: only the whole innermost axis has an address.
        (axis, length), other = _innermost(source), _innermost(target)
        if (axis, length) != other or axis in ("token", "layer", "head") or length * bits % 8:
            refuse_unlike(f"the innermost axis of packed {source.data_type.name}", source, target)
        run = length * bits // 8
        levels = [level for level in levels if level.src_stride or level.dst_stride]
    return run, levels


def _innermost(side: Side) -> tuple[str, int]:
    assert side.layout is not None  # rows without a layout are copied as bytes
    return side.layout.axes[-1], side.shape[-1]


def kv_level(levels: list[Level], source: Side, target: Side) -> Level | None:
    """Return the level of keys and values, if `levels` contains it."""
    kv = Level(source.extent("kv"), source.stride_of("kv"), target.stride_of("kv"))
    return kv if kv in levels else None

"""Tokens of a request: the runs that lie together on both sides.

Tokens are counted in the whole request. A *place* counts those that a shard of tokens stores.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvplan.planning.blocks import Indices, RequestBlocks
from kvplan.planning.side import ALL_TOKENS, Side, Spread
from kvplan.planning.texts import plural
from kvplan.status import invalid

Mask: TypeAlias = NDArray[np.bool_]
"""A mask of the tokens of a request, in their order: True for those that move."""


class BlockTables(NamedTuple):
    """The rows of a request on both sides, in the order of its tokens, and the tokens that move.

    Attributes:
        src, dst: block indices, or one slot.
        src_token, dst_token: the number of the request's tokens that each side skips.
        num_tokens: number of tokens that move; None: whole rows move.
    """

    src: Indices
    dst: Indices
    src_token: int = 0
    dst_token: int = 0
    num_tokens: int | None = None

    def of_leases(
        self, source: Side, target: Side, src_blocks: object, dst_blocks: object
    ) -> BlockTables:
        """Drop blocks of leases (`RequestBlocks`) that do not fit the other table.

        At src those of `num_tokens` stay, so that a short table at dst is the one that is refused.
        """
        src, dst, wanted = self.src, self.dst, self.num_tokens or 0
        if type(src_blocks) is RequestBlocks:
            most = max(room(target, len(dst), self.dst_token), wanted) + self.src_token
            src = src[: -(-source.spread.count(most) // source.extent("token"))]
        if type(dst_blocks) is RequestBlocks:
            most = room(source, len(src), self.src_token) + self.dst_token
            dst = dst[: -(-target.spread.count(most) // target.extent("token"))]
        return self._replace(src=src, dst=dst)

    def count_in_common(self, source: Side, target: Side) -> int:
        """Return the number of moved tokens that both sides hold."""
        sides = (source, self.src, self.src_token), (target, self.dst, self.dst_token)
        num_tokens = self.num_tokens
        if num_tokens is None:
            num_tokens = max(fewest(side, len(table), skipped) for side, table, skipped in sides)
        src, dst = (
            _pieces(side.spread, side.extent("token"), skipped, max(num_tokens, 0))
            for side, _, skipped in sides
        )
        return int(_runs(src, dst, None)[1].sum())


def room(side: Side, num_rows: int, skipped: int) -> int:
    """Return the number of tokens after the skipped ones that fit into `num_rows` rows."""
    places = num_rows * side.extent("token")
    spread = side.spread
    return (places if spread is ALL_TOKENS else spread.token(places)) - skipped


def fewest(side: Side, num_rows: int, skipped: int) -> int:
    """Return the minimum number of tokens after the skipped ones that fills `num_rows` rows."""
    places = num_rows * side.extent("token")
    spread = side.spread
    if spread is ALL_TOKENS or not places:
        return places - skipped
    return spread.token(places - 1) + 1 - skipped


def token_runs(
    source: Side, target: Side, tables: BlockTables, wanted: Mask | None = None
) -> tuple[Indices, Indices, int | Indices]:
    """Return the runs of tokens that lie in one row on both sides, limited to `wanted`.

    The result is the byte offset of each run at src and at dst, and its number of tokens: one int
    if equal for all runs. LLM_PARAM_INVALID: different numbers of tokens, or tokens beyond a
    table.
    """
    assert source.layout is not None
    src_size, dst_size = source.extent("token"), target.extent("token")
    num_tokens = tables.num_tokens
    tokens: int | Indices
    if not len(tables.dst) and not num_tokens and (not len(tables.src) or not source.paged):
        nothing = np.empty(0, np.int64)
        return nothing, nothing, src_size
    if "state" in source.layout.axes and (
        num_tokens is not None or tables.src_token or tables.dst_token
    ):
        raise invalid(
            f"num_tokens={num_tokens} and token offsets need an axis token; src is {source}"
        )
    sides = (source, len(tables.src), tables.src_token), (target, len(tables.dst), tables.dst_token)
    has = [room(*rows) for rows in sides]
    if num_tokens is None:
        num_tokens = max(fewest(*rows) for rows in sides)  # neither side holds further tokens
        if num_tokens > min(has):
            src_has, dst_has = (
                count * side.extent("token") - (skipped if side.has_all_tokens else 0)
                for side, count, skipped in sides
            )
            raise invalid(
                f"src.blocks hold {src_has} tokens ({len(tables.src)} of {src_size}) and "
                f"dst.blocks {dst_has} ({len(tables.dst)} of {dst_size}); give num_tokens to a "
                "pull or push, and tables of equally many tokens to a copy or swap"
            )
    for name, most, skipped in zip(("src", "dst"), has, tables[2:4], strict=True):
        if not 1 <= num_tokens <= most:
            raise invalid(
                f"{name}.first_token={skipped} skips all {most + skipped} tokens of {name}"
                if most < 1 <= skipped
                else f"num_tokens={num_tokens} is out of range [1, {max(most, 0)}], the room in "
                f"the {name} rows from {name}.first_token={skipped} on"
            )
    _check_one_request(source, target, tables, num_tokens)
    src, dst = source.spread, target.spread
    step = min(src_size, dst_size)
    if src is not ALL_TOKENS or dst is not ALL_TOKENS or wanted is not None:
        step = 0
        starts, sizes = _runs(
            _pieces(src, src_size, tables.src_token, num_tokens),
            _pieces(dst, dst_size, tables.dst_token, num_tokens),
            wanted,
        )
        tokens = _uniform(sizes)
    elif not any(
        offset % step for offset in (src_size, dst_size, tables.src_token, tables.dst_token)
    ):
        # Each of the smaller rows is one run, inside a larger row.
        starts = np.arange(0, num_tokens, step, dtype=np.int64)
        tokens = step
        if num_tokens % step:
            tokens = np.full(len(starts), step, np.int64)
            tokens[-1] = num_tokens % step
    else:
        step = 0
        edges = _distinct(
            np.concatenate(
                [
                    [0],
                    np.arange(-tables.src_token % src_size, num_tokens, src_size),
                    np.arange(-tables.dst_token % dst_size, num_tokens, dst_size),
                    [num_tokens],
                ]
            )
        )
        starts, tokens = edges[:-1], _uniform(np.diff(edges))
    return (
        _offsets(source, tables.src, src, tables.src_token, starts, step),
        _offsets(target, tables.dst, dst, tables.dst_token, starts, step),
        tokens,
    )


def _uniform(sizes: Indices) -> int | Indices:
    """Return one number if all sizes are equal; 1 without sizes."""
    if not len(sizes):
        return 1
    return int(sizes[0]) if bool(np.all(sizes == sizes[0])) else sizes


def _pieces(spread: Spread, size: int, skipped: int, num_tokens: int) -> tuple[Indices, Indices]:
    """Return first and end of each piece of consecutive tokens in one row.

    Tokens are counted from the first one that moves.
    """
    first, last = spread.count(skipped), spread.count(skipped + num_tokens)
    edges = [np.array([first, last]), np.arange(first + -first % size, last, size)]
    if spread.size < spread.period:
        edges.append(np.arange(first + -first % spread.size, last, spread.size))
    places = _distinct(np.concatenate(edges))
    starts = spread.tokens(places[:-1]) - skipped
    return starts, starts + np.diff(places)


def _runs(
    src: tuple[Indices, Indices], dst: tuple[Indices, Indices], wanted: Mask | None
) -> tuple[Indices, Indices]:
    """Return first token and number of tokens of each run that lies in one piece on both sides."""
    if not len(src[0]) or not len(dst[0]):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    edges = [*src, *dst]
    if wanted is not None:
        edges.append(np.flatnonzero(wanted[1:] != wanted[:-1]) + 1)
    ends = _distinct(np.concatenate(edges))
    starts, sizes = ends[:-1], np.diff(ends)
    is_run = np.ones(len(starts), np.bool_)
    for begins, stops in (src, dst):
        piece = np.searchsorted(begins, starts, "right") - 1
        is_run &= (piece >= 0) & (starts < stops[piece])
    if wanted is not None:
        is_run[is_run] = wanted[starts[is_run]]
    return starts[is_run], sizes[is_run]


def _distinct(numbers: Indices) -> Indices:
    """Return the numbers in order, each once."""
    ordered = np.sort(numbers)  # not np.unique, whose first call imports numpy.ma
    return ordered[np.concatenate(([True], ordered[1:] != ordered[:-1]))]


def _check_one_request(source: Side, target: Side, tables: BlockTables, num_tokens: int) -> None:
    """Refuse tables that cannot belong to one request of which `num_tokens` move.

    Valid tables hold equally many tokens, or both end in the block with the request's last token,
    even if that token does not move.
    """
    sides = (
        ("src", source, len(tables.src), tables.src_token),
        ("dst", target, len(tables.dst), tables.dst_token),
    )
    # Some request ends in the last block of each table, and not before the tokens that move.
    ends = [room(side, count - 1, skip) + 1 for _, side, count, skip in sides if count]
    if max(num_tokens, *ends, 0) <= min(room(side, count, skip) for _, side, count, skip in sides):
        return
    # Some number of tokens, from the first of the request on, fills both tables.
    if max(fewest(side, count, 0) for _, side, count, _ in sides) <= min(
        room(side, count, 0) for _, side, count, _ in sides
    ):
        return
    texts, needed = [], []
    for name, cache, count, skipped in sides:
        size = cache.extent("token")
        if cache.paged:
            texts.append(f"{name}.blocks has {plural(count, 'block')} of {plural(size, 'token')}")
            blocks = -(-cache.spread.count(skipped + num_tokens) // size)
            needed.append(f"{blocks} of {name}.blocks")
        else:
            texts.append(f"the {name} slot has {plural(size, 'token')}")
    raise invalid(
        f"{' and '.join(texts)}: no request fills both from src.first_token={tables.src_token} and "
        f"dst.first_token={tables.dst_token} on; num_tokens={num_tokens} needs the first "
        f"{' and '.join(needed)}"
    )


def _offsets(
    side: Side, table: Indices, spread: Spread, skipped: int, starts: Indices, step: int
) -> Indices:
    """Return byte offsets of tokens, counted from `skipped` on.

    `step` tokens from each start on lie in one row; 0: the number is unknown.
    """
    assert side.layout is not None
    stride, size = side.stride_of(side.layout.axes[side.layout.row_axis]), side.extent("token")
    if step == size:  # row by row
        first = skipped // size
        return table[first : first + len(starts)] * stride
    row, inside = np.divmod(spread.places(starts + skipped), size)
    offsets: Indices = table[row] * stride + inside * side.stride_of("token")
    return offsets

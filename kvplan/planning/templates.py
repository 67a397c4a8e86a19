"""Templates: the cut of requests between two sides, for any rows and tokens.

A template is made once for two sides and the layers that move. With the block tables of a request
it determines the descriptors without a plan. The request's part of a plan is a `LoweredPart`.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvplan.planning.axes import Level, elements, in_common, kv_level
from kvplan.planning.blocks import Blocks
from kvplan.planning.kinds import move_as_bytes, plan_rows
from kvplan.planning.layers import pair_views
from kvplan.planning.part import Kind, Operation, Part
from kvplan.planning.segments import Segments
from kvplan.planning.side import Side
from kvplan.planning.tokens import BlockTables
from kvplan.status import LLMException
from kvplan.types import KvCacheExtParam


class RowShape(NamedTuple):
    """The placement of one side's rows in memory.

    Attributes:
        num_rows: rows of a tensor.
        tokens: tokens of a row; its bytes if rows are copied as bytes.
        stride, token_stride: bytes from one row, or token, to the next.
        start: bytes of a token before the first byte that moves.
        is_slot: True if a request has one row here, and uses as much of this row as the other
            side has.
    """

    num_rows: int
    tokens: int
    stride: int
    token_stride: int
    start: int
    is_slot: bool


class Template(NamedTuple):
    """Properties that all requests between two sides share.

    Attributes:
        src, dst: the rows of both sides.
        run: bytes that stay together in every request.
        levels: the axes along which both sides step, except tokens.
        kv: the level of keys and values. Requests that keep this level, but need more levels than
            repeats can express, use the next template. None: this template is the last.
        as_bytes: True if whole rows are copied as bytes.
        part: the fields that all parts share.
    """

    src: RowShape
    dst: RowShape
    run: int
    levels: tuple[Level, ...]
    kv: Level | None
    as_bytes: bool
    part: dict[str, Any]


class LoweredPart(Part):
    """A part whose request was lowered from a template, without segments.

    Its `segments` and `tables` are planned at their first use, and `num_slices` if it is not known
    from lowering.

    Attributes:
        request: the arguments of `plan_rows` after the sides.
        as_bytes: as in the template.
    """

    request: tuple[Any, ...]
    as_bytes: bool

    @cached_property
    def _planned(self) -> Part:
        return plan_rows(self.operation, self.kind, self.src, self.dst, *self.request)

    if not TYPE_CHECKING:  # a type checker sees the fields of Part

        @cached_property
        def segments(self) -> Segments:
            """Segments, as the planner makes them."""
            return self._planned.segments

        @cached_property
        def tables(self) -> BlockTables | None:
            """Rows of the request in its order."""
            return self._planned.tables

        @cached_property
        def num_slices(self) -> int:
            """Slices of one tensor before coalescing."""
            return self._planned.num_slices

    @property
    def unplanned_rows(self) -> tuple[Blocks, Blocks] | None:
        """See `Part.unplanned_rows`."""
        if not self.as_bytes or "segments" in vars(self):
            return None
        src_rows, dst_rows, *_ = self.request
        return src_rows, dst_rows


_OF_REQUESTS: Final = frozenset({"segments", "tables", "num_slices", "nbytes", "nbytes_per_tensor"})


def templates_of(
    operation: Operation,
    kind: Kind,
    source: Side,
    target: Side,
    ext_param: KvCacheExtParam,
    *,
    by_layer: bool,
    by_tokens: bool,
    reinterpret: bool,
    heads: range | None = None,
) -> tuple[Template, ...]:
    """Return templates of requests between two sides; the first that accepts a request is used.

    `by_tokens` requests name tokens, others move whole rows. `heads` are the model's KV heads that
    move; None means all that both sides have. The result is empty if the planner refuses all such
    requests, or must plan each of them because a shard names tokens.
    """
    try:
        as_bytes = (
            not by_tokens
            and heads is None
            and move_as_bytes(
                source, target, ext_param, by_layer, chunked=kind != "B2B", reinterpret=reinterpret
            )
        )
        if not as_bytes and not (source.has_all_tokens and target.has_all_tokens):
            return ()
        has_tokens = source.layout is not None and "token" in source.layout.axes
        # This request is valid between any two sides, so that a refusal holds for all requests.
        sample = plan_rows(
            operation, kind, source, target, (0,), (0,), ext_param, by_layer,
            1 if by_tokens or (has_tokens and not as_bytes) else None,
            reinterpret=reinterpret, heads=heads,
        )  # fmt: skip
        fields = {name: value for name, value in vars(sample).items() if name not in _OF_REQUESTS}
        if as_bytes:
            src, dst = (
                RowShape(side.count, side.row_nbytes, side.stride, 1, 0, not side.paged)
                for side in (source, target)
            )
            return (Template(src, dst, 1, (), None, True, fields),)
        src_start, dst_start, every_level, split = in_common(source, target, heads)
        src, dst = _row_shape(source, src_start), _row_shape(target, dst_start)
        run, levels = elements(source, target, every_level)
        kv = kv_level(levels, source, target)
        templates = []
        for level in (None,) if kv is None else (kv, None):
            views = pair_views(source, target, ext_param, tuple(split))
            names = "src_tensors", "dst_tensors", "tensors_per_layer", "split"
            of_views = dict(zip(names, (*views, tuple(split)), strict=True))
            template = Template(src, dst, run, tuple(levels), level, False, fields | of_views)
            templates.append(template)
            if level is not None:  # the next template pairs keys and values separately
                levels.remove(level)
                split.append("kv")
    except LLMException:
        return ()
    return tuple(templates)


def _row_shape(side: Side, start: int) -> RowShape:
    assert side.layout is not None  # rows without a layout are copied as bytes
    row = side.layout.axes[side.layout.row_axis]
    return RowShape(
        side.count, side.extent("token"), side.stride_of(row), side.stride_of("token"), start,
        not side.paged,
    )  # fmt: skip

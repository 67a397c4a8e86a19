"""Templates: how requests between two sides are cut, whatever rows and tokens they name.

The planner makes a template once for two sides and the layers that are moved. From it and the
block tables of a request `kvplan.execution.rows` makes the descriptors that the plan of the request
would have, without that plan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvplan.planning.axes import Level, elements, in_common, kv_level
from kvplan.planning.kinds import move_as_bytes, plan_rows
from kvplan.planning.layers import pair_views
from kvplan.status import LLMException

if TYPE_CHECKING:
    from kvplan.planning.part import Kind, Operation
    from kvplan.planning.side import Side
    from kvplan.types import KvCacheExtParam


class RowShape(NamedTuple):
    """How rows lie on one side.

    Attributes:
        num_rows: rows of a tensor.
        tokens: tokens of a row; bytes of it where rows are copied as bytes.
        stride, token_stride: bytes from one row, or token, to the next.
        start: bytes of a token before the first that is moved.
        is_slot: whether a request has one row, filled or read as far as the other side reaches.
    """

    num_rows: int
    tokens: int
    stride: int
    token_stride: int
    start: int
    is_slot: bool


class Template(NamedTuple):
    """What requests between two sides have in common.

    Attributes:
        src, dst: the rows.
        run: bytes that lie together however a request is cut.
        levels: the axes that both sides step along, but that of tokens.
        kv: the level of keys and values. Requests that are left with it and with more levels than
            segments have repeats are cut as the next template says. None: it never becomes pairs.
        as_bytes: whether whole rows are copied as bytes.
        part: the fields that the parts of all requests have in common.
    """

    src: RowShape
    dst: RowShape
    run: int
    levels: tuple[Level, ...]
    kv: Level | None
    as_bytes: bool
    part: dict[str, Any]


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
    """Return templates of requests between two sides; the first that takes a request is used.

    Args:
        by_tokens: whether requests name tokens; otherwise they are of whole rows.
        heads: KV heads of the model that are moved; None: all that both sides have.

    Returns:
        Nothing if the planner refuses all such requests, or must be asked for each: a shard names
        tokens.
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
        # A request that is right between all sides: it shows what is refused whatever is asked for.
        sample = plan_rows(
            operation, kind, source, target, (0,), (0,), ext_param, by_layer,
            1 if by_tokens or (has_tokens and not as_bytes) else None,
            reinterpret=reinterpret, heads=heads,
        )  # fmt: skip
        fields = {name: it for name, it in vars(sample).items() if name not in _OF_REQUESTS}
        if as_bytes:
            src, dst = (
                RowShape(it.count, it.stride, it.stride, 1, 0, not it.paged)
                for it in (source, target)
            )
            return (Template(src, dst, 1, (), None, True, fields),)
        src_start, dst_start, every_level, split = in_common(source, target, heads)
        src, dst = _row_shape(source, src_start), _row_shape(target, dst_start)
        run, levels = elements(source, target, every_level)
        kv = kv_level(levels, source, target)
        templates = []
        for it in (None,) if kv is None else (kv, None):
            views = pair_views(source, target, ext_param, tuple(split))
            names = "src_tensors", "dst_tensors", "tensors_per_layer", "split"
            of_views = dict(zip(names, (*views, tuple(split)), strict=True))
            templates.append(Template(src, dst, run, tuple(levels), it, False, fields | of_views))
            if it is not None:  # keys and values as pairs of their own
                levels.remove(it)
                split.append("kv")
    except LLMException:
        return ()
    return tuple(templates)


def _row_shape(side: Side, start: int) -> RowShape:
    assert side.layout is not None  # else nothing is cut by axes
    row = side.layout.axes[side.layout.row_axis]
    return RowShape(
        side.count, side.extent("token"), side.stride_of(row), side.stride_of("token"), start,
        not side.paged,
    )  # fmt: skip

"""Explain a plan as a tree or as a table. Offsets are relative: stable in tests, safe in logs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, get_args

from kvplan.inspection.contents import (
    RequestOrder,
    kv_of,
    layers_text,
    local_layers,
    model_note,
    to_text,
    tokens_moved,
)
from kvplan.inspection.copy_ways import copied_lines
from kvplan.inspection.table import summary, table_lines
from kvplan.inspection.units import WIDTH, Format, fit, nbytes_text, place, plural, shown_rows, span
from kvplan.status import invalid
from kvplan.validation import check_type, shown

if TYPE_CHECKING:
    from kvplan.inspection.cost import TransportCost
    from kvplan.planning.plan import Plan
    from kvplan.planning.side import Side


_SIDE_WIDTH = 100
"""Columns of the lines that say what both sides are."""


def one_line(plan: Plan) -> str:
    """`<Plan push_blocks B2B L4-5>0-1 x 3 blocks: 8 desc, 3.0 MiB>`."""
    src, dst = (local_layers(plan, it) for it in ("src", "dst"))
    layers = f"L{span(src)}" if src == dst else f"L{span(src)}>{span(dst)}"
    rows = plural(_num_rows(plan), plan.dst.row)
    if (tokens := tokens_moved(plan)) is not None:
        if (
            plan.tables is not None
            and plan.kind == "B2B"
            and len(plan.tables.src) != _num_rows(plan)
        ):
            rows = f"{len(plan.tables.src)}>{rows}"
        rows = f"{plural(tokens, 'token')}, {rows}"
    return (
        f"<Plan {plan.operation} {plan.kind} {layers} x {rows}: "
        f"{plan.num_descriptors} desc, {nbytes_text(plan.nbytes)}>"
    )


def explain_lines(
    plan: Plan,
    format: Format,  # noqa: A002
    limit: int | None,
    cost: TransportCost | None = None,
    same_as: str = "",
    *,
    is_part: bool = False,
) -> Iterator[str]:
    """Return `plan` as lines of text; of each list at most `limit` rows (None: all).

    With `cost` a line more: under the head of a tree, or as the last one of a table. With `same_as`
    a tree does not list the segments: that names what has the same. How a GPU copies is not said of
    a part, which does not go alone.

    Raises, before the first line:
        LLMException: LLM_PARAM_INVALID for another format or a limit below 1.
    """
    if limit is not None and check_type("limit", limit, int) < 1:
        raise invalid(f"limit={limit} must be None or >= 1")
    moved = [] if cost is None else [cost.outline(plan)]
    match format:
        case "tree":
            copied = [] if is_part else copied_lines(plan)
            head = [*_header(plan), *(f"  {line}" for line in [*copied, *moved])]
            return chain(chain.from_iterable(map(fit, head)), _tree(plan, limit, same_as))
        case "table":
            return chain(table_lines(plan, limit), moved)
    raise invalid(f"format={shown(format)} must be one of {get_args(Format)}")


def _num_rows(plan: Plan) -> int:
    """How many rows are written, as far as the plan knows."""
    if plan.tables is not None:
        return len(plan.tables.dst)
    return 1 if plan.kind == "C2C" else plan.num_slices  # of one slot ranges may be moved


def _header(plan: Plan) -> list[str]:
    ends = " -> ".join(
        name or word for name, word in ((plan.src.name, "src"), (plan.dst.name, "dst"))
    )
    src, dst = ("{}..{}".format(*local_layers(plan, it)) for it in ("src", "dst"))
    slices = plan.num_slices * plan.num_tensor_pairs
    merged = slices - plan.num_descriptors
    return [
        f"{plan.operation}  {plan.kind}   {ends}   plan {plan.fingerprint[:6]}",
        *(f"  {line}" for line in _meaning(plan)),
        f"  layers {src} -> {dst}{model_note(plan)} | tensors/layer {plan.tensors_per_layer} | "
        f"{_rows_moved(plan)}",
        f"  {plural(slices, 'slice')} -> {plural(plan.num_descriptors, 'descriptor')} "
        f"({merged:,} merged) | {nbytes_text(plan.nbytes)}",
        *([f"  {transposed}"] if (transposed := _transposed(plan)) else []),
        *(f"  over {way}" for way in (plan.src.way, plan.dst.way) if way),
    ]


def _meaning(plan: Plan) -> list[str]:
    """Data type, layout and shard of both sides, on one line where they fit."""
    src, dst = plan.src, plan.dst
    forced = "REINTERPRETED: bytes as they are"
    if str(src) == str(dst):
        return _side_lines(src, "", ", both sides")
    line = f"{src} -> {dst}{f', {forced}' if plan.reinterpret else ''}"
    if len(line) + 2 <= _SIDE_WIDTH:
        return [line]
    return [
        *_side_lines(src, "src "),
        *_side_lines(dst, "dst "),
        *([forced] if plan.reinterpret else []),
    ]


def _side_lines(side: Side, name: str, end: str = "") -> list[str]:
    """A side in one line, or its shard below it where it is too long."""
    line, shard = f"{name}{side}{end}", f", {side.shard}"
    if len(line) + 2 <= _SIDE_WIDTH or side.shard is None:
        return [line]
    return [f"{name}{str(side).removesuffix(shard)},", f"{' ' * len(name)}{shard[2:]}{end}"]


def _rows_moved(plan: Plan) -> str:
    """`3 blocks x 32 KiB`, or, where tokens are cut, `40 tokens, 3 blocks -> 2 blocks`."""
    tables, tokens = plan.tables, tokens_moved(plan)
    if tables is None or (
        tokens is None and (len(tables.src) == len(tables.dst) or plan.kind == "C2B")
    ):
        rows = plural(_num_rows(plan), plan.dst.row)
        return f"parts of {rows}" if _is_cut(plan) else f"{rows} x {nbytes_text(_row_nbytes(plan))}"
    return (
        f"{'' if tokens is None else plural(tokens, 'token') + ', '}"
        f"{plural(len(tables.src), plan.src.row)} -> {plural(len(tables.dst), plan.dst.row)}"
    )


def _is_cut(plan: Plan) -> bool:
    """Whether blocks are not written whole: what other heads or layers have of them is left."""
    if plan.split or plan.kind != "B2B":
        return bool(plan.split)
    return plan.nbytes_per_tensor < _num_rows(plan) * _row_nbytes(plan)


def _row_nbytes(plan: Plan) -> int:
    """Bytes of a row at dst, which need not lie together."""
    return plan.dst.tensor_nbytes // plan.dst.count


def _transposed(plan: Plan) -> str:
    """What it costs that rows lie differently: how many runs make up a row."""
    segments = plan.segments
    if not segments.repeats or not len(segments):
        return ""
    runs = int(segments.runs().max())
    index = int(segments.runs().argmax())
    nbytes = int(segments.nbytes[index])
    same = plan.src.layout == plan.dst.layout
    word = "cut by head or token" if same else "transposing"
    return f"{word}: {plural(runs, 'run')} of {nbytes_text(nbytes)} a {plan.dst.row}"


def _places(plan: Plan, indices: range) -> Iterator[tuple[str, str, str]]:
    """The rows at src and at dst and the size of some segments, as texts."""
    src_side, dst_side = plan.src, plan.dst
    part = slice(indices.start, indices.stop)
    columns = [getattr(plan.segments, it)[part].tolist() for it in plan.segments.columns()]
    runs = plan.segments.runs()[part].tolist()
    for src, dst, nbytes, times in zip(*columns, runs, strict=True):
        yield (
            place(src_side.rows(src, nbytes), src, src_side.stride),
            place(dst_side.rows(dst, nbytes), dst, dst_side.stride),
            f"{f'{times} x ' if times > 1 else ''}{nbytes_text(nbytes)}",
        )


def _notes(plan: Plan, order: RequestOrder, indices: range) -> Iterator[tuple[str, str, str]]:
    """How many slices a segment is; where the one before ended; what of the request it holds."""
    src_side, dst_side = plan.src, plan.dst
    smallest = min(src_side.stride, dst_side.stride)
    before: tuple[int, int] | None = None
    begin = max(indices.start - 1, 0)
    columns = [
        getattr(plan.segments, it)[begin : indices.stop].tolist() for it in plan.segments.columns()
    ]
    ends = plan.segments.ends()[1][begin : indices.stop].tolist()
    for index, (src, dst, nbytes, end) in enumerate(zip(*columns, ends, strict=True), begin):
        # Where the one before ended is where this one would have had to begin.
        breaks = (
            [
                f"{name} {stop // side.stride} -> {place(side.rows(at, 1), at, side.stride)}"
                for name, side, stop, at in (
                    ("src", src_side, before[0] - 1, src),
                    ("dst", dst_side, before[1] - 1, dst),
                )
                if stop + 1 != at
            ]
            if before and not (plan.segments.repeats or plan.split)  # parts of rows never meet
            else []
        )
        before = src + nbytes, dst + nbytes
        if index < indices.start:
            continue
        slices = -(-nbytes // smallest)
        note = f"merged {slices}" if slices > 1 else ""
        if breaks:
            note = f"{note or 'alone'}: not adjacent"
        held = order.text(dst, end - 1)
        yield note, f" ({', '.join(breaks)})" if breaks else "", f"  {held}" if held else ""


def _segment_lines(plan: Plan, limit: int | None, width: int) -> Iterator[str]:
    """A line for each segment: rows, size, tokens, and why it is not part of the one before."""
    total = len(plan.segments)
    head, tail = shown_rows(total, limit)
    parts = range(head), range(total - tail, total)
    widths = [0, 0, 7]
    for places in chain.from_iterable(_places(plan, it) for it in parts):
        widths = [max(it) for it in zip(widths, map(len, places), strict=True)]
    order = RequestOrder(plan)
    for part in parts:
        for (src, dst, size), (note, breaks, held) in zip(
            _places(plan, part), _notes(plan, order, part), strict=True
        ):
            text = f"{src:<{widths[0]}} -> {dst:<{widths[1]}}  {size:<{widths[2] + 1}} {note}"
            line = f"{text}{breaks}".rstrip() + held
            if len(line) > width:  # the rows themselves say where it breaks
                line = text.rstrip() + held
            yield from fit(line, width)
        if part.start == 0 and head + tail < total:
            more = f"... {plural(total - head - tail, 'more segment')}"
            yield f"{more}. Of all {total:,}:" if tail else more
            if tail:
                for line in summary(plan):
                    yield from fit(f"      {line}", width)


def _tree(plan: Plan, limit: int | None, same_as: str) -> Iterator[str]:
    """The first tensor of the first layer in full; the others, which are like it, together."""
    num_layers, per_layer = len(plan.src_layers), plan.segments.num_runs
    num_tensors = min(plan.tensors_per_layer, plan.num_tensor_pairs)
    descriptors = num_tensors * per_layer
    branch, trunk = ("`--", "    ") if num_layers == 1 else ("|--", "|   ")
    yield (
        f"{branch} {layers_text(plan, slice(1))}   desc [0:{descriptors})   "
        f"{nbytes_text(num_tensors * plan.nbytes_per_tensor)}"
    )
    others = [*_other_tensors(plan, num_tensors)]
    name = f"{'|--' if others else '`--'} {_tensor_text(plan, 0, 1)}   "
    under = ("|" if others else " ").ljust(len(name))
    segments = [f"same {plan.dst.row}s as {same_as}"] if same_as else None
    for line in segments or _segment_lines(plan, limit, WIDTH - len(trunk) - len(name)):
        yield f"{trunk}{name}{line}"
        name = under
    for index, text in enumerate(others, 1):
        yield f"{trunk}{'`--' if index == len(others) else '|--'} {text}   same {plan.dst.row}s"
    if num_layers > 1:
        rest = (plan.num_tensor_pairs - num_tensors) * plan.nbytes_per_tensor
        yield (
            f"`-- {layers_text(plan, slice(1, None))}   desc "
            f"[{descriptors}:{plan.num_descriptors})   {nbytes_text(rest)}   same {plan.dst.row}s"
        )


def _other_tensors(plan: Plan, num_tensors: int) -> Iterator[str]:
    """The tensors of the first layer but its first: those that are consecutive together."""
    begin = 1
    while begin < num_tensors:
        end = begin + 1
        if _kv(plan, begin) == "":
            while end < num_tensors and all(
                plan.pair(end)[side][0] == plan.pair(end - 1)[side][0] + 1 for side in (0, 1)
            ):
                end += 1
        yield _tensor_text(plan, begin, end)
        begin = end


def _tensor_text(plan: Plan, begin: int, end: int) -> str:
    """`tensor 0 -> 2 K`, or `tensors 1..3 -> 1..3`."""
    (src, _), (dst, _) = plan.pair(begin)
    kv = _kv(plan, begin)
    many = end - begin - 1
    numbers = " -> ".join(to_text(it, it + many) for it in (src, dst))
    return f"tensor{'s' if many else ''} {numbers}{f' {kv}' if kv else ''}"


def _kv(plan: Plan, index: int) -> str:
    if "kv" not in plan.split and plan.tensors_per_layer != 2:
        return ""
    return kv_of(plan, plan.dst_tensors[index], 0, 0)

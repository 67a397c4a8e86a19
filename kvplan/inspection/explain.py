"""Explain a plan as a tree or as a table. Offsets are relative: stable in tests, safe in logs."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from kvplan.inspection.contents import (
    kv_of,
    layers_text,
    local_layers,
    model_note,
    model_text,
    spans_text,
    tokens_moved,
    tokens_of,
)
from kvplan.inspection.units import nbytes_text, place, plural, span
from kvplan.status import invalid
from kvplan.validation import check_type, shown

if TYPE_CHECKING:
    from kvplan.inspection.cost import TransportCost
    from kvplan.planning.plan import Plan
    from kvplan.planning.side import Side

Format = Literal["tree", "table"]

DEFAULT_LIMIT = 16
"""Rows shown of a list before the rest is only counted."""

WIDTH = 100
"""Columns of the lines that say what both sides are."""


class _Row(NamedTuple):
    """A segment, as it is written."""

    src: str
    dst: str
    nbytes: int
    slices: int
    why_alone: str
    runs: int
    tokens: str


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


def explain(
    plan: Plan,
    format: Format,  # noqa: A002
    limit: int | None,
    cost: TransportCost | None = None,
) -> str:
    """Return `plan` as text; at most `limit` rows of each list (None: all).

    With `cost` a line more: under the head of a tree, or as the last one of a table.

    Raises:
        LLMException: LLM_PARAM_INVALID for another format or a limit below 1.
    """
    if limit is not None and check_type("limit", limit, int) < 1:
        raise invalid(f"limit={limit} must be None or >= 1")
    moved = [] if cost is None else [cost.outline(plan)]
    match format:
        case "tree":
            under = [f"  {line}" for line in moved]
            return "\n".join([*_header(plan), *under, *_tree(plan, limit)])
        case "table":
            return "\n".join([*_table(plan, limit), *moved])
    raise invalid(f"format={shown(format)} must be one of {get_args(Format)}")


def _num_rows(plan: Plan) -> int:
    """How many rows are written, as far as the plan knows."""
    return plan.num_slices if plan.tables is None else len(plan.tables.dst)


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
    if len(line) + 2 <= WIDTH:
        return [line]
    return [
        *_side_lines(src, "src "),
        *_side_lines(dst, "dst "),
        *([forced] if plan.reinterpret else []),
    ]


def _side_lines(side: Side, name: str, end: str = "") -> list[str]:
    """A side in one line, or its shard below it where it is too long."""
    line, shard = f"{name}{side}{end}", f", {side.shard}"
    if len(line) + 2 <= WIDTH or side.shard is None:
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
    if not segments.repeats:
        return ""
    runs = int(segments.runs().max())
    index = int(segments.runs().argmax())
    nbytes = int(segments.nbytes[index])
    same = plan.src.layout == plan.dst.layout
    word = "cut by head or token" if same else "transposing"
    return f"{word}: {plural(runs, 'run')} of {nbytes_text(nbytes)} a {plan.dst.row}"


def _rows(plan: Plan, limit: int | None) -> list[_Row]:
    rows: list[_Row] = []
    before: tuple[int, int] | None = None
    runs = plan.segments.runs()
    _, dst_ends = plan.segments.ends()
    for index, (src, dst, nbytes) in enumerate(islice(plan.segments, limit)):
        src_rows, dst_rows = plan.rows(index)
        slices = -(-nbytes // min(plan.src.stride, plan.dst.stride))
        # Where the one before ended is where this one would have had to begin.
        breaks = (
            [
                f"{name} {end // side.stride} -> {place(side.rows(start, 1), start, side.stride)}"
                for name, side, end, start in (
                    ("src", plan.src, before[0] - 1, src),
                    ("dst", plan.dst, before[1] - 1, dst),
                )
                if end + 1 != start
            ]
            if before and not (plan.segments.repeats or plan.split)  # parts of rows never meet
            else []
        )
        why = f"not adjacent ({', '.join(breaks)})" if breaks else ""
        rows.append(
            _Row(
                place(src_rows, src, plan.src.stride),
                place(dst_rows, dst, plan.dst.stride),
                nbytes,
                slices,
                why,
                int(runs[index]),
                spans_text("token", tokens_of(plan, dst, int(dst_ends[index]) - 1)),
            )
        )
        before = src + nbytes, dst + nbytes
    return rows


def _segment_lines(plan: Plan, limit: int | None) -> list[str]:
    """A line for each segment: rows, size, tokens, and why it is not part of the one before."""
    rows = _rows(plan, limit)
    sizes = [f"{f'{it.runs} x ' if it.runs > 1 else ''}{nbytes_text(it.nbytes)}" for it in rows]
    src_width, dst_width = max(len(row.src) for row in rows), max(len(row.dst) for row in rows)
    width = max(8, *(len(size) + 1 for size in sizes))
    lines = []
    for row, size in zip(rows, sizes, strict=True):
        note = f"merged {row.slices}" if row.slices > 1 else ""
        if row.why_alone:
            note = f"{note or 'alone'}: {row.why_alone}"
        tokens = f"  {row.tokens}" if row.tokens else ""
        text = f"{row.src:<{src_width}} -> {row.dst:<{dst_width}}  {size:<{width}} {note}"
        lines.append(text.rstrip() + tokens)
    if hidden := len(plan.segments) - len(rows):
        lines.append(f"... {plural(hidden, 'more segment')}")
    return lines


def _tree(plan: Plan, limit: int | None) -> list[str]:
    """The first layer in full, and one line for the others, which are like it."""
    segments = _segment_lines(plan, limit)
    num_layers, per_layer = len(plan.src_layers), plan.segments.num_runs
    layer = plan.layer(0)
    descriptors = len(layer.tensors) * per_layer
    branch, trunk = ("`--", "    ") if num_layers == 1 else ("|--", "|   ")
    lines = [
        f"{branch} {layers_text(plan, slice(1))}   desc [0:{descriptors})   "
        f"{nbytes_text(len(layer.tensors) * plan.nbytes_per_tensor)}"
    ]
    for index, (_, view) in enumerate(layer.tensors[:limit]):
        last = index == len(layer.tensors) - 1
        (src, _), (dst, _) = plan.pair(index)
        kv = kv_of(plan, view, 0, 0) if "kv" in plan.split or plan.tensors_per_layer == 2 else ""
        name = f"{'`--' if last else '|--'} tensor {src} -> {dst}{' ' + kv if kv else ''}"
        if index:
            lines.append(f"{trunk}{name}   same {plan.dst.row}s")
            continue
        lines.append(f"{trunk}{name}   {segments[0]}")
        under = (" " if last else "|").ljust(len(name))
        lines.extend(f"{trunk}{under}   {text}" for text in segments[1:])
    if limit is not None and (hidden := len(layer.tensors) - limit) > 0:
        lines.append(f"{trunk}`-- ... {plural(hidden, 'more tensor')}, same {plan.dst.row}s")
    if num_layers > 1:
        rest = (plan.num_tensor_pairs - len(layer.tensors)) * plan.nbytes_per_tensor
        lines.append(
            f"`-- {layers_text(plan, slice(1, None))}   desc "
            f"[{descriptors}:{plan.num_descriptors})   {nbytes_text(rest)}   same {plan.dst.row}s"
        )
    return lines


def _table(plan: Plan, limit: int | None) -> list[str]:
    sides = ("dst", "src") if plan.local == "dst" else ("src", "dst")
    heads = sides if plan.local == "both" else ("local", "remote")
    in_model = bool(model_note(plan))  # a column more
    of_model = ("model",) if in_model else ()
    table = [("#", "layer", *of_model, "tensor", f"{plan.dst.row}s", *heads, "nbytes")]
    per_pair = plan.segments.num_runs
    shown = plan.num_descriptors if limit is None else min(limit, plan.num_descriptors)
    for index in range(shown):
        origin = plan.origin(index)
        src, dst, nbytes = plan.run(index % per_pair)
        number = index // per_pair // plan.tensors_per_layer
        layer = slice(number, number + 1)
        src_layers, dst_layers = (local_layers(plan, it, layer) for it in ("src", "dst"))
        rows = (
            place(origin.src_rows, src, plan.src.stride),
            place(origin.dst_rows, dst, plan.dst.stride),
        )
        (src_tensor, src_start), (dst_tensor, dst_start) = plan.pair(index // per_pair)
        places = {
            "src": f"t{src_tensor}+{src_start + src:#x}",
            "dst": f"t{dst_tensor}+{dst_start + dst:#x}",
        }
        table.append(
            (
                str(index),
                f"{span(src_layers)}>{span(dst_layers)}",
                *((model_text(plan, layer),) if in_model else ()),
                f"{origin.src_tensor}>{origin.dst_tensor}",
                ">".join(rows),
                places[sides[0]],
                places[sides[1]],
                str(nbytes),
            )
        )
    widths = [max(len(cell) for cell in column) for column in zip(*table, strict=True)]
    left = (*(False for _ in table[0][:-3]), True, True, False)
    lines = [
        "  ".join(
            cell.ljust(width) if to_left else cell.rjust(width)
            for cell, width, to_left in zip(cells, widths, left, strict=True)
        ).rstrip()
        for cells in table
    ]
    if hidden := plan.num_descriptors - shown:
        lines.append(f"... {plural(hidden, 'more descriptor')}")
    return lines

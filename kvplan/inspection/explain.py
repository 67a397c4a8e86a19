"""A plan as a tree or a table, and sentences about its costs and likely mistakes.

Offsets are relative: stable in tests, safe in logs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Final, get_args

import numpy as np

from kvplan.inspection.table import summary, table_lines
from kvplan.planning.contents import (
    RequestOrder,
    kv_of,
    layers_text,
    local_layers,
    model_note,
    rows_written,
    tokens_moved,
)
from kvplan.planning.part import Part
from kvplan.planning.plan import Plan
from kvplan.planning.side import Side
from kvplan.planning.texts import (
    WIDTH,
    Format,
    fit,
    nbytes_text,
    place,
    plural,
    shown_rows,
    to_text,
)
from kvplan.status import invalid
from kvplan.validation import check_type, shown

_SIDE_WIDTH = 100
"""Maximum columns of a line that describes one side or both."""

TINY: Final = 2048
"""Bytes below which the fixed cost of a descriptor exceeds the cost of its bytes, over "local"."""


def explain_plan(
    plan: Plan,
    format: Format,  # noqa: A002
    limit: int | None,
) -> Iterator[str]:
    """Return a plan as lines of text; see `Plan.explain_lines`.

    Several parts stand below their labels. Equal parts are shown once. A tree does not list rows
    again that equal those of an earlier part.
    """
    if limit is not None and check_type("limit", limit, int) < 1:
        raise invalid(f"limit={limit} must be None or >= 1")
    if format not in get_args(Format):
        raise invalid(f"format={shown(format)} must be one of {get_args(Format)}")
    if plan.is_single:
        return _explain_part(plan.parts[0], format, limit)
    head = [
        f"{plan.operation}  {plan.kind}   {plural(len(plan.parts), 'part')}   "
        f"plan {plan.fingerprint[:6]}",
        f"  {plural(plan.num_descriptors, 'descriptor')} | {nbytes_text(plan.nbytes)}",
    ]
    return chain(head, _explain_parts(plan.parts, format, limit))


def _explain_parts(
    parts: Sequence[Part],
    format: Format,  # noqa: A002
    limit: int | None,
) -> Iterator[str]:
    """Yield the lines of each part, below its label."""
    seen: list[tuple[Part, list[str]]] = []
    for part in parts:
        equal = next((names for before, names in seen if _is_same(before, part)), None)
        if equal is not None:
            equal.append(part.label)
        else:
            seen.append((part, [part.label]))
    for index, (part, labels) in enumerate(seen):
        yield from fit(labels_text(labels), indent="  ")
        like = next((names for before, names in seen[:index] if _has_same_rows(before, part)), None)
        same_as = "" if like is None else f"part {like[0]}"
        yield from (f"  {line}" for line in _explain_part(part, format, limit, same_as))


def _explain_part(
    part: Part,
    format: Format,  # noqa: A002
    limit: int | None,
    same_as: str = "",
) -> Iterator[str]:
    """Return a part as lines of text; `same_as` names a part whose rows are not listed again."""
    if format == "table":
        return table_lines(part, limit)
    return chain(chain.from_iterable(map(fit, _header(part))), _tree(part, limit, same_as))


def labels_text(labels: list[str]) -> str:
    """Return `part latent`, or `parts 0, 1, 2`."""
    names = ", ".join(label or "(unnamed)" for label in labels)
    return f"part{'s' if len(labels) > 1 else ''} {names}"


def _is_same(a: Part, b: Part) -> bool:
    """Return True if both parts have the same text: equal parts of caches with equal names."""
    return (
        a == b
        and (a.src.name, a.dst.name, a.src.way, a.dst.way)
        == (b.src.name, b.dst.name, b.src.way, b.dst.way)
        and _has_same_tables(a, b)
    )


def _has_same_tables(a: Part, b: Part) -> bool:
    if a.tables is None or b.tables is None:
        return a.tables is b.tables
    return a.tables[2:] == b.tables[2:] and all(map(np.array_equal, a.tables[:2], b.tables[:2]))


def _has_same_rows(a: Part, b: Part) -> bool:
    """Return True if both have the same segments, in rows, for the same tokens of the request."""
    if a.tables is None or b.tables is None or len(a.segments) != len(b.segments):
        return False
    if a.split or b.split or a.segments.repeats or b.segments.repeats:
        return False
    if (a.kind, a.operation, a.dst.extent("token")) != (b.kind, b.operation, b.dst.extent("token")):
        return False
    sides = (("src_offsets", "src"), ("dst_offsets", "dst"), ("nbytes", "dst"))
    for name, side in sides:
        strides = [np.uint64(getattr(part, side).stride) for part in (a, b)]
        columns = [getattr(part.segments, name) for part in (a, b)]
        if any((column % stride).any() for column, stride in zip(columns, strides, strict=True)):
            return False
        if not np.array_equal(columns[0] // strides[0], columns[1] // strides[1]):
            return False
    return _has_same_tables(a, b)


def _header(part: Part) -> list[str]:
    ends = " -> ".join(
        name or word for name, word in ((part.src.name, "src"), (part.dst.name, "dst"))
    )
    src, dst = ("{}..{}".format(*local_layers(part, side)) for side in ("src", "dst"))
    slices = part.num_slices * part.num_tensor_pairs
    merged = slices - part.num_descriptors
    return [
        f"{part.operation}  {part.kind}   {ends}   plan {part.fingerprint[:6]}",
        *(f"  {line}" for line in _meaning(part)),
        f"  layers {src} -> {dst}{model_note(part)} | tensors/layer {part.tensors_per_layer} | "
        f"{_rows_moved(part)}",
        f"  {plural(slices, 'slice')} -> {plural(part.num_descriptors, 'descriptor')} "
        f"({merged:,} merged) | {nbytes_text(part.nbytes)}",
        *([f"  {transposed}"] if (transposed := _transposed(part)) else []),
        *(f"  over {way}" for way in (part.src.way, part.dst.way) if way),
    ]


def _meaning(part: Part) -> list[str]:
    """Return data type, layout and shard of both sides, on one line if they fit."""
    src, dst = part.src, part.dst
    forced = "REINTERPRETED: bytes as they are"
    if str(src) == str(dst):
        return _side_lines(src, "", ", both sides")
    line = f"{src} -> {dst}{f', {forced}' if part.reinterpret else ''}"
    if len(line) + 2 <= _SIDE_WIDTH:
        return [line]
    return [
        *_side_lines(src, "src "),
        *_side_lines(dst, "dst "),
        *([forced] if part.reinterpret else []),
    ]


def _side_lines(side: Side, name: str, end: str = "") -> list[str]:
    """Return a side in one line, or with its shard below if the line is too long."""
    line, shard = f"{name}{side}{end}", f", {side.shard}"
    if len(line) + 2 <= _SIDE_WIDTH or side.shard is None:
        return [line]
    return [f"{name}{str(side).removesuffix(shard)},", f"{' ' * len(name)}{shard[2:]}{end}"]


def _rows_moved(part: Part) -> str:
    """Return `3 blocks x 32 KiB`, or, with cut tokens, `40 tokens, 3 blocks -> 2 blocks`."""
    tables, tokens = part.tables, tokens_moved(part)
    if tables is None or (
        tokens is None and (len(tables.src) == len(tables.dst) or part.kind == "C2B")
    ):
        rows = plural(rows_written(part), part.dst.row)
        return f"parts of {rows}" if _is_cut(part) else f"{rows} x {nbytes_text(_row_nbytes(part))}"
    return (
        f"{'' if tokens is None else plural(tokens, 'token') + ', '}"
        f"{plural(len(tables.src), part.src.row)} -> {plural(len(tables.dst), part.dst.row)}"
    )


def _is_cut(part: Part) -> bool:
    """Return True if blocks are written only in part: their other heads or layers stay."""
    if part.split or part.kind != "B2B":
        return bool(part.split)
    return part.nbytes_per_tensor < rows_written(part) * _row_nbytes(part)


def _row_nbytes(part: Part) -> int:
    """Return the bytes of a row at dst, which need not be contiguous."""
    return part.dst.rows_nbytes // part.dst.count


def _most_runs(part: Part) -> tuple[int, int] | None:
    """Return the highest number of runs in a segment, and their size; None: rows are not cut."""
    segments = part.segments
    if not segments.repeats or not len(segments):
        return None
    runs = segments.runs()
    index = int(runs.argmax())
    return int(runs[index]), int(segments.nbytes[index])


def _transposed(part: Part) -> str:
    """Return the number and size of the runs into which rows are cut; empty if rows are whole."""
    if (most := _most_runs(part)) is None:
        return ""
    word = "cut by head or token" if part.src.layout == part.dst.layout else "transposing"
    return f"{word}: {plural(most[0], 'run')} of {nbytes_text(most[1])} a {part.dst.row}"


def _places(part: Part, indices: range) -> Iterator[tuple[str, str, str]]:
    """Yield source rows, destination rows and size of some segments, as texts."""
    src_side, dst_side = part.src, part.dst
    piece = slice(indices.start, indices.stop)
    columns = [getattr(part.segments, column)[piece].tolist() for column in part.segments.columns()]
    runs = part.segments.runs()[piece].tolist()
    for src, dst, nbytes, times in zip(*columns, runs, strict=True):
        yield (
            place(src_side.rows(src, nbytes), src, src_side.stride),
            place(dst_side.rows(dst, nbytes), dst, dst_side.stride),
            f"{f'{times} x ' if times > 1 else ''}{nbytes_text(nbytes)}",
        )


def _notes(part: Part, order: RequestOrder, indices: range) -> Iterator[tuple[str, str, str]]:
    """Yield, for each segment: the merged slices, the breaks before it, and its contents."""
    src_side, dst_side = part.src, part.dst
    smallest = min(src_side.row_nbytes, dst_side.row_nbytes)
    before: tuple[int, int] | None = None
    begin = max(indices.start - 1, 0)
    columns = [
        getattr(part.segments, column)[begin : indices.stop].tolist()
        for column in part.segments.columns()
    ]
    ends = part.segments.ends()[1][begin : indices.stop].tolist()
    for index, (src, dst, nbytes, end) in enumerate(zip(*columns, ends, strict=True), begin):
        # To be merged, a segment must begin where the one before it ends.
        breaks = (
            [
                f"{name} {stop // side.stride} -> {place(side.rows(at, 1), at, side.stride)}"
                for name, side, stop, at in (
                    ("src", src_side, before[0] - 1, src),
                    ("dst", dst_side, before[1] - 1, dst),
                )
                if stop + 1 != at
            ]
            if before and not (part.segments.repeats or part.split)  # parts of rows never meet
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


def _segment_lines(part: Part, limit: int | None, width: int) -> Iterator[str]:
    """Yield a line for each segment: rows, size, tokens, and why it is separate."""
    total = len(part.segments)
    head, tail = shown_rows(total, limit)
    parts = range(head), range(total - tail, total)
    widths = [0, 0, 7]
    for places in chain.from_iterable(_places(part, indices) for indices in parts):
        widths = [max(cells) for cells in zip(widths, map(len, places), strict=True)]
    order = RequestOrder(part)
    for piece in parts:
        for (src, dst, size), (note, breaks, held) in zip(
            _places(part, piece), _notes(part, order, piece), strict=True
        ):
            text = f"{src:<{widths[0]}} -> {dst:<{widths[1]}}  {size:<{widths[2] + 1}} {note}"
            line = f"{text}{breaks}".rstrip() + held
            if len(line) > width:  # the rows themselves show the breaks
                line = text.rstrip() + held
            yield from fit(line, width)
        if piece.start == 0 and head + tail < total:
            more = f"... {plural(total - head - tail, 'more segment')}"
            yield f"{more}. Of all {total:,}:" if tail else more
            if tail:
                yield from fit(f"      {summary(part)}", width)


def _tree(part: Part, limit: int | None, same_as: str) -> Iterator[str]:
    """Yield the first tensor of the first layer in full, then the others, which have equal rows."""
    num_layers, per_layer = len(part.src_layers), part.segments.num_runs
    num_tensors = min(part.tensors_per_layer, part.num_tensor_pairs)
    descriptors = num_tensors * per_layer
    branch, trunk = ("`--", "    ") if num_layers == 1 else ("|--", "|   ")
    yield (
        f"{branch} {layers_text(part, slice(1))}   desc [0:{descriptors})   "
        f"{nbytes_text(num_tensors * part.nbytes_per_tensor)}"
    )
    others = [*_other_tensors(part, num_tensors)]
    name = f"{'|--' if others else '`--'} {_tensor_text(part, 0, 1)}   "
    under = ("|" if others else " ").ljust(len(name))
    segments = [f"same {part.dst.row}s as {same_as}"] if same_as else None
    if not per_layer:
        segments = ["nothing"]
    for line in segments or _segment_lines(part, limit, WIDTH - len(trunk) - len(name)):
        yield f"{trunk}{name}{line}"
        name = under
    for index, text in enumerate(others, 1):
        yield f"{trunk}{'`--' if index == len(others) else '|--'} {text}   same {part.dst.row}s"
    if num_layers > 1:
        rest = (part.num_tensor_pairs - num_tensors) * part.nbytes_per_tensor
        yield (
            f"`-- {layers_text(part, slice(1, None))}   desc "
            f"[{descriptors}:{part.num_descriptors})   {nbytes_text(rest)}   same {part.dst.row}s"
        )


def _other_tensors(part: Part, num_tensors: int) -> Iterator[str]:
    """Yield the tensors of the first layer except its first; consecutive ones together."""
    begin = 1
    while begin < num_tensors:
        end = begin + 1
        if _kv(part, begin) == "":
            while end < num_tensors and all(
                part.pair(end)[side][0] == part.pair(end - 1)[side][0] + 1 for side in (0, 1)
            ):
                end += 1
        yield _tensor_text(part, begin, end)
        begin = end


def _tensor_text(part: Part, begin: int, end: int) -> str:
    """Return `tensor 0 -> 2 K`, or `tensors 1..3 -> 1..3`."""
    (src, _), (dst, _) = part.pair(begin)
    kv = _kv(part, begin)
    many = end - begin - 1
    numbers = " -> ".join(to_text(tensor, tensor + many) for tensor in (src, dst))
    return f"tensor{'s' if many else ''} {numbers}{f' {kv}' if kv else ''}"


def _kv(part: Part, index: int) -> str:
    return kv_of(part, part.dst_tensors[index], 0, 0) if part.tensors_per_layer == 2 else ""


def oddities(part: Part) -> list[str]:
    """Return a sentence for each oddity, most severe first.

    Stale leases are not included: a plan does not contain them.
    """
    found = (_reinterpreted(part), _read_twice(part), _cut(part), _tiny(part), _apart(part))
    return [sentence for several in found for sentence in several]


def _reinterpreted(part: Part) -> Iterator[str]:
    if part.reinterpret:
        yield (
            "REINTERPRETED: the bytes are copied as they are, whatever the two sides say that they "
            f"mean: {part.src} at the source, {part.dst} at the destination."
        )


def _read_twice(part: Part) -> Iterator[str]:
    """Report source rows that a request reads twice; a copy inside a process may do so."""
    if part.tables is None or part.local == "both":
        return
    rows, counts = np.unique(part.tables.src, return_counts=True)
    twice = np.flatnonzero(counts > 1)
    if len(twice):
        first = int(twice[0])
        more = f", and {len(twice) - 1:,} more are" if len(twice) > 1 else ""
        yield (
            f"Source {part.src.row} {int(rows[first])} is read {int(counts[first])} times{more}: "
            "is the block table right?"
        )


def _cut(part: Part) -> Iterator[str]:
    """Report rows that lie differently at the two ends and are cut into runs."""
    if (most := _most_runs(part)) is None:
        return
    count = f"{most[0]:,} runs of {nbytes_text(most[1])}"
    if part.src.layout == part.dst.layout:
        yield f"Cut by head or token: each {part.dst.row} is moved in {count}."
    else:
        yield (
            "Transposing: the axes lie in another order at the two ends, so that each "
            f"{part.dst.row} is moved in {count}."
        )


def _tiny(part: Part) -> Iterator[str]:
    segments = part.segments
    runs = segments.runs()
    tiny = int(runs[segments.nbytes < TINY].sum())
    if 2 * tiny > segments.num_runs and part.num_descriptors > 1:
        yield (
            f"Tiny runs: {plural(tiny * part.num_tensor_pairs, 'descriptor')} of less than "
            f"{nbytes_text(TINY)}, each of which costs more than its bytes do."
        )


def _apart(part: Part) -> Iterator[str]:
    """Report runs that could be merged; otherwise rows that are each a run alone."""
    tables, segments = part.tables, part.segments
    if segments.repeats or part.split or tables is None or len(segments) < 2:
        return
    sizes = segments.nbytes[:-1]
    src, dst = np.diff(segments.src_offsets), np.diff(segments.dst_offsets)
    if unmerged := int(((src == sizes) & (dst == sizes)).sum()):
        yield (
            f"Not merged: {plural(unmerged, 'run')} could be one with the run before "
            f"(coalesce is {part.coalesce.value})."
        )
        return
    if part.src.row_nbytes != part.dst.row_nbytes:
        return  # larger blocks on one side: a run is a part of a block
    alone = int((segments.nbytes <= part.dst.row_nbytes).sum())
    row, count = part.dst.row, len(segments)
    if alone == count:
        yield (
            f"Scattered: each of the {count:,} {row}s is a run alone, as no two are neighbours at "
            "both ends."
        )
    elif alone:
        yield (
            f"Alone: {alone:,} of {count:,} runs {'is' if alone == 1 else 'are'} one {row}, which "
            "has no neighbour at both ends."
        )

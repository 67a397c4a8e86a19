"""The difference between two plans: identical, equivalent, different bytes or different caches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvplan.inspection.explain import labels_text
from kvplan.inspection.table import blocks_of
from kvplan.planning.contents import (
    heads_of_runs,
    layers_text,
    local_layers,
    model_note,
    model_text,
    tokens_of,
)
from kvplan.planning.part import Part
from kvplan.planning.plan import Plan
from kvplan.planning.segments import Segments
from kvplan.planning.side import Side
from kvplan.planning.texts import fit, nbytes_text, place, plural, shown_rows, spans_text
from kvplan.planning.tokens import BlockTables

OTHER_BYTES = "different bytes"
"""Beginning of the verdict on plans of equal caches that write other bytes, or elsewhere."""

LIMIT = 16
"""Maximum number of listed segments; a longer list has its first and last ones and a summary."""


def diff_plans(old: Plan, new: Plan) -> str:
    """Return what changed from `old` to `new`, part by part, as text that ends in a verdict.

    Names of caches are not compared.
    """
    if old.is_single and new.is_single:
        return diff(old.parts[0], new.parts[0])
    parts = [{part.label: part for part in plan.parts} for plan in (old, new)]
    lines: list[str] = []
    changes: dict[str, str] = {}  # the text of a change, and the part that has it first
    verdicts: dict[str, list[str]] = {}
    same: list[str] = []  # consecutive parts in which nothing changed
    for label in dict.fromkeys([*parts[0], *parts[1]]):
        before, after = (by_label.get(label) for by_label in parts)
        if before is not None and before == after:
            same.append(label)
            continue
        lines += _identical(same)
        same = []
        if before is None or after is None:
            change = f"only in the {'old' if after is None else 'new'} plan"
            sign = "-" if after is None else "+"
            lines += fit(f"{labels_text([label])}: {sign} {before or after!r}")
            verdicts.setdefault(change, []).append(label)
            continue
        verdicts.setdefault(f": {verdict(before, after)}", []).append(label)
        text = diff(before, after)
        if (first := changes.setdefault(text, label)) != label:
            lines.append(f"{labels_text([label])}: same change as in {labels_text([first])}")
        else:
            lines += [labels_text([label]), *(f"  {line}" for line in text.splitlines())]
    lines += _identical(same)
    odd = [
        f"{labels_text(labels)}{'' if change.startswith(':') else ' '}{change}"
        for change, labels in verdicts.items()
    ]
    if not odd and [*parts[0]] != [*parts[1]]:
        odd.append("the parts are in another order")
    lines += fit(f"verdict: {'; '.join(odd) or 'identical'}")
    return "\n".join(lines)


def _identical(labels: list[str]) -> list[str]:
    return fit(f"{labels_text(labels)}: identical", indent="  ") if labels else []


def diff(old: Part, new: Part) -> str:
    """Return what changed from `old` to `new`, as text that ends in a verdict."""
    lines = [f"  cache    {text}" for text in _meanings(old, new)]
    lines += [f"  option   {text}" for text in _options(old, new)]
    layers = [model_text(part) for part in (old, new)]
    if all(layers) and layers[0] != layers[1]:
        lines.append(f"  layers   {layers[0]} of the model -> {layers[1]} of the model")
    descriptors = _change(f"{old.num_descriptors}", f"{new.num_descriptors}")
    nbytes = _change(nbytes_text(old.nbytes), nbytes_text(new.nbytes))
    lines.append(f"  desc     {descriptors}      bytes {nbytes}")
    changed = _segments(old, new)
    if changed:
        (src_tensor, _), (dst_tensor, _) = old.pair(0)
        first = slice(1)
        layer = f", {layers_text(old, first)}" if model_note(old, first) else ""
        lines.append(f"  tensor {src_tensor}>{dst_tensor}{layer}")
        lines += _changed_lines(old, new, changed)
        if old.split == new.split:
            lines += _other_tensors(old.num_tensor_pairs, new.num_tensor_pairs)
    result = verdict(old, new)
    if result.startswith(OTHER_BYTES) and (mistake := cause(old, new)):
        lines.append(f"  cause    {mistake}")
    lines.append(f"  verdict: {result}")
    return "\n".join(row for line in lines for row in fit(line))


def _other_tensors(old: int, new: int) -> Iterator[str]:
    """Yield text about tensors that change like the first, and about tensors of only one part."""
    notes = []
    if (both := min(old, new) - 1) > 0:
        notes.append(f"same change in {plural(both, 'more tensor')}")
    if more := abs(old - new):
        notes.append(f"{plural(more, 'tensor')} in the {'old' if old > new else 'new'} plan alone")
    if notes:
        yield f"  ({'; '.join(notes)})"


def _changed_lines(old: Part, new: Part, changed: list[tuple[str, Part, int]]) -> list[str]:
    """Return a line for each segment that only one of the parts has, or for the first and last."""
    head, tail = shown_rows(len(changed), LIMIT)
    lines = [_segment_line(*change) for change in changed[:head]]
    if tail:
        removed = sum(sign == "-" for sign, *_ in changed)
        lines.append(
            f"  ... {plural(len(changed) - head - tail, 'more line')}. In all -{removed:,} and "
            f"+{len(changed) - removed:,} segments"
        )
        lines += [f"      {text}" for text in (_moved_blocks(old, new),) if text]
        lines += [_segment_line(*change) for change in changed[-tail:]]
    return lines


def _moved_blocks(old: Part, new: Part) -> str:
    """Return counts of dst blocks from another source, no longer or newly written, as text."""
    sides = [blocks_of(part) for part in (old, new)]
    if sides[0] is None or sides[1] is None:
        return ""
    (old_src, old_dst), (new_src, new_dst) = sides[0], sides[1]
    both, at_old, at_new = np.intersect1d(old_dst, new_dst, return_indices=True)
    steps = new_src[at_new] - old_src[at_old]
    steps = steps[steps != 0]
    facts = []
    if len(steps):
        values, counts = np.unique(steps, return_counts=True)
        most = int(counts.argmax())
        often = f", most often {int(values[most]):+d}: {int(counts[most]):,}"
        often = "" if counts[most] * 10 < len(steps) else often
        facts.append(f"{len(steps):,} of {len(both):,} dst blocks from another{often}")
    for count, what in (
        (len(old_dst) - len(both), "no longer written"),
        (len(new_dst) - len(both), "newly written"),
    ):
        facts += [f"{count:,} {what}"] if count else []
    return "; ".join(facts)


def _change(old: str, new: str) -> str:
    return f"{old} = {new}" if old == new else f"{old} -> {new}"


def _options(old: Part, new: Part) -> Iterator[str]:
    for name in (
        "operation", "kind", "coalesce", "tensors_per_layer", "src_tensors", "dst_tensors", "split",
    ):  # fmt: skip
        a, b = getattr(old, name), getattr(new, name)
        if a != b:
            yield f"{name}: {a} -> {b}"
    for name in ("src", "dst"):
        yield from _sizes_of_side(name, getattr(old, name), getattr(new, name))


def side_changes(name: str, old: Side, new: Side) -> list[str]:
    """Return the differences of two sides, such as "src.shape: old -> new"; empty if equal."""
    return [*_meanings_of_side(name, old, new), *_sizes_of_side(name, old, new)]


def _sizes_of_side(name: str, old: Side, new: Side) -> Iterator[str]:
    implied = {"count", "stride"} if old.shape and new.shape else set[str]()  # by the shapes
    if old.stride - old.row_nbytes != new.stride - new.row_nbytes:
        implied.discard("stride")
    for field in ("num_tensors", "count", "stride", "paged", "placement"):
        a, b = getattr(old, field), getattr(new, field)
        if a != b and field not in implied:
            yield f"{name}.{field}: {_text(a)} -> {_text(b)}"


def _meanings_of_side(name: str, old: Side, new: Side) -> Iterator[str]:
    for field in ("data_type", "shape", "layout", "label", "shard"):
        a, b = getattr(old, field), getattr(new, field)
        if a != b:
            yield f"{name}.{field}: {_text(a)} -> {_text(b)}"


def _text(value: object) -> str:
    return value.name if isinstance(value, Enum) else str(value)


def _meanings(old: Part, new: Part) -> Iterator[str]:
    """Yield how the descriptions of the caches differ."""
    for name in ("src", "dst"):
        yield from _meanings_of_side(name, getattr(old, name), getattr(new, name))
    if old.reinterpret != new.reinterpret:
        yield f"reinterpret: {old.reinterpret} -> {new.reinterpret}"


def _segments(old: Part, new: Part) -> list[tuple[str, Part, int]]:
    """Return the segments that only one part has, in destination order: sign, part, index."""
    before, after = (dict(_keyed(part)) for part in (old, new))
    odd = [(key[1], 0, key) for key in before.keys() - after.keys()]
    odd += [(key[1], 1, key) for key in after.keys() - before.keys()]
    return [
        ("+", new, after[key]) if is_new else ("-", old, before[key])
        for _, is_new, key in sorted(odd)
    ]


def _segment_line(sign: str, part: Part, index: int) -> str:
    segments = part.segments
    src, dst, nbytes = (int(getattr(segments, column)[index]) for column in segments.columns())
    repeats = [(int(repeat.counts[index]), repeat.dst_stride) for repeat in segments.repeats]
    src_rows, dst_rows = part.rows(index)
    places = f"{place(src_rows, src, part.src.stride)}>{place(dst_rows, dst, part.dst.stride)}"
    last = int(segments.ends()[1][index]) - 1
    heads = heads_of_runs(part, dst, nbytes, repeats)
    if heads is not None and heads[1] - heads[0] + 1 == part.dst.extent("head"):
        heads = None  # all heads: not shown
    times = "".join(f"{count} x " for count, _ in repeats)
    held = " ".join(
        filter(
            None,
            (
                spans_text("token", tokens_of(part, dst, last)),
                spans_text("head", [heads] if heads else []),
            ),
        )
    )
    return f"{sign}   {places:<12}  {times}{nbytes}{'  ' + held if held else ''}"


def _keyed(part: Part) -> Iterator[tuple[tuple[Any, ...], int]]:
    """Yield each segment as a value, and its position."""
    repeats = [(repeat.counts.tolist(), *repeat[1:]) for repeat in part.segments.repeats]
    for index, segment in enumerate(part.segments):
        yield (*segment, *((counts[index], *strides) for counts, *strides in repeats)), index


def verdict(old: Part, new: Part) -> str:
    """Return the verdict on a difference, in one line."""
    if old == new:
        return "identical"
    if meanings := [*_meanings(old, new)]:
        return f"different caches - {meanings[0]}"
    if any(
        (getattr(old, s).num_tensors, getattr(old, s).tensor_nbytes)
        != (getattr(new, s).num_tensors, getattr(new, s).tensor_nbytes)
        for s in ("src", "dst")
    ):
        return "different caches - their sizes are not the same"
    per_layer = {part.tensors_per_layer for part in (old, new)}
    if old.split != new.split or (old.split and len(per_layer) > 1):
        # The pairs are pieces of tensors: compare the runs of all pairs together.
        counts = _compare_runs(*(_runs_of_all(part) for part in (old, new)))
    elif (old.src_tensors, old.dst_tensors) != (new.src_tensors, new.dst_tensors):
        layers = [[local_layers(part, side) for side in ("src", "dst")] for part in (old, new)]
        return f"{OTHER_BYTES} - other {'tensors' if layers[0] == layers[1] else 'layers'}"
    else:
        counts = [count * old.num_tensor_pairs for count in _compare_bytes(old, new)]
    if not any(counts):
        what = "options" if old.segments == new.segments else "segmentation"
        return f"equivalent - same byte mapping, different {what}"
    facts = [
        (count, what)
        for count, what in zip(
            counts, ("from another source", "no longer written", "newly written"), strict=True
        )
        if count
    ]
    if len(facts) == 1:
        count, what = facts[0]
        return f"{OTHER_BYTES} - {plural(count, 'destination byte')} {what}"
    listed = ", ".join(f"{count:,} {what}" for count, what in facts)
    return f"{OTHER_BYTES} - bytes at dst: {listed}"


def cause(old: Part, new: Part) -> str:
    """Return text about the likely mistake behind different bytes; empty if none is recognized."""
    return "; ".join(filter(None, [_layer_change(old, new), _table_change(old, new)]))


def _layer_change(old: Part, new: Part) -> str:
    """Return how the pairs of layers changed: shifted, or replaced."""
    (old_src, old_dst), (new_src, new_dst) = (
        (local_layers(part, "src"), local_layers(part, "dst")) for part in (old, new)
    )
    if (old_src, old_dst) == (new_src, new_dst):
        return ""
    before, after = old_src[0] - old_dst[0], new_src[0] - new_dst[0]
    common = max(old_dst[0], new_dst[0])
    if before != after and common <= min(old_dst[1], new_dst[1]):
        return (
            f"layers are shifted by {after - before:+d}: layer {common} at dst came from layer "
            f"{common + before}, and comes from layer {common + after}"
        )
    texts = [layers_text(part, slice(None)) for part in (old, new)]
    return f"{texts[0]} before, and {texts[1]} now"


def _table_change(old: Part, new: Part) -> str:
    """Return the change of token numbers, and of block tables if it is a common mistake."""
    if old.tables is None or new.tables is None:
        return ""
    numbers = [
        f"{name} is {_number(after)}, and was {_number(before)}"
        for name in ("src_token", "dst_token", "num_tokens")
        for before, after in [(getattr(old.tables, name), getattr(new.tables, name))]
        if before != after
    ]
    tables = _changed_tables(old.tables, new.tables)
    if numbers and not tables and not all(map(np.array_equal, old.tables[:2], new.tables[:2])):
        tables = "the block tables differ as well"
    return "; ".join([*numbers, *filter(None, [tables])])


def _number(given: int | None) -> str:
    return "not given" if given is None else str(given)


def _changed_tables(old: BlockTables, new: BlockTables) -> str:
    """Return the change of the rows of the tables, if it is a common mistake; otherwise ""."""
    changed = [
        name
        for name in ("src", "dst")
        if not np.array_equal(getattr(old, name), getattr(new, name))
    ]
    if len(changed) == 1:
        name = changed[0]
        return changed_table(name, getattr(old, name), getattr(new, name))
    if np.array_equal(old.src, new.dst) and np.array_equal(old.dst, new.src):
        return "src_blocks and dst_blocks are exchanged"
    sizes = [len(tables.src) for tables in (old, new)]
    if len(changed) == 2 and sizes[0] != sizes[1]:
        least = min(sizes)
        if all(
            np.array_equal(getattr(old, name)[:least], getattr(new, name)[:least])
            for name in changed
        ) and sizes == [len(tables.dst) for tables in (old, new)]:
            more = sizes[1] - sizes[0]
            word = "more" if more > 0 else "fewer"
            return f"{plural(abs(more), 'block')} {word} at the end of both block tables"
    return ""


def changed_table(name: str, a: NDArray[np.int64], b: NDArray[np.int64]) -> str:
    """Return the change of one block table as text; empty if it is not a common mistake."""
    if len(a) != len(b):
        return ""
    odd = np.flatnonzero(a != b)
    first = int(odd[0])
    if len(odd) == 1:
        return f"{name}_blocks[{first}] is {int(b[first])}, and was {int(a[first])}"
    if len(odd) == 2 and a[odd[0]] == b[odd[1]] and a[odd[1]] == b[odd[0]]:
        second = int(odd[1])
        return (
            f"{name}_blocks[{first}] and {name}_blocks[{second}] are swapped "
            f"({int(a[first])} and {int(a[second])})"
        )
    if len(a) > 2 and np.array_equal(a[1:], b[:-1]):
        return f"{name}_blocks are shifted by one: what was {name}_blocks[1] is first"
    if len(a) > 2 and np.array_equal(a[:-1], b[1:]):
        return f"{name}_blocks are shifted by one: what was {name}_blocks[0] is second"
    steps = b - a
    if bool((steps == steps[0]).all()):
        return f"every one of {name}_blocks is {int(steps[0]):+d}"
    if np.array_equal(a, b[::-1]):
        return f"{name}_blocks are in reverse order"
    if np.array_equal(np.sort(a), np.sort(b)):
        return f"{name}_blocks are the same in another order, from {name}_blocks[{first}] on"
    if first and len(odd) == len(a) - first:
        return f"{name}_blocks are others from {name}_blocks[{first}] on"
    return ""


def is_equivalent(old: Plan, new: Plan) -> bool:
    """Return True if both put the same bytes into the same places of equal caches, part by part."""
    return [part.label for part in old.parts] == [part.label for part in new.parts] and all(
        verdict(a, b).startswith(("identical", "equivalent"))
        for a, b in zip(old.parts, new.parts, strict=True)
    )


def _compare_bytes(old: Part, new: Part) -> list[int]:
    """Count bytes of one destination tensor: from another source, only in old, only in new.

    Equal segments are skipped. If only the src offset of a segment differs, every byte differs.
    """
    before, after = (dict(_keyed(part)) for part in (old, new))
    # Keys without the source are unique, because no byte is written twice.
    a_only = {key[1:]: before[key] for key in before.keys() - after.keys()}
    b_only = {key[1:]: after[key] for key in after.keys() - before.keys()}
    moved = a_only.keys() & b_only.keys()
    other_source = sum(
        nbytes * math.prod(count for count, *_ in repeats) for _, nbytes, *repeats in moved
    )
    odd_old, odd_new = (
        _runs_of(part, [index for key, index in only.items() if key not in moved])
        for part, only in ((old, a_only), (new, b_only))
    )
    counts = _compare_runs(odd_old, odd_new)
    return [counts[0] + other_source, *counts[1:]]


def _compare_runs(old: Segments, new: Segments) -> list[int]:
    """Count bytes as `_compare_bytes` does, for runs.

    Every boundary of a run cuts the runs of both, so that no piece is partly inside a run. Pieces
    are then compared by their source.
    """
    edges = np.unique(
        np.concatenate(
            [
                piece
                for runs in (old, new)
                for piece in (runs.dst_offsets, runs.dst_offsets + runs.nbytes)
            ]
        )
    )
    starts, lengths = edges[:-1], np.diff(edges).astype(np.int64)
    a, b = _sources(old, starts), _sources(new, starts)
    in_a, in_b = a >= 0, b >= 0
    pieces = in_a & in_b & (a != b), in_a & ~in_b, in_b & ~in_a
    return [int(lengths[piece].sum()) for piece in pieces]


def _runs_of_all(part: Part) -> Segments:
    """Return the runs of all pairs, as if the tensors of each side followed each other."""
    runs = part.segments.expanded()
    starts = []
    for side, views in ((part.src, part.src_tensors), (part.dst, part.dst_tensors)):
        tensors, inside = side.locate(views, part.split, part.tensors_per_layer)
        starts.append(tensors.astype(np.uint64) * np.uint64(side.tensor_nbytes) + inside)
    src, dst = (
        (start[:, None] + offsets).reshape(-1)
        for start, offsets in zip(starts, (runs.src_offsets, runs.dst_offsets), strict=True)
    )
    return runs.adopt(src, dst, np.tile(runs.nbytes, len(starts[0])))


def _runs_of(part: Part, chosen: list[int]) -> Segments:
    """Return the runs of some segments."""
    segments = part.segments
    src, dst, nbytes = (getattr(segments, name)[chosen] for name in segments.columns())
    repeats = tuple(repeat._replace(counts=repeat.counts[chosen]) for repeat in segments.repeats)
    return segments.adopt(src, dst, nbytes, repeats).expanded()


def _sources(
    segments: Segments, starts: np.ndarray[tuple[int], np.dtype[np.uint64]]
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the source offset of each destination offset in `starts`; -1: not written."""
    if not len(segments):
        return np.full(len(starts), -1)
    order = np.argsort(segments.dst_offsets)
    dst = segments.dst_offsets[order].astype(np.int64)
    src = segments.src_offsets[order].astype(np.int64)
    nbytes = segments.nbytes[order].astype(np.int64)
    at = starts.astype(np.int64)
    holder = np.searchsorted(dst, at, side="right") - 1
    inside = (holder >= 0) & (at < dst[holder] + nbytes[holder])
    return np.where(inside, src[holder] + at - dst[holder], -1)

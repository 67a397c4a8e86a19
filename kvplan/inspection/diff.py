"""How two plans differ, ending in a verdict: identical, equivalent, or different bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvplan.inspection.units import nbytes_text, place, plural

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvplan.planning.plan import Plan

LIMIT = 16
"""Changed segments shown before the rest is only counted."""


def diff(old: Plan, new: Plan) -> str:
    """Return what changed from `old` to `new`; names of caches are not compared."""
    lines = [f"  option   {text}" for text in _options(old, new)]
    descriptors = _change(f"{old.num_descriptors}", f"{new.num_descriptors}")
    nbytes = _change(nbytes_text(old.nbytes), nbytes_text(new.nbytes))
    lines.append(f"  desc     {descriptors}      bytes {nbytes}")
    changed = [*_segments(old, new)]
    if changed:
        lines.append(f"  tensor {old.src_tensors[0]}>{old.dst_tensors[0]}")
        lines.extend(changed[:LIMIT])
        if (hidden := len(changed) - LIMIT) > 0:
            lines.append(f"  ... {plural(hidden, 'more line')}")
        if old.num_tensor_pairs > 1:
            lines.append(f"  (same change in {plural(old.num_tensor_pairs - 1, 'more tensor')})")
    lines.append(f"  verdict: {_verdict(old, new)}")
    return "\n".join(lines)


def _change(old: str, new: str) -> str:
    return f"{old} = {new}" if old == new else f"{old} -> {new}"


def _options(old: Plan, new: Plan) -> Iterator[str]:
    for name in (
        "operation",
        "kind",
        "coalesce",
        "tensors_per_layer",
        "src_tensors",
        "dst_tensors",
    ):
        a, b = getattr(old, name), getattr(new, name)
        if a != b:
            yield f"{name}: {a} -> {b}"
    for name in ("src", "dst"):
        for field in ("num_tensors", "count", "stride", "paged", "placement"):
            a, b = getattr(getattr(old, name), field), getattr(getattr(new, name), field)
            if a != b:
                yield f"{name}.{field}: {a} -> {b}"


def _segments(old: Plan, new: Plan) -> Iterator[str]:
    """The segments that only one plan has, in the order of the destination."""
    before, after = (dict(zip(p.segments, range(len(p.segments)), strict=True)) for p in (old, new))
    odd = [(key[1], 0, key, "-", old) for key in before.keys() - after.keys()]
    odd += [(key[1], 1, key, "+", new) for key in after.keys() - before.keys()]
    for _, _, key, sign, plan in sorted(odd, key=lambda row: row[:3]):
        src_rows, dst_rows = plan.rows((before if plan is old else after)[key])
        src, dst, nbytes = key
        places = f"{place(src_rows, src, plan.src.stride)}>{place(dst_rows, dst, plan.dst.stride)}"
        yield f"{sign}   {places:<12}  {nbytes}"


def _verdict(old: Plan, new: Plan) -> str:
    if old == new:
        return "identical"
    if (old.src_tensors, old.dst_tensors) != (new.src_tensors, new.dst_tensors):
        return "different bytes - other tensors"
    if any(
        (getattr(old, s).num_tensors, getattr(old, s).tensor_nbytes)
        != (getattr(new, s).num_tensors, getattr(new, s).tensor_nbytes)
        for s in ("src", "dst")
    ):
        return "different caches - their sizes are not the same"
    other_source, only_old, only_new = _compare_bytes(old, new)
    if not (other_source or only_old or only_new):
        what = "options" if old.segments == new.segments else "segmentation"
        return f"equivalent - same byte mapping, different {what}"
    facts = [
        f"{plural(count * old.num_tensor_pairs, 'destination byte')} {what}"
        for count, what in (
            (other_source, "from another source"),
            (only_old, "no longer written"),
            (only_new, "newly written"),
        )
        if count
    ]
    return "different bytes - " + ", ".join(facts)


def _compare_bytes(old: Plan, new: Plan) -> tuple[int, int, int]:
    """Bytes of one destination tensor: from another source, only in old, only in new.

    Both plans are cut at every boundary of either, so that each piece is wholly in or out of a
    segment; then a piece is compared by the source offset that it is read from.
    """
    edges = np.unique(
        np.concatenate(
            [
                part
                for plan in (old, new)
                for part in (
                    plan.segments.dst_offsets,
                    plan.segments.dst_offsets + plan.segments.nbytes,
                )
            ]
        )
    )
    starts, lengths = edges[:-1], np.diff(edges).astype(np.int64)
    a, b = _sources(old, starts), _sources(new, starts)
    in_a, in_b = a >= 0, b >= 0
    return (
        int(lengths[in_a & in_b & (a != b)].sum()),
        int(lengths[in_a & ~in_b].sum()),
        int(lengths[in_b & ~in_a].sum()),
    )


def _sources(
    plan: Plan, starts: np.ndarray[tuple[int], np.dtype[np.uint64]]
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Source offset of each destination offset in `starts`; -1 where the plan does not write."""
    segments = plan.segments
    order = np.argsort(segments.dst_offsets)
    dst = segments.dst_offsets[order].astype(np.int64)
    src = segments.src_offsets[order].astype(np.int64)
    nbytes = segments.nbytes[order].astype(np.int64)
    at = starts.astype(np.int64)
    holder = np.searchsorted(dst, at, side="right") - 1
    inside = (holder >= 0) & (at < dst[holder] + nbytes[holder])
    return np.where(inside, src[holder] + at - dst[holder], -1)

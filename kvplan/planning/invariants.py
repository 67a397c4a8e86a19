"""Check the invariants of a part: every byte in bounds, no destination byte written twice.

Repeated runs are expanded only if the segments do not show that they are disjoint: a plan of a
million tokens has as many runs as tokens times heads.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvplan.planning.layers import has_layers
from kvplan.planning.part import Kind, Operation, Part
from kvplan.planning.segments import Coalesce, Segments, first_overlap
from kvplan.planning.side import Side
from kvplan.status import invalid
from kvplan.validation import INT64_MAX, UINT32_MAX

KINDS: dict[Operation, tuple[Kind, ...]] = {
    "pull_cache": ("C2C",),
    "pull_blocks": ("C2B", "B2B"),
    "push_cache": ("C2C",),
    "push_blocks": ("C2B", "B2B"),
    "copy_cache": ("C2C",),
    "copy_blocks": ("C2B", "B2B"),
    "swap_blocks": ("C2B", "B2B"),
    "pull_ranges": ("C2C",),
    "push_ranges": ("C2C",),
}

MAX_RUNS = 2**28
"""Maximum runs of a tensor in a document, where a few bytes can stand for any number of runs."""

MAX_COMPARED = 2**23
"""Maximum runs to expand for a comparison: half a gigabyte, about a second."""


def check_invariants(part: Part) -> None:
    """Check a part that was perhaps not made by the planner: read from a file, or built by hand."""
    segments, t = part.segments, part.tensors_per_layer
    if not segments.nbytes.all():
        raise invalid("segments.nbytes must be at least 1 for every segment")
    letters = "2".join("B" if side.paged else "C" for side in (part.src, part.dst))
    if part.kind != letters or part.kind not in KINDS[part.operation]:
        raise invalid(
            f"kind={part.kind} of operation={part.operation} between {part.src.row}s and "
            f"{part.dst.row}s must be {letters} and one of {KINDS[part.operation]}"
        )
    for name, side, tensors in (
        ("src", part.src, part.src_tensors),
        ("dst", part.dst, part.dst_tensors),
    ):
        if not 1 <= side.tensor_nbytes <= INT64_MAX or not 1 <= side.num_tensors <= UINT32_MAX:
            raise invalid(
                f"{name}: {side.num_tensors} tensors of {side.tensor_nbytes} bytes are out of "
                f"range [1, {UINT32_MAX}] and [1, {INT64_MAX}]"
            )
        _check_bounds(name, side, part)
        views = side.num_views(part.split)
        if not tensors or tensors.step != 1 or tensors.start < 0 or tensors.stop > views:
            raise invalid(
                f"{name}_tensors={tensors} must be a non-empty range of step 1 in [0, {views})"
            )
        if tensors.start % t or (tensors.stop % t and tensors.stop != views):
            raise invalid(f"{name}_tensors={tensors} must hold whole layers of {t} tensors")
        kv = side.extent("kv") if "kv" in part.split else 1
        if (
            has_layers(side)
            and not part.reinterpret
            and side.numbered_layers(part.split, t) is None
        ):
            raise invalid(
                f"tensors_per_layer={t} of {views} {name} tensors, split={part.split}, must group "
                f"them into the layers of the shard: {name} is {side}"
            )
        # A layer takes `t // kv` tensors: a whole number, which divides that of all tensors.
        if part.split and (side.num_tensors * kv % t or t % kv):
            raise invalid(
                f"tensors_per_layer={t} must group {views} views, split={part.split}, into layers"
            )
    if len(part.src_tensors) != len(part.dst_tensors):
        raise invalid(
            f"src_tensors={part.src_tensors} and dst_tensors={part.dst_tensors} must be of equal "
            "length"
        )
    least = segments.num_runs
    exact = part.coalesce is Coalesce.NONE or not least
    if part.num_slices < least or (exact and part.num_slices != least):
        raise invalid(
            f"num_slices={part.num_slices} must be {'' if exact else 'at least '}{least}, the "
            f"number of runs, with coalesce={part.coalesce}"
        )
    _check_views(part)
    _check_written_once(part)


def _check_bounds(name: str, side: Side, part: Part) -> None:
    """Refuse a run that ends outside a tensor, and more runs than a document may have."""
    segments, limit = part.segments, np.uint64(side.tensor_nbytes)
    last_view = np.uint64(
        sum((side.extent(axis) - 1) * side.stride_of(axis) for axis in part.split)
    )
    ends = getattr(segments, f"{name}_offsets").copy()
    outside = ends > limit
    # No sum can wrap around in this form.
    spans = [last_view + np.zeros_like(ends), segments.nbytes]
    for level, (counts, *strides) in enumerate(segments.repeats):
        stride = np.uint64(strides[name == "dst"])
        if not counts.all():
            raise invalid(f"repeats[{level}]: every count must be at least 1")
        steps = counts - np.uint64(1)
        too_far = (steps > limit // stride) if stride else np.zeros_like(outside)
        outside |= too_far
        spans.append(np.where(too_far, 0, steps) * stride)
    for span in spans:
        outside |= (span > limit) | (ends > limit - np.minimum(span, limit))
        ends = np.minimum(ends, limit) + np.minimum(span, limit)
    if bool(outside.any()):
        i = int(np.flatnonzero(outside)[0])
        offset, nbytes = (
            int(getattr(segments, column)[i]) for column in (f"{name}_offsets", "nbytes")
        )
        raise invalid(
            f"segment {i}: {name} bytes [{offset}, {offset + nbytes})"
            f"{', repeated or of another view,' if segments.repeats or part.split else ''} are "
            f"outside the tensor's [0, {side.tensor_nbytes})"
        )
    runs = np.ones(len(segments))  # floats: a product that is too large must not wrap around
    for counts, *_ in segments.repeats:
        runs *= counts
    if runs.sum() > MAX_RUNS:
        raise invalid(
            f"repeats: {runs.sum():.0f} runs exceed {MAX_RUNS}, the maximum of a document"
        )


def _check_views(part: Part) -> None:
    """Refuse a run that leaves its row, or crosses from its view into another."""
    for name, side in (("src", part.src), ("dst", part.dst)):
        if side.stride > side.row_nbytes:
            whose = f"the {side.row} that they begin in"
            between = f"{side.row}s lie {side.stride} bytes apart"
            _check_inside(part, name, 0, side.stride, side.row_nbytes, whose, between)
        for axis in part.split:
            if side.extent(axis) == 1:
                continue
            row = side.stride if side.is_inside(axis) and side.stride > side.row_nbytes else 0
            stride = side.stride_of(axis)
            period = stride * side.extent(axis)  # distance to the next bytes of the view
            whose, each = f"the {axis} that they begin in", f"split={part.split} pairs each"
            _check_inside(part, name, row, period, stride, whose, f"{each} by itself")


def _check_inside(
    part: Part, name: str, row: int, period: int, length: int, whose: str, why: str
) -> None:
    """Refuse a run that leaves the first `length` bytes of its period.

    With `row` above 0, periods restart every `row` bytes.
    """
    segments = part.segments
    starts, spans = getattr(segments, f"{name}_offsets"), segments.nbytes.copy()
    if row:
        starts = starts % np.uint64(row)
    reach = starts + spans
    for counts, *strides in segments.repeats:
        step = strides[name == "dst"]
        if row and step % row == 0:
            continue
        further = (counts - np.uint64(1)) * np.uint64(step)
        reach += further
        if step % period:
            spans += further
    unsure = starts % np.uint64(period) + spans > np.uint64(length)
    if row:
        unsure |= reach > np.uint64(row)
    runs, numbers = _spelled_out(segments, np.flatnonzero(unsure))
    offsets = getattr(runs, f"{name}_offsets")
    places = offsets % np.uint64(row) if row else offsets
    outside = np.flatnonzero(places % np.uint64(period) + runs.nbytes > np.uint64(length))
    if len(outside):
        i = int(outside[0])
        raise invalid(
            f"run {int(numbers[i])}: {name} bytes [{int(offsets[i])}, "
            f"{int(offsets[i]) + int(runs.nbytes[i])}) leave {whose}, of {length} bytes; {why}"
        )


def _check_written_once(part: Part) -> None:
    """Refuse two runs that write the same byte."""
    segments = part.segments
    if not len(segments):
        return
    runs, numbers = _spelled_out(segments, _perhaps_overlapping(segments))
    if (overlap := first_overlap(runs.dst_offsets, runs.nbytes)) is not None:
        first, second = overlap
        word = "segments" if segments.num_runs == len(segments) else "runs"
        raise invalid(
            f"{word} {int(numbers[first])} and {int(numbers[second])} write the same destination "
            f"bytes, from dst offset {int(runs.dst_offsets[second])}"
        )


def _perhaps_overlapping(segments: Segments) -> NDArray[np.intp]:
    """Return the segments whose runs must be expanded; runs of other segments share no byte.

    Segments whose extents overlap form a cluster; any other segment is a cluster by itself. In a
    cluster, the outermost level of repeats steps over the rows of a grid. If the rows are equal or
    disjoint, comparing one row is enough.
    """
    one = np.uint64(1)
    order = np.argsort(segments.dst_offsets, kind="stable")
    starts, inner = segments.dst_offsets[order], segments.nbytes[order]
    span, rows, stride = inner, np.ones_like(inner), np.uint64(0)
    unsure = np.zeros(len(order), bool)
    for repeat in sorted(segments.repeats, key=lambda repeat: repeat.dst_stride):
        inner, rows, stride = span, repeat.counts[order], np.uint64(repeat.dst_stride)
        unsure |= (rows > one) & (inner > stride)  # overlaps itself
        span = inner + (rows - one) * stride
    reach = np.maximum.accumulate(starts + span)
    meets = starts[1:] < reach[:-1]  # True: in the cluster of its predecessor
    apart = np.zeros_like(meets)
    if stride:
        row, place = np.divmod(starts, stride)
        in_row = place + inner <= stride
        same = (row[1:] == row[:-1]) & (rows[1:] == rows[:-1])
        apart = in_row[1:] & in_row[:-1] & (starts[:-1] + inner[:-1] <= starts[1:])
        apart &= same | (row[:-1] + rows[:-1] <= row[1:])
    unsure[1:] |= meets & ~apart
    cluster = np.concatenate(([0], np.cumsum(~meets)))
    bad = np.zeros(int(cluster[-1]) + 1, bool)
    bad[cluster[unsure]] = True
    return np.sort(order[bad[cluster]])


def _spelled_out(
    segments: Segments, chosen: NDArray[np.intp]
) -> tuple[Segments, NDArray[np.uint64]]:
    """Return the expanded runs of some segments, and the number of each run among all runs."""
    counts = segments.runs()
    some = counts[chosen]
    if int(some.sum()) > MAX_COMPARED:
        raise invalid(
            f"repeats: segments with overlapping extents have {int(some.sum())} runs; at most "
            f"{MAX_COMPARED} are compared one by one"
        )
    before, of_chosen = np.cumsum(counts) - counts, np.cumsum(some) - some
    numbers = np.arange(int(some.sum()), dtype=np.uint64)
    numbers += np.repeat(before[chosen] - of_chosen, some.astype(np.int64))
    src, dst, nbytes = (getattr(segments, name)[chosen] for name in Segments.columns())
    repeats = tuple(repeat._replace(counts=repeat.counts[chosen]) for repeat in segments.repeats)
    return Segments.adopt(src, dst, nbytes, repeats).expanded(), numbers

"""Comparison of two plans, run by run: layers, sizes and blocks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvplan.inspection.diff import cause, side_changes
from kvplan.planning.part import Part
from kvplan.planning.plan import Plan
from kvplan.planning.texts import nbytes_text, place, plural

_Numbers = NDArray[np.int64]
_KINDS: Final = (
    ("layers", "src_tensor"),
    ("sizes", "nbytes"),
    ("src blocks", "src"),
    ("dst blocks", "dst"),
)
"""Kinds of differences, most severe first, and the column of `Runs` that each compares."""


class Runs(NamedTuple):
    """The runs of a plan, in its order; whole blocks in the order of the block table.

    Attributes:
        src_tensor, dst_tensor: the paired tensors, or views of tensors.
        src, dst: the offsets in the tensors, in bytes.
        nbytes: the size of the run.
        part: the position of the part in the plan.
        number: the position of the run among those of its destination tensor.
    """

    src_tensor: _Numbers
    dst_tensor: _Numbers
    src: _Numbers
    dst: _Numbers
    nbytes: _Numbers
    part: _Numbers
    number: _Numbers

    @classmethod
    def of(cls, plan: Plan) -> Runs:
        """Return the runs of a plan."""
        found = [_of_part(number, part) for number, part in enumerate(plan.parts)]
        columns = [np.concatenate(column) for column in zip(*found, strict=True)]
        order = np.argsort(columns[1], kind="stable")
        tensor = columns[1][order]
        number = np.empty_like(order)
        number[order] = np.arange(len(tensor)) - np.searchsorted(tensor, tensor)
        return cls._make([*columns, number])

    @property
    def by_tensor(self) -> Runs:
        """The same runs, one destination tensor after the other."""
        order = np.argsort(self.dst_tensor, kind="stable")
        return Runs._make([column[order] for column in self])

    @property
    def keys(self) -> _Numbers:
        """A number for each run, unique for its destination tensor and position."""
        return (self.dst_tensor << 40) + self.number


def _of_part(number: int, part: Part) -> Iterator[_Numbers]:
    """Yield the columns of `Runs`; if whole blocks move, each block is a run, in table order."""
    tables, stride = part.tables, part.dst.stride
    runs = part.segments.expanded()
    columns = [
        column.astype(np.int64) for column in (runs.src_offsets, runs.dst_offsets, runs.nbytes)
    ]
    if (
        tables is not None
        and len(tables.src) == len(tables.dst)
        and part.src.stride == stride
        and runs.total_nbytes == len(tables.dst) * stride
    ):
        columns = [tables.src * stride, tables.dst * stride, np.full(len(tables.dst), stride)]
    pairs, count = len(part.src_tensors), len(columns[0])
    for views in (part.src_tensors, part.dst_tensors):
        yield np.repeat(np.arange(views.start, views.stop), count)
    for column in columns:
        yield np.tile(column, pairs)
    yield np.full(pairs * count, number)


def compare(old: Plan, new: Plan, names: tuple[str, str] = ("A", "B")) -> list[str]:
    """Return how the second plan differs from the first, a line for each kind of difference.

    Plans of different requests are compared by position: run i of a destination tensor with run i.
    Lines about layers come first: two requests may use different blocks, but not different layers.
    No line: both put the same bytes into the same places, in the same order for each tensor.
    """
    both = Runs.of(old).by_tensor, Runs.of(new).by_tensor
    _, *at = np.intersect1d(both[0].keys, both[1].keys, assume_unique=True, return_indices=True)
    lines = []
    for what, column in _KINDS:
        columns = (getattr(runs, column)[rows] for runs, rows in zip(both, at, strict=True))
        if len(odd := np.flatnonzero(np.not_equal(*columns))):
            texts = (
                f"{run_text(plan, runs, int(rows[odd[0]]))} in {name}"
                for plan, runs, rows, name in zip((old, new), both, at, names, strict=True)
            )
            lines.append(
                f"{what}: {len(odd):,} of {plural(len(at[0]), 'run')} differ; the first is "
                f"{', and '.join(texts)}"
            )
    for plan, runs, rows, name in zip((old, new), both, at, names, strict=True):
        if len(extra := np.setdiff1d(np.arange(len(runs.number)), rows)):
            lines.append(
                f"only in {name}: {plural(len(extra), 'run')}; the first is "
                f"{run_text(plan, runs, int(extra[0]))}"
            )
    for before, after in zip_longest(old.parts, new.parts):
        if before is not None and after is not None:
            for side in ("src", "dst"):
                changes = side_changes(side, getattr(before, side), getattr(after, side))
                lines += [f"cache: {change}" for change in changes]
            if lines and len(old.parts) == len(new.parts) and (mistake := cause(before, after)):
                lines.append(f"cause: {mistake}")
    return list(dict.fromkeys(lines))


def run_text(plan: Plan, runs: Runs, index: int) -> str:
    """Return a run as `layer 3, run 2: block 9 > block 4`."""
    part, tensor = plan.parts[int(runs.part[index])], int(runs.src_tensor[index])
    source = "" if tensor == int(runs.dst_tensor[index]) else (
        f" from {_tensor_text(tensor, part.tensors_per_layer)}"
    )  # fmt: skip
    nbytes = int(runs.nbytes[index])
    places = []
    for offset, side in ((int(runs.src[index]), part.src), (int(runs.dst[index]), part.dst)):
        rows = offset // side.stride, (offset + nbytes - 1) // side.stride
        word = "block" if side.paged else "slot"
        places.append(f"{word} {place(rows, offset, side.stride)}")
    whole = nbytes == part.dst.stride
    size = "" if whole else f", {nbytes_text(nbytes)}"
    return f"{place_text(plan, runs, index)}{source}: {' > '.join(places)}{size}"


def place_text(plan: Plan, runs: Runs, index: int) -> str:
    """Return the place of a run in the plan, as `layer 3, run 2`."""
    part = plan.parts[int(runs.part[index])]
    several = any(other.dst != part.dst for other in plan.parts)
    label = f"part {part.label}, " if several else ""
    layer = _tensor_text(int(runs.dst_tensor[index]), part.tensors_per_layer)
    return f"{label}{layer}, run {int(runs.number[index])}"


def _tensor_text(tensor: int, per_layer: int) -> str:
    """Return `layer 3`, or `layer 3 tensor 1` for the second of several tensors of a layer."""
    layer, inside = divmod(tensor, per_layer)
    return f"layer {layer} tensor {inside}" if inside else f"layer {layer}"

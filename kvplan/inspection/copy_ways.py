"""Which way a GPU copies a plan: in launches of a kernel, in batches of the driver's, one by one.

The decision is made in C, for each part of a batch when that is issued
(kvnative/src/cuda/copies.c). It is made here from the same table, without a device: for texts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, cast, get_args

import numpy as np

from kvplan.inspection.units import nbytes_text, plural
from kvplan.machine_file import cache_path, read_machines, unreadable
from kvplan.types import Placement
from kvplan.validation import check_type, shown

if TYPE_CHECKING:
    from pathlib import Path

    from kvplan.planning.groups import AnyPlan
    from kvplan.planning.plan import Plan

CopyDirection = Literal["host_to_device", "device_to_host", "device_to_device"]
Way = Literal["kernel", "batch", "single"]

NO_LIMIT: Final = 2**63
FILE_VERSION: Final = 2  # of 1 nothing said whether the driver has batches

_MOST: Final = 8192
"""Descriptors that are looked at, and that a launch or a batch takes: KVN_CUDA_LAUNCH_COUNT."""
_SINGLES: Final = 64
"""Single copies, before those that follow are looked at: SINGLES of copies.c."""
_UNSTOPPABLE: Final[Mapping[CopyDirection, int]] = {
    "host_to_device": 64 << 20,
    "device_to_host": 64 << 20,
    "device_to_device": 256 << 20,
}
"""Bytes of a call of the driver's; a larger descriptor goes in slices: kvn_most_unstoppable."""
_CALLS: Final[Mapping[Way, str]] = {"kernel": "launch", "batch": "batch", "single": "copy"}
_MIB: Final = 1 << 20


class CopyLimits(NamedTuple):
    """Of one direction, by the mean size of descriptors, in bytes.

    Attributes:
        kernel_below: smaller ones go by the kernel.
        batch_below: then these in batches; what is larger by a copy each.
        blocks: of the kernel, at most; 0: as many as the device runs at one time.
    """

    kernel_below: int
    batch_below: int
    blocks: int = 0


class Moved(NamedTuple):
    """What of a plan goes one way.

    Attributes:
        way: "kernel", "batch" or "single".
        calls: launches, batches or copies.
        descriptors, nbytes: that these move.
    """

    way: Way
    calls: int
    descriptors: int
    nbytes: int

    @property
    def call(self) -> str:
        """The word for a call, in the singular."""
        return _CALLS[self.way]

    def __str__(self) -> str:
        most = f" of up to {_MOST:,} descriptors" if self.calls > 1 and self.way != "single" else ""
        return f"{self.way}, {plural(self.calls, self.call)}{most}"


@dataclass(frozen=True)
class CopyTable:
    """How a GPU copies. Frozen.

    Attributes:
        limits: of each direction.
        source: where they come from: "built in", "measured ...".
        device: the GPU, for texts; empty: any.
        has_batches: whether its driver has `cuMemcpyBatchAsync`, as of CUDA 12.8.
    """

    limits: Mapping[CopyDirection, CopyLimits] = field(hash=False)
    source: str = "built in"
    device: str = ""
    has_batches: bool = True

    def way(self, direction: CopyDirection, mean_nbytes: int, count: int) -> Way:
        """How so many descriptors of that mean size go."""
        kernel_below, batch_below, _ = self.limits[direction]
        if mean_nbytes < kernel_below:
            return "kernel"
        return "batch" if self.has_batches and count > 1 and mean_nbytes < batch_below else "single"

    def moved(self, plan: AnyPlan) -> list[Moved]:
        """How the descriptors of `plan` go, if they are submitted as one; [] where no GPU is.

        Memory of the host is taken to be pinned: what is pageable goes by a copy each.
        """
        direction = direction_of(plan)
        if direction is None:
            return []
        steps = sorted(self._steps(direction, _Sizes(plan)))
        return [
            Moved(way, *map(sum, zip(*(it[1:] for it in found), strict=True)))
            for way, found in groupby(steps, lambda it: it.way)
        ]

    def _steps(self, direction: CopyDirection, sizes: _Sizes) -> Iterator[Moved]:
        """Each call of a row of the device's table, which looks at what it is given."""
        at, most = 0, _UNSTOPPABLE[direction]
        while at < sizes.count:
            begin = sizes.before(at)
            count = sizes.count_below(at, min(_MOST, sizes.count - at), most)
            if count == 0:
                nbytes = sizes.before(at + 1) - begin
                slices = [*[most] * (nbytes // most), nbytes % most]
                for number, size in enumerate(filter(None, slices)):
                    yield Moved(self.way(direction, size, 1), 1, number == 0, size)
                at += 1
                continue
            way = self.way(direction, (sizes.before(at + count) - begin) // count, count)
            taken = count
            if way != "kernel":
                taken = sizes.count_within(at, count, most)
            if way == "single":
                taken = min(taken, _SINGLES)
            calls = taken if way == "single" else 1
            yield Moved(way, calls, taken, sizes.before(at + taken) - begin)
            at += taken

    def words(self, limits: CopyLimits) -> str:
        """What goes which way: `one launch below 8 MiB, then a copy each`."""
        kernel, batch, _ = limits
        batch = batch if self.has_batches else 0
        parts = [
            *([f"one launch{_limit(kernel)}"] if kernel else []),
            *([f"a batch call{_limit(batch)}"] if batch > kernel else []),
            *(["a copy each"] if max(kernel, batch) < NO_LIMIT else []),
        ]
        return ", then ".join(parts)

    def outline(self, plan: AnyPlan) -> str:
        """How `plan` goes, and why, in one line."""
        direction = direction_of(plan)
        if direction is None:
            return f"no GPU copies this, {_why_none(plan)}"
        ways = " and ".join(map(str, self.moved(plan)))
        mean = nbytes_text(plan.nbytes // max(1, plan.num_descriptors))
        return (
            f"{direction.replace('_', ' ')}: {ways} (mean {mean}: "
            f"{self.words(self.limits[direction])}; {self.source})"
        )

    def document(self, plan: AnyPlan) -> dict[str, object] | None:
        """The same as plain JSON values; None: no GPU copies this."""
        direction = direction_of(plan)
        if direction is None:
            return None
        return {
            "direction": direction,
            "ways": [it._asdict() for it in self.moved(plan)],
            "kernel_below": self.limits[direction].kernel_below,
            "batch_below": self.limits[direction].batch_below,
            "has_batches": self.has_batches,
            "device": self.device or None,
            "source": self.source,
        }


BUILTIN: Final = CopyTable(
    {
        "host_to_device": CopyLimits(128 << 10, 4 << 20, 32),
        "device_to_host": CopyLimits(128 << 10, 4 << 20, 32),
        "device_to_device": CopyLimits(8 << 20, 0),
    }
)
"""As in copies.c: thought out, and measured on no GPU."""


def copied_lines(plan: AnyPlan) -> list[str]:
    """How the GPU of the engine that gave `plan` copies it; [] where none does."""
    tables = [table for it in _plans(plan) for table in (it.src.copies, it.dst.copies)]
    if direction_of(plan) is None or tables[0] is None or None in tables:
        return []
    return [f"on {tables[0].device}: {tables[0].outline(plan)}"]


def direction_of(plan: AnyPlan) -> CopyDirection | None:
    """Which way a plan goes, as its sides say where they are; None: within the host, or not one."""
    found = _directions(plan)
    return found.pop() if len(found) == 1 else None


def _directions(plan: AnyPlan) -> set[CopyDirection | None]:
    return {_direction_of(it) for it in _plans(plan)}


def _why_none(plan: AnyPlan) -> str:
    if len(_directions(plan)) > 1:
        return "as one: groups go in several directions"
    return "both sides are in host memory"


def _direction_of(plan: Plan) -> CopyDirection | None:
    match plan.src.placement, plan.dst.placement:
        case Placement.HOST, Placement.HOST:
            return None
        case Placement.HOST, _:
            return "host_to_device"
        case _, Placement.HOST:
            return "device_to_host"
    return "device_to_device"


def _plans(plan: AnyPlan) -> list[Plan]:
    # By a type that this room does not import.
    groups: Mapping[str, Plan] = getattr(plan, "groups", None) or {"": cast("Plan", plan)}
    return [*groups.values()]


class _Sizes:
    """The sizes of a plan's descriptors, in their order, without a number for each."""

    def __init__(self, plan: AnyPlan) -> None:
        self.count = 0
        self._nbytes = 0
        self._parts = []
        for it in _plans(plan):
            segments = it.segments
            sizes, runs = (col.astype(np.int64) for col in (segments.nbytes, segments.runs()))
            ends, nbytes = np.cumsum(runs), np.cumsum(runs * sizes)
            self._parts.append((self.count, self._nbytes, sizes, ends, nbytes))
            self.count += it.num_descriptors
            self._nbytes += it.nbytes
        self._largest = max((int(it[2].max(initial=0)) for it in self._parts), default=0)

    def count_below(self, at: int, count: int, most: int) -> int:
        """How many of so many from `at` on come before the first of more than `most` bytes."""
        if self._largest <= most:
            return count
        sizes = (self.before(at + it + 1) - self.before(at + it) for it in range(count))
        return next((number for number, nbytes in enumerate(sizes) if nbytes > most), count)

    def count_within(self, at: int, count: int, most: int) -> int:
        """How many of so many from `at` on have at most so many bytes together."""
        begin = self.before(at)
        return bisect_right(range(count), most, key=lambda it: self.before(at + it + 1) - begin)

    def before(self, index: int) -> int:
        """Bytes of the descriptors before that one."""
        first, before, sizes, ends, nbytes = next(
            it for it in reversed(self._parts) if it[0] <= index
        )
        pairs, run = divmod(index - first, int(ends[-1]))
        segment = int(np.searchsorted(ends, run, "right"))
        left = int(ends[segment]) - run
        inside = int(nbytes[segment]) - left * int(sizes[segment])
        return int(before + pairs * int(nbytes[-1]) + inside)


def _limit(nbytes: int) -> str:
    if nbytes >= NO_LIMIT:
        return ""
    return f" below {nbytes / _MIB:g} MiB" if nbytes >= _MIB else f" below {nbytes / 1024:g} KiB"


# ---- what was measured ----


def tables_path() -> Path:
    """Where `kvplan tune` stores how GPUs copy, by their kind.

    Raises:
        LLMException: as `cache_path`.
    """
    return cache_path("cuda.json")


def stored_tables() -> dict[str, CopyTable]:
    """What `kvplan tune` has stored, by kind of GPU, the latest first; empty: nothing yet.

    Raises:
        OSError: there is a file, and it cannot be read.
        LLMException: LLM_PARAM_INVALID: what is wrong with it.
    """
    path = tables_path()
    machines = read_machines(path, FILE_VERSION)
    tables = {kind: stored_table(path, machines, kind) for kind in machines}
    latest = sorted(tables, key=lambda it: str(machines[it]["measured"]), reverse=True)
    return {kind: tables[kind] for kind in latest}


def stored_table(path: Path, machines: Mapping[str, object], kind: str) -> CopyTable:
    """The table of one kind, checked.

    Raises:
        LLMException: LLM_PARAM_INVALID: what is wrong with it.
    """
    try:
        document = check_type("machine", machines[kind], dict)
        stored = check_type("tunings", document["tunings"], dict)
        limits = {it: _limits_of(stored[it]) for it in get_args(CopyDirection)}
        measured = check_type("measured", document["measured"], str)
        has_batches = check_type("has_batches", document["has_batches"], bool)
    except (TypeError, ValueError, KeyError) as error:
        raise unreadable(path, f"machines[{shown(kind)}]: {error}") from None
    return CopyTable(limits, f"measured by kvplan tune on {measured[:10]}", kind, has_batches)


def _limits_of(document: object) -> CopyLimits:
    fields = check_type("tuning", document, dict)
    values = [check_type(name, fields[name], int) for name in CopyLimits._fields]
    for name, value in zip(CopyLimits._fields, values, strict=True):
        most = 2**31 - 1 if name == "blocks" else NO_LIMIT
        if not 0 <= value <= most:
            raise ValueError(f"{name}={value} must be 0 to {most}")
    return CopyLimits(*values)

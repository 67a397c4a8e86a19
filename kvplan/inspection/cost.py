"""How long a transfer is expected to take: lines through measured ones, by ranges of sizes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from statistics import median
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import numpy as np

from kvplan.inspection.copy_ways import BUILTIN, CopyTable
from kvplan.inspection.units import nbytes_text, plural
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.validation import check_type, shown

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvplan.planning.groups import AnyPlan

MIB: Final = 1 << 20
MOST_MS: Final = 1e12
"""Of a measured transfer: 30 years."""

_HERE: Final = "measured by benchmarks/cost_model.py on a 2-core VM, scaled to an ordinary day"
_NO_HARDWARE: Final = "it has run on simulated libraries only, which says nothing of time"


@dataclass(frozen=True)
class Estimate:
    """The time that a plan is expected to take over a transport; `print` shows its parts.

    From the call of an operation to its return: both ends idle, every page touched before, the
    bytes not in a cache. Waiting for others, and for a lost packet, is not in it.

    Attributes:
        operation: the plan's.
        transport: the name of the costs that were used.
        way: how bytes move: "mapped", "one-sided".
        call: what the transfer is cut into, in the singular: "message", "native call".
        calls: how many of them.
        descriptors, nbytes: the plan's.
        fixed_ms, calls_ms, descriptors_ms, bytes_ms: what adds up to `ms`.
    """

    operation: str
    transport: str
    way: str
    call: str
    calls: int
    descriptors: int
    nbytes: int
    fixed_ms: float
    calls_ms: float
    descriptors_ms: float
    bytes_ms: float

    @property
    def ms(self) -> float:
        """Milliseconds in all."""
        return self.fixed_ms + self.calls_ms + self.descriptors_ms + self.bytes_ms

    @property
    def gigabytes_per_s(self) -> float:
        """Bytes in 10**9 a second, over all of the time."""
        return self.nbytes / self.ms / 1e6

    def outline(self) -> str:
        """One line: how it moves, and how long."""
        return (
            f"over {self.transport}: {self.way}, {plural(self.calls, self.call)} | "
            f"{nbytes_text(self.nbytes)} | about {ms_text(self.ms)}"
        )

    def __str__(self) -> str:
        parts = (
            ("fixed", self.fixed_ms),
            (plural(self.calls, self.call), self.calls_ms),
            (plural(self.descriptors, "descriptor"), self.descriptors_ms),
            (nbytes_text(self.nbytes), self.bytes_ms),
        )
        rows = [f"  {ms_text(ms):>8}  {what}" for what, ms in parts if ms]
        head = f"{self.operation} over {self.transport}, {self.way}: {ms_text(self.ms)}"
        return "\n".join([f"{head}, {self.gigabytes_per_s:.2f} GB/s", *rows])


def ms_text(ms: float) -> str:
    """`0.024 ms`, `1.08 ms`, `112 ms`: three digits that count."""
    digits = 0 if ms >= 100 else 1 if ms >= 10 else 2 if ms >= 1 else 3
    return f"{ms:.{digits}f} ms"


@dataclass(frozen=True, kw_only=True)
class CostLine:
    """Microseconds of a transfer: the sum of four products.

    Attributes:
        fixed_us: of every transfer, whatever its size.
        call_us: of each message or native call.
        descriptor_us: of each descriptor.
        mib_us: of each MiB (2**20 bytes).
        upto_nbytes: the largest transfer that it holds for; None: any.
    """

    fixed_us: float = 0.0
    call_us: float = 0.0
    descriptor_us: float = 0.0
    mib_us: float = 0.0
    upto_nbytes: int | None = None

    def __post_init__(self) -> None:
        for name in COEFFICIENTS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{name}={shown(value)} must be a number")
            if not 0 <= value < float("inf"):
                raise invalid(f"{name}={value} must be >= 0 and finite")
        if self.upto_nbytes is not None and check_type("upto_nbytes", self.upto_nbytes, int) < 1:
            raise invalid(f"upto_nbytes={self.upto_nbytes} must be None or >= 1")


COEFFICIENTS: Final = ("fixed_us", "call_us", "descriptor_us", "mib_us")


@dataclass(frozen=True, kw_only=True)
class TransportCost:
    """How a transport moves a plan, and what that costs. Frozen; `scale` and `fit` measure.

    Attributes:
        name: for people, and what `plan.estimate` is given for the rows that kvplan has.
        way: how bytes move, in a word or two: "mapped", "one-sided".
        call: what a transfer is cut into, in the singular: "message", "native call".
        call_nbytes, call_descriptors: the most that one of them takes; None: no such bound.
        lines: by ascending `upto_nbytes`, the last one without; empty: not measured.
        source: where the lines come from, or why there are none.
        copies: how a GPU copies: which way and how many calls then follow from the plan, and not
            from what stands above; None: it is not one.
    """

    name: str
    way: str
    call: str = "native call"
    call_nbytes: int | None = None
    call_descriptors: int | None = None
    lines: tuple[CostLine, ...] = ()
    source: str = ""
    copies: CopyTable | None = None

    def __post_init__(self) -> None:
        if self.copies is not None:
            check_type("copies", self.copies, CopyTable)
        for name in ("name", "way", "call", "source"):
            check_type(name, getattr(self, name), str)
        for name in ("call_nbytes", "call_descriptors"):
            value = getattr(self, name)
            if value is not None and check_type(name, value, int) < 1:
                raise invalid(f"{name}={value} must be None or >= 1")
        for line in check_type("lines", self.lines, tuple):
            check_type("lines[]", line, CostLine)
        bounds = [float("inf") if it is None else it for it in self._bounds]
        if any(a >= b for a, b in pairwise(bounds)) or bounds[-1:] not in ([], [float("inf")]):
            raise invalid(f"upto_nbytes of lines={self._bounds} must ascend and end in None")

    @property
    def _bounds(self) -> list[int | None]:
        return [line.upto_nbytes for line in self.lines]

    def calls(self, descriptors: int, nbytes: int) -> int:
        """Messages or native calls that a transfer is cut into."""
        by_nbytes = 1 if self.call_nbytes is None else -(-nbytes // self.call_nbytes)
        by_count = 1 if self.call_descriptors is None else -(-descriptors // self.call_descriptors)
        return max(by_nbytes, by_count)

    def estimate(self, plan: AnyPlan) -> Estimate:
        """What `plan` is expected to take.

        Raises:
            LLMException: LLM_FEATURE_NOT_ENABLED: nothing was measured.
        """
        nbytes, descriptors = plan.nbytes, plan.num_descriptors
        line = self._line(nbytes)
        way, call, calls = self._cut(plan)
        amounts = (1, calls, descriptors, nbytes / MIB)
        parts = [
            getattr(line, name) * amount / 1000
            for name, amount in zip(COEFFICIENTS, amounts, strict=True)
        ]
        head = (plan.operation, self.name, way, call, calls, descriptors, nbytes)
        return Estimate(*head, *parts)

    def outline(self, plan: AnyPlan) -> str:
        """How `plan` would move, in one line: way, calls, bytes, and the time where it is known."""
        if self.copies is not None:
            time = f"about {ms_text(self.estimate(plan).ms)}" if self.lines else "time not known"
            moved = self.copies.outline(plan)
            return f"over {self.name}: {moved} | {nbytes_text(plan.nbytes)} | {time}"
        if self.lines:
            return self.estimate(plan).outline()
        calls = plural(self.calls(plan.num_descriptors, plan.nbytes), self.call)
        cut = "" if self.call_nbytes is self.call_descriptors is None else f", {calls}"
        return f"over {self.name}: {self.way}{cut} | {nbytes_text(plan.nbytes)} | time not known"

    def fit(
        self, measurements: Iterable[tuple[AnyPlan, float]], name: str | None = None
    ) -> TransportCost:
        """This transport with the costs of another machine: yours.

        The lines are fitted by least squares of the relative error, no coefficient below 0.

        Args:
            measurements: plans, and the milliseconds that each took; at least four for each line,
                of different sizes and numbers of descriptors. What is slow at first (pages that
                were never touched) should not be among them.
            name: of the result; None: as this one's.

        Raises:
            TypeError: a time that is not a number.
            LLMException: LLM_PARAM_INVALID: a time that is not > 0, or too few of them.
        """
        rows = [self._row(plan, ms) for plan, ms in measurements]
        bounds = self._bounds or [None]
        lines, above = [], 0
        for bound in bounds:
            part = [row for row in rows if above < row[3] * MIB <= (bound or float("inf"))]
            if len(part) < len(COEFFICIENTS):
                size = (
                    "any size"
                    if bounds == [None]
                    else (
                        f"more than {above} bytes"
                        if bound is None
                        else f"{above + 1} to {bound} bytes"
                    )
                )
                raise invalid(
                    f"measurements: {len(part)} of {size}; {self.name} needs at least "
                    f"{len(COEFFICIENTS)} to fit a line"
                )
            values = _non_negative_fit(np.array(part))
            lines.append(
                CostLine(**dict(zip(COEFFICIENTS, values, strict=True)), upto_nbytes=bound)
            )
            above = bound or 0
        source = f"fitted to {len(rows)} measured transfers"
        return replace(self, name=name or self.name, lines=tuple(lines), source=source)

    def scale(
        self, measurements: Iterable[tuple[AnyPlan, float]], name: str | None = None
    ) -> TransportCost:
        """These costs on a machine, or a day, on which this transport is faster or slower.

        All of them are multiplied by one factor: the median of measured to estimated time. One
        transfer is enough; of three or more, a single odd one does not count. Where a network or a
        way of copying differs, so that one part of the costs changes more than the others, `fit`.

        Args:
            measurements: plans, and the milliseconds that each took.
            name: of the result; None: as this one's.

        Raises:
            TypeError: a time that is not a number.
            LLMException: LLM_PARAM_INVALID: a time that is not > 0, none, or an estimate that is 0;
                LLM_FEATURE_NOT_ENABLED: there are no costs to begin with.
        """
        ratios = []
        for plan, ms in measurements:
            measured, estimated = _checked_ms(plan, ms), self.estimate(plan).ms
            if not estimated:
                raise invalid(f"{self.name}: {plan!r} costs 0 ms, which no factor changes")
            ratios.append(measured / estimated)
        if not ratios:
            raise invalid("measurements: there are none; one transfer is enough")
        factor = median(ratios)
        lines = tuple(
            replace(line, **{it: factor * getattr(line, it) for it in COEFFICIENTS})
            for line in self.lines
        )
        source = f"scaled by {factor:.3g} to {plural(len(ratios), 'measured transfer')}"
        if self.source:
            source += f"; {self.source}"
        return replace(self, name=name or self.name, lines=lines, source=source)

    def _row(self, plan: AnyPlan, ms: float) -> tuple[float, float, float, float, float]:
        """The amounts that a line has coefficients for, and the time in microseconds."""
        us = 1000.0 * _checked_ms(plan, ms)
        return 1, self._cut(plan)[2], plan.num_descriptors, plan.nbytes / MIB, us

    def _cut(self, plan: AnyPlan) -> tuple[str, str, int]:
        """How a plan moves, the word for a call, and how many there are.

        Raises:
            LLMException: LLM_PARAM_INVALID: a GPU has no part in it.
        """
        if self.copies is None:
            return self.way, self.call, self.calls(plan.num_descriptors, plan.nbytes)
        moved = self.copies.moved(plan)
        if not moved:
            raise invalid(f"transport={self.name!r}: {self.copies.outline(plan)}")
        call = moved[0].call if len(moved) == 1 else "call"
        return " and ".join(it.way for it in moved), call, sum(it.calls for it in moved)

    def _line(self, nbytes: int) -> CostLine:
        for line in self.lines:
            if line.upto_nbytes is None or nbytes <= line.upto_nbytes:
                return line
        raise LLMException(
            f"transport={self.name!r}: {self.source or 'it has no lines'}; measure transfers, and "
            "fit() their costs",
            status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
        )


def _checked_ms(plan: AnyPlan, ms: float) -> float:
    if isinstance(ms, bool) or not isinstance(ms, int | float):
        raise TypeError(f"milliseconds of {plan!r} = {shown(ms)} must be a number")
    if not 0 < ms <= MOST_MS:
        raise invalid(f"milliseconds of {plan!r} = {shown(ms)} must be > 0 and at most {MOST_MS:g}")
    return ms


def _non_negative_fit(rows: NDArray[np.float64]) -> Sequence[float]:
    """The coefficients >= 0 that bring the sum of squared relative errors to its least.

    The best solution without a bound, over some of the columns, is the best one with it: all 15
    sets of columns are tried, so no iteration has to converge.
    """
    amounts, times = rows[:, :-1], rows[:, -1]
    scaled = amounts / times[:, None]
    best: tuple[float, list[float]] = (float("inf"), [])
    width = scaled.shape[1]
    for size in range(1, width + 1):
        for chosen in combinations(range(width), size):
            part = scaled[:, chosen]
            solution, *_ = np.linalg.lstsq(part, np.ones(len(part)), rcond=None)
            error = float(np.square(part @ solution - 1).sum())
            if (solution >= 0).all() and error < best[0] * (1 - 1e-9):
                values = [0.0] * width
                for column, value in zip(chosen, solution, strict=True):
                    values[column] = float(value)
                best = error, values
    return best[1]


def cuda_cost(table: CopyTable) -> TransportCost:
    """Copies of a GPU: in a process, and over `local` from and to peers of the same host."""
    source = f"{table.source}; no time was measured on a GPU"
    return TransportCost(name="cuda", way="copies of a GPU", copies=table, source=source)


TRANSPORT_COSTS: Final = MappingProxyType(
    {
        cost.name: cost
        for cost in (
            TransportCost(
                name="local",
                way="mapped",
                source=_HERE,
                lines=(
                    CostLine(fixed_us=148, descriptor_us=0.96, mib_us=72, upto_nbytes=256 << 10),
                    CostLine(fixed_us=232, descriptor_us=0.136, mib_us=73.6, upto_nbytes=24 << 20),
                    CostLine(fixed_us=576, descriptor_us=0.112, mib_us=56),
                ),
            ),
            TransportCost(
                name="local-registered",
                way="process_vm",
                call_nbytes=4 << 20,
                call_descriptors=1024,
                source=_HERE,
                lines=(
                    CostLine(fixed_us=152, descriptor_us=3.2, mib_us=414, upto_nbytes=128 << 10),
                    CostLine(fixed_us=266, descriptor_us=0.52, mib_us=103),
                ),
            ),
            TransportCost(
                name="tcp",
                way="sockets",
                source=_HERE,
                lines=(CostLine(fixed_us=350, descriptor_us=0.24, mib_us=320),),
            ),
            TransportCost(
                name="ucx",
                way="one-sided",
                call="get or put",
                call_descriptors=1,
                source=_HERE,
                lines=(CostLine(fixed_us=1390, descriptor_us=1.34, mib_us=207),),
            ),
            TransportCost(
                name="hccl",
                way="one-sided",
                call="HCCL operation",
                call_descriptors=256,
                source=_NO_HARDWARE,
            ),
            TransportCost(name="acl", way="batch copies of ACL", source=_NO_HARDWARE),
            cuda_cost(BUILTIN),
        )
    }
)
"""By name. `plan.estimate` takes a name, or a `TransportCost` of your own."""


def cost_of(transport: str | TransportCost) -> TransportCost:
    """The costs that are meant.

    Raises:
        TypeError: neither a name nor costs.
        LLMException: LLM_PARAM_INVALID: a name that there is not.
    """
    if isinstance(transport, TransportCost):
        return transport
    cost = TRANSPORT_COSTS.get(check_type("transport", transport, str))
    if cost is None:
        names = ", ".join(TRANSPORT_COSTS)
        raise invalid(f"transport={shown(transport)} must be one of {names}, or a TransportCost")
    return cost

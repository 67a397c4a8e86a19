"""Rows: their registration, measurement, verdict and output."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

Sense = Literal["at most", "at least"]


@dataclass(frozen=True)
class Row:
    """One figure. `limit` has the same unit: a budget, another library, or a limit of the machine.

    The target is met if `value / limit` is `sense` `target`. A row without a target only informs.
    """

    name: str
    value: float
    unit: str
    limit: float
    sense: Sense = "at most"
    target: float | None = 1.0
    note: str = ""
    cases: Mapping[str, float] = field(default_factory=dict)
    """The figures of single cases; only in the JSON lines."""

    @property
    def ratio(self) -> float:
        """`value` in units of `limit`."""
        return self.value / self.limit

    @property
    def met(self) -> bool:
        """True if the target is met, or if there is none."""
        if self.target is None:
            return True
        return self.ratio <= self.target if self.sense == "at most" else self.ratio >= self.target

    def to_json(self) -> str:
        """Return one line of build/bench.jsonl."""
        figures = {"value": self.value, "unit": self.unit, "limit": self.limit, "ratio": self.ratio}
        rounded = {key: round(x, 4) if isinstance(x, float) else x for key, x in figures.items()}
        judged = {"sense": self.sense, "target": self.target, "met": self.met}
        cases = {key: round(x, 4) for key, x in self.cases.items()}
        return json.dumps(
            {"name": self.name, **rounded, **judged, **({"cases": cases} if cases else {})}
        )

    def cells(self) -> tuple[str, ...]:
        """Return the row as the table prints it."""
        target = "-" if self.target is None else f"{self.sense} {self.target:.2f}"
        verdict = "" if self.target is None else "met" if self.met else "MISSED"
        figures = (f"{self.value:.2f}", self.unit, f"{self.limit:.2f}", f"{self.ratio:.2f}")
        return (self.name, *figures, target, verdict, self.note)


class Unmeasured(Exception):  # noqa: N818
    """A row cannot be measured on this machine; the message says what is missing."""


@dataclass(frozen=True)
class Blank:
    """A row that was not measured. It neither meets nor misses its target."""

    name: str
    reason: str
    met: bool = True

    def to_json(self) -> str:
        """Return one line of build/bench.jsonl."""
        return json.dumps({"name": self.name, "unmeasured": self.reason})

    def cells(self) -> tuple[str, ...]:
        """Return the row as the table prints it."""
        return (self.name, *("-",) * 5, "", f"not measured: {self.reason}")


@dataclass
class Run:
    """One run of the benchmarks: how long to measure, and what rows share until it ends."""

    quick: bool = False
    opened: ExitStack = field(default_factory=ExitStack)
    shared: dict[Any, Any] = field(default_factory=dict)
    say: Callable[[str], object] | None = None
    """Called with the last step of a slow row, at most every two seconds."""
    _said_at: float = field(default=0.0, init=False)

    def share(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the result of `make()`, called once a run: pools and peers are expensive."""
        if key not in self.shared:
            self.shared[key] = make()
        return self.shared[key]

    def note(self, step: str) -> None:
        """Report the last step of a slow row."""
        if self.say is not None and time.monotonic() - self._said_at > 2:
            self._said_at = time.monotonic()
            self.say(step)

    def medians(
        self, *candidates: Callable[[], float], rounds: int, settle: int = 0
    ) -> list[float]:
        """Return the median seconds of each candidate, in turns (A B A B) after a warm-up turn.

        Turns make other work on the machine affect all candidates alike. In its turn a candidate
        runs `settle` times before it counts, so that it finds the CPU's caches as it left them
        itself.
        """

        def turn(candidate: Callable[[], float]) -> float:
            for _ in range(settle):
                candidate()
            return candidate()

        for candidate in candidates:
            candidate()
        rounds = max(3, rounds // 4) if self.quick else rounds
        turns = []
        for number in range(1, rounds + 1):
            turns.append([turn(candidate) for candidate in candidates])
            self.note(f"timed {number} of {rounds} times")
        return [statistics.median(times) for times in zip(*turns, strict=True)]


Measure = Callable[[Run, str], Row]


class Topic(dict[str, Measure]):
    """The rows of one file, by name, in the order of the table."""

    def row(self, name: str) -> Callable[[Measure], Measure]:
        """Register the decorated function, which measures row `name`."""

        def register(measure: Measure) -> Measure:
            if name in self:
                raise ValueError(f"name={name!r} is already a row")
            self[name] = measure
            return measure

        return register


def timed(call: Callable[[], object], repeats: int = 1) -> Callable[[], float]:
    """Return a candidate for `Run.medians`: seconds of one `call`, from `repeats` in a loop."""

    def seconds() -> float:
        start = time.perf_counter_ns()
        for _ in range(repeats):
            call()
        return (time.perf_counter_ns() - start) / 1e9 / repeats

    return seconds


HEADER = ("name", "value", "unit", "limit", "ratio", "target", "", "")


def format_table(rows: Iterable[Row | Blank]) -> Iterator[str]:
    """Yield aligned lines: names and words to the left, figures to the right."""
    cells = [HEADER, *(row.cells() for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        aligned = (
            cell.rjust(width) if title in ("value", "limit", "ratio") else cell.ljust(width)
            for cell, width, title in zip(line, widths, HEADER, strict=True)
        )
        yield "  ".join(aligned).rstrip()

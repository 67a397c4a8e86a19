"""The paged work by kvplan and another library in turns, and one row that sums up all cases."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

from benchmarks.movers.paged import BLOCK, TENSORS
from benchmarks.pairs import Library, Pair, Place
from benchmarks.table import Row, Run

DIRECTIONS = ("pull", "push")
SIZES = (64, 256)
"""Blocks of each tensor: 128 and 512 MiB in total."""
TRIALS, TRIAL_BLOCKS = 3, 256


class Case(NamedTuple):
    """GB/s of kvplan and of the other library in one case."""

    name: str
    ours: float
    theirs: float
    us: str
    them: str

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs


class Comparison:
    """Several cases; their row is the case in which kvplan does worst."""

    def __init__(self) -> None:
        self._cases: list[Case] = []

    def add(
        self,
        run: Run,
        place: Place,
        direction: str,
        ours: Library,
        other: Library,
        *,
        rounds: int,
        times: int = 1,
    ) -> None:
        """Measure one direction with every size.

        Repeat it `times` times (an odd number) with new processes; the median counts. Depending on
        where the system puts the pages of a pool, a process is a tenth faster or slower for its
        whole life.
        """
        measured = [self._measure(run, place, direction, ours, other, rounds) for _ in range(times)]
        for cases in zip(*measured, strict=True):
            self._cases.append(sorted(cases, key=lambda case: case.ratio)[times // 2])

    def _measure(
        self, run: Run, place: Place, direction: str, ours: Library, other: Library, rounds: int
    ) -> list[Case]:
        cases = []
        with ExitStack() as opened:
            pairs = [opened.enter_context(Pair(value, place)) for value in (ours, other)]
            # A connection has to find its window first; the bare program did so in its trials.
            for pair in pairs * TRIALS:
                pair.seconds(direction, max(SIZES))
            for blocks in SIZES:
                candidates = (partial(pair.seconds, direction, blocks) for pair in pairs)
                times = run.medians(*candidates, rounds=rounds)
                mine, others = (TENSORS * blocks * BLOCK / seconds / 1e9 for seconds in times)
                us, them = (f"{item.library.name} ({item.settings})" for item in pairs)
                case = f"{place.name} {direction} {blocks}"
                cases.append(Case(case, mine, others, us, them))
        return cases

    def row(self, name: str, target: float | None, limit: str) -> Row:
        """Return the row of the worst case; the JSON lines have all cases."""
        worst = min(self._cases, key=lambda case: case.ratio)
        most = max(case.ratio for case in self._cases)
        note = (
            f"{worst.name}, {worst.us} beside {worst.them}, the least of {len(self._cases)} cases "
            f"up to {most:.2f}; limit: {limit}"
        )
        cases = {}
        for case in self._cases:
            cases[f"{case.name}: {case.us} beside {case.them}"] = case.ours
            cases[f"{case.name}: {case.them}"] = case.theirs
        return Row(name, worst.ours, "GB/s", worst.theirs, "at least", target, note, cases)


def fastest(libraries: Sequence[Library], place: Place) -> dict[str, Library]:
    """Return the best settings for each direction, found by short trials."""
    if len(libraries) == 1:
        return dict.fromkeys(DIRECTIONS, libraries[0])
    seconds: dict[str, list[float]] = {direction: [] for direction in DIRECTIONS}
    for library in libraries:
        with Pair(library, place) as pair:
            for direction in DIRECTIONS:
                _, *trials = [pair.seconds(direction, TRIAL_BLOCKS) for _ in range(TRIALS + 1)]
                seconds[direction].append(statistics.median(trials))
    return {second: libraries[times.index(min(times))] for second, times in seconds.items()}

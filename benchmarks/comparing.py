"""The paged work by ours and by another library in turns, and the row that sums up all cases."""

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
"""Blocks of each tensor: 128 and 512 MiB in all."""
TRIALS, TRIAL_BLOCKS = 3, 256


class Case(NamedTuple):
    """GB/s of ours and of the other library."""

    name: str
    ours: float
    theirs: float
    us: str
    them: str

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs


class Comparison:
    """Cases, and the row made of them: the one where ours does worst."""

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

        `times` times (an odd number), each with processes of its own, of which the one in the
        middle counts: by where the system puts the pages of a pool, the same program is a tenth
        faster or slower as long as it lives.
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
            # A connection finds its window first: the bare program's trials have done that.
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
        """The worst case; all of them are in the JSON lines."""
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
    """For each direction, the best choice of settings, by short trials."""
    if len(libraries) == 1:
        return dict.fromkeys(DIRECTIONS, libraries[0])
    seconds: dict[str, list[float]] = {direction: [] for direction in DIRECTIONS}
    for library in libraries:
        with Pair(library, place) as pair:
            for direction in DIRECTIONS:
                _, *trials = [pair.seconds(direction, TRIAL_BLOCKS) for _ in range(TRIALS + 1)]
                seconds[direction].append(statistics.median(trials))
    return {second: libraries[times.index(min(times))] for second, times in seconds.items()}

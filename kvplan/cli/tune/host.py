"""The comparison of copy tunings on this machine, for `kvplan tune`.

The built-in tuning stays unless another one is clearly faster, so that noise changes nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Final

import numpy as np

from kvnative._lower import Descriptors
from kvnative._tuning import NEVER, Tuning, measure_copies
from kvplan.execution.tuning import Finding
from kvplan.transport.host_memory import new_arena

BUDGET_MS: Final = 1000
"""Time budget of a measurement in ms, including memory and threads."""

_SPAN_NBYTES: Final = 128 << 20
"""Size of each side. Copies take other blocks each time, so few are in a cache, as in a pool."""
_BLOCK_NBYTES: Final = 32 << 10
_SIZES: Final = tuple(mib << 20 for mib in (1, 2, 4, 8, 16))
_PIECES_NBYTES: Final = (256 << 10, 512 << 10, 1 << 20, 2 << 20)
_LARGE_NBYTES: Final = 16 << 20
_THREADS: Final = (1, 2, 4, 8, 12)

_ROUNDS: Final = 5
_FEWEST_ROUNDS: Final = 3
_MARGIN: Final = 0.12
"""Minimum relative gain of another tuning, in the median and in the best rounds.

Rounds of both tunings alternate. The choice of pages alone makes a difference of a tenth.
"""
_OF_CORES: Final = 0.85
"""Minimum share of the wanted core time. Below it, other processes use the cores."""
_SHARE: Final = 0.75
"""Minimum share of rounds in which the other tuning is faster."""
_STEADY: Final = 1.6
"""Maximum ratio of the median round to the fastest. Above it, other processes use the machine."""

Measure = Callable[[Sequence[Tuning], int, int, int], tuple[list[list[int]], float]]
"""Maps (tunings, bytes of a transfer, rounds, deadline in ns) to the ns of each complete round, and
to the share of the wanted core time.
"""


class _Comparison:
    """Times of tunings that moved the same bytes in turns."""

    def __init__(self, rounds: list[list[int]], share: float) -> None:
        self._rounds = rounds
        self._share = share

    @property
    def sure(self) -> bool:
        """True if enough was measured and no other process used the machine."""
        steady = all(
            median(column) <= _STEADY * min(column) for column in zip(*self._rounds, strict=True)
        )
        return len(self._rounds) >= _FEWEST_ROUNDS and self._share >= _OF_CORES and steady

    def gain(self, of: int, over: int) -> float:
        """Return the relative gain of one tuning over another, 0 if it is not clear."""
        ratios = [row[of] / row[over] for row in self._rounds]
        fastest, other = (min(row[one] for row in self._rounds) for one in (of, over))
        gain = 1 - max(median(ratios), fastest / other)
        wins = sum(ratio < 1 for ratio in ratios) / len(ratios)
        return gain if gain >= _MARGIN and wins >= _SHARE else 0.0


class _BusyError(Exception):
    """Other processes used the machine, so the measurement is not valid."""


class _Calibration:
    """A sequence of comparisons, each of which begins with the best tuning so far."""

    def __init__(self, builtin: Tuning, measure: Measure, began_ns: int, budget_ns: float) -> None:
        self.tuning = builtin
        self.reasons: list[str] = []
        self._measure = measure
        self._began_ns = began_ns
        self._budget_ns = budget_ns

    def settle(
        self, title: str, field: str, others: Sequence[object], nbytes: int, until: float
    ) -> None:
        """Set a field to the clearly best value, within the share `until` of the time."""
        values = [getattr(self.tuning, field)]
        values += [value for value in others if value not in values]
        if len(values) == 1:
            return
        found = self._compare(title, field, values, nbytes, until)
        gains = [found.gain(index, 0) for index in range(len(values))]
        best = max(range(len(values)), key=gains.__getitem__)
        if gains[best]:
            text = f"{values[best]}, {gains[best]:.0%} faster than {values[0]} at {_mib(nbytes)}"
            self.tuning = _with(self.tuning, field, values[best])
        else:
            text = f"{values[0]}, as built in: nothing is clearly faster"
        self.reasons.append(f"{title}: {text}")

    def find_bypass(self, begin: float, end: float) -> None:
        """Find the size from which copies bypass the caches, if another one is clearly better."""
        title, builtin = "past the caches from", self.tuning.bypass_nbytes
        gains = {}  # of bypassing the caches; below 0: of not bypassing; 0: not clear
        done = 0
        for nbytes in _SIZES:
            done += nbytes
            until = begin + (end - begin) * done / sum(_SIZES)
            found = self._compare(title, "bypass_nbytes", [NEVER, 0], nbytes, until)
            gains[nbytes] = found.gain(1, 0) - found.gain(0, 1)
        lost = [size for size, gain in gains.items() if (gain < 0 if size >= builtin else gain > 0)]
        if not lost:
            self.reasons.append(f"{title} {_mib(builtin)}, as built in: nothing is clearly faster")
            return
        kept = max((size for size, gain in gains.items() if gain < 0), default=0)
        past = min(
            (size for size, gain in gains.items() if gain > 0 and size > kept), default=2 * kept
        )
        self.tuning = self.tuning._replace(bypass_nbytes=past)
        most = max(abs(gains[size]) for size in lost)
        where = ", ".join(map(_mib, lost))
        self.reasons.append(f"{title} {_mib(past)}: up to {most:.0%} faster at {where}")

    def _compare(
        self, title: str, field: str, values: Sequence[object], nbytes: int, until: float
    ) -> _Comparison:
        candidates = [_with(self.tuning, field, value) for value in values]
        deadline_ns = self._began_ns + int(until * self._budget_ns)
        found = _Comparison(*self._measure(candidates, nbytes, _ROUNDS, deadline_ns))
        if not found.sure:
            raise _BusyError(f"{title}: other processes used the machine")
        return found


def calibrate(
    builtin: Tuning,
    measure: Measure,
    clock: Callable[[], int] = time.monotonic_ns,
    budget_ms: float = BUDGET_MS,
) -> Finding:
    """Compare tunings with the built-in one within the time budget, by the times of `measure`."""
    began_ns = clock()
    found = _Calibration(builtin, measure, began_ns, 1e6 * budget_ms)
    try:
        if builtin.bypass_nbytes < NEVER:
            found.find_bypass(0.0, 0.6)
        found.settle("at once", "piece_nbytes", _PIECES_NBYTES, _LARGE_NBYTES, 0.7)
        fewer = [count for count in _THREADS if count < builtin.threads]
        found.settle("threads", "threads", fewer, _LARGE_NBYTES, 0.8)
    except _BusyError as busy:
        reason = f"{busy}; the built-in tuning stays"
        return Finding(builtin, False, (reason,), (clock() - began_ns) / 1e6)
    return Finding(found.tuning, True, tuple(found.reasons), (clock() - began_ns) / 1e6)


def _with(tuning: Tuning, field: str, value: object) -> Tuning:
    return Tuning(**{**tuning._asdict(), field: value})


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):g} MiB"


@contextmanager
def measured_here() -> Iterator[Measure]:
    """Return a `Measure` of this machine with its own memory."""
    with new_arena(2 * _SPAN_NBYTES, prefault=True) as arena:
        rng = np.random.default_rng(0)
        count = _SPAN_NBYTES // _BLOCK_NBYTES
        # Random blocks, like those of a cache.
        dst, src = (rng.permutation(count).astype(np.uint64) * _BLOCK_NBYTES for _ in range(2))
        dst, src = dst + np.uint64(arena.address), src + np.uint64(arena.address + _SPAN_NBYTES)
        sizes = np.full(count, _BLOCK_NBYTES, dtype=np.uint64)
        descriptors = Descriptors.from_columns(dst, src, sizes)

        def measure(
            tunings: Sequence[Tuning], nbytes: int, rounds: int, deadline_ns: int
        ) -> tuple[list[list[int]], float]:
            return measure_copies(
                tunings,
                descriptors,
                at_once=nbytes // _BLOCK_NBYTES,
                rounds=rounds,
                deadline_ns=deadline_ns,
            )

        yield measure


def is_crowded() -> bool:
    """Return True if more threads want to run on this host than it has cores."""
    try:
        running = Path("/proc/loadavg").read_text(encoding="utf-8").split()[3]
        return int(running.partition("/")[0]) > (os.cpu_count() or 1)
    except (OSError, ValueError, IndexError):
        return False  # unknown: the measurement finds out


def tune(builtin: Tuning, *, crowded: Callable[[], bool] = is_crowded) -> Finding:
    """Measure this machine, unless `crowded` returns True because other processes disturb it."""
    began = time.monotonic_ns()
    if crowded():
        reason = "more threads want to run than there are cores; the built-in tuning stays"
        return Finding(builtin, False, (reason,), (time.monotonic_ns() - began) / 1e6)
    with measured_here() as measure:
        # Freeing the memory takes about half as long as populating it.
        left = BUDGET_MS - 1.5 * (time.monotonic_ns() - began) / 1e6
        found = calibrate(builtin, measure, budget_ms=left)
    return found._replace(took_ms=(time.monotonic_ns() - began) / 1e6)

"""Measuring many things in turn, so that what disturbs the machine disturbs all of them alike."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvplan.planning.groups import AnyPlan

_FEWEST: Final = 3
"""Rounds that are measured, however little time there is."""


@dataclass
class Sample:
    """One thing that is done many times.

    Attributes:
        move: does it once, and returns its seconds.
        plan: what is moved; None: it is no plan.
        seconds: of each time.
    """

    move: Callable[[], float]
    plan: AnyPlan | None = None
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Seconds."""
        return median(self.seconds)


def measure(samples: Sequence[Sample], seconds: float, progress: Callable[[float], object]) -> None:
    """Do each of them once a round, each time in another order, until the time is over.

    Args:
        seconds: that it may take; three rounds are done in any case.
        progress: is told how much of it is done, from 0 to 1.
    """
    order, shuffler = list(samples), random.Random(0)
    for sample in order:  # warms up
        sample.move()
    began = time.perf_counter()
    rounds = 0
    while rounds < _FEWEST or time.perf_counter() - began < seconds:
        shuffler.shuffle(order)
        for sample in order:
            sample.seconds.append(sample.move())
        rounds += 1
        by_time = (time.perf_counter() - began) / seconds if seconds else 1.0
        progress(min(1.0, by_time, rounds / _FEWEST))

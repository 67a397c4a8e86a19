"""Measuring many things in turn, so that what disturbs the machine disturbs all of them alike."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvplan.planning.plan import Plan


@dataclass
class Sample:
    """One thing that is done many times.

    Attributes:
        move: does it once, and returns its seconds.
        plan: what is moved; None: it is no plan.
        burst: how often it is done in a row: what is small then finds the processor awake.
        seconds: of each time.
    """

    move: Callable[[], float]
    plan: Plan | None = None
    burst: int = 1
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Seconds."""
        return median(self.seconds)


def measure(samples: Sequence[Sample], seconds: float, progress: Callable[[float], object]) -> None:
    """Do each of them once a round, each time in another order, until the time is over.

    Args:
        seconds: that it may take; one round is done in any case.
        progress: is told how much of it is done, from 0 to 1.
    """
    order, shuffler = list(samples), random.Random(0)
    for sample in order:  # warms up
        sample.move()
    began = time.perf_counter()
    done = False
    while not done:
        shuffler.shuffle(order)
        for sample in order:
            sample.seconds += [sample.move() for _ in range(sample.burst)]
        spent = time.perf_counter() - began
        done = spent >= seconds
        progress(1.0 if done else spent / seconds)

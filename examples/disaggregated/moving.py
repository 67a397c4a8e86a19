"""Moving the prompt's cache through kvplan, all at once, and taking the time."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

from kvplan import LlmDataDist, Plan, Transfer

from .messages import Moved

TIMEOUT_MS = 10_000
REPETITIONS = 9
EXPLAINED_ROWS = 6
"""Segments, and layers, that `explain` shows before it counts the rest."""


def moved(
    datadist: LlmDataDist,
    transfer: Transfer,
    link_seconds: float | None = None,
    right: Plan | None = None,
) -> Moved:
    """Plan a transfer, then move it.

    `right` is the plan that this one should have been, if it is wrong on purpose.
    """
    started = time.perf_counter()
    plan = datadist.plan(transfer)
    plan_seconds = time.perf_counter() - started
    first, repeated = timed(lambda: datadist.run(transfer, timeout_ms=TIMEOUT_MS))
    return Moved(
        explanation=plan.explain(limit=EXPLAINED_ROWS),
        nbytes=plan.nbytes,
        num_slices=plan.part.num_slices * plan.num_tensor_pairs,
        num_descriptors=plan.num_descriptors,
        plan_seconds=plan_seconds,
        transfer_seconds=first,
        repeated_seconds=repeated,
        link_seconds=link_seconds,
        difference="" if right is None else right.diff(plan),
    )


def timed(move: Callable[[], None]) -> tuple[float, float]:
    """Return the seconds of the first call, which counts, and the median of more.

    Those say what it costs when nothing is new to the processor and its caches; the same bytes go
    to the same place.
    """
    times = []
    for _ in range(1 + REPETITIONS):
        started = time.perf_counter()
        move()
        times.append(time.perf_counter() - started)
    return times[0], median(times[1:])

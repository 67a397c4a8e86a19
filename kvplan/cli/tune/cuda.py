"""The measurement of the fastest ways to copy on a CUDA device, for `kvplan tune`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import numpy as np

from kvnative._cuda import CopyTuning, builtin_copy_tuning, copy_tuning, has_batches, tune_copies
from kvnative._device import COPY_DIRECTIONS
from kvnative._executor import Executor
from kvnative._lower import Descriptors
from kvnative._pinned import allocate_host
from kvplan.device.cuda_copies import NO_LIMIT, Tunings, words
from kvplan.device.device import CopyDirection
from kvplan.status import LLMException

if TYPE_CHECKING:
    from kvplan.device.device import Device

SIZES: Final = tuple(4096 << (2 * step) for step in range(7))
"""Sizes of a descriptor: 4 KiB to 16 MiB."""
Way = Literal["kernel", "batch", "single"]
Timer = Callable[[CopyDirection, Way, int], float]
_SPAN_NBYTES: Final = 64 << 20
_MAX_COUNT: Final = 4096
_ROUNDS: Final = 5
_NO_WORSE: Final = 1.05
"""A way is used if it takes at most this multiple of the time of the best later way in `_FORCED`.

The kernel comes first, because only the kernel can be stopped.
"""
_FORCED: Final[Mapping[Way, tuple[int, int]]] = {
    "kernel": (NO_LIMIT, NO_LIMIT),
    "batch": (0, NO_LIMIT),
    "single": (0, 0),
}


class Found(NamedTuple):
    """A measurement of the ways of a GPU."""

    tunings: Tunings  # the best ones, by direction
    seconds: Mapping[tuple[CopyDirection, Way, int], float]  # by direction, way, descriptor's bytes

    def words(self, device: Device) -> dict[CopyDirection, str]:
        """Describe how the device copies with the measured tunings."""
        with_batches = has_batches(device.native)
        return {
            direction: words(tuning, with_batches=with_batches)
            for direction, tuning in self.tunings.items()
        }


def scattered(dst: int, src: int, nbytes: int, span_nbytes: int) -> Descriptors:
    """Return descriptors of one size at random places of two spans at these addresses."""
    places = span_nbytes // nbytes
    count = min(places, _MAX_COUNT)
    rng = np.random.default_rng(0)
    to, at = (rng.permutation(places)[:count].astype(np.uint64) * np.uint64(nbytes) for _ in "ds")
    return Descriptors.from_columns(
        to + np.uint64(dst), at + np.uint64(src), np.full(count, nbytes, np.uint64)
    )


def time_copies(
    device: Device,
    direction: CopyDirection,
    way: Way | None,
    nbytes: int,
    *,
    span_nbytes: int = _SPAN_NBYTES,
) -> float:
    """Return the seconds of the fastest of several tries to copy a batch of scattered descriptors.

    A given `way` also applies to concurrent transfers of the device; None: the device's own choice.
    A batch has at most 4,096 descriptors of `nbytes` each and moves at most `span_nbytes`.
    """
    native = device.native
    source, target = (
        native.allocate(span_nbytes) if kind == "device" else allocate_host(native, span_nbytes)
        for kind in direction.split("_to_")
    )
    descriptors = scattered(target.address, source.address, nbytes, span_nbytes)
    before = copy_tuning(native, direction)
    executor = Executor(native.backend(direction))
    if way is not None:
        kernel_below, batch_below = _FORCED[way]
        tune_copies(native, direction, CopyTuning(kernel_below, batch_below, before.blocks))
    try:
        return min(_time(executor, descriptors) for _ in range(_ROUNDS))
    finally:
        tune_copies(native, direction, before)


def _time(executor: Executor, descriptors: Descriptors) -> float:
    began = time.perf_counter()
    report = executor.run(descriptors)
    took = time.perf_counter() - began
    if report.status != 0:
        raise LLMException(report.message)
    return took


def calibrate(timer: Timer) -> Found:
    """Compare the ways in all directions and for all sizes, by the times of `timer`."""
    seconds = {
        (direction, way, nbytes): timer(direction, way, nbytes)
        for direction in COPY_DIRECTIONS
        for nbytes in SIZES
        for way in _FORCED
    }
    tunings: dict[CopyDirection, CopyTuning] = {}
    for direction in COPY_DIRECTIONS:
        kernel_below = _below(direction, "kernel", 0, seconds)
        batch_below = _below(direction, "batch", kernel_below, seconds)
        blocks = builtin_copy_tuning(direction).blocks
        tunings[direction] = CopyTuning(kernel_below, batch_below, blocks)
    return Found(tunings, seconds)


def _below(
    direction: CopyDirection,
    way: Way,
    start: int,
    seconds: Mapping[tuple[CopyDirection, Way, int], float],
) -> int:
    """Return the size from which a way is worse than a later one, searching from `start`."""
    others = list(_FORCED)[list(_FORCED).index(way) + 1 :]
    for nbytes in SIZES:
        best = min(seconds[direction, other, nbytes] for other in others)
        if nbytes >= start and seconds[direction, way, nbytes] > _NO_WORSE * best:
            return nbytes
    return NO_LIMIT

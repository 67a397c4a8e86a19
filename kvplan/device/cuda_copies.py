"""Which way a CUDA device copies best: measured, and stored by the kind of GPU.

There are three: one launch of kvplan's kernel for a whole batch, the driver's batch call, and a
copy of the driver's for each descriptor (kvnative/src/cuda/copies.h). Until a GPU was measured what
is built in holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple, cast

import numpy as np

from kvnative._cuda import (
    CopyTuning,
    builtin_copy_tuning,
    copy_tuning,
    tune_copies,
)
from kvnative._device import COPY_DIRECTIONS
from kvnative._executor import Executor
from kvnative._lower import Descriptors
from kvplan.inspection.copy_ways import (
    FILE_VERSION,
    NO_LIMIT,
    CopyDirection,
    CopyLimits,
    CopyTable,
    Way,
    stored_table,
    tables_path,
)
from kvplan.machine_file import read_machines, write_machines
from kvplan.status import LLMException

if TYPE_CHECKING:
    from kvnative._cuda import CudaLibrary
    from kvplan.device.device import Device

SIZES: Final = tuple(4096 << (2 * step) for step in range(7))
"""Of a descriptor: 4 KiB to 16 MiB."""

Tunings = Mapping[CopyDirection, CopyTuning]
Timer = Callable[[CopyDirection, Way, int], float]

_SPAN_NBYTES: Final = 64 << 20
_MAX_COUNT: Final = 4096
_ROUNDS: Final = 5
_NO_WORSE: Final = 1.05
"""A way is taken where it takes at most so many times as long as the best of those behind it in
`_FORCED`: the kernel is the one that can be stopped."""
_FORCED: Final[Mapping[Way, tuple[int, int]]] = {
    "kernel": (NO_LIMIT, NO_LIMIT),
    "batch": (0, NO_LIMIT),
    "single": (0, 0),
}


class Found(NamedTuple):
    """What was measured.

    Attributes:
        tunings: for each direction.
        seconds: (direction, way, bytes of a descriptor) -> seconds of a sample.
    """

    tunings: Tunings
    seconds: Mapping[tuple[CopyDirection, Way, int], float]

    def words(self, device: Device) -> dict[CopyDirection, str]:
        """How bytes then go on that device."""
        table = _table(device, self.tunings, "measured")
        return {direction: table.words(it) for direction, it in table.limits.items()}


def scattered(dst: int, src: int, nbytes: int, span_nbytes: int) -> Descriptors:
    """Descriptors of that size, at random places of two spans that begin at these addresses."""
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
    """Seconds from the submission of scattered descriptors to the end, the least of some tries.

    Args:
        way: that is taken, by transfers that others make on the device meanwhile, too; None: that
            which the device takes.
        nbytes: of a descriptor; there are 4,096 at most.
        span_nbytes: of each side, and the most that is moved.

    Raises:
        NativeError, LLMException: what the device says.
    """
    native = device.native
    source, target = (
        native.allocate(span_nbytes) if kind == "device" else native.allocate_host(span_nbytes)
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


class Figure(NamedTuple):
    """Scattered blocks beside one contiguous copy of as many bytes, in the same run.

    Attributes:
        direction: of the copies.
        block_nbytes, blocks: what was moved.
        seconds: it took.
        contiguous_seconds: of one copy of the driver's.
    """

    direction: CopyDirection
    block_nbytes: int
    blocks: int
    seconds: float
    contiguous_seconds: float

    @property
    def share(self) -> float:
        """Of the bandwidth of the contiguous copy."""
        return self.contiguous_seconds / self.seconds


def figures(device: Device, blocks: int = _MAX_COUNT) -> list[Figure]:
    """Measure what copies are judged by: 4, 32 and 256 KiB within, 32 KiB to and fro, one block.

    Takes `blocks` x 256 KiB of the device twice, and an eighth of that of pinned memory.

    Raises:
        NativeError, LLMException: what the device says.
    """
    asked: list[tuple[CopyDirection, int, int]] = [
        ("device_to_device", 4 << 10, blocks),
        ("device_to_device", 32 << 10, blocks),
        ("device_to_device", 256 << 10, blocks),
        ("host_to_device", 32 << 10, blocks),
        ("device_to_host", 32 << 10, blocks),
        ("device_to_device", 4 << 10, 1),
    ]
    return [
        Figure(
            direction,
            nbytes,
            count,
            time_copies(device, direction, None, nbytes, span_nbytes=nbytes * count),
            time_copies(device, direction, "single", nbytes * count, span_nbytes=nbytes * count),
        )
        for direction, nbytes, count in asked
    ]


def calibrate(timer: Timer) -> Found:
    """Compare the ways in all directions and for all sizes.

    Args:
        timer: what takes the times.
    """
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
    """The size from which that way is worse than one behind it, looking from `start` on."""
    others = list(_FORCED)[list(_FORCED).index(way) + 1 :]
    for nbytes in SIZES:
        best = min(seconds[direction, other, nbytes] for other in others)
        if nbytes >= start and seconds[direction, way, nbytes] > _NO_WORSE * best:
            return nbytes
    return NO_LIMIT


def key_of(device: Device) -> str:
    """What tunings are stored by: the GPU and the driver."""
    library = cast("CudaLibrary", device.native.library)
    return f"{device.native.name}, CUDA {library.version}"


def save(device: Device, tunings: Tunings) -> None:
    """Store them for this kind of GPU; those of others stay.

    Raises:
        OSError: it cannot be written.
        LLMException: LLM_PARAM_INVALID: what is wrong with the file that is there.
    """
    path = tables_path()
    machines = read_machines(path, FILE_VERSION)
    machines[key_of(device)] = {
        "measured": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "has_batches": _has_batches(device),
        "tunings": {direction: tuning._asdict() for direction, tuning in tunings.items()},
    }
    write_machines(path, FILE_VERSION, machines)


def load(device: Device) -> Tunings | None:
    """Return what is stored for this kind of GPU; None: nothing yet.

    Raises:
        OSError: there is a file, and it cannot be read.
        LLMException: LLM_PARAM_INVALID: what is wrong with it.
    """
    path = tables_path()
    machines = read_machines(path, FILE_VERSION)
    key = key_of(device)
    if key not in machines:
        return None
    limits = stored_table(path, machines, key).limits
    return {direction: CopyTuning(*it) for direction, it in limits.items()}


def apply(device: Device, tunings: Tunings) -> None:
    """Let the device copy so, for all that use it in this process."""
    for direction, tuning in tunings.items():
        tune_copies(device.native, direction, tuning)


def table_of(device: Device) -> CopyTable:
    """How a device copies now."""
    tunings = {it: copy_tuning(device.native, it) for it in COPY_DIRECTIONS}
    builtin = all(it == builtin_copy_tuning(direction) for direction, it in tunings.items())
    return _table(device, tunings, "built in" if builtin else "measured")


def _table(device: Device, tunings: Tunings, source: str) -> CopyTable:
    limits = {direction: CopyLimits(*it) for direction, it in tunings.items()}
    return CopyTable(limits, source, device.name, _has_batches(device))


def _has_batches(device: Device) -> bool:
    lacks = cast("CudaLibrary", device.native.library).missing
    return not {"cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2"} <= set(lacks)

"""Which way a CUDA device copies best: measured, and stored by the kind of GPU.

There are three: one launch of kvplan's kernel for a whole batch, the driver's batch call, and a
copy of the driver's for each descriptor (kvnative/src/cuda/copies.h). Until a GPU was measured what
is built in holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, cast

import numpy as np

from kvnative._cuda import (
    CopyTuning,
    builtin_copy_tuning,
    copy_tuning,
    far_copy_tuning,
    tune_copies,
)
from kvnative._device import COPY_DIRECTIONS
from kvnative._executor import Executor
from kvnative._lower import Descriptors
from kvplan.device.device import CopyDirection
from kvplan.status import LLMException
from kvplan.system.machine_file import cache_path, read_machines, unreadable, write_machines
from kvplan.validation import check_type, shown

if TYPE_CHECKING:
    from kvnative._cuda import CudaLibrary
    from kvplan.device.device import Device

SIZES: Final = tuple(4096 << (2 * step) for step in range(7))
"""Of a descriptor: 4 KiB to 16 MiB."""

NO_LIMIT: Final = 2**63
FILE_VERSION: Final = 2
FILE_NAME: Final = "cuda.json"

Way = Literal["kernel", "batch", "single"]
Tunings = Mapping[CopyDirection, CopyTuning]
Timer = Callable[[CopyDirection, Way, int], float]

_MIB: Final = 1 << 20
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
        has_batches = _has_batches(device)
        return {it: words(tuning, has_batches=has_batches) for it, tuning in self.tunings.items()}


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
    path = cache_path(FILE_NAME)
    machines = read_machines(path, FILE_VERSION)
    machines[key_of(device)] = {
        "measured": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "tunings": {direction: tuning._asdict() for direction, tuning in tunings.items()},
    }
    write_machines(path, FILE_VERSION, machines)


def load(device: Device) -> Tunings | None:
    """Return what is stored for this kind of GPU; None: nothing yet.

    Raises:
        OSError: there is a file, and it cannot be read.
        LLMException: LLM_PARAM_INVALID: what is wrong with it.
    """
    path = cache_path(FILE_NAME)
    machines = read_machines(path, FILE_VERSION)
    key = key_of(device)
    if key not in machines:
        return None
    try:
        stored = check_type("tunings", check_type("machine", machines[key], dict)["tunings"], dict)
        return {it: _stored_tuning(stored[it]) for it in COPY_DIRECTIONS}
    except (TypeError, ValueError, KeyError) as error:
        raise unreadable(path, f"machines[{shown(key)}]: {error}") from None


def _stored_tuning(document: object) -> CopyTuning:
    fields = check_type("tuning", document, dict)
    values = [check_type(name, fields[name], int) for name in CopyTuning._fields]
    for name, value in zip(CopyTuning._fields, values, strict=True):
        limit = 2**31 - 1 if name == "blocks" else NO_LIMIT
        if not 0 <= value <= limit:
            raise ValueError(f"{name}={value} must be 0 to {limit}")
    return CopyTuning(*values)


def apply(device: Device, tunings: Tunings) -> None:
    """Let the device copy so, for all that use it in this process."""
    for direction, tuning in tunings.items():
        tune_copies(device.native, direction, tuning)


def describe(device: Device) -> dict[str, str]:
    """Describe in words how the device copies now: by direction, and between two GPUs."""
    tunings = {it: copy_tuning(device.native, it) for it in COPY_DIRECTIONS}
    has_batches = _has_batches(device)
    return {
        **{it: words(tuning, has_batches=has_batches) for it, tuning in tunings.items()},
        "between_gpus": words(far_copy_tuning(), has_batches=has_batches),
    }


def words(tuning: CopyTuning, *, has_batches: bool) -> str:
    """Describe a tuning: `one launch below 8 MiB, then a copy each`."""
    kernel = tuning.kernel_below
    batch = tuning.batch_below if has_batches else 0
    parts = [
        *([f"one launch{_limit(kernel)}"] if kernel else []),
        *([f"a batch call{_limit(batch)}"] if batch > kernel else []),
        *(["a copy each"] if max(kernel, batch) < NO_LIMIT else []),
    ]
    return ", then ".join(parts)


def _limit(nbytes: int) -> str:
    if nbytes >= NO_LIMIT:
        return ""
    return f" below {nbytes / _MIB:g} MiB" if nbytes >= _MIB else f" below {nbytes / 1024:g} KiB"


def _has_batches(device: Device) -> bool:
    lacks = cast("CudaLibrary", device.native.library).missing
    return not {"cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2"} <= set(lacks)

"""The tuning of a CUDA device's copies, stored for each kind of GPU and version of CUDA.

There are three ways: one launch of kvplan's kernel for a whole batch, the driver's batch call, and
one driver copy for each descriptor (kvnative/src/cuda/copies.h). `kvplan tune` measures them. An
unmeasured GPU uses the built-in thresholds.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, cast

from kvnative._cuda import CopyTuning, copy_tuning, far_copy_tuning, has_batches, tune_copies
from kvnative._device import COPY_DIRECTIONS
from kvplan.device.device import CopyDirection
from kvplan.system.machine_file import cache_path, read_machines, unreadable, write_machines
from kvplan.validation import check_type, shown

if TYPE_CHECKING:
    from kvnative._cuda import CudaLibrary
    from kvplan.device.device import Device


NO_LIMIT: Final = 2**63
FILE_VERSION: Final = 3
FILE_NAME: Final = "cuda.json"

Tunings = Mapping[CopyDirection, CopyTuning]

_MIB: Final = 1 << 20


def key_of(device: Device) -> str:
    """Return the key of stored tunings: the GPU and the version of CUDA."""
    library = cast("CudaLibrary", device.native.library)
    return f"{device.native.name}, CUDA {library.version}"


def save(device: Device, tunings: Tunings) -> None:
    """Store the tunings under the key of this GPU, and keep those of other keys."""
    path = cache_path(FILE_NAME)
    machines = read_machines(path, FILE_VERSION)
    machines[key_of(device)] = {
        "measured": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "tunings": {direction: tuning._asdict() for direction, tuning in tunings.items()},
    }
    write_machines(path, FILE_VERSION, machines)


def load(device: Device) -> Tunings | None:
    """Return the tunings that are stored under the key of this GPU, or None."""
    path = cache_path(FILE_NAME)
    machines = read_machines(path, FILE_VERSION)
    key = key_of(device)
    if key not in machines:
        return None
    try:
        stored = check_type("tunings", check_type("machine", machines[key], dict)["tunings"], dict)
        return {direction: _stored_tuning(stored[direction]) for direction in COPY_DIRECTIONS}
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
    """Use these tunings for copies of the device in this process, except between two GPUs."""
    for direction, tuning in tunings.items():
        tune_copies(device.native, direction, tuning)


def describe(device: Device) -> dict[str, str]:
    """Describe the ways of copies by direction, and between two GPUs."""
    tunings = {direction: copy_tuning(device.native, direction) for direction in COPY_DIRECTIONS}
    with_batches = has_batches(device.native)
    return {
        **{
            direction: words(tuning, with_batches=with_batches)
            for direction, tuning in tunings.items()
        },
        "between_gpus": words(far_copy_tuning(), with_batches=with_batches),
    }


def words(tuning: CopyTuning, *, with_batches: bool) -> str:
    """Describe a tuning: `one launch below 8 MiB, then a copy each`."""
    kernel = tuning.kernel_below
    batch = tuning.batch_below if with_batches else 0
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

"""Looks at CUDA: which driver library, which devices, and opens one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvnative._backend import NativeError
from kvplan.device.cuda import CudaDevice, driver_version, load_library
from kvplan.status import LLMException

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvnative._cuda import CudaLibrary


def look(note: Callable[..., None], device_id: int) -> CudaDevice | None:
    """Report which devices there are, and return that one open; None where it cannot be."""
    note(step="opening CUDA's library", cuda={"driver": driver_version()})
    try:
        library = load_library()
        note(
            step="asking CUDA for its devices (cuInit)",
            cuda={"library": library.path, "version": library.version},
        )
        count = library.device_count()
        note(cuda={"missing": list(library.missing), "num_devices": count})
        note(cuda={"devices": [_of_device(note, library, it) for it in range(count)]})
        note(step=f"opening CUDA device {device_id}")
        return CudaDevice(device_id, library)
    except (LLMException, NativeError) as error:
        note(cuda={"why_not": str(error.args[0]) if error.args else type(error).__name__})
    return None


def _of_device(
    note: Callable[..., None], library: CudaLibrary, device_id: int
) -> dict[str, object]:
    note(step=f"opening CUDA device {device_id}")
    try:
        device = CudaDevice(device_id, library)
    except LLMException as error:
        return {"id": device_id, "why_not": str(error.args[0])}
    try:
        return device.describe()
    except (LLMException, NativeError) as error:
        return {"id": device_id, "why_not": str(error.args[0])}
    finally:
        device.close()

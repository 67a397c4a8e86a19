"""The table of accelerators, and the choice among them."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Final, NamedTuple

from kvplan.status import LLMException, within
from kvplan.system.logs import Log

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvnative._device import DeviceLibrary
    from kvplan.device.device import Device

_LOG = Log("kvplan")


class CudaOptions(NamedTuple):
    """The options of an engine that only CUDA devices have."""

    context: str = "primary"
    batch_calls: bool = True
    copy_blocks: int = 0


def _ascend(device_id: int, cuda: CudaOptions) -> Device:
    from kvplan.device.ascend import AscendDevice  # loaded only if it is used

    del cuda
    return AscendDevice(device_id)


def _cuda(device_id: int, cuda: CudaOptions) -> Device:
    from kvplan.device.cuda import CudaDevice, load_library

    device = CudaDevice(device_id, load_library(cuda.context))
    device.limit_copies(batch_calls=cuda.batch_calls, max_blocks=cuda.copy_blocks)
    return device


_DEFAULTS: Final = CudaOptions()

# In the order in which "auto" tries them.
_OPEN: Final[Mapping[str, Callable[[int, CudaOptions], Device]]] = {
    "ascend": _ascend,
    "cuda": _cuda,
}

ACCELERATORS: Final = ("auto", "none", *_OPEN)
"""The values of `kvplan.accelerator`."""

CUDA_CONTEXTS: Final = ("primary", "own")
"""Contexts of a CUDA device: the primary one, which frameworks use, or one only for kvplan."""


def current_device(choice: str) -> int | None:
    """Return the device that the calling thread has set current; None: no device."""
    from kvplan.device import ascend, cuda  # loaded only if needed

    known: Mapping[str, tuple[Callable[[], DeviceLibrary], str]] = {
        "ascend": (ascend.load_library, "aclrtGetDevice"),
        "cuda": (cuda.load_library, "cuCtxGetDevice"),
    }
    chosen = known if choice == "auto" else known.keys() & {choice}
    found = (_asked(*known[name]) for name in chosen)
    return next((number for number in found if number is not None), None)


def _asked(load_library: Callable[[], DeviceLibrary], call: str) -> int | None:
    try:
        library = load_library()
    except LLMException:
        return None
    number = ctypes.c_int32()
    # Opens the library that the program has loaded, in which its threads have set their devices.
    if getattr(ctypes.CDLL(library.path), call)(ctypes.byref(number)) != 0:
        return None
    return number.value


def open_accelerator(choice: str, device_id: int, cuda: CudaOptions = _DEFAULTS) -> Device | None:
    """Open the device to use, which the caller closes; None: use no device."""
    if choice == "none":
        return None
    if choice != "auto":
        try:
            return _OPEN[choice](device_id, cuda)
        except LLMException as error:
            raise within(f"accelerator={choice!r}", error) from error
    reasons = []
    for open_one in _OPEN.values():
        try:
            return open_one(device_id, cuda)
        except LLMException as error:
            reasons.append(str(error))
    _LOG.info(
        "accelerator=auto: caches with placement=DEVICE are in host memory: %s", "; ".join(reasons)
    )
    return None

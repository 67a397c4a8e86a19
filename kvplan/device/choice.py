"""The table of accelerators, and the choice among them."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Final, NamedTuple

from kvnative._backend import NativeError
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


def current_device(choice: str) -> int:
    """Return the current device of this thread on the first accelerator with devices; else 0."""
    from kvplan.device import ascend, cuda  # loaded only if needed

    known: Mapping[str, tuple[Callable[[], DeviceLibrary], str]] = {
        "ascend": (ascend.load_library, "aclrtGetDevice"),
        "cuda": (cuda.load_library, "cuCtxGetDevice"),
    }
    number = ctypes.c_int32()
    for load_library, call in [known[name] for name in known if choice in ("auto", name)]:
        try:
            library = load_library()
            has_devices = library.device_count() > 0
        except (LLMException, NativeError):
            continue
        if has_devices:
            # The library that the program has loaded, in which its threads set their devices.
            failed = getattr(ctypes.CDLL(library.path), call)(ctypes.byref(number))
            return 0 if failed else number.value
    return 0


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

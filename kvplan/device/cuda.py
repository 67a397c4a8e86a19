"""CUDA devices: the driver's library of this host, never linked."""

from __future__ import annotations

import re
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from kvnative._backend import NativeError
from kvplan.device.cuda_sharing import CudaSharing
from kvplan.device.device import Device, device_error, find_library
from kvplan.status import LLMException
from kvplan.system.logs import Log

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvnative._cuda import CudaLibrary
    from kvplan.device.device import Watch

_LOG = Log("kvplan")

OVERRIDE: Final = "KVPLAN_CUDA_LIBRARY"
"""Environment variable: where it is set, the only place that is looked at: a library, or the folder
that has libcuda.so.1. Empty: there is none. Otherwise the loader finds libcuda.so.1."""

_DRIVER: Final = Path("/proc/driver/nvidia/version")


def load_library(context: str = "primary") -> CudaLibrary:
    """Return the CUDA driver's library for devices in that context, loaded once in a process.

    Args:
        context: "primary" or "own".

    Raises:
        LLMException: LLM_FEATURE_NOT_ENABLED: there is none, or it cannot be used; says where it
            was looked for, and what the loader said.
    """

    def load(place: str | None) -> CudaLibrary:
        from kvnative._cuda import CudaLibrary

        return CudaLibrary.load(place, context)

    return find_library("driver library of CUDA", OVERRIDE, load)


def driver_version() -> str | None:
    """The version of the kernel's driver, "550.54.15" say; None: unknown."""
    with suppress(OSError, UnicodeDecodeError):
        found = re.search(r"Kernel Module\D*(\d+(?:\.\d+)+)", _DRIVER.read_text())
        return found[1] if found else None
    return None


class CudaDevice(Device):
    """A CUDA device of this process, as long as one engine uses it.

    May be used from several threads; in a forked child it is of no use.

    Args:
        device_id: its number among the devices that CUDA_VISIBLE_DEVICES leaves.
        library: of the driver; None: the one that is found, for the primary context.

    Raises:
        LLMException: LLM_FEATURE_NOT_ENABLED: no library, or no such device; what CUDA says.
    """

    tensor_kind = "cuda"

    def __init__(self, device_id: int, library: CudaLibrary | None = None) -> None:
        super().__init__(device_id, library or load_library())
        from kvplan.device import cuda_copies  # not where there is no library

        try:
            if (tunings := cuda_copies.load(self)) is not None:
                cuda_copies.apply(self, tunings)
        except (OSError, LLMException) as error:
            _LOG.info("device=%d copies as is built in: %s", device_id, error)

    @cached_property
    def sharing(self) -> CudaSharing:
        """How processes of this host share its memory."""
        uuid = cast("CudaLibrary", self.native.library).uuid(self.id)
        return CudaSharing(self.native, uuid.removeprefix("GPU-").replace("-", ""))

    def watch(self, addresses: NDArray[np.uint64], nbytes: NDArray[np.uint64]) -> tuple[Watch, ...]:
        """See `Device.watch`: CUDA numbers its allocations, and uses no number again.

        Raises:
            LLMException: what CUDA says.
        """
        from kvnative import _cuda

        try:
            made, replaced = _cuda.watch(self.native, addresses, nbytes)
        except NativeError as error:
            raise device_error(error, f"memory of device {self.id} to be registered") from error
        if replaced:
            _LOG.warning(
                "device=%d memory of %d registered caches was freed without unregister_cache: its "
                "addresses are now those of another cache that is registered",
                self.id,
                replaced,
            )
        return (made,)

    def describe(self) -> dict[str, object]:
        """What people want to know of it, by name."""
        library = cast("CudaLibrary", self.native.library)
        major, minor = library.capability(self.id)
        others = [it for it in range(library.device_count()) if it != self.id]
        from kvplan.device import cuda_copies

        return {
            **super().describe(),
            "uuid": library.uuid(self.id),
            "pci": library.pci_id(self.id),
            "capability": f"{major}.{minor}",
            "context": library.context,
            "driver": driver_version(),
            "copies": cuda_copies.describe(self),
            "peer_access": [it for it in others if library.reaches(self.id, it)],
        }

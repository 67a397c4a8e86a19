"""CUDA devices: the driver's library of this host, never linked."""

from __future__ import annotations

import re
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from kvplan.device.cuda_sharing import CudaSharing
from kvplan.device.device import Device, find_library
from kvplan.execution.task import native_errors
from kvplan.status import LLMException
from kvplan.system.logs import Log

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvnative._cuda import CudaLibrary
    from kvplan.device.device import Watch

_LOG = Log("kvplan")

OVERRIDE: Final = "KVPLAN_CUDA_LIBRARY"
"""Environment variable with the only place to search: a library, or the folder of libcuda.so.1.

If it is empty, no library is loaded. If it is not set, the loader finds libcuda.so.1.
"""

_DRIVER: Final = Path("/proc/driver/nvidia/version")


def load_library(context: str = "primary") -> CudaLibrary:
    """Return the library of the CUDA driver for devices in `context` ("primary" or "own")."""

    def load(place: str | None) -> CudaLibrary:
        from kvnative._cuda import CudaLibrary

        return CudaLibrary.load(place, context)

    return find_library("driver library of CUDA", OVERRIDE, load)


def driver_version() -> str | None:
    """Return the version of the kernel's driver, such as "550.54.15", or None."""
    with suppress(OSError, UnicodeDecodeError):
        found = re.search(r"Kernel Module\D*(\d+(?:\.\d+)+)", _DRIVER.read_text())
        return found[1] if found else None
    return None


class CudaDevice(Device):
    """A CUDA device of this process, for the lifetime of one engine. Any thread may use it.

    A forked child cannot use it.

    Args:
        device_id: Its number among the devices in CUDA_VISIBLE_DEVICES.
        library: The library of the driver; None: the installed one, in the primary context.
    """

    tensor_kind = "cuda"

    def __init__(self, device_id: int, library: CudaLibrary | None = None) -> None:
        super().__init__(device_id, library or load_library())
        from kvplan.device import cuda_copies  # only if there is a library

        try:
            if (tunings := cuda_copies.load(self)) is not None:
                cuda_copies.apply(self, tunings)
        except (OSError, LLMException) as error:
            _LOG.info("device=%d copies as is built in: %s", device_id, error)

    def limit_copies(self, *, batch_calls: bool, max_blocks: int) -> None:
        """Limit how copies use the driver and the GPU, in all directions.

        Args:
            batch_calls: False: the driver's batch call is not used.
            max_blocks: Maximum number of blocks of the copy kernel; 0: as tuned or built in.
        """
        from kvnative._cuda import limit_copies

        limit_copies(self.native, batch_calls=batch_calls, max_blocks=max_blocks)

    @cached_property
    def sharing(self) -> CudaSharing:
        """The sharing of its memory with processes of this host."""
        uuid = cast("CudaLibrary", self.native.library).uuid(self.id)
        return CudaSharing(self.native, uuid.removeprefix("GPU-").replace("-", ""))

    def watch(self, addresses: NDArray[np.uint64], nbytes: NDArray[np.uint64]) -> tuple[Watch, ...]:
        """Watch memory by CUDA's allocation ids, which CUDA never reuses; see `Device.watch`."""
        from kvnative import _cuda

        with native_errors(f"memory of device {self.id} to be registered"):
            made, replaced = _cuda.watch(self.native, addresses, nbytes)
        if replaced:
            _LOG.warning(
                "device=%d memory of %d registered caches was freed without unregister_cache: its "
                "addresses are now those of another cache that is registered",
                self.id,
                replaced,
            )
        return (made,)

    def describe(self) -> dict[str, object]:
        """Return the properties of the device, for people, by name."""
        library = cast("CudaLibrary", self.native.library)
        major, minor = library.capability(self.id)
        others = [number for number in range(library.device_count()) if number != self.id]
        from kvplan.device import cuda_copies

        return {
            **super().describe(),
            "uuid": library.uuid(self.id),
            "pci": library.pci_id(self.id),
            "capability": f"{major}.{minor}",
            "context": library.context,
            "driver": driver_version(),
            "copies": cuda_copies.describe(self),
            "peer_access": [number for number in others if library.reaches(self.id, number)],
        }

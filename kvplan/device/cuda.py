"""CUDA devices: the driver's library, loaded at run time, and shared GPU memory."""

from __future__ import annotations

import platform
import re
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast
from weakref import WeakValueDictionary

from kvnative import _cuda_share
from kvnative._backend import NativeError
from kvnative._signals import Mutex
from kvplan.device.device import Device, find_library
from kvplan.device.sharing import AllocationRef, Exported, Piece, exported, next_number
from kvplan.execution.task import native_error, native_errors
from kvplan.status import LLMException, invalid, unsupported
from kvplan.system.logs import Log

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    from numpy.typing import NDArray

    from kvnative._cuda import CudaLibrary
    from kvnative._device import Device as NativeDevice
    from kvnative._device import DeviceBuffer
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
    """Return the version of the kernel module, such as "550.54.15", or None."""
    with suppress(OSError, UnicodeDecodeError):
        found = re.search(r"Kernel Module\D*(\d+(?:\.\d+)+)", _DRIVER.read_text())
        return found[1] if found else None
    return None


_HOST_REGISTER_SUPPORTED: Final = 99  # CUdevice_attribute
_MPS_ENABLED: Final = 133


def restrictions(device: CudaDevice, kernel: str) -> list[str]:
    """Return sentences about what restricts a device on this host, with the consequences.

    Args:
        device: The device.
        kernel: The release of the operating system's kernel.
    """
    attribute = device.native.attribute  # None: the driver does not know it
    found = {
        "MPS: a fatal error of one of its clients, such as a wrong address in a kernel, ends all "
        "of them on this GPU": attribute(_MPS_ENABLED) == 1,
        "confidential computing: host memory is not pinned, kvplan launches no kernel, and the "
        "driver copies descriptors of host memory one by one": attribute(_HOST_REGISTER_SUPPORTED)
        == 0,
        "WSL: little memory can be pinned, and CUDA IPC may be missing; if kvplan.transport=local "
        "is refused, use tcp": "microsoft" in kernel.lower(),
    }
    return [sentence for sentence, applies in found.items() if applies]


class CudaSharing:
    """The sharing of a CUDA device; see `Sharing`.

    kvplan's own memory is exported as one descriptor, and memory that users map (cuMemMap) as one
    for each piece: mappings keep the memory alive. Memory of cuMemAlloc has a handle of
    cuIpcGetMemHandle, which keeps nothing alive.
    """

    def __init__(self, native: NativeDevice, uuid: str) -> None:
        self._native = native
        self._mutex = Mutex()  # a finalizer may register memory
        self._buffers: WeakValueDictionary[int, Exported] = WeakValueDictionary()  # by address
        self.uuid = uuid

    def export(
        self, address: int, nbytes: int, buffer: DeviceBuffer | None, *, is_pool: bool = False
    ) -> Exported:
        """See `Sharing.export`; a buffer has one export."""
        if buffer is None:
            return self._export(address, nbytes, None, is_pool)
        with self._mutex:
            # The export holds the buffer, so no other buffer is at that address.
            known = self._buffers.get(buffer.address)
            if known is None:
                known = self._export(address, nbytes, buffer, is_pool)
                self._buffers[buffer.address] = known
            return known

    def map(self, ref: AllocationRef, batches: Iterable[list[Piece]]) -> _cuda_share.Imported:
        """See `Sharing.map`."""
        native, what = self._native, f"{ref.nbytes} bytes of GPU {ref.device} of a peer"
        uuid, gpu = bytes.fromhex(ref.device), ""
        here = exported(ref)
        try:
            gpu = _cuda_share.check_reach(native, uuid, both_ways=False)
            is_far = gpu != "same"
            if not ref.handle:
                return _cuda_share.import_pieces(native, ref.nbytes, batches, is_far=is_far)
            if here is not None:  # CUDA does not open a handle in its own process
                return _cuda_share.import_here(native, here.device, ref.address, ref.nbytes)
            handle = bytes.fromhex(ref.handle)
            return _cuda_share.import_handle(native, handle, ref.nbytes, is_far=is_far)
        except ValueError as error:
            raise invalid(f"{what}: {error}") from error
        except NativeError as error:
            what += f", to be mapped for device {native.id}"
            if gpu != "hidden":
                raise native_error(error, what) from error
            raise unsupported(
                f"{what}: {error}; CUDA_VISIBLE_DEVICES hides that GPU from this process. If "
                "that is the cause, let both processes see both GPUs, and choose by "
                "llm.DeviceId; if the two have no peer access (nvidia-smi topo -p2p r), "
                "use kvplan.transport=tcp"
            ) from error

    def shortfall(self, uuid: str) -> str | None:
        """See `Sharing.shortfall`."""
        try:
            _cuda_share.check_reach(self._native, bytes.fromhex(uuid), both_ways=True)
        except NativeError as error:
            return str(error)
        return None

    def _export(
        self, address: int, nbytes: int, buffer: DeviceBuffer | None, is_pool: bool
    ) -> Exported:
        with native_errors(f"memory of device {self._native.id}"):
            native = _cuda_share.export(self._native, address, nbytes)
        handle = native.handle.hex()
        ref = AllocationRef(
            self.uuid, native.address, native.nbytes, next_number(), native.fd, handle, is_pool
        )
        take = native.take if native.num_pieces else None
        return Exported(ref, self._native, (native, buffer), take)


class CudaDevice(Device):
    """A CUDA device of this process; see `Device`.

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
            _LOG.info("device=%d uses built-in copy tunings: %s", device_id, error)

    def limit_copies(self, *, batch_calls: bool, max_blocks: int) -> None:
        """Limit how copies use the driver and the GPU, in all directions.

        Args:
            batch_calls: False to avoid the driver's batch call.
            max_blocks: Maximum number of blocks of the copy kernel; 0: the tuned or built-in one.
        """
        from kvnative._cuda import limit_copies

        limit_copies(self.native, batch_calls=batch_calls, max_blocks=max_blocks)

    @cached_property
    def sharing(self) -> CudaSharing:
        """The sharing of the device's memory with processes of this host."""
        uuid = cast("CudaLibrary", self.native.library).uuid(self.id)
        return CudaSharing(self.native, uuid.partition("-")[2].replace("-", ""))  # GPU- or MIG-

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
        """Return the properties of the device by name, for display."""
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
            "restrictions": restrictions(self, platform.release()),
            "peer_access": [number for number in others if library.reaches(self.id, number)],
        }

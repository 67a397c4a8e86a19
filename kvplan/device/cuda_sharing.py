"""Memory of CUDA devices that processes of one host share: by descriptors, or by CUDA's handles."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from kvnative import _cuda_share
from kvnative._backend import NativeError
from kvplan.device.device import device_error
from kvplan.device.sharing import AllocationRef, Exported, next_number
from kvplan.status import invalid

if TYPE_CHECKING:
    from kvnative._device import Device as NativeDevice
    from kvnative._device import DeviceBuffer


class CudaSharing:
    """What a CUDA device shares with processes of this host; see `Sharing`.

    Memory that kvplan has allocated is exported as a descriptor: a peer that has mapped it keeps
    it. Memory of users has a handle of cuIpcGetMemHandle, which keeps nothing.

    Args:
        native: the device.
        uuid: of the GPU: 32 hexadecimal digits.
    """

    def __init__(self, native: NativeDevice, uuid: str) -> None:
        self._native = native
        self._mutex = threading.RLock()  # a finalizer may register memory
        self._buffers: WeakValueDictionary[int, Exported] = WeakValueDictionary()  # by address
        self.uuid = uuid

    def export(
        self, address: int, nbytes: int, buffer: DeviceBuffer | None, *, is_pool: bool = False
    ) -> Exported:
        """See `Sharing.export`; of one buffer always the same."""
        if buffer is None:
            return self._export(address, nbytes, None, is_pool)
        with self._mutex:
            # Held by what is found here, so at that address there is no other.
            known = self._buffers.get(buffer.address)
            if known is None:
                known = self._export(address, nbytes, buffer, is_pool)
                self._buffers[buffer.address] = known
            return known

    def map(self, ref: AllocationRef, fd: int) -> _cuda_share.Imported:
        """See `Sharing.map`."""
        native, what = self._native, f"{ref.nbytes} bytes of GPU {ref.device} of a peer"
        try:
            _cuda_share.check_reach(native, bytes.fromhex(ref.device))
            if ref.fd >= 0:
                return _cuda_share.import_descriptor(native, fd, ref.nbytes)
            return _cuda_share.import_handle(native, bytes.fromhex(ref.handle), ref.nbytes)
        except ValueError as error:
            raise invalid(f"{what}: {error}") from error
        except NativeError as error:
            raise device_error(error, f"{what}, to be mapped for device {native.id}") from error

    def _export(
        self, address: int, nbytes: int, buffer: DeviceBuffer | None, is_pool: bool
    ) -> Exported:
        try:
            native = _cuda_share.export(self._native, address, nbytes)
        except NativeError as error:
            raise device_error(error, f"memory of device {self._native.id}") from error
        handle = native.handle.hex()
        ref = AllocationRef(
            self.uuid, native.address, native.nbytes, next_number(), native.fd, handle, is_pool
        )
        return Exported(ref, self._native, (native, buffer))

"""Memory of CUDA devices that processes of one host share: by descriptors, or by CUDA's handles."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from kvnative import _cuda_share
from kvnative._backend import NativeError
from kvnative._signals import Mutex
from kvplan.device.sharing import AllocationRef, Exported, exported, next_number
from kvplan.execution.task import native_error, native_errors
from kvplan.status import invalid, unsupported

if TYPE_CHECKING:
    from kvnative._device import Device as NativeDevice
    from kvnative._device import DeviceBuffer


class CudaSharing:
    """The sharing of a CUDA device; see `Sharing`.

    kvplan's own memory is exported as a descriptor, which a mapping keeps. Memory of users has a
    handle of cuIpcGetMemHandle, which keeps nothing.
    """

    def __init__(self, native: NativeDevice, uuid: str) -> None:
        self._native = native
        self._mutex = Mutex()  # a finalizer may register memory
        self._buffers: WeakValueDictionary[int, Exported] = WeakValueDictionary()  # by address
        self.uuid = uuid

    def export(
        self, address: int, nbytes: int, buffer: DeviceBuffer | None, *, is_pool: bool = False
    ) -> Exported:
        """See `Sharing.export`; of one buffer always the same."""
        if buffer is None:
            return self._export(address, nbytes, None, is_pool)
        with self._mutex:
            # The export holds the buffer, so no other buffer is at that address.
            known = self._buffers.get(buffer.address)
            if known is None:
                known = self._export(address, nbytes, buffer, is_pool)
                self._buffers[buffer.address] = known
            return known

    def map(self, ref: AllocationRef, fd: int) -> _cuda_share.Imported:
        """See `Sharing.map`."""
        native, what = self._native, f"{ref.nbytes} bytes of GPU {ref.device} of a peer"
        uuid, gpu = bytes.fromhex(ref.device), ""
        here = exported(ref)
        try:
            gpu = _cuda_share.check_reach(native, uuid, both_ways=False)
            is_far = gpu != "same"
            if ref.fd >= 0:
                return _cuda_share.import_descriptor(native, fd, ref.nbytes, is_far=is_far)
            if here is not None:  # CUDA does not open a handle in its own process
                return _cuda_share.import_here(native, here.device, ref.address, ref.nbytes)
            handle = bytes.fromhex(ref.handle)
            return _cuda_share.import_handle(native, handle, ref.nbytes, is_far=is_far)
        except ValueError as error:
            raise invalid(f"{what}: {error}") from error
        except NativeError as error:
            failure = native_error(error, f"{what}, to be mapped for device {native.id}")
            if gpu != "hidden":
                raise failure from error
            raise unsupported(
                f"{failure.args[0]}; CUDA_VISIBLE_DEVICES hides that GPU from this process: if the "
                "driver does not reach it so, let both processes see both GPUs, and choose by "
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
        return Exported(ref, self._native, (native, buffer))

"""A device of an engine: its memory, host memory that is pinned for it, and its copies."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar
from weakref import WeakSet

from kvnative._backend import NativeError
from kvnative._pinned import allocate_host, pin
from kvnative._signals import Mutex
from kvplan.execution.compute_events import handle_of, stream_handle_of
from kvplan.execution.task import native_error, native_errors
from kvplan.status import invalid, unsupported
from kvplan.system.logs import Log
from kvplan.validation import shown

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Buffer

    from kvnative._acl import AclLibrary
    from kvnative._backend import Backend
    from kvnative._cuda import CudaLibrary
    from kvnative._device import Device as NativeDevice
    from kvnative._device import DeviceBuffer, DeviceLibrary
    from kvnative._pinned import HostBuffer, Pinned
    from kvnative._task import Gate
    from kvplan.device.sharing import Sharing
    from kvplan.execution.compute_events import ComputeEvent, ComputeStream

CopyDirection = Literal["host_to_device", "device_to_host", "device_to_device"]

_L = TypeVar("_L")

_LOG = Log("kvplan")
_WHERE = {
    "device": "memory of another device",
    "foreign": "device memory of another context in this process",
    "host": "pinned host memory",
    "managed": "unified memory",
    "pageable": "host memory",
}


@dataclass(eq=False, slots=True)
class _Shared:
    """The state that all users of a device in this process share."""

    native: NativeDevice
    users: int = 0
    logged_fallback: bool = False
    backends: dict[CopyDirection, Backend] = field(default_factory=dict)


_shared: dict[tuple[int, DeviceLibrary, int], _Shared] = {}  # by process, library and device
_mutex = Mutex()


class Watch(Protocol):
    """A watch over registered memory that detects its replacement by other memory."""

    @property
    def is_replaced(self) -> bool:
        """True if other memory was found at the watched addresses."""


class Device:
    """A device of this process, for the lifetime of one engine. Any thread may use it.

    A forked child cannot use it.

    Attributes:
        id: Its logical number.
        native: The device itself, which all users in this process share.
        tensor_kind: The name of such devices, events and streams in torch, such as "npu".
    """

    tensor_kind: ClassVar[str] = ""

    def __init__(self, device_id: int, library: AclLibrary | CudaLibrary) -> None:
        self._key = os.getpid(), library, device_id
        self._pinned: WeakSet[Pinned] = WeakSet()
        self._closed = True  # until the device is open
        self.id = device_id
        try:
            count = library.device_count()
            if not 0 <= device_id < count:
                raise unsupported(
                    f"device_id={device_id} is out of range [0, {count}): {library.path} has "
                    f"{count} devices"
                )
            with _mutex:
                shared = _shared.get(self._key)
                if shared is None:
                    shared = _shared[self._key] = _Shared(library.device(device_id))
                shared.users += 1
        except NativeError as error:
            raise native_error(error, f"device {device_id} cannot be used") from error
        self._shared = shared
        self._closed = False
        self.native: NativeDevice = shared.native

    @property
    def sharing(self) -> Sharing | None:
        """The sharing of the device's memory with processes of this host, or None."""
        return None

    @property
    def name(self) -> str:
        """The name of the chip, such as "Ascend910B3"."""
        return self.native.name

    def allocate(self, nbytes: int) -> DeviceBuffer:
        """Return new zeroed memory of the device, which is freed with its last reference.

        Raises:
            ValueError: `nbytes` is 0, or not a uint64.
            LLMException: LLM_DEVICE_OUT_OF_MEMORY, with the free bytes; an error of the library.
        """
        try:
            buffer = self.native.allocate(nbytes)
            self.native.clear(buffer.address, nbytes)
        except NativeError as error:
            raise native_error(error, f"{nbytes} bytes of {self._memory()}") from error
        return buffer

    def allocate_host(self, nbytes: int) -> HostBuffer:
        """Return new zeroed host memory of the runtime, which is freed with its last reference.

        Raises:
            LLMException: LLM_PARAM_INVALID: an invalid size; an error of the library.
        """
        try:
            with native_errors(f"{nbytes} bytes of host memory for device {self.id}"):
                return allocate_host(self.native, nbytes)
        except ValueError as error:
            raise invalid(str(error)) from error

    def pin(self, address: int, nbytes: int, keep: object = None) -> Pinned:
        """Pin host memory for the device, until the result is dropped, or until `close`.

        No byte of the memory may be pinned already. `keep` is kept alive until the memory is
        unpinned.

        Raises:
            LLMException: LLM_PARAM_INVALID: `address` is not the start of a page, or the range is
                empty or overlaps pinned memory; an error of the library.
        """
        try:
            with native_errors(f"{nbytes} bytes of host memory at {address:#x} to be pinned"):
                pinned = pin(self.native, address, nbytes, keep)
        except ValueError as error:
            raise invalid(str(error)) from error
        self._pinned.add(pinned)
        return pinned

    def watch(
        self,
        addresses: NDArray[np.uint64],
        nbytes: NDArray[np.uint64],
    ) -> tuple[Watch, ...]:
        """Watch memory, so that transfers refuse it once other memory has its addresses.

        The result keeps the watch alive. Empty: the library cannot distinguish allocations.
        """
        return ()

    def check_range(self, name: str, address: int, nbytes: int) -> None:
        """Refuse a range that is not memory of this device, by its first and last byte.

        Raises:
            LLMException: LLM_PARAM_INVALID, with the actual kind of memory; an error of the
                library.
        """
        for at in (address, address + nbytes - 1):
            kind, device_id = self._locate(at)
            if (kind, device_id) != ("device", self.id):
                other = f" ({device_id})" if kind == "device" else ""
                raise invalid(
                    f"{name} has {nbytes} bytes at {address:#x}; the byte at {at:#x} is "
                    f"{_WHERE[kind]}{other}, but placement=DEVICE needs memory of device {self.id} "
                    "(with kvplan.accelerator=none the placement is ignored)"
                )

    def check_host(self, name: str, address: int) -> None:
        """Refuse an address in memory of a device; Ascend does not recognize other contexts'.

        Raises:
            LLMException: LLM_PARAM_INVALID; an error of the library.
        """
        kind, device_id = self._locate(address)
        if kind in ("device", "foreign"):
            where = _WHERE[kind] if kind == "foreign" else f"memory of device {device_id}"
            raise invalid(
                f"{name} at {address:#x} is {where}, but placement=HOST needs host memory"
            )

    def read(self, address: int, buffer: Buffer | NDArray[Any]) -> None:
        """Fill `buffer` from device memory at `address`; the range must be valid.

        Raises:
            LLMException: an error of the device.
        """
        with native_errors(f"device {self.id} at {address:#x}"):
            self.native.read(address, buffer)

    def write(self, address: int, buffer: Buffer | NDArray[Any]) -> None:
        """Write `buffer` to device memory at `address`; the range must be valid.

        Raises:
            LLMException: an error of the device.
        """
        with native_errors(f"device {self.id} at {address:#x}"):
            self.native.write(address, buffer)

    def backend(self, direction: CopyDirection) -> Backend:
        """Return the backend that copies in a direction. All users of the device share it.

        Raises:
            NativeError: the device is closed.
        """
        if self._closed:
            raise NativeError(f"device {self.id} is closed")
        shared = self._shared
        if (known := shared.backends.get(direction)) is None:
            with _mutex:
                known = shared.backends.setdefault(direction, self.native.backend(direction))
        if (reason := self.native.fallback_reason) and not shared.logged_fallback:
            shared.logged_fallback = True
            _LOG.warning("device=%d does not copy in the fastest way: %s", self.id, reason)
        return known

    def gate(self, name: str, event: ComputeEvent) -> Gate:
        """Return a gate that holds a transfer until the device's work reaches `event`.

        On return the event can be recorded again, or destroyed. `name` is for messages.

        Raises:
            TypeError: neither an event nor a stream.
            LLMException: LLM_PARAM_INVALID: an event of another accelerator, or one that was never
                recorded; an error of the library, for an event of another device or a destroyed
                one.
        """
        is_stream, handle = handle_of(name, event, self.tensor_kind)
        try:
            return self.native.take_stream(handle) if is_stream else self.native.take_event(handle)
        except NativeError as error:
            what = f"{name}={shown(event)} cannot be waited for on device {self.id}"
            raise native_error(error, what) from error

    def stream(self, name: str, stream: ComputeStream) -> int:
        """Return the handle of a stream of this device.

        Raises:
            TypeError: not a stream.
            LLMException: LLM_PARAM_INVALID: a stream of another accelerator, or without a handle.
        """
        return stream_handle_of(name, stream, self.tensor_kind)

    def describe(self) -> dict[str, object]:
        """Return the properties of the device by name, for display."""
        free, total = self.native.memory()
        return {
            "id": self.id,
            "physical_id": self.native.physical_id,
            "name": self.name,
            "library": self.native.library.path,
            "version": self.native.library.version,
            "free_bytes": free,
            "total_bytes": total,
            "fallback": self.native.fallback_reason,
        }

    def close(self) -> None:
        """Unpin all memory; the last user closes the device. Idempotent.

        Transfers must not use the device any more. Allocated memory stays until it is dropped.
        """
        if self._closed or os.getpid() != self._key[0]:
            return
        self._closed = True
        for pinned in list(self._pinned):
            pinned.close()
        with _mutex:
            self._shared.users -= 1
            if self._shared.users:
                return
            del _shared[self._key]
            self._shared.backends.clear()
            self.native.close()

    def __repr__(self) -> str:
        state = ": closed" if self._closed else ""
        return f"<{type(self).__name__} {self.id}, {self.name}{state}>"

    def _locate(self, address: int) -> tuple[str, int]:
        try:  # not `native_errors`: raw addresses are checked with each transfer
            return self.native.locate(address)
        except NativeError as error:
            raise native_error(error, f"address {address:#x}") from error

    def _memory(self) -> str:
        try:
            free, total = self.native.memory()
        except NativeError:  # the original error matters more
            return f"device {self.id}"
        return f"device {self.id}, which has {free} of {total} bytes free"


def find_library(what: str, override: str, load: Callable[[str | None], _L]) -> _L:
    """Load a library from the place that an environment variable names.

    Args:
        what: The library, for messages.
        override: The variable. Not set: `load` gets None. Empty: nothing is loaded.
        load: Loads the library from a place; NativeError: it cannot be used.

    Raises:
        LLMException: LLM_FEATURE_NOT_ENABLED, with the reason: nothing can be loaded.
    """
    if (place := os.environ.get(override)) == "":
        raise unsupported(f"no {what} can be used: {override} is empty")
    try:
        return load(place)
    except NativeError as error:
        raise unsupported(f"no {what} can be used: {error}") from error

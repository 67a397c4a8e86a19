"""Devices of any kind: their memory, and backends that copy it.

One module: a Device makes objects of every other class, and they hold the Device. Host memory for a
device is in `_pinned`.
"""

cimport cython
from cpython.buffer cimport (
    PyBUF_ANY_CONTIGUOUS,
    PyBUF_WRITABLE,
    PyBuffer_Release,
    PyObject_GetBuffer,
)
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t, uintptr_t
from posix.unistd cimport getpid

from kvnative._backend cimport Backend
from kvnative._crossing cimport kvn_failure, library_path, missing_calls, raise_failure
from kvnative._host cimport unsigned
from kvnative._task cimport Gate
from kvnative._native cimport (
    KVN_DEVICE_TO_DEVICE,
    KVN_DEVICE_TO_HOST,
    KVN_HOST_TO_DEVICE,
    KVN_OK,
    KVN_UNSUPPORTED,
)

import threading
import weakref

from kvnative._backend import CallError, NativeError

__all__ = [
    "COPY_DIRECTIONS", "Device", "DeviceBuffer", "DeviceError", "DeviceEvent", "DeviceLibrary",
]

# Direction: its bit and its number of channels. One stream keeps a link to the host busy; the
# second one is for transfers that would wait behind a large one.
cdef dict DIRECTIONS = {
    "host_to_device": (KVN_HOST_TO_DEVICE, 2),
    "device_to_host": (KVN_DEVICE_TO_HOST, 2),
    "device_to_device": (KVN_DEVICE_TO_DEVICE, 4),
}
COPY_DIRECTIONS = tuple(DIRECTIONS)

cdef dict KINDS = {
    KVN_MEMORY_PAGEABLE: "pageable",
    KVN_MEMORY_PINNED: "host",
    KVN_MEMORY_DEVICE: "device",
    KVN_MEMORY_MANAGED: "managed",
    KVN_MEMORY_FOREIGN: "foreign",
}


cdef int direction_of(str name) except -1:
    if name not in DIRECTIONS:
        raise ValueError(f"direction is {name!r}; it must be one of"
                         f" {', '.join(map(repr, DIRECTIONS))}")
    return DIRECTIONS[name][0]


class DeviceError(CallError):
    """A failed call of a device's runtime."""


@cython.auto_pickle(False)
cdef class DeviceLibrary:
    """The runtime library of one kind of device, opened in this process.

    Attributes:
        path: file of the library.
        version: version of the library or of its toolkit, or None.
        missing: names of calls of later versions that this one lacks.
    """

    def __cinit__(self):
        self.pid = getpid()
        self.error = DeviceError
        self.lock = threading.Lock()
        self.devices = weakref.WeakValueDictionary()

    def __init__(self, *args, **kwargs):
        raise TypeError("a DeviceLibrary is one of its subclasses: AclLibrary, CudaLibrary")

    cdef int check_process(self) except -1:
        if self.ops is NULL:
            raise TypeError("the library was not opened")
        if self.pid != getpid():
            raise NativeError(f"{self.ops.runtime.decode()} was opened by process {self.pid} and"
                              f" does not work in process {getpid()}, forked from it: start such"
                              f" processes with spawn")
        return 0

    cdef int check(self, int status, const kvn_failure *failure) except -1 nogil:
        if status != KVN_OK:
            with gil:
                raise_failure(self.error, status, failure)
        return 0

    cdef int opened(self) except -1:
        self.path = library_path(self.runtime, self.ops.symbols)
        self.missing = missing_calls(self.runtime, self.ops.symbols)
        return 0

    cdef int begin(self) except -1:
        return self.check_process()

    cdef int physical_number(self, int32_t device) except? -1:
        return device

    cdef str name_of(self, int32_t device):
        return ""

    def device_count(self) -> int:
        """Return the number of devices that this process can use."""
        cdef kvn_failure failure
        cdef uint32_t count = 0
        self.begin()
        with nogil:
            self.check(self.ops.count_devices(self.runtime, &count, &failure), &failure)
        return count

    def device(self, int device_id) -> Device:
        """Return the device with this number; the same object while a reference to it exists."""
        self.begin()
        with self.lock:
            device = self.devices.get(device_id)
            if device is None:
                device = Device.open_number(self, device_id)
                self.devices[device_id] = device
            return device


@cython.final
@cython.auto_pickle(False)
@cython.no_gc_clear
cdef class Device:
    """A device of this process: its memory, and backends that copy it."""

    def __init__(self, *args, **kwargs):
        raise TypeError("a Device comes from the device() of its library")

    @staticmethod
    cdef Device open_number(DeviceLibrary library, int32_t number):
        cdef kvn_failure failure
        cdef Device self = Device.__new__(Device)
        self.library = library
        self.lock = threading.Lock()
        self.channels = weakref.WeakValueDictionary()
        with nogil:
            self.library.check(kvn_device_open(library.ops, library.runtime, number, &self.device,
                                               &failure), &failure)
        self.opened = True
        return self

    def __dealloc__(self):
        if self.opened and self.library.pid == getpid():
            with nogil:  # waits for the thread of events
                if self.events is not NULL:
                    kvn_events_destroy(self.events)
                kvn_device_close(&self.device)

    cdef int check_usable(self) except -1:
        self.library.check_process()
        if self.closed:
            raise NativeError(f"device {self.device.id} is closed")
        return 0

    @property
    def id(self) -> int:
        """Number among the devices that this process can use."""
        return self.device.id

    @property
    def physical_id(self) -> int:
        """Number among the devices of the server."""
        return self.library.physical_number(self.device.id)

    @property
    def name(self) -> str:
        """Name of the chip."""
        return self.library.name_of(self.device.id)

    @property
    def fallback_reason(self) -> str:
        """Reason why copies to and from the host are slower than they could be, or "".

        Some reasons show only after the first batch copy.
        """
        cdef char reason[256]
        self.check_usable()
        kvn_device_fallback(&self.device, reason, sizeof(reason))
        return reason.decode(errors="replace")

    def allocate(self, nbytes) -> DeviceBuffer:
        """Return new memory of the device, its contents undefined."""
        cdef uint64_t size = unsigned("nbytes", nbytes)
        cdef kvn_failure failure
        cdef DeviceBuffer buffer
        cdef int status
        self.check_usable()
        if size < 1:
            raise ValueError("nbytes is 0; it must be at least 1")
        buffer = DeviceBuffer.__new__(DeviceBuffer)
        buffer.device = self
        with nogil:
            status = kvn_device_allocate(&self.device, size, &buffer.start, &failure)
        if status != KVN_OK:
            buffer.start = NULL
        self.library.check(status, &failure)
        buffer.nbytes = size
        return buffer

    def locate(self, address) -> tuple[str, int]:
        """Return the kind of memory at an address, and its device.

        Returns:
            "device", "host" (pinned), "managed", "pageable"; or "foreign": memory of this device
            that belongs to another context of this process and is out of reach.
        """
        cdef kvn_memory_place found = self.look_up(address)
        return KINDS[found.kind], found.device

    def page_nbytes(self, address) -> int:
        """Return the page size of memory of the device; 0 if unknown."""
        return self.look_up(address).page_nbytes

    cdef kvn_memory_place look_up(self, object address) except *:
        cdef uint64_t where = unsigned("address", address)
        cdef kvn_failure failure
        cdef kvn_memory_place found
        self.check_usable()
        with nogil:
            self.library.check(kvn_device_locate(&self.device, where, &found, &failure), &failure)
        return found

    def write(self, address, buffer) -> None:
        """Copy a contiguous buffer to the device, and wait. Bounds are not checked."""
        self.copy(address, buffer, True)

    def read(self, address, buffer) -> None:
        """Fill a contiguous writable buffer from the device, and wait. Bounds are not checked."""
        self.copy(address, buffer, False)

    cdef int copy(self, object address, object buffer, bint to_device) except -1:
        cdef uint64_t there = unsigned("address", address)
        cdef kvn_failure failure
        cdef Py_buffer view
        cdef uint64_t here
        cdef int status
        self.check_usable()
        PyObject_GetBuffer(buffer, &view,
                           PyBUF_ANY_CONTIGUOUS | (0 if to_device else PyBUF_WRITABLE))
        here = <uintptr_t>view.buf
        try:
            with nogil:
                status = kvn_device_copy(
                    &self.device, KVN_HOST_TO_DEVICE if to_device else KVN_DEVICE_TO_HOST,
                    there if to_device else here, here if to_device else there, view.len, &failure)
        finally:
            PyBuffer_Release(&view)
        self.library.check(status, &failure)
        return 0

    def clear(self, address, nbytes) -> None:
        """Zero memory of the device, and wait. Bounds are not checked."""
        cdef uint64_t where = unsigned("address", address), size = unsigned("nbytes", nbytes)
        cdef kvn_failure failure
        self.check_usable()
        with nogil:
            self.library.check(kvn_device_clear(&self.device, where, size, &failure), &failure)

    def memory(self) -> tuple[int, int]:
        """Return the free and the total bytes of the device's memory."""
        cdef size_t free_nbytes = 0, total_nbytes = 0
        cdef kvn_failure failure
        self.check_usable()
        with nogil:
            self.library.check(kvn_device_memory(&self.device, &free_nbytes, &total_nbytes,
                                                 &failure), &failure)
        return free_nbytes, total_nbytes

    def attribute(self, int number) -> int | None:
        """Return an attribute by the runtime's number; None if this version lacks it."""
        cdef kvn_failure failure
        cdef int64_t value = 0
        cdef int status
        self.check_usable()
        with nogil:
            status = self.library.ops.attribute(
                self.library.runtime, self.device.id, number, &value, &failure
            )
        if status == KVN_UNSUPPORTED:
            return None
        self.library.check(status, &failure)
        return value

    def backend(self, str direction not None) -> Backend:
        """Return a backend that copies in a direction.

        Args:
            direction: "host_to_device", "device_to_host" or "device_to_device". All backends of one
                direction share its channels, whose threads need no caller to poll or wait.
        """
        cdef Channels channels
        cdef int bit
        self.check_usable()
        bit = direction_of(direction)
        with self.lock:
            channels = self.channels.get(direction)
            if channels is None:
                channels = Channels.start(self, DIRECTIONS[direction][1])
                self.channels[direction] = channels
        what = f"backend {direction} of device {self.device.id}"
        return Backend.adopt(
            kvn_device_copy_create(&self.device, channels.items, channels.count, bit), channels,
            what)

    def take_event(self, handle) -> DeviceEvent:
        """Return the point at which an event of the program was last recorded.

        The event must belong to this runtime. After the return the program may record it again or
        destroy it.
        """
        if handle == 0:
            raise ValueError("handle is 0; expected the handle of a recorded event")
        return self.take(handle, False)

    def take_stream(self, handle) -> DeviceEvent:
        """Return the point after all work that was issued to a stream of the program.

        Args:
            handle: stream of this device's primary context; 0 is the default stream.
        """
        return self.take(handle, True)

    cdef DeviceEvent take(self, object handle, bint is_stream):
        cdef uint64_t given = unsigned("handle", handle)
        cdef void *native = <void *><uintptr_t>given
        cdef kvn_failure failure
        cdef DeviceEvent event = DeviceEvent.__new__(DeviceEvent)
        cdef int status
        self.check_usable()
        with self.lock:
            if self.events is NULL:
                self.events = kvn_events_create(&self.device)
            if self.events is NULL:
                raise MemoryError()
        with nogil:
            if is_stream:
                status = kvn_event_take_stream(self.events, native, &event.event, &failure)
            else:
                status = kvn_event_take(self.events, native, &event.event, &failure)
        self.library.check(status, &failure)
        event.device = self
        event.taken = True
        event.gate = &event.event.gate
        return event

    def close(self) -> None:
        """Refuse new work; objects made from the device stay valid. Idempotent."""
        self.closed = True
        if self.events is not NULL and self.library.pid == getpid():
            with nogil:
                kvn_events_close(self.events)
        devices = self.library.devices
        if devices.get(self.device.id) is self:
            del devices[self.device.id]

    @property
    def is_closed(self) -> bool:
        """True once `close` was called."""
        return self.closed

    def __repr__(self):
        return f"<Device {self.device.id}: {self.name}>"


@cython.final
@cython.auto_pickle(False)
@cython.no_gc_clear
@cython.internal
cdef class Channels:
    # Threads and streams of a device; backends own it.
    cdef Device device         # outlives the channels
    cdef kvn_channel *items[16]  # KVN_MAX_CHANNELS
    cdef unsigned count
    cdef object __weakref__

    @staticmethod
    cdef Channels start(Device device, unsigned count):
        cdef Channels self = Channels.__new__(Channels)
        cdef kvn_failure failure
        self.device = device
        while self.count < count:
            with nogil:
                device.library.check(kvn_channel_create(&device.device, &self.items[self.count],
                                                        &failure), &failure)
            self.count += 1
        return self

    def __dealloc__(self):
        with nogil:
            for i in range(self.count):
                kvn_channel_destroy(self.items[i])


@cython.final
@cython.auto_pickle(False)
@cython.no_gc_clear
cdef class DeviceBuffer:
    """Memory of a device, freed with its last reference, except in a forked child."""

    def __init__(self, *args, **kwargs):
        raise TypeError("a DeviceBuffer comes from Device.allocate()")

    @property
    def address(self) -> int:
        """Address of the first byte, which only the device can access."""
        return <uintptr_t>self.start

    def __dealloc__(self):
        cdef kvn_failure ignored
        if self.start is not NULL and self.device.library.pid == getpid():
            with nogil:
                kvn_device_free(&self.device.device, self.start, &ignored)

    def __repr__(self):
        return (f"<DeviceBuffer of {self.nbytes} bytes at {self.address:#x} of device"
                f" {self.device.id}>")


@cython.final
@cython.auto_pickle(False)
@cython.no_gc_clear
cdef class DeviceEvent(Gate):
    """A point in the work of a stream that transfers can wait for."""

    def __dealloc__(self):
        if self.taken and self.device.library.pid == getpid():
            with nogil:  # gives the event back to the device
                kvn_event_give_back(&self.event)

    def __repr__(self):
        return f"<DeviceEvent of device {self.device.id}>"

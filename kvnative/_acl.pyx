"""Ascend devices through ACL, whose library is found and opened at run time."""

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
from kvnative._host cimport kvn_failure, unsigned
from kvnative._native cimport (
    KVN_DEVICE_TO_DEVICE,
    KVN_DEVICE_TO_HOST,
    KVN_FAILED,
    KVN_HOST_TO_DEVICE,
    KVN_INVALID,
    KVN_OK,
    KVN_UNSUPPORTED,
)

import os
import threading
import weakref

from kvnative._backend import NativeError
from kvnative.ascend_files import candidates, toolkit_version

__all__ = ["AclError", "AclLibrary", "Device", "DeviceBuffer", "Pinned"]

NAMES = ("libacl_rt.so", "libascendcl.so")  # since CANN 8.5; before, and kept for old links

# Direction: its bit, and how many channels. One stream keeps a link to the host busy; the second is
# for who would wait behind a large transfer.
cdef dict DIRECTIONS = {
    "host_to_device": (KVN_HOST_TO_DEVICE, 2),
    "device_to_host": (KVN_DEVICE_TO_HOST, 2),
    "device_to_device": (KVN_DEVICE_TO_DEVICE, 4),
}

cdef dict LIBRARIES = {}  # path -> AclLibrary: a library is never closed
LIBRARIES_LOCK = threading.Lock()


class AclError(NativeError):
    """A call of ACL failed: the message has the call, its code in words and the vendor's text.

    Attributes:
        code: the aclError; 0 where the failure is not ACL's.
        status: one of the KVN_ constants.
    """

    def __init__(self, message, code=0, status=KVN_FAILED):
        super().__init__(message)
        self.code = code
        self.status = status


cdef int check_acl(int status, const kvn_failure *failure) except -1:
    if status == KVN_OK:
        return 0
    message = failure.message.decode("utf-8", "replace")
    if status == KVN_INVALID and failure.code == 0:
        raise ValueError(message)
    raise AclError(message, failure.code, status)


@cython.final
@cython.auto_pickle(False)
cdef class AclLibrary:
    """The ACL library of this process.

    Attributes:
        path: the file that it was found in.
        version: of the toolkit, "8.5.0" say, or of its ACL interface, "acl 1.16.0"; None: unknown.
        missing: names of the calls that later versions have and this one lacks.
    """

    def __init__(self, *args, **kwargs):
        raise TypeError("an AclLibrary comes from AclLibrary.load()")

    @staticmethod
    def load(path: str | None = None) -> AclLibrary:
        """Open the library, or return the one that is open.

        Args:
            path: its file, the folder of a toolkit, or a name for the loader's own search; None to
                look where the environment and the installer of the toolkit say, then to ask the
                loader.

        Raises:
            NativeError: it is not there, or cannot be opened, or is too old: says what was tried.
        """
        tried = []
        for files in candidates(NAMES, path):
            try:
                return AclLibrary.open_files(files)
            except AclError as error:
                tried.append(str(error))
        told = "; ".join(tried) or f"{path} has neither {' nor '.join(NAMES)}"
        raise NativeError(f"no ACL library: {told}")

    @staticmethod
    cdef AclLibrary open_files(list files):
        cdef kvn_failure failure
        cdef const char *paths[2]
        cdef char found[4096]
        cdef AclLibrary self = AclLibrary.__new__(AclLibrary)
        cdef int status
        cdef size_t count = min(len(files), 2)
        encoded = [os.fsencode(it) for it in files]
        for i in range(count):
            paths[i] = <const char *>encoded[i]
        with nogil:
            status = kvn_acl_library_open(paths, count, &self.library, &failure)
        check_acl(status, &failure)
        kvn_acl_library_path(&self.library, found, sizeof(found))
        self.path = os.fsdecode(<bytes>found)
        self.lock = threading.Lock()
        self.devices = weakref.WeakValueDictionary()
        self.missing = tuple(self.list_missing())
        self.version = toolkit_version(self.path) or self.interface_version()
        with LIBRARIES_LOCK:
            return LIBRARIES.setdefault(os.path.realpath(self.path), self)

    cdef list list_missing(self):
        cdef list names = []
        cdef const char *name = kvn_acl_missing(&self.library.calls, 0)
        while name is not NULL:
            names.append(name.decode())
            name = kvn_acl_missing(&self.library.calls, len(names))
        return names

    cdef object interface_version(self):
        cdef int32_t numbers[3]
        if not kvn_acl_library_interface(&self.library, numbers):
            return None
        return f"acl {numbers[0]}.{numbers[1]}.{numbers[2]}"

    cdef int check_process(self) except -1:
        if self.library.pid != getpid():
            raise NativeError(f"the Ascend runtime was opened by process {self.library.pid} and"
                              f" does not work in process {getpid()}, forked from it: start such"
                              f" processes with spawn")
        return 0

    cdef int begin(self) except -1:
        cdef kvn_failure failure
        cdef int first = 0
        cdef int status
        self.check_process()
        if self.initialized:
            return 0
        with self.lock:
            if not self.initialized:
                with nogil:
                    status = kvn_acl_library_init(&self.library, &first, &failure)
                check_acl(status, &failure)
                self.ours = first != 0
                self.initialized = True
        return 0

    @property
    def has_batch(self) -> bool:
        """Whether it has batch copies; a device may still not support them."""
        return "aclrtMemcpyBatch" not in self.missing

    def device_count(self) -> int:
        """Return how many devices this process can use.

        Raises:
            AclError: there is no driver, say.
        """
        cdef kvn_failure failure
        cdef uint32_t count = 0
        cdef int status
        self.begin()
        with nogil:
            status = kvn_acl_library_devices(&self.library, &count, &failure)
        check_acl(status, &failure)
        return count

    def soc_name(self) -> str:
        """Return the name of the devices' chip, "Ascend910B1" say."""
        self.begin()
        return kvn_acl_library_soc(&self.library).decode(errors="replace")

    def device(self, int device_id) -> Device:
        """Return the device of this number, the same object as long as anybody uses it.

        Raises:
            AclError: there is no such device, or it cannot be used.
        """
        cdef Device device
        self.begin()
        with self.lock:
            device = self.devices.get(device_id)
            if device is None:
                device = Device.open_number(self, device_id)
                self.devices[device_id] = device
            return device

    def finalize(self) -> None:
        """Call aclFinalize, if it was this library's first user who called aclInit.

        Only for a process whose other parts do not use ACL: they could not any more.

        Raises:
            NativeError: a device is still in use.
        """
        cdef kvn_failure failure
        cdef int status
        self.check_process()
        with self.lock:
            if not self.initialized or not self.ours:
                return
            if len(self.devices):
                raise NativeError(f"devices {sorted(self.devices)} are still in use")
            with nogil:
                status = kvn_acl_library_finalize(&self.library, &failure)
            check_acl(status, &failure)
            self.initialized = False

    def __repr__(self):
        return f"<AclLibrary {self.path}>"


cdef int physical_number(AclLibrary library, int32_t device) except? -1:
    """Number on the server: as the runtime says, else as the list of visible devices says."""
    cdef int32_t physical = -1
    if kvn_acl_library_physical(&library.library, device, &physical):
        return physical
    visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES", "").split(",")
    if device < len(visible) and visible[device].strip().isdigit():
        return int(visible[device])
    return device


@cython.final
@cython.auto_pickle(False)
@cython.no_gc_clear
cdef class Device:
    """A device of this process: its memory, and the backends that copy to, from and in it."""

    def __init__(self, *args, **kwargs):
        raise TypeError("a Device comes from AclLibrary.device()")

    @staticmethod
    cdef Device open_number(AclLibrary library, int32_t number):
        cdef kvn_failure failure
        cdef Device self = Device.__new__(Device)
        cdef int status
        self.library = library
        self.lock = threading.Lock()
        self.channels = weakref.WeakValueDictionary()
        with nogil:
            status = kvn_device_open(&library.library, number, &self.device, &failure)
        check_acl(status, &failure)
        self.opened = True
        return self

    def __dealloc__(self):
        if self.opened and self.library.library.pid == getpid():
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
        return physical_number(self.library, self.device.id)

    @property
    def soc_name(self) -> str:
        """Name of its chip."""
        return self.library.soc_name()

    @property
    def fallback_reason(self) -> str:
        """Why copies to and from the host are not the fastest that kvplan knows; "" if they are.

        What only the first batch copy tells is there after it.
        """
        cdef char reason[256]
        self.check_usable()
        kvn_device_fallback(&self.device, reason, sizeof(reason))
        return reason.decode(errors="replace")

    def allocate(self, nbytes) -> DeviceBuffer:
        """Return new memory of the device, its contents undefined.

        Raises:
            ValueError: nbytes < 1.
            AclError: the device has no such memory (KVN_NO_DEVICE_MEMORY).
        """
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
        check_acl(status, &failure)
        buffer.nbytes = size
        return buffer

    def pin(self, address, nbytes, keep: object = None) -> Pinned:
        """Pin [address, address + nbytes) of this process until the result is closed or let go.

        Copies between it and the device then go without the help of a processor.

        Args:
            keep: the memory's owner, kept as long: it must be mapped until it is unpinned.

        Raises:
            ValueError: no page begins at address, or the range overlaps another that is pinned.
            AclError: the system refuses.
        """
        cdef uint64_t start = unsigned("address", address), size = unsigned("nbytes", nbytes)
        cdef kvn_failure failure
        cdef Pinned pinned
        cdef int status
        self.check_usable()
        pinned = Pinned.__new__(Pinned)
        pinned.device = self
        pinned.keep = keep
        pinned.address = start
        pinned.nbytes = size
        with nogil:
            status = kvn_device_pin(&self.device, start, size, &failure)
        check_acl(status, &failure)
        pinned.held = True
        return pinned

    def locate(self, address) -> tuple[str, int]:
        """Return where memory lies: "device", "host" (pinned), "managed" or "pageable"; its device.

        Raises:
            AclError: nobody knows the address.
        """
        cdef uint64_t where = unsigned("address", address)
        cdef kvn_failure failure
        cdef kvn_acl_location location
        cdef int status
        self.check_usable()
        with nogil:
            status = kvn_device_locate(&self.device, where, &location, &failure)
        check_acl(status, &failure)
        if location.type == KVN_ACL_LOCATION_DEVICE:
            return "device", location.id
        if location.type == KVN_ACL_LOCATION_MANAGED:
            return "managed", location.id
        pinned = location.type in (KVN_ACL_LOCATION_HOST, KVN_ACL_LOCATION_HOST_NUMA)
        return "host" if pinned else "pageable", location.id

    def write(self, address, buffer) -> None:
        """Copy a contiguous buffer to the device, and wait. Bounds are the caller's.

        Raises:
            AclError: the copy failed.
        """
        cdef uint64_t where = unsigned("address", address)
        cdef kvn_failure failure
        cdef Py_buffer view
        cdef int status
        self.check_usable()
        PyObject_GetBuffer(buffer, &view, PyBUF_ANY_CONTIGUOUS)
        try:
            with nogil:
                status = kvn_device_copy(&self.device, where, <uintptr_t>view.buf, view.len,
                                         KVN_ACL_HOST_TO_DEVICE, &failure)
        finally:
            PyBuffer_Release(&view)
        check_acl(status, &failure)

    def read(self, address, buffer) -> None:
        """Fill a contiguous writable buffer from the device, and wait. Bounds are the caller's.

        Raises:
            AclError: the copy failed.
        """
        cdef uint64_t where = unsigned("address", address)
        cdef kvn_failure failure
        cdef Py_buffer view
        cdef int status
        self.check_usable()
        PyObject_GetBuffer(buffer, &view, PyBUF_ANY_CONTIGUOUS | PyBUF_WRITABLE)
        try:
            with nogil:
                status = kvn_device_copy(&self.device, <uintptr_t>view.buf, where, view.len,
                                         KVN_ACL_DEVICE_TO_HOST, &failure)
        finally:
            PyBuffer_Release(&view)
        check_acl(status, &failure)

    def clear(self, address, nbytes) -> None:
        """Zero memory of the device, and wait. Bounds are the caller's.

        Raises:
            AclError: the device refuses.
        """
        cdef uint64_t where = unsigned("address", address), size = unsigned("nbytes", nbytes)
        cdef kvn_failure failure
        cdef int status
        self.check_usable()
        with nogil:
            status = kvn_device_clear(&self.device, where, size, &failure)
        check_acl(status, &failure)

    def memory(self) -> tuple[int, int]:
        """Return the free and all bytes of the device's HBM."""
        cdef size_t free_nbytes = 0, total_nbytes = 0
        cdef kvn_failure failure
        cdef int status
        self.check_usable()
        with nogil:
            status = kvn_device_memory(&self.device, &free_nbytes, &total_nbytes, &failure)
        check_acl(status, &failure)
        return free_nbytes, total_nbytes

    def attribute(self, int number) -> int | None:
        """Return an aclrtDevAttr of the device; None where this version does not know it.

        Raises:
            AclError: the device cannot be asked.
        """
        cdef kvn_failure failure
        cdef int64_t value = 0
        cdef int status
        self.check_usable()
        with nogil:
            status = kvn_acl_library_attribute(&self.library.library, self.device.id, number,
                                               &value, &failure)
        if status == KVN_UNSUPPORTED:
            return None
        check_acl(status, &failure)
        return value

    def backend(self, str direction not None) -> Backend:
        """Return a backend that copies in a direction.

        Args:
            direction: "host_to_device", "device_to_host" or "device_to_device". All backends of one
                direction share its channels, threads that need nobody to poll or wait.

        Raises:
            ValueError: another direction.
            AclError: the device has no stream left.
        """
        cdef Channels channels
        cdef int bit
        self.check_usable()
        if direction not in DIRECTIONS:
            raise ValueError(f"direction is {direction!r}; it must be one of"
                             f" {', '.join(map(repr, DIRECTIONS))}")
        bit, count = DIRECTIONS[direction]
        with self.lock:
            channels = self.channels.get(direction)
            if channels is None:
                channels = Channels.start(self, count)
                self.channels[direction] = channels
        what = f"backend {direction} of device {self.device.id}"
        return Backend.adopt(
            kvn_acl_copy_create(&self.device, channels.items, channels.count, bit), channels, what)

    def close(self) -> None:
        """Take no more; what was made of it goes on until it is let go. Idempotent."""
        self.closed = True
        devices = self.library.devices
        if devices.get(self.device.id) is self:
            del devices[self.device.id]

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self.closed

    def __repr__(self):
        return f"<Device {self.device.id}: {self.soc_name}>"


@cython.final
@cython.auto_pickle(False)
@cython.no_gc_clear
@cython.internal
cdef class Channels:
    # Threads and streams of a device; a backend has it among its owners.
    cdef Device device         # before the channels: they use it as long as they are
    cdef kvn_channel *items[16]  # KVN_MAX_CHANNELS
    cdef unsigned count
    cdef object __weakref__

    @staticmethod
    cdef Channels start(Device device, unsigned count):
        cdef Channels self = Channels.__new__(Channels)
        cdef kvn_failure failure
        cdef int status = KVN_OK
        self.device = device
        while self.count < count:
            with nogil:
                status = kvn_channel_create(&device.device, &self.items[self.count], &failure)
            check_acl(status, &failure)
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
    """Memory of a device; freed with the last reference to it, never in a forked child."""

    def __init__(self, *args, **kwargs):
        raise TypeError("a DeviceBuffer comes from Device.allocate()")

    @property
    def address(self) -> int:
        """Where it begins: an address that only the device can reach."""
        return <uintptr_t>self.start

    def __dealloc__(self):
        cdef kvn_failure ignored
        if self.start is not NULL and self.device.library.library.pid == getpid():
            with nogil:
                kvn_device_free(&self.device.device, self.start, &ignored)

    def __repr__(self):
        return (f"<DeviceBuffer of {self.nbytes} bytes at {self.address:#x} of device"
                f" {self.device.id}>")


@cython.final
@cython.auto_pickle(False)
@cython.no_gc_clear
cdef class Pinned:
    """Host memory that is pinned for a device, until it is closed or let go."""

    cdef readonly Device device
    cdef object keep           # let go after the memory is unpinned
    cdef readonly uint64_t address
    cdef readonly uint64_t nbytes
    cdef bint held

    def __init__(self, *args, **kwargs):
        raise TypeError("Pinned memory comes from Device.pin()")

    @cython.critical_section
    def close(self) -> None:
        """Unpin it; no copy may be in flight. Idempotent; nothing in a forked child.

        Raises:
            AclError: the system refuses; it counts as unpinned all the same.
        """
        cdef kvn_failure failure
        cdef int status = KVN_OK
        if not self.held:
            return
        self.held = False
        if self.device.library.library.pid != getpid():
            return
        with nogil:
            status = kvn_device_unpin(&self.device.device, self.address, &failure)
        self.keep = None
        check_acl(status, &failure)

    def __dealloc__(self):
        cdef kvn_failure ignored
        if self.held and self.device.library.library.pid == getpid():
            with nogil:
                kvn_device_unpin(&self.device.device, self.address, &ignored)

    def __repr__(self):
        return f"<Pinned [{self.address:#x}, {self.address + self.nbytes:#x})>"

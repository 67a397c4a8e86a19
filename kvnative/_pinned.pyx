"""Host memory for the copies of a device: allocated by its runtime, or pinned."""

cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from libc.stdint cimport uint64_t, uintptr_t
from libc.string cimport memset
from posix.unistd cimport getpid

from kvnative._device cimport (
    Device,
    kvn_device_allocate_pinned,
    kvn_device_free_pinned,
    kvn_device_pin,
    kvn_device_pinned_at,
    kvn_device_unpin,
    kvn_pinned,
)
from kvnative._host cimport kvn_failure, unsigned
from kvnative._native cimport KVN_OK

__all__ = ["HostBuffer", "Pinned", "allocate_host", "pin", "pinned_by"]


@cython.final
@cython.auto_pickle(False)
@cython.no_gc_clear
cdef class HostBuffer:
    """Page-aligned host memory from a device's runtime.

    It supports the buffer protocol, as `Arena` does, and is freed with its last reference, except
    in a forked child.
    """

    cdef readonly Device device
    cdef void *start
    cdef readonly uint64_t nbytes

    def __init__(self, *args, **kwargs):
        raise TypeError("a HostBuffer comes from allocate_host()")

    @property
    def address(self) -> int:
        """Address of the first byte."""
        return <uintptr_t>self.start

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.start, <Py_ssize_t>self.nbytes, False, flags)

    def __buffer__(self, int flags, /):
        """Return `memoryview(self)`, like all types with buffers since Python 3.12 (PEP 688)."""
        return memoryview(self)

    def __dealloc__(self):
        cdef kvn_failure ignored
        if self.start is not NULL and self.device.library.pid == getpid():
            with nogil:
                kvn_device_free_pinned(&self.device.device, self.start, &ignored)

    def __repr__(self):
        return (f"<HostBuffer of {self.nbytes} bytes at {self.address:#x} for device"
                f" {self.device.id}>")


@cython.final
@cython.auto_pickle(False)
@cython.no_gc_clear
cdef class Pinned:
    """Host memory that is pinned for a device until it is closed or dropped."""

    cdef readonly Device device
    cdef object keep           # released after the memory is unpinned
    cdef readonly uint64_t address
    cdef readonly uint64_t nbytes
    cdef bint held
    cdef object __weakref__

    def __init__(self, *args, **kwargs):
        raise TypeError("Pinned memory comes from pin()")

    @cython.critical_section
    def close(self) -> None:
        """Unpin the memory, which no copy may use. Idempotent; no effect in a forked child."""
        cdef kvn_failure failure
        cdef int status = KVN_OK
        if not self.held:
            return
        self.held = False
        if self.device.library.pid != getpid():
            return
        with nogil:
            status = kvn_device_unpin(&self.device.device, self.address, &failure)
        self.keep = None
        self.device.library.check(status, &failure)

    def __dealloc__(self):
        cdef kvn_failure ignored
        if self.held and self.device.library.pid == getpid():
            with nogil:
                kvn_device_unpin(&self.device.device, self.address, &ignored)

    def __repr__(self):
        return f"<Pinned [{self.address:#x}, {self.address + self.nbytes:#x})>"


def allocate_host(Device device not None, nbytes) -> HostBuffer:
    """Return new zeroed host memory that is pinned for a device."""
    cdef uint64_t size = unsigned("nbytes", nbytes)
    cdef kvn_failure failure
    cdef HostBuffer buffer
    cdef int status
    device.check_usable()
    buffer = HostBuffer.__new__(HostBuffer)
    buffer.device = device
    with nogil:
        status = kvn_device_allocate_pinned(&device.device, size, &buffer.start, &failure)
        if status == KVN_OK:
            memset(buffer.start, 0, size)
    if status != KVN_OK:
        buffer.start = NULL
    device.library.check(status, &failure)
    buffer.nbytes = size
    return buffer


def pinned_by(Device device not None, address, nbytes) -> str:
    """Return how host memory is pinned for a device.

    Returns:
        "runtime" if the range lies in one `HostBuffer`, "pin" if `pin` has pinned it, else "".
    """
    cdef uint64_t start = unsigned("address", address), size = unsigned("nbytes", nbytes)
    cdef kvn_pinned found
    device.check_usable()
    if not kvn_device_pinned_at(&device.device, start, &found) or size > found.last - start:
        return ""
    return "runtime" if found.is_allocated else "pin"


def pin(Device device not None, address, nbytes, keep: object = None) -> Pinned:
    """Pin [address, address + nbytes) of this process until the result is closed or dropped.

    Copies between pinned memory and the device need no CPU.

    Args:
        device: the device.
        address, nbytes: range, which must stay mapped meanwhile.
        keep: owner of the memory, kept alive meanwhile.
    """
    cdef uint64_t start = unsigned("address", address), size = unsigned("nbytes", nbytes)
    cdef kvn_failure failure
    cdef Pinned pinned
    device.check_usable()
    pinned = Pinned.__new__(Pinned)
    pinned.device = device
    pinned.keep = keep
    pinned.address = start
    pinned.nbytes = size
    with nogil:
        device.library.check(kvn_device_pin(&device.device, start, size, &failure), &failure)
    pinned.held = True
    return pinned

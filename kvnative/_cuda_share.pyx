"""Memory of CUDA devices that processes of one host share: exported here, mapped from peers."""

cimport cython
from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport uint64_t
from libc.string cimport memcpy
from posix.unistd cimport close, getpid

from kvnative._cuda cimport check_cuda
from kvnative._device cimport Device, kvn_device
from kvnative._host cimport kvn_failure, unsigned

__all__ = ["Exported", "Imported", "check_reach", "export", "import_descriptor", "import_handle",
           "import_here"]

GPUS = ("same", "other", "hidden")  # kvn_cuda_gpu

cdef extern from "kvnative/cuda.h" nogil:
    ctypedef struct kvn_cuda_ipc_memory:
        char bytes[64]
    ctypedef struct kvn_cuda_uuid:
        char bytes[16]

cdef extern from "cuda/share.h" nogil:
    ctypedef struct kvn_cuda_exported:
        uint64_t address
        uint64_t nbytes
        int fd
        kvn_cuda_ipc_memory handle
    ctypedef struct kvn_cuda_imported:
        uint64_t address
        uint64_t nbytes
    int kvn_cuda_export(const kvn_device *device, uint64_t address, uint64_t nbytes,
                        kvn_cuda_exported *out, kvn_failure *failure)
    ctypedef enum kvn_cuda_gpu:
        pass
    int kvn_cuda_check_reach(const kvn_device *device, const kvn_cuda_uuid *uuid, bint both_ways,
                             kvn_cuda_gpu *out, kvn_failure *failure)
    int kvn_cuda_import_descriptor(const kvn_device *device, int fd, uint64_t nbytes, bint is_far,
                                   kvn_cuda_imported *out, kvn_failure *failure)
    int kvn_cuda_import_handle(const kvn_device *device, const kvn_cuda_ipc_memory *handle,
                               uint64_t nbytes, bint is_far, kvn_cuda_imported *out,
                               kvn_failure *failure)
    int kvn_cuda_import_here(const kvn_device *device, const kvn_device *owner, uint64_t address,
                             uint64_t nbytes, kvn_cuda_imported *out, kvn_failure *failure)
    int kvn_cuda_unmap(const kvn_device *device, const kvn_cuda_imported *imported,
                       kvn_failure *failure)


@cython.final
@cython.auto_pickle(False)
@cython.no_gc_clear
cdef class Exported:
    """An allocation of a device that other processes can map as long as this is held.

    Attributes:
        address, nbytes: of the allocation, here.
        fd: the descriptor that peers take; -1: they map it by its `handle`.
        handle: 64 bytes; empty: there is a descriptor.
    """

    cdef kvn_cuda_exported exported

    def __cinit__(self):
        self.exported.fd = -1

    def __init__(self, *args, **kwargs):
        raise TypeError("Exported comes from export()")

    @property
    def address(self) -> int:
        return self.exported.address

    @property
    def nbytes(self) -> int:
        return self.exported.nbytes

    @property
    def fd(self) -> int:
        return self.exported.fd

    @property
    def handle(self) -> bytes:
        if self.exported.fd >= 0:
            return b""
        return PyBytes_FromStringAndSize(self.exported.handle.bytes, 64)

    def __dealloc__(self):
        if self.exported.fd >= 0:
            close(self.exported.fd)  # a forked child has descriptors of its own


@cython.final
@cython.auto_pickle(False)
@cython.no_gc_clear
cdef class Imported:
    """An allocation of another process, mapped here until this is let go; not in a forked child.

    Or one of another device of this process, where it is.

    Attributes:
        device: that reaches it here.
        address, nbytes: where it is mapped.
    """

    cdef readonly Device device
    cdef Device owner  # of this process
    cdef kvn_cuda_imported imported
    cdef bint is_mapped
    cdef object __weakref__

    def __init__(self, *args, **kwargs):
        raise TypeError("Imported comes from import_descriptor(), _handle() or _here()")

    @property
    def address(self) -> int:
        return self.imported.address

    @property
    def nbytes(self) -> int:
        return self.imported.nbytes

    def __dealloc__(self):
        cdef kvn_failure ignored
        if self.is_mapped and self.device.library.pid == getpid():
            with nogil:
                kvn_cuda_unmap(&self.device.device, &self.imported, &ignored)

    def __repr__(self):
        return f"<Imported {self.address:#x}+{self.nbytes} of {self.device!r}>"


def export(Device device not None, address, nbytes) -> Exported:
    """Let peers map the allocation that [address, address + nbytes) is a part of."""
    cdef uint64_t start = unsigned("address", address), size = unsigned("nbytes", nbytes)
    cdef Exported made = Exported.__new__(Exported)
    cdef kvn_failure failure
    cdef int status
    check_cuda(device)
    with nogil:
        status = kvn_cuda_export(&device.device, start, size, &made.exported, &failure)
    device.library.check(status, &failure)
    return made


def import_descriptor(Device device not None, int fd, nbytes, *, bint is_far) -> Imported:
    """Map what a descriptor of this process exports, which may be closed then.

    Args:
        device: to map it for.
        fd: the descriptor.
        nbytes: of the allocation.
        is_far: whether it is memory of another GPU.
    """
    cdef uint64_t size = unsigned("nbytes", nbytes)
    cdef Imported made = Imported.__new__(Imported)
    cdef kvn_failure failure
    cdef int status
    check_cuda(device)
    made.device = device
    with nogil:
        status = kvn_cuda_import_descriptor(&device.device, fd, size, is_far, &made.imported,
                                            &failure)
    device.library.check(status, &failure)
    made.is_mapped = True
    return made


def import_handle(Device device not None, bytes handle not None, nbytes, *,
                  bint is_far) -> Imported:
    """Map what has this handle of 64 bytes in another process; as `import_descriptor`."""
    cdef uint64_t size = unsigned("nbytes", nbytes)
    cdef Imported made = Imported.__new__(Imported)
    cdef kvn_cuda_ipc_memory given
    cdef kvn_failure failure
    cdef int status
    check_cuda(device)
    if len(handle) != sizeof(given):
        raise ValueError(f"handle has {len(handle)} bytes; it must have {sizeof(given)}")
    memcpy(&given, <const char *>handle, sizeof(given))
    made.device = device
    with nogil:
        status = kvn_cuda_import_handle(&device.device, &given, size, is_far, &made.imported,
                                        &failure)
    device.library.check(status, &failure)
    made.is_mapped = True
    return made


def import_here(Device device not None, Device owner not None, address, nbytes) -> Imported:
    """Reach memory of cuMemAlloc of another device of this process, where it is."""
    cdef uint64_t start = unsigned("address", address), size = unsigned("nbytes", nbytes)
    cdef Imported made = Imported.__new__(Imported)
    cdef kvn_failure failure
    cdef int status
    check_cuda(device)
    check_cuda(owner)
    made.device, made.owner = device, owner
    with nogil:
        status = kvn_cuda_import_here(&device.device, &owner.device, start, size, &made.imported,
                                      &failure)
    device.library.check(status, &failure)
    made.is_mapped = True
    return made


def check_reach(Device device not None, bytes uuid not None, *, bint both_ways) -> str:
    """Refuse memory of a GPU that the device cannot reach.

    Args:
        device: of this process.
        uuid: of the GPU.
        both_ways: refuse also where that GPU does not reach the device's memory.

    Returns:
        "same", "other" (with peer access) or "hidden": CUDA_VISIBLE_DEVICES leaves it out, and
        whether it is reached shows when memory is mapped.
    """
    cdef kvn_cuda_uuid given
    cdef kvn_cuda_gpu found
    cdef kvn_failure failure
    cdef int status
    check_cuda(device)
    if len(uuid) != sizeof(given):
        raise ValueError(f"uuid has {len(uuid)} bytes; it must have {sizeof(given)}")
    memcpy(&given, <const char *>uuid, sizeof(given))
    with nogil:
        status = kvn_cuda_check_reach(&device.device, &given, both_ways, &found, &failure)
    device.library.check(status, &failure)
    return GPUS[<int>found]

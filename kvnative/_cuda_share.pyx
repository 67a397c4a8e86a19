"""Memory of CUDA devices that processes of one host share."""

cimport cython
from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport uint64_t
from libc.stdlib cimport free
from libc.string cimport memcpy
from posix.unistd cimport close, getpid

from kvnative._cuda cimport check_cuda
from kvnative._device cimport Device, kvn_device
from kvnative._host cimport kvn_failure, unsigned

__all__ = ["Exported", "Imported", "check_reach", "export", "import_handle", "import_here",
           "import_pieces"]

GPUS = ("same", "other", "hidden")  # kvn_cuda_gpu

cdef extern from "kvnative/cuda.h" nogil:
    ctypedef struct kvn_cuda_ipc_memory:
        char bytes[64]
    ctypedef struct kvn_cuda_uuid:
        char bytes[16]

cdef extern from "cuda/share.h" nogil:
    ctypedef struct kvn_cuda_piece:
        uint64_t address
        uint64_t nbytes
    ctypedef struct kvn_cuda_exported:
        uint64_t address
        uint64_t nbytes
        int fd
        kvn_cuda_ipc_memory handle
        kvn_cuda_piece *pieces
        size_t num_pieces
    ctypedef struct kvn_cuda_imported:
        uint64_t address
        uint64_t nbytes
    int kvn_cuda_export(const kvn_device *device, uint64_t address, uint64_t nbytes,
                        kvn_cuda_exported *out, kvn_failure *failure)
    int kvn_cuda_export_piece(const kvn_device *device, const kvn_cuda_piece *piece, int *fd,
                              kvn_failure *failure)
    ctypedef enum kvn_cuda_gpu:
        pass
    int kvn_cuda_check_reach(const kvn_device *device, const kvn_cuda_uuid *uuid, bint both_ways,
                             kvn_cuda_gpu *out, kvn_failure *failure)
    int kvn_cuda_import_begin(const kvn_device *device, uint64_t nbytes, kvn_cuda_imported *out,
                              kvn_failure *failure)
    int kvn_cuda_import_piece(const kvn_device *device, kvn_cuda_imported *imported, int fd,
                              uint64_t nbytes, kvn_failure *failure)
    int kvn_cuda_import_end(const kvn_device *device, kvn_cuda_imported *imported, bint is_far,
                            kvn_failure *failure)
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
    """An allocation of a device that other processes can map while this object lives.

    Attributes:
        device: device of the memory.
        address, nbytes: the allocation in this process, or all of its pieces.
        fd: descriptor for peers, or -1 if they map it by `handle` or in pieces.
        handle: 64 bytes, or empty if peers map it by descriptors.
        num_pieces: pieces whose descriptors `take` makes; 0: the memory is not in pieces.
    """

    cdef readonly Device device
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
        if self.exported.fd >= 0 or self.exported.num_pieces:
            return b""
        return PyBytes_FromStringAndSize(self.exported.handle.bytes, 64)

    @property
    def num_pieces(self) -> int:
        return self.exported.num_pieces

    def take(self, size_t first, size_t count) -> list:
        """Make descriptors of up to `count` pieces from index `first`; the caller closes them.

        Fewer are made if the process runs out of descriptors. Raise an error only if none is made.

        Returns:
            The descriptor of each piece, and its size in bytes.
        """
        cdef list made = []
        cdef kvn_failure failure
        cdef size_t i
        cdef int fd = -1, status
        if first >= self.exported.num_pieces:
            raise IndexError(f"first={first} is out of range [0, {self.exported.num_pieces})")
        for i in range(first, min(first + count, self.exported.num_pieces)):
            with nogil:
                status = kvn_cuda_export_piece(&self.device.device, &self.exported.pieces[i], &fd,
                                               &failure)
            if status:
                if made:
                    break
                self.device.library.check(status, &failure)
            made.append((fd, self.exported.pieces[i].nbytes))
        return made

    def __dealloc__(self):
        free(self.exported.pieces)
        if self.exported.fd >= 0:
            close(self.exported.fd)  # in a forked child too, which has its own copy


@cython.final
@cython.auto_pickle(False)
@cython.no_gc_clear
cdef class Imported:
    """A mapping of an allocation of another process, or of another device of this one.

    The last reference unmaps it, except in a forked child.

    Attributes:
        device: device that the allocation is mapped for.
        address, nbytes: the mapping.
    """

    cdef readonly Device device
    cdef Device owner  # of this process
    cdef kvn_cuda_imported imported
    cdef bint is_mapped
    cdef object __weakref__

    def __init__(self, *args, **kwargs):
        raise TypeError("Imported comes from import_pieces(), _handle() or _here()")

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
    """Export the allocation that contains [address, address + nbytes)."""
    cdef uint64_t start = unsigned("address", address), size = unsigned("nbytes", nbytes)
    cdef Exported made = Exported.__new__(Exported)
    cdef kvn_failure failure
    check_cuda(device)
    made.device = device
    with nogil:
        device.library.check(kvn_cuda_export(&device.device, start, size, &made.exported,
                                             &failure), &failure)
    return made


def import_pieces(Device device not None, nbytes, batches, *, bint is_far) -> Imported:
    """Map the pieces of an allocation side by side, as one range of addresses.

    Args:
        device: device to map them for.
        nbytes: size of all pieces together.
        batches: iterable of lists of (descriptor, size of the piece in bytes), in order of address.
            The descriptors of a batch may be closed when the next batch is requested.
        is_far: the memory belongs to another GPU.
    """
    cdef uint64_t size = unsigned("nbytes", nbytes), part
    cdef Imported made = Imported.__new__(Imported)
    cdef kvn_failure failure
    cdef int fd
    check_cuda(device)
    made.device = device
    with nogil:
        device.library.check(kvn_cuda_import_begin(&device.device, size, &made.imported, &failure),
                             &failure)
    made.is_mapped = True  # from here on, the last reference unmaps the mapped pieces
    for batch in batches:
        for number, piece in batch:
            fd, part = number, unsigned("nbytes of a piece", piece)
            with nogil:
                device.library.check(kvn_cuda_import_piece(&device.device, &made.imported, fd, part,
                                                           &failure), &failure)
    with nogil:
        device.library.check(kvn_cuda_import_end(&device.device, &made.imported, is_far, &failure),
                             &failure)
    return made


def import_handle(Device device not None, bytes handle not None, nbytes, *,
                  bint is_far) -> Imported:
    """Map the allocation with a handle of 64 bytes from another process."""
    cdef uint64_t size = unsigned("nbytes", nbytes)
    cdef Imported made = Imported.__new__(Imported)
    cdef kvn_cuda_ipc_memory given
    cdef kvn_failure failure
    check_cuda(device)
    if len(handle) != sizeof(given):
        raise ValueError(f"handle has {len(handle)} bytes; it must have {sizeof(given)}")
    memcpy(&given, <const char *>handle, sizeof(given))
    made.device = device
    with nogil:
        device.library.check(kvn_cuda_import_handle(&device.device, &given, size, is_far,
                                                    &made.imported, &failure), &failure)
    made.is_mapped = True
    return made


def import_here(Device device not None, Device owner not None, address, nbytes) -> Imported:
    """Make memory that cuMemAlloc gave another device of this process accessible to `device`."""
    cdef uint64_t start = unsigned("address", address), size = unsigned("nbytes", nbytes)
    cdef Imported made = Imported.__new__(Imported)
    cdef kvn_failure failure
    check_cuda(device)
    check_cuda(owner)
    made.device, made.owner = device, owner
    with nogil:
        device.library.check(kvn_cuda_import_here(&device.device, &owner.device, start, size,
                                                  &made.imported, &failure), &failure)
    made.is_mapped = True
    return made


def check_reach(Device device not None, bytes uuid not None, *, bint both_ways) -> str:
    """Raise if a device cannot reach memory of a GPU.

    Args:
        device: a device of this process.
        uuid: UUID of the GPU.
        both_ways: raise also if that GPU cannot reach memory of the device.

    Returns:
        "same"; "other", with peer access; or "hidden" by CUDA_VISIBLE_DEVICES, so that only mapping
        shows whether the memory can be reached.
    """
    cdef kvn_cuda_uuid given
    cdef kvn_cuda_gpu found
    cdef kvn_failure failure
    check_cuda(device)
    if len(uuid) != sizeof(given):
        raise ValueError(f"uuid has {len(uuid)} bytes; it must have {sizeof(given)}")
    memcpy(&given, <const char *>uuid, sizeof(given))
    with nogil:
        device.library.check(kvn_cuda_check_reach(&device.device, &given, both_ways, &found,
                                                  &failure), &failure)
    return GPUS[<int>found]

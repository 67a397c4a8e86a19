"""CUDA devices by the driver API, whose library is opened at run time."""

cimport cython
from libc.stdint cimport int32_t, uint64_t
from posix.unistd cimport getpid

from kvnative._crossing cimport acquire_columns, release_columns
from kvnative._device cimport DeviceLibrary, direction_of
from kvnative._host cimport kvn_failure, unsigned

import os
import threading
from typing import NamedTuple

from kvnative._backend import NativeError
from kvnative._device import DeviceError

__all__ = ["CopyTuning", "CudaError", "CudaLibrary", "Watch", "builtin_copy_tuning", "copy_tuning",
           "copy_way", "far_copy_tuning", "has_batches", "limit_copies", "limit_registered",
           "tune_copies", "watch"]

NAME = "libcuda.so.1"
CONTEXTS = ("primary", "own")

WAYS = ("kernel", "batch", "single")  # kvn_cuda_way

cdef dict LIBRARIES = {}  # (path, context) -> CudaLibrary: a library is never closed
LIBRARIES_LOCK = threading.Lock()


class CudaError(DeviceError):
    """A failed call of CUDA's driver; the message has the call, its code and the driver's text.

    Attributes:
        code: CUresult, or 0 if the failure is not CUDA's.
        status: one of the KVN_ constants.
    """


@cython.final
@cython.auto_pickle(False)
cdef class CudaLibrary(DeviceLibrary):
    """The library of CUDA's driver in this process, for devices of one kind of context.

    Attributes:
        path: file of the library.
        version: newest CUDA version that the driver supports, such as "12.4", or None.
        context: "primary" or "own".
        missing: names of calls of later versions that this one lacks.
    """

    def __init__(self, *args, **kwargs):
        raise TypeError("a CudaLibrary comes from CudaLibrary.load()")

    @staticmethod
    def load(path: str | None = None, str context not None = "primary") -> CudaLibrary:
        """Open the library, or return the one that is open.

        Args:
            path: file of the library, its folder, or a name that the loader searches; None searches
                libcuda.so.1.
            context: context of the devices. Frameworks of the program allocate in the "primary"
                context, and other contexts do not reach that memory; or "own".
        """
        if context not in CONTEXTS:
            raise ValueError(f"context is {context!r}; it must be one of"
                             f" {', '.join(map(repr, CONTEXTS))}")
        file = os.path.join(path, NAME) if path and os.path.isdir(path) else path or NAME
        try:
            return CudaLibrary.open_file(file, context)
        except CudaError as error:
            raise NativeError(f"no CUDA library: {error}") from error

    @staticmethod
    cdef CudaLibrary open_file(str file, str context):
        cdef kvn_failure failure
        cdef CudaLibrary self = CudaLibrary.__new__(CudaLibrary)
        cdef bytes encoded = os.fsencode(file)
        cdef const char *name = encoded
        self.ops = &kvn_cuda_ops
        self.runtime = &self.library
        self.error = CudaError
        self.context = context
        with nogil:
            self.check(kvn_cuda_library_open(name, &self.library, &failure), &failure)
        self.library.own_context = context == "own"
        self.opened()
        version = kvn_cuda_library_version(&self.library)
        self.version = f"{version // 1000}.{version % 1000 // 10}" if version else None
        with LIBRARIES_LOCK:
            return LIBRARIES.setdefault((os.path.realpath(self.path), context), self)

    cdef int begin(self) except -1:
        cdef kvn_failure failure
        self.check_process()
        if self.initialized:
            return 0
        with nogil:
            self.check(kvn_cuda_library_init(&self.library, &failure), &failure)
        self.initialized = True
        return 0

    def uuid(self, int device_id) -> str:
        """Return the UUID of a device, "GPU-" and 36 characters."""
        cdef kvn_cuda_facts facts
        self.facts_of(device_id, &facts)
        return facts.uuid.decode()

    def pci_id(self, int device_id) -> str:
        """Return the PCI address of a device, such as "0000:17:00.0"."""
        cdef kvn_cuda_facts facts
        self.facts_of(device_id, &facts)
        return facts.pci.decode(errors="replace")

    def capability(self, int device_id) -> tuple[int, int]:
        """Return the compute capability of a device, such as (9, 0)."""
        cdef kvn_cuda_facts facts
        self.facts_of(device_id, &facts)
        return facts.major, facts.minor

    def reaches(self, int device_id, int peer) -> bool:
        """Return whether a device can have peer access to the memory of `peer`."""
        cdef kvn_failure failure
        cdef int can = 0
        self.begin()
        with nogil:
            self.check(kvn_cuda_library_reaches(&self.library, device_id, peer, &can,
                                                &failure), &failure)
        return can != 0

    cdef int facts_of(self, int32_t device, kvn_cuda_facts *out) except -1:
        cdef kvn_failure failure
        self.begin()
        with nogil:
            self.check(kvn_cuda_library_facts(&self.library, device, out, &failure), &failure)
        return 0

    cdef str name_of(self, int32_t device):
        cdef kvn_cuda_facts facts
        self.facts_of(device, &facts)
        return facts.name.decode(errors="replace")

    def __repr__(self):
        return f"<CudaLibrary {self.path}, {self.context} context>"


class CopyTuning(NamedTuple):
    """Thresholds for copies in one direction, in bytes of the mean size of a batch's descriptors.

    Attributes:
        kernel_below: smaller descriptors are copied by one launch of kvplan's kernel.
        batch_below: larger ones below this by cuMemcpyBatchAsync; the rest by one copy each.
        blocks: maximum number of blocks of the kernel; 0: as many as the device runs at once.
    """

    kernel_below: int
    batch_below: int
    blocks: int


cdef int check_cuda(NativeDevice device) except -1:
    device.check_usable()
    if not isinstance(device.library, CudaLibrary):
        raise TypeError(f"device is {device!r}; it must be a CUDA device")
    return 0


def builtin_copy_tuning(str direction not None) -> CopyTuning:
    """Return the built-in thresholds, which were not measured on any device."""
    cdef kvn_cuda_tuning tuning = kvn_cuda_tuning_builtin(direction_of(direction))
    return CopyTuning(tuning.kernel_below, tuning.batch_below, tuning.blocks)


def copy_tuning(NativeDevice device not None, str direction not None) -> CopyTuning:
    """Return the thresholds of a device."""
    check_cuda(device)
    cdef kvn_cuda_tuning tuning = kvn_cuda_copies_tuning(&device.device, direction_of(direction))
    return CopyTuning(tuning.kernel_below, tuning.batch_below, tuning.blocks)


def tune_copies(NativeDevice device not None, str direction not None, tuning) -> None:
    """Set the thresholds of a device to `tuning`, a CopyTuning."""
    cdef kvn_cuda_tuning given
    check_cuda(device)
    given.kernel_below = unsigned("kernel_below", tuning.kernel_below)
    given.batch_below = unsigned("batch_below", tuning.batch_below)
    if not 0 <= tuning.blocks < 1 << 31:
        raise ValueError(f"blocks is {tuning.blocks}; it must be 0 to 2**31 - 1")
    given.blocks = tuning.blocks
    kvn_cuda_copies_tune(&device.device, direction_of(direction), given)


def limit_copies(
    NativeDevice device not None, *, bint batch_calls=True, uint32_t max_blocks=0
) -> None:
    """Limit the copies of a device in all directions.

    Args:
        device: a CUDA device.
        batch_calls: False: do not call cuMemcpyBatchAsync any more.
        max_blocks: maximum number of blocks of the kernel, instead of that of each CopyTuning, also
            between two GPUs; 0: keep them.
    """
    check_cuda(device)
    kvn_cuda_copies_limit(&device.device, not batch_calls, max_blocks)


def has_batches(NativeDevice device not None) -> bool:
    """Return False if the driver lacks or has refused the batch call, or a limit forbids it."""
    check_cuda(device)
    return kvn_cuda_copies_has_batch(&device.device)


def limit_registered(NativeDevice device not None, nbytes) -> None:
    """Limit the size of registrations of host memory; call it before any memory is pinned.

    Args:
        device: a CUDA device.
        nbytes: maximum size, a multiple of the page size; 64 GiB by default.
    """
    check_cuda(device)
    kvn_cuda_limit_registered(&device.device, unsigned("nbytes", nbytes))


def far_copy_tuning() -> CopyTuning:
    """Return the thresholds for copies between two GPUs, the same on all devices."""
    cdef kvn_cuda_tuning tuning = kvn_cuda_tuning_far()
    return CopyTuning(tuning.kernel_below, tuning.batch_below, tuning.blocks)


def copy_way(
    NativeDevice device not None, str direction not None, mean_nbytes, size_t count, *,
    bint is_far=False,
) -> str:
    """Return how `count` descriptors of a mean size are copied: "kernel", "batch" or "single".

    Methods that the driver has refused are excluded. `is_far`: one side is memory of another GPU.
    """
    check_cuda(device)
    cdef uint64_t mean = unsigned("mean_nbytes", mean_nbytes)
    return WAYS[
        kvn_cuda_copies_way(&device.device, direction_of(direction), is_far, mean, count)
    ]


@cython.final
@cython.auto_pickle(False)
@cython.no_gc_clear
cdef class Watch:
    """The identity of registered memory of the program, which transfers check while this lives.

    Attributes:
        is_replaced: True once a transfer or a registration has found other memory at the addresses.
            Reading it makes no call of the driver.
    """

    cdef NativeDevice device
    cdef kvn_cuda_watch *watch

    def __init__(self, *args, **kwargs):
        raise TypeError("a Watch comes from watch()")

    @property
    def is_replaced(self) -> bool:
        return kvn_cuda_watch_is_replaced(self.watch)

    def __dealloc__(self):
        if self.watch is not NULL and self.device.library.pid == getpid():
            kvn_cuda_watch_destroy(&self.device.device, self.watch)


def watch(NativeDevice device not None, addresses, nbytes) -> tuple[Watch, int]:
    """Watch ranges, so that no transfer uses memory that later replaces them.

    Args:
        device: device of the memory.
        addresses, nbytes: contiguous uint64 columns of the ranges.

    Returns:
        The watch, and the number of older watches whose memory proved to be replaced.
    """
    cdef Watch made = Watch.__new__(Watch)
    cdef Py_buffer columns[2]
    cdef kvn_failure failure
    cdef size_t replaced = 0
    cdef int status
    check_cuda(device)
    acquire_columns(columns, (addresses, nbytes), ("addresses", "nbytes"))
    made.device = device
    with nogil:
        status = kvn_cuda_watch_create(
            &device.device, <const uint64_t *>columns[0].buf, <const uint64_t *>columns[1].buf,
            columns[0].shape[0], &made.watch, &replaced, &failure
        )
    release_columns(columns, 2)
    device.library.check(status, &failure)
    return made, replaced

"""CUDA devices through the driver API: its library, opened at run time, and its errors."""

cimport cython
from libc.stdint cimport int32_t, uint32_t, uint64_t
from posix.unistd cimport getpid

from kvnative._crossing cimport acquire_columns, release_columns
from kvnative._device cimport DeviceLibrary, direction_of
from kvnative._host cimport kvn_failure, unsigned
from kvnative._native cimport KVN_UNSUPPORTED

import os
import threading
from typing import NamedTuple

from kvnative._backend import NativeError
from kvnative._device import Device, DeviceBuffer, DeviceError, HostBuffer, Pinned

# The one module to import for CUDA devices: what they are comes along.
__all__ = ["CopyTuning", "CudaError", "CudaLibrary", "Device", "DeviceBuffer", "HostBuffer",
           "Pinned", "Watch", "builtin_copy_tuning", "copy_tuning", "copy_way", "far_copy_tuning",
           "tune_copies", "watch"]

NAME = "libcuda.so.1"
CONTEXTS = ("primary", "own")

WAYS = ("kernel", "batch", "single")  # kvn_cuda_way

cdef dict LIBRARIES = {}  # (path, context) -> CudaLibrary: a library is never closed
LIBRARIES_LOCK = threading.Lock()


class CudaError(DeviceError):
    """A call of CUDA's driver failed: the message has the call, its code, and the driver's words.

    Attributes:
        code: the CUresult; 0 where the failure is not CUDA's.
        status: one of the KVN_ constants.
    """


@cython.final
@cython.auto_pickle(False)
cdef class CudaLibrary(DeviceLibrary):
    """The CUDA driver's library of this process, for devices that work in one kind of context.

    Attributes:
        path: the file that it was found in.
        version: the newest CUDA that the driver knows, "12.4" say; None: unknown.
        context: "primary" or "own".
        missing: names of the calls that later versions have and this one lacks.
    """

    def __init__(self, *args, **kwargs):
        raise TypeError("a CudaLibrary comes from CudaLibrary.load()")

    @staticmethod
    def load(path: str | None = None, str context not None = "primary") -> CudaLibrary:
        """Open the library, or return the one that is open.

        Args:
            path: its file, a folder that has it, or a name for the loader's own search; None:
                libcuda.so.1, as the loader finds it.
            context: that devices work in: "primary", where the program's frameworks allocate, whose
                memory is out of reach in another; "own".
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
        cdef char found[4096]
        cdef CudaLibrary self = CudaLibrary.__new__(CudaLibrary)
        cdef bytes encoded = os.fsencode(file)
        cdef const char *name = encoded
        cdef int status
        self.ops = &kvn_cuda_ops
        self.runtime = &self.library
        self.error = CudaError
        self.context = context
        with nogil:
            status = kvn_cuda_library_open(name, &self.library, &failure)
        self.check(status, &failure)
        self.library.own_context = context == "own"
        kvn_cuda_library_path(&self.library, found, sizeof(found))
        self.path = os.fsdecode(<bytes>found)
        self.missing = tuple(self.list_missing())
        version = kvn_cuda_library_version(&self.library)
        self.version = f"{version // 1000}.{version % 1000 // 10}" if version else None
        with LIBRARIES_LOCK:
            return LIBRARIES.setdefault((os.path.realpath(self.path), context), self)

    cdef list list_missing(self):
        cdef list names = []
        cdef const char *name = kvn_cuda_missing(&self.library.calls, 0)
        while name is not NULL:
            names.append(name.decode())
            name = kvn_cuda_missing(&self.library.calls, len(names))
        return names

    cdef int begin(self) except -1:
        cdef kvn_failure failure
        cdef int status
        self.check_process()
        if self.initialized:
            return 0
        with nogil:
            status = kvn_cuda_library_init(&self.library, &failure)
        self.check(status, &failure)
        self.initialized = True
        return 0

    def device_count(self) -> int:
        """Return how many devices this process can use."""
        cdef kvn_failure failure
        cdef uint32_t count = 0
        cdef int status
        self.begin()
        with nogil:
            status = kvn_cuda_library_devices(&self.library, &count, &failure)
        self.check(status, &failure)
        return count

    def uuid(self, int device_id) -> str:
        """Return what tells a device from all others, "GPU-" and 36 characters."""
        cdef kvn_cuda_facts facts
        self.facts_of(device_id, &facts)
        return facts.uuid.decode()

    def pci_id(self, int device_id) -> str:
        """Return where a device is plugged in, "0000:17:00.0" say."""
        cdef kvn_cuda_facts facts
        self.facts_of(device_id, &facts)
        return facts.pci.decode(errors="replace")

    def capability(self, int device_id) -> tuple[int, int]:
        """Return the compute capability of a device, (9, 0) say."""
        cdef kvn_cuda_facts facts
        self.facts_of(device_id, &facts)
        return facts.major, facts.minor

    def reaches(self, int device_id, int peer) -> bool:
        """Return whether a device can have peer access to the memory of another one."""
        cdef kvn_failure failure
        cdef int status, can = 0
        self.begin()
        with nogil:
            status = kvn_cuda_library_reaches(&self.library, device_id, peer, &can, &failure)
        self.check(status, &failure)
        return can != 0

    cdef int facts_of(self, int32_t device, kvn_cuda_facts *out) except -1:
        cdef kvn_failure failure
        cdef int status
        self.begin()
        with nogil:
            status = kvn_cuda_library_facts(&self.library, device, out, &failure)
        self.check(status, &failure)
        return 0

    cdef str name_of(self, int32_t device):
        cdef kvn_cuda_facts facts
        self.facts_of(device, &facts)
        return facts.name.decode(errors="replace")

    cdef object attribute_of(self, int32_t device, int number):
        cdef kvn_failure failure
        cdef int value = 0
        cdef int status
        with nogil:
            status = kvn_cuda_library_attribute(&self.library, device, number, &value, &failure)
        if status == KVN_UNSUPPORTED:
            return None
        self.check(status, &failure)
        return value

    def __repr__(self):
        return f"<CudaLibrary {self.path}, {self.context} context>"


class CopyTuning(NamedTuple):
    """Which way bytes are copied in one direction, by the mean size of a batch's descriptors.

    Attributes:
        kernel_below: bytes: batches of smaller ones go by one launch of kvplan's kernel.
        batch_below: then these by cuMemcpyBatchAsync; what is larger by a copy for each descriptor.
        blocks: of the kernel, at most; 0: as many as the device runs at one time.
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
    """Return what is built in: thought out, and measured on no device."""
    cdef kvn_cuda_tuning tuning = kvn_cuda_tuning_builtin(direction_of(direction))
    return CopyTuning(tuning.kernel_below, tuning.batch_below, tuning.blocks)


def copy_tuning(NativeDevice device not None, str direction not None) -> CopyTuning:
    """Return what a device copies by."""
    check_cuda(device)
    cdef kvn_cuda_tuning tuning = kvn_cuda_copies_tuning(&device.device, direction_of(direction))
    return CopyTuning(tuning.kernel_below, tuning.batch_below, tuning.blocks)


def tune_copies(NativeDevice device not None, str direction not None, tuning) -> None:
    """Let a device copy by `tuning`, a CopyTuning, from now on."""
    cdef kvn_cuda_tuning given
    check_cuda(device)
    given.kernel_below = unsigned("kernel_below", tuning.kernel_below)
    given.batch_below = unsigned("batch_below", tuning.batch_below)
    if not 0 <= tuning.blocks < 1 << 31:
        raise ValueError(f"blocks is {tuning.blocks}; it must be 0 to 2**31 - 1")
    given.blocks = tuning.blocks
    kvn_cuda_copies_tune(&device.device, direction_of(direction), given)


def far_copy_tuning() -> CopyTuning:
    """Return what copies between two GPUs go by, on all devices."""
    cdef kvn_cuda_tuning tuning = kvn_cuda_tuning_far()
    return CopyTuning(tuning.kernel_below, tuning.batch_below, tuning.blocks)


def copy_way(
    NativeDevice device not None, str direction not None, mean_nbytes, size_t count, *,
    bint is_far=False,
) -> str:
    """Return how `count` descriptors of that mean size go: "kernel", "batch" or "single".

    What the driver has refused so far is left out. `is_far`: whether one side is another GPU's.
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
    """What memory of the program was when it was registered: until this is let go.

    Attributes:
        is_replaced: whether a transfer, or another registration, has found other memory at its
            addresses; no call of the driver.
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
    """Let no transfer take other memory for what is at these addresses now.

    Args:
        device: that has the memory.
        addresses, nbytes: of each range: uint64, contiguous.

    Returns:
        The watch, and how many others are known from now on to be of memory that was replaced.
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

# Declarations for Cython modules that call the driver of CUDA devices.
from libc.stdint cimport int32_t, uint32_t, uint64_t

from kvnative._device cimport Device as NativeDevice
from kvnative._device cimport DeviceLibrary, kvn_device, kvn_device_ops
from kvnative._host cimport kvn_failure


cdef extern from "kvnative/cuda.h" nogil:
    ctypedef struct kvn_cuda:
        pass


cdef extern from "cuda/library.h" nogil:
    ctypedef struct kvn_cuda_library:
        kvn_cuda calls
        bint own_context
    ctypedef struct kvn_cuda_facts:
        char name[128]
        char uuid[41]
        char pci[32]
        int major
        int minor

    int kvn_cuda_library_open(const char *file, kvn_cuda_library *out, kvn_failure *failure)
    int kvn_cuda_library_init(const kvn_cuda_library *library, kvn_failure *failure)
    int kvn_cuda_library_version(const kvn_cuda_library *library)
    int kvn_cuda_library_facts(
        const kvn_cuda_library *library, int32_t device, kvn_cuda_facts *out, kvn_failure *failure
    )
    int kvn_cuda_library_reaches(
        const kvn_cuda_library *library, int32_t device, int32_t peer, int *can,
        kvn_failure *failure
    )


cdef extern from "cuda/device.h" nogil:
    const kvn_device_ops kvn_cuda_ops


cdef extern from "cuda/reach.h" nogil:
    ctypedef struct kvn_cuda_watch:
        pass

    int kvn_cuda_watch_create(
        const kvn_device *device, const uint64_t *addresses, const uint64_t *nbytes, size_t count,
        kvn_cuda_watch **out, size_t *replaced, kvn_failure *failure
    )
    void kvn_cuda_watch_destroy(const kvn_device *device, kvn_cuda_watch *watch)
    bint kvn_cuda_watch_is_replaced(const kvn_cuda_watch *watch)


cdef extern from "cuda/copies.h" nogil:
    ctypedef struct kvn_cuda_tuning:
        uint64_t kernel_below
        uint64_t batch_below
        uint32_t blocks

    kvn_cuda_tuning kvn_cuda_tuning_builtin(int direction)
    kvn_cuda_tuning kvn_cuda_copies_tuning(const kvn_device *device, int direction)
    void kvn_cuda_copies_tune(const kvn_device *device, int direction, kvn_cuda_tuning tuning)
    void kvn_cuda_copies_limit(const kvn_device *device, bint without_batch, uint32_t max_blocks)
    bint kvn_cuda_copies_has_batch(const kvn_device *device)
    int kvn_cuda_copies_way(
        const kvn_device *device, int direction, bint is_far, uint64_t mean_nbytes, size_t count
    )
    kvn_cuda_tuning kvn_cuda_tuning_far()


cdef extern from "cuda/pin.h" nogil:
    void kvn_cuda_limit_registered(const kvn_device *device, uint64_t nbytes)


cdef class CudaLibrary(DeviceLibrary):
    cdef kvn_cuda_library library
    cdef bint initialized
    cdef readonly str context

    @staticmethod
    cdef CudaLibrary open_file(str file, str context)
    cdef int facts_of(self, int32_t device, kvn_cuda_facts *out) except -1


# Raise TypeError unless this is a CUDA device, and NativeError if it cannot be used here.
cdef int check_cuda(NativeDevice device) except -1

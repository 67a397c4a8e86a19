# What other Cython modules may see of ACL: cimport this to work with a Device and its streams.
from libc.stdint cimport int32_t, uint32_t, uint64_t

from kvnative._acl_library cimport AclLibrary, kvn_acl_library
from kvnative._host cimport kvn_failure
from kvnative._native cimport kvn_backend


cdef extern from "device/ops.h" nogil:
    enum:
        KVN_MEMORY_PAGEABLE
        KVN_MEMORY_PINNED
        KVN_MEMORY_DEVICE
        KVN_MEMORY_MANAGED
    ctypedef struct kvn_memory_place:
        int kind
        uint32_t device
        uint32_t page_nbytes
    ctypedef struct kvn_device_ops:
        pass


cdef extern from "device/device.h" nogil:
    ctypedef struct kvn_device:
        int32_t id

    int kvn_device_open(
        const kvn_device_ops *ops, const void *runtime, int32_t id, kvn_device *out,
        kvn_failure *failure
    )
    void kvn_device_close(kvn_device *device)
    int kvn_device_allocate(
        const kvn_device *device, uint64_t nbytes, void **out, kvn_failure *failure
    )
    int kvn_device_free(const kvn_device *device, void *address, kvn_failure *failure)
    int kvn_device_pin(
        kvn_device *device, uint64_t address, uint64_t nbytes, kvn_failure *failure
    )
    int kvn_device_unpin(kvn_device *device, uint64_t address, kvn_failure *failure)
    int kvn_device_locate(
        const kvn_device *device, uint64_t address, kvn_memory_place *out, kvn_failure *failure
    )
    int kvn_device_copy(
        const kvn_device *device, int direction, uint64_t dst, uint64_t src, uint64_t nbytes,
        kvn_failure *failure
    )
    int kvn_device_clear(
        const kvn_device *device, uint64_t address, uint64_t nbytes, kvn_failure *failure
    )
    int kvn_device_memory(
        const kvn_device *device, size_t *free_nbytes, size_t *total_nbytes, kvn_failure *failure
    )
    void kvn_device_fallback(kvn_device *device, char *out, size_t room)


cdef extern from "device/channel.h" nogil:
    ctypedef struct kvn_channel:
        pass

    int kvn_channel_create(kvn_device *device, kvn_channel **out, kvn_failure *failure)
    void kvn_channel_destroy(kvn_channel *channel)


cdef extern from "device/stream_backend.h" nogil:
    enum:
        KVN_MAX_CHANNELS


cdef extern from "device/copy.h" nogil:
    kvn_backend *kvn_device_copy_create(
        kvn_device *device, kvn_channel **channels, unsigned num_channels, int direction
    )


cdef extern from "acl/ops.h" nogil:
    const kvn_device_ops kvn_acl_ops


cdef class Device:
    cdef readonly AclLibrary library
    cdef kvn_device device     # stays in place: channels and backends point to it
    cdef bint opened
    cdef bint closed
    cdef object lock
    cdef object channels       # direction -> Channels, weak
    cdef object __weakref__

    @staticmethod
    cdef Device open_number(AclLibrary library, int32_t number)
    # NativeError in a forked child, and when it is closed.
    cdef int check_usable(self) except -1
    cdef kvn_memory_place look_up(self, object address) except *
    cdef int copy(self, object address, object buffer, bint to_device) except -1


cdef class DeviceBuffer:
    cdef readonly Device device
    cdef void *start
    cdef readonly uint64_t nbytes

# What other Cython modules may see of ACL: cimport this to work with a Device and its streams.
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from posix.types cimport pid_t

from kvnative._host cimport kvn_failure
from kvnative._native cimport kvn_backend


cdef extern from "kvnative/acl.h" nogil:
    ctypedef void *aclrtContext
    ctypedef void *aclrtStream
    enum:
        KVN_ACL_OK
        KVN_ACL_HOST_TO_DEVICE
        KVN_ACL_DEVICE_TO_HOST
        KVN_ACL_LOCATION_HOST
        KVN_ACL_LOCATION_DEVICE
        KVN_ACL_LOCATION_UNREGISTERED
        KVN_ACL_LOCATION_MANAGED
        KVN_ACL_LOCATION_HOST_NUMA
    ctypedef struct kvn_acl_location:
        uint32_t id
        int32_t type
    ctypedef struct kvn_acl:
        pass


cdef extern from "acl_library.h" nogil:
    ctypedef struct kvn_acl_library:
        kvn_acl calls
        pid_t pid

    int kvn_acl_library_open(
        const char *const *paths, size_t num_paths, kvn_acl_library *out, kvn_failure *failure
    )
    void kvn_acl_library_path(const kvn_acl_library *library, char *out, size_t room)
    const char *kvn_acl_missing(const kvn_acl *acl, size_t n)
    int kvn_acl_library_init(const kvn_acl_library *library, int *first, kvn_failure *failure)
    int kvn_acl_library_finalize(const kvn_acl_library *library, kvn_failure *failure)
    int kvn_acl_library_check(const kvn_acl_library *library, kvn_failure *failure)
    int kvn_acl_library_devices(
        const kvn_acl_library *library, uint32_t *count, kvn_failure *failure
    )
    const char *kvn_acl_library_soc(const kvn_acl_library *library)
    int kvn_acl_library_interface(const kvn_acl_library *library, int32_t *version)
    int kvn_acl_library_physical(
        const kvn_acl_library *library, int32_t logical, int32_t *physical
    )
    int kvn_acl_library_attribute(
        const kvn_acl_library *library, int32_t device, int attribute, int64_t *value,
        kvn_failure *failure
    )


cdef extern from "acl_device.h" nogil:
    ctypedef struct kvn_device:
        const kvn_acl *acl
        int32_t id

    int kvn_device_open(
        const kvn_acl_library *library, int32_t id, kvn_device *out, kvn_failure *failure
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
        const kvn_device *device, uint64_t address, kvn_acl_location *out, kvn_failure *failure
    )
    int kvn_device_copy(
        const kvn_device *device, uint64_t dst, uint64_t src, uint64_t nbytes, int kind,
        kvn_failure *failure
    )
    int kvn_device_clear(
        const kvn_device *device, uint64_t address, uint64_t nbytes, kvn_failure *failure
    )
    int kvn_device_memory(
        const kvn_device *device, size_t *free_nbytes, size_t *total_nbytes, kvn_failure *failure
    )
    void kvn_device_fallback(kvn_device *device, char *out, size_t room)


cdef extern from "channel.h" nogil:
    ctypedef struct kvn_channel:
        pass

    int kvn_channel_create(kvn_device *device, kvn_channel **out, kvn_failure *failure)
    void kvn_channel_destroy(kvn_channel *channel)


cdef extern from "streamed.h" nogil:
    enum:
        KVN_MAX_CHANNELS


cdef extern from "acl_copy.h" nogil:
    kvn_backend *kvn_acl_copy_create(
        kvn_device *device, kvn_channel **channels, unsigned num_channels, int direction
    )


# Raises what `failure` says of a call of ACL: AclError, or ValueError for an argument that was
# refused before any call.
cdef int check_acl(int status, const kvn_failure *failure) except -1


cdef class AclLibrary:
    cdef kvn_acl_library library
    cdef object lock
    cdef object devices        # id -> Device, weak
    cdef bint initialized
    cdef bint ours             # this process was not initialized by anybody else
    cdef readonly str path
    cdef readonly object version
    cdef readonly tuple missing
    cdef object __weakref__

    @staticmethod
    cdef AclLibrary open_files(list files)
    cdef list list_missing(self)
    cdef object interface_version(self)
    # NativeError in a forked child.
    cdef int check_process(self) except -1
    # aclInit, once.
    cdef int begin(self) except -1


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


cdef class DeviceBuffer:
    cdef readonly Device device
    cdef void *start
    cdef readonly uint64_t nbytes

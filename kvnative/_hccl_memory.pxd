# Declarations of the sources behind _hccl_memory, and its classes.
from libc.stdint cimport int32_t, uint32_t, uint64_t

from kvnative._acl cimport AclLibrary, kvn_acl
from kvnative._crossing cimport kvn_symbols
from kvnative._device cimport Device, kvn_device
from kvnative._host cimport kvn_failure


cdef extern from "hccl/library.h" nogil:
    ctypedef struct kvn_hccl_calls:
        pass
    ctypedef struct kvn_hixl_calls:
        pass
    ctypedef struct kvn_hccl:
        kvn_hccl_calls calls
        kvn_hixl_calls hixl
        bint is_per_comm
        bint is_client_server
        char driver[32]

    int kvn_hccl_open(
        const char *path, const kvn_acl *acl, const char *soc_name, kvn_hccl *out,
        kvn_failure *failure
    )
    void kvn_hccl_set_driver(
        kvn_hccl *hccl, const char *version, uint64_t most_host, uint64_t most_device
    )
    int kvn_hixl_open(const char *path, const kvn_acl *acl, kvn_hccl *out, kvn_failure *failure)
    const kvn_symbols kvn_hccl_symbols, kvn_hixl_symbols


cdef extern from "hccl/server.h" nogil:
    ctypedef struct kvn_hixl_endpoint:
        pass
    ctypedef struct kvn_hixl_server:
        void *handle

    int kvn_hixl_server_open(
        kvn_hccl *hccl, const kvn_device *device, const kvn_hixl_endpoint *endpoints,
        uint32_t num_endpoints, const char *ip, uint32_t port, kvn_hixl_server *out,
        kvn_failure *failure
    )
    int kvn_hixl_server_close(kvn_hixl_server *server, kvn_failure *failure)


cdef extern from "acl/ops.h" nogil:
    int kvn_acl_try_map(
        const kvn_device *device, uint64_t address, uint64_t nbytes, kvn_failure *failure
    )


cdef extern from "hccl/region.h" nogil:
    ctypedef struct kvn_region:
        uint64_t address
        uint64_t nbytes
        bint on_device
        uint32_t num_bound
        bint is_open

    int kvn_region_open(
        kvn_hccl *hccl, const kvn_device *device, uint64_t address, uint64_t nbytes,
        bint on_device, kvn_region *out, kvn_failure *failure
    )
    void kvn_hccl_registered(kvn_hccl *hccl, int32_t device_id, uint64_t *nbytes)
    int kvn_region_close(kvn_region *region, kvn_failure *failure)


cdef extern from "hccl/staging.h" nogil:
    ctypedef struct kvn_staging:
        uint64_t slot_nbytes
        uint32_t num_sets
        bint is_open

    int kvn_staging_check(uint64_t slot_nbytes, uint64_t sets, kvn_failure *failure)
    int kvn_staging_open(
        kvn_device *device, uint64_t address, uint64_t slot_nbytes, uint32_t num_sets,
        kvn_staging *out, kvn_failure *failure
    )
    int kvn_staging_close(kvn_staging *staging, kvn_failure *failure)
    void kvn_staging_free(kvn_staging *staging)


cdef extern from "hccl/communicator.h" nogil:
    enum:
        KVN_MAX_GUARDS


# Raise `failure` as HcclError.
cdef int check_hccl(int status, const kvn_failure *failure) except -1 nogil
# Likewise, but raise ValueError for an argument that was refused before any call.
cdef int check_arguments(int status, const kvn_failure *failure) except -1 nogil
# Raise TypeError unless this is an Ascend device, and NativeError if it cannot be used here.
cdef int check_device(Device device) except -1


cdef class HcclLibrary:
    cdef readonly AclLibrary acl  # declared before `hccl`, which uses this library
    cdef kvn_hccl hccl            # stays in place
    cdef readonly str path
    cdef readonly tuple missing

    @staticmethod
    cdef HcclLibrary open_file(AclLibrary acl, str file, bint client_server)


cdef class Region:
    cdef HcclLibrary library
    cdef Device device
    cdef object owner             # of the memory
    cdef kvn_region region        # stays in place: communicators and the library's list point to it
    cdef bint made


cdef class Guards:
    cdef uint64_t *words          # `count` addresses, then as many expected words
    cdef uint32_t count


cdef class Server:
    cdef HcclLibrary library
    cdef Device device
    cdef kvn_hixl_server server   # stays in place: the library points to it
    cdef bint made


cdef class Staging:
    cdef Device device
    cdef readonly Region region   # owns the memory
    cdef kvn_staging staging      # stays in place: backends point to it
    cdef bint made

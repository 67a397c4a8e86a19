# Declarations for Cython modules that work with workers and endpoints of UCX.
from libc.stdint cimport int64_t, uint32_t, uint64_t

from kvnative._host cimport kvn_failure


cdef extern from "kvnative/ucx.h" nogil:
    enum:
        KVN_UCS_MEMORY_HOST
        KVN_UCS_MEMORY_CUDA


cdef extern from "ucx/library.h" nogil:
    ctypedef struct kvn_ucx_library:
        unsigned version[3]
        const char *path

    ctypedef struct kvn_ucx_setting:
        const char *name
        const char *value

    int kvn_ucx_library_open(const char *path, kvn_ucx_library *out, kvn_failure *failure)


cdef extern from "ucx/worker.h" nogil:
    enum:
        KVN_UCX_TICKETS
    ctypedef struct kvn_ucx_worker:
        const void *tickets
        const void *address
        size_t address_nbytes
        const char *transports

    int kvn_ucx_worker_create(
        kvn_ucx_library *library, const kvn_ucx_setting *settings, size_t num_settings,
        const char *name, kvn_ucx_worker **out, kvn_failure *failure
    )
    void kvn_ucx_worker_stop(kvn_ucx_worker *self)
    void kvn_ucx_worker_release(kvn_ucx_worker *self)
    bint kvn_ucx_worker_is_forked(const kvn_ucx_worker *self)


cdef extern from "ucx/endpoint.h" nogil:
    enum:
        KVN_UCX_CONNECTED
    ctypedef struct kvn_ucx_remote:
        const void *address
        size_t address_nbytes
        uint64_t generations
        uint64_t num_slots
        uint64_t tickets
        const void *generations_key
        size_t generations_key_nbytes
        const void *tickets_key
        size_t tickets_key_nbytes
        uint32_t tag
    ctypedef struct kvn_ucx_endpoint:
        int state
        int death_fd
        const char *transport

    int kvn_ucx_endpoint_create(
        kvn_ucx_worker *worker, const kvn_ucx_remote *remote, kvn_ucx_endpoint **out,
        kvn_failure *failure
    )
    int kvn_ucx_endpoint_connect(
        kvn_ucx_endpoint *self, int64_t deadline_ns, kvn_failure *failure
    )
    void kvn_ucx_endpoint_fail(
        kvn_ucx_endpoint *self, int status, int code, const char *message
    )
    void kvn_ucx_endpoints_close(kvn_ucx_worker *worker)
    bint kvn_ucx_endpoint_has_failed(const kvn_ucx_endpoint *self, kvn_failure *why)
    void kvn_ucx_endpoint_release(kvn_ucx_endpoint *self)


cdef extern from "ucx/tickets.h" nogil:
    int kvn_ucx_endpoint_read_tickets(
        kvn_ucx_endpoint *self, int64_t deadline_ns, uint64_t *out, kvn_failure *failure
    )


cdef extern from "ucx/region.h" nogil:
    ctypedef struct kvn_ucx_region:
        const char *key
        size_t key_nbytes
    ctypedef struct kvn_ucx_regions:
        pass

    void kvn_ucx_regions_init(kvn_ucx_regions *self, kvn_ucx_worker *worker)
    void kvn_ucx_regions_fini(kvn_ucx_regions *self)
    int kvn_ucx_region_use(
        kvn_ucx_regions *self, uint64_t address, uint64_t nbytes, int memory_type,
        kvn_ucx_region **out, kvn_failure *failure
    )
    void kvn_ucx_region_drop(kvn_ucx_regions *self, kvn_ucx_region *region)


cdef class UcxLibrary:
    cdef kvn_ucx_library library
    cdef readonly str path
    cdef readonly tuple version


cdef class UcxWorker:
    cdef UcxLibrary library
    cdef kvn_ucx_worker *worker
    cdef kvn_ucx_regions regions
    cdef readonly bytes address
    cdef readonly str transports
    cdef object __weakref__

    # Raise TypeError unless `__init__` has succeeded, and NativeError in a forked child.
    cdef int check_made(self) except -1


cdef class UcxEndpoint:
    cdef readonly UcxWorker worker
    cdef kvn_ucx_endpoint *endpoint
    cdef object __weakref__

    # See UcxWorker.
    cdef int check_made(self) except -1


# Raise `failure` as UcxError, or as ValueError for an argument.
cdef int check_ucx(int status, const kvn_failure *failure) except -1 nogil
# Return UCX's number of a memory type; ValueError names the argument.
cdef int memory_type(str name, kind) except -1

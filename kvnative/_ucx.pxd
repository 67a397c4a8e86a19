# Declarations of the sources behind _ucx.
from libc.stdint cimport int64_t, uint32_t, uint64_t

from kvnative._host cimport kvn_failure
from kvnative._native cimport kvn_backend


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
    int kvn_ucx_endpoint_read_tickets(
        kvn_ucx_endpoint *self, int64_t deadline_ns, uint64_t *out, kvn_failure *failure
    )
    void kvn_ucx_endpoint_fail(
        kvn_ucx_endpoint *self, int status, int code, const char *message
    )
    void kvn_ucx_endpoints_close(kvn_ucx_worker *worker)
    bint kvn_ucx_endpoint_has_failed(const kvn_ucx_endpoint *self, kvn_failure *why)
    void kvn_ucx_endpoint_release(kvn_ucx_endpoint *self)


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


cdef extern from "ucx/transfer.h" nogil:
    ctypedef struct kvn_ucx_peer_range:
        uint64_t address
        uint64_t nbytes
        uint64_t slot
        uint64_t generation
        uint64_t key

    ctypedef struct kvn_ucx_lease:
        uint64_t slot
        uint64_t generation
        char name[128]


cdef extern from "ucx/backend.h" nogil:
    ctypedef struct kvn_ucx_packed_key:
        const void *bytes
        size_t nbytes
    ctypedef struct kvn_ucx_backend_options:
        int direction
        const kvn_ucx_peer_range *ranges
        uint64_t num_ranges
        const kvn_ucx_packed_key *keys
        uint64_t num_keys
        int local_type

    int kvn_ucx_backend_create(
        kvn_ucx_regions *regions, kvn_ucx_endpoint *endpoint,
        const kvn_ucx_backend_options *options, kvn_backend **out, kvn_failure *failure
    )
    int kvn_ucx_backend_create_leased(
        const kvn_backend *whole, const kvn_ucx_lease *leases, uint64_t num_leases,
        kvn_backend **out, kvn_failure *failure
    )

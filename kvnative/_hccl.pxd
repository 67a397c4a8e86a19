# Declarations of the sources behind _hccl, and its class.
from libc.stdint cimport uint32_t, uint64_t

from kvnative._device cimport Device, kvn_device
from kvnative._hccl_memory cimport (
    HcclLibrary, kvn_hccl, kvn_hixl_endpoint, kvn_region, kvn_staging
)
from kvnative._host cimport kvn_failure
from kvnative._native cimport kvn_backend


cdef extern from "kvnative/hccl.h" nogil:
    const uint32_t KVN_HCCL_NOT_SET


cdef extern from "hccl/communicator.h" nogil:
    enum:
        KVN_CLIENT_MAX_OPERATIONS
        KVN_COMM_CLOSED
    ctypedef struct kvn_communicator:
        pass
    ctypedef struct kvn_hixl_peer:
        kvn_hixl_endpoint local
        kvn_hixl_endpoint remote
        const char *ip
        uint32_t port
    ctypedef struct kvn_communicator_options:
        const char *rank_table
        uint32_t rank
        uint32_t remote_rank
        const char *name
        uint32_t traffic_class
        uint32_t service_level
        uint32_t max_batch
        const kvn_hixl_peer *peer

    int kvn_communicator_create(
        kvn_hccl *hccl, kvn_device *device, const kvn_communicator_options *options,
        kvn_communicator **out, kvn_failure *failure
    )
    void kvn_communicator_destroy(kvn_communicator *self)
    int kvn_communicator_bind(kvn_communicator *self, kvn_region *region, kvn_failure *failure)
    int kvn_communicator_unbind(kvn_communicator *self, kvn_region *region, kvn_failure *failure)
    int kvn_communicator_prepare(kvn_communicator *self, int timeout_s, kvn_failure *failure)
    int kvn_communicator_close(kvn_communicator *self, kvn_failure *failure)
    void kvn_communicator_cancel(kvn_communicator *self, const char *message)
    int kvn_communicator_state_of(kvn_communicator *self)
    bint kvn_communicator_is_disturbed(const kvn_communicator *self)
    void kvn_communicator_disturb(kvn_communicator *self)


cdef extern from "hccl/transfer.h" nogil:
    enum:
        KVN_HCCL_MAX_BATCH
        KVN_HCCL_TICKETS
    ctypedef struct kvn_tickets:
        uint64_t address

    ctypedef struct kvn_lease_name:
        char text[128]

    ctypedef struct kvn_transfer_options:
        int direction
        const uint64_t *guard_addresses
        const uint64_t *guard_words
        uint32_t num_guards
        const kvn_lease_name *lease_names
        uint32_t num_leases
        kvn_tickets *tickets
        uint32_t tag
        kvn_staging *staging
        bint local_on_device

    kvn_backend *kvn_transfer_create(
        kvn_communicator *communicator, const kvn_transfer_options *options
    )


cdef class Tickets:
    cdef object owner
    cdef kvn_tickets tickets


cdef class Communicator:
    cdef HcclLibrary library
    cdef Device device
    cdef kvn_communicator *communicator
    cdef list bound               # regions, kept alive while they are bound
    cdef object lock              # of `bound`
    cdef readonly str name
    cdef readonly int rank
    cdef readonly int remote_rank

    cdef int check_made(self) except -1
    cdef int let_go(self) except -1

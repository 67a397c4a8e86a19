# Declarations of the sources behind _hccl, and its classes.
from libc.stdint cimport int32_t, uint32_t, uint64_t

from kvnative._acl cimport AclLibrary, Device, DeviceBuffer, kvn_acl, kvn_device
from kvnative._host cimport kvn_failure
from kvnative._native cimport kvn_backend


cdef extern from "kvnative/hccl.h" nogil:
    const uint32_t KVN_HCCL_NOT_SET


cdef extern from "hccl_library.h" nogil:
    ctypedef struct kvn_hccl:
        bint is_per_comm

    int kvn_hccl_open(
        const char *path, const kvn_acl *acl, const char *soc_name, kvn_hccl *out,
        kvn_failure *failure
    )
    void kvn_hccl_path(const kvn_hccl *hccl, char *out, size_t room)
    const char *kvn_hccl_missing(const kvn_hccl *hccl, size_t n)


cdef extern from "hccl_region.h" nogil:
    ctypedef struct kvn_region:
        uint64_t address
        uint64_t nbytes
        bint on_device
        bint is_open

    int kvn_region_open(
        kvn_hccl *hccl, const kvn_device *device, uint64_t address, uint64_t nbytes,
        bint on_device, kvn_region *out, kvn_failure *failure
    )
    int kvn_region_close(kvn_region *region, kvn_failure *failure)


cdef extern from "hccl_communicator.h" nogil:
    enum:
        KVN_MAX_GUARDS
        KVN_COMM_READY
        KVN_COMM_CLOSED
    ctypedef struct kvn_communicator:
        pass
    ctypedef struct kvn_communicator_options:
        const char *rank_table
        uint32_t rank
        uint32_t remote_rank
        const char *name
        uint32_t traffic_class
        uint32_t service_level
        uint32_t max_batch

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
    int32_t kvn_communicator_async_error(kvn_communicator *self, char *text, size_t room)


cdef extern from "hccl_staging.h" nogil:
    ctypedef struct kvn_staging:
        uint64_t slot_nbytes
        uint32_t slots
        uint32_t num_lanes
        bint is_open

    int kvn_staging_check(
        uint64_t slot_nbytes, uint64_t slots, uint64_t lanes, kvn_failure *failure
    )
    int kvn_staging_open(
        kvn_device *device, uint64_t address, uint64_t slot_nbytes, uint32_t slots,
        uint32_t num_lanes, kvn_staging *out, kvn_failure *failure
    )
    int kvn_staging_close(kvn_staging *staging, kvn_failure *failure)
    void kvn_staging_free(kvn_staging *staging)


cdef extern from "hccl_passage.h" nogil:
    enum:
        KVN_HCCL_MAX_BATCH


cdef extern from "hccl_transfer.h" nogil:
    ctypedef struct kvn_transfer_options:
        int direction
        const uint64_t *guard_addresses
        const uint64_t *guard_words
        uint32_t num_guards
        kvn_staging *staging
        bint local_on_device

    kvn_backend *kvn_transfer_create(
        kvn_communicator *communicator, const kvn_transfer_options *options
    )


cdef class HcclLibrary:
    cdef readonly AclLibrary acl  # before the calls, which lead into it
    cdef kvn_hccl hccl            # stays in place
    cdef readonly str path
    cdef readonly tuple missing

    @staticmethod
    cdef HcclLibrary open_file(AclLibrary acl, str file)


cdef class Region:
    cdef HcclLibrary library
    cdef Device device
    cdef object owner             # of the memory
    cdef kvn_region region        # stays in place: communicators and the library's list point to it
    cdef bint made


cdef class Guards:
    cdef uint64_t *words          # count addresses, then as many expected words
    cdef uint32_t count


cdef class Staging:
    cdef Device device
    cdef readonly Region region   # owns the memory
    cdef kvn_staging staging      # stays in place: backends point to it
    cdef bint made


cdef class Communicator:
    cdef HcclLibrary library
    cdef Device device
    cdef kvn_communicator *communicator
    cdef list bound               # regions: they stay as long as they are bound
    cdef object lock              # of `bound`
    cdef readonly str name
    cdef readonly int rank
    cdef readonly int remote_rank

    cdef int check_made(self) except -1
    cdef int let_go(self) except -1

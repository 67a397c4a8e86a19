# Declarations of the sources behind _ucx_one_sided, and its classes.
from libc.stdint cimport uint64_t

from kvnative._host cimport kvn_failure
from kvnative._native cimport kvn_backend
from kvnative._ucx cimport UcxEnd, kvn_ucx_end, kvn_ucx_link


cdef extern from "kvnative/ucx.h" nogil:
    enum:
        KVN_UCS_MEMORY_HOST
        KVN_UCS_MEMORY_CUDA
        KVN_UCS_MEMORY_ROCM


cdef extern from "ucx_region.h" nogil:
    ctypedef struct kvn_ucx_region:
        const char *key
        size_t key_nbytes
    ctypedef struct kvn_ucx_regions:
        pass

    void kvn_ucx_regions_init(kvn_ucx_regions *self, kvn_ucx_end *end)
    void kvn_ucx_regions_fini(kvn_ucx_regions *self)
    int kvn_ucx_region_use(
        kvn_ucx_regions *self, uint64_t address, uint64_t nbytes, int memory_type,
        kvn_ucx_region **out, kvn_failure *failure
    )
    void kvn_ucx_region_drop(kvn_ucx_regions *self, kvn_ucx_region *region)


cdef extern from "ucx_one_sided.h" nogil:
    ctypedef struct kvn_ucx_mover:
        pass
    ctypedef struct kvn_ucx_range:
        uint64_t address
        uint64_t nbytes
        uint64_t slot
        uint64_t generation
        uint64_t key
    ctypedef struct kvn_ucx_packed_key:
        const void *bytes
        size_t nbytes
    ctypedef struct kvn_ucx_one_sided_options:
        int direction
        const kvn_ucx_range *ranges
        uint64_t num_ranges
        const kvn_ucx_packed_key *keys
        uint64_t num_keys
        uint64_t board
        uint64_t board_slots
        uint64_t board_key
        int local_type

    int kvn_ucx_mover_create(kvn_ucx_end *end, kvn_ucx_mover **out, kvn_failure *failure)
    int kvn_ucx_one_sided_create(
        kvn_ucx_mover *mover, kvn_ucx_regions *regions, kvn_ucx_link *link,
        const kvn_ucx_one_sided_options *options, kvn_backend **out, kvn_failure *failure
    )


cdef class UcxRegions:
    cdef readonly UcxEnd end
    cdef kvn_ucx_mover *mover      # the end's
    cdef kvn_ucx_regions regions
    cdef bint made

    cdef int check_made(self) except -1


cdef class UcxRegion:
    cdef readonly UcxRegions regions
    cdef object owner
    cdef kvn_ucx_region *region    # NULL once it is released
    cdef readonly uint64_t address
    cdef readonly uint64_t nbytes
    cdef readonly str kind
    cdef readonly bytes rkey

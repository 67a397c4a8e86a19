# Declarations of kvnative/src/core/lower.h, as C has them.
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stddef cimport size_t

cdef extern from "core/gate.h" nogil:
    ctypedef struct kvn_gate:
        pass

cdef extern from "kvnative/descriptor.h" nogil:
    enum:
        KVN_CALLER_RETURNS
        KVN_CALLER_WAITS
    ctypedef struct kvn_batch_end:
        pass
    ctypedef struct kvn_columns:
        const uint64_t *dst
        const uint64_t *src
        const uint64_t *nbytes
        size_t count
        uint64_t first
        uint32_t caller
        kvn_gate *after
        kvn_batch_end *end

cdef extern from "core/lower.h" nogil:
    enum:
        KVN_MAX_REPEATS
    ctypedef struct kvn_repeat:
        const uint64_t *counts
        uint64_t src_stride
        uint64_t dst_stride
    ctypedef struct kvn_recipe:
        const uint64_t *src_offsets
        const uint64_t *dst_offsets
        const uint64_t *nbytes
        size_t num_segments
        kvn_repeat repeats[2]
        size_t num_repeats
        size_t num_runs
        const uint64_t *src_bases
        const uint64_t *dst_bases
        size_t num_pairs
    ctypedef enum kvn_argument:
        KVN_ARG_NBYTES
        KVN_ARG_SRC_OFFSETS
        KVN_ARG_DST_OFFSETS
        KVN_ARG_SRC_BASES
        KVN_ARG_DST_BASES
        KVN_NUM_ARGUMENTS
        KVN_ARG_COUNTS
    ctypedef struct kvn_refusal:
        kvn_argument argument
        size_t index
        uint64_t value
        uint64_t most
    size_t kvn_column_stride(size_t count)
    int kvn_lower_count(kvn_recipe *recipe, size_t *nbytes, kvn_refusal *refusal)
    int kvn_lower_check(const kvn_recipe *recipe, uint64_t *total_nbytes, kvn_refusal *refusal)
    void kvn_lower(const kvn_recipe *recipe, uint64_t *out)
    void *kvn_descriptors_alloc(size_t nbytes)
    void kvn_descriptors_free(void *buffer)
    enum:
        KVN_BEING_WRITTEN
    int kvn_lease_read(int64_t *leases)
    void kvn_lease_done(int64_t *leases)
    int kvn_lease_write(int64_t *leases)
    void kvn_lease_written(int64_t *leases)
    int64_t kvn_lease_count(const int64_t *leases)

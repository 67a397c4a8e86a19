# Declarations of the sources behind _ucx_gathered.
from libc.stdint cimport uint64_t

from kvnative._native cimport kvn_backend
from kvnative._ucx cimport kvn_ucx_link, kvn_ucx_serve


cdef extern from "ucx_gathered.h" nogil:
    ctypedef struct kvn_gathered_ranges:
        const uint64_t *slots
        const uint64_t *generations
        const uint64_t *addresses
        const uint64_t *nbytes
        uint64_t count

    kvn_backend *kvn_gathered_create(
        kvn_ucx_serve *serve, kvn_ucx_link *link, int direction, const kvn_gathered_ranges *ranges,
        bint hands_over
    )

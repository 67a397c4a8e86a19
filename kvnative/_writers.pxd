from libc.stdint cimport uint64_t


cdef extern from "host/writers.h" nogil:
    ctypedef struct kvn_announcement:
        uint64_t place
        uint64_t number
    ctypedef struct kvn_guard:
        pass
    bint kvn_guard_try_enter(kvn_guard *guard, kvn_announcement *out)
    void kvn_guard_leave(kvn_guard *guard, const kvn_announcement *announcement)
    void kvn_guard_destroy(kvn_guard *guard)


cdef class WriteGuard:
    cdef kvn_guard *guard
    cdef object writer

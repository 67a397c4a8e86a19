# What other Cython modules may see of the executor.
from kvnative._backend cimport Backend


cdef class Executor:
    cdef Backend _backend
    cdef dict tasks               # in flight, oldest first; a dict because sets have no order
    cdef bint closed

    cdef int check_usable(self) except -1

# Declarations for Cython modules that use the executor.
from kvnative._backend cimport Backend
from kvnative._lower cimport Descriptors
from kvnative._task cimport AnyTask, Gate, Task


cdef class Executor:
    cdef Backend _backend
    cdef dict tasks               # in flight, oldest first; a dict because sets have no order
    cdef bint closed

    cdef Backend usable(self, Backend backend)
    cdef int admit(self, AnyTask task) except -1
    cdef Task start(self, Backend backend, Descriptors descriptors, object keep, bint waits,
                    Gate after, list into)

# What other Cython modules may see of the executor.
from libc.stdint cimport uint64_t

from kvnative._backend cimport Backend, ThreadPool
from kvnative._lower cimport Descriptors
from kvnative._native cimport kvn_task


cdef class Report:
    cdef readonly int status
    cdef readonly int code
    cdef readonly object failed
    cdef readonly unsigned long long bytes_done
    cdef readonly unsigned long long descriptors_done
    cdef readonly tuple unconfirmed
    cdef readonly str message


cdef class Task:
    # The backend and the memory that the task works with: they stand before it, and stay until the
    # outcome (`descriptors`, `keep`) or as long as this object (`backend`).
    cdef Backend backend
    cdef Descriptors descriptors  # held; None after the outcome
    cdef object keep
    cdef dict siblings            # the executor's tasks in flight, this one among them
    cdef kvn_task task
    cdef uint64_t count
    cdef Report outcome           # None while in flight

    @staticmethod
    cdef Task begin(Backend backend, Descriptors descriptors, object keep, dict siblings)
    cdef Report settle(self)


cdef class Executor:
    cdef Backend _backend
    cdef dict tasks               # in flight, oldest first; a dict because sets have no order
    cdef bint closed

    cdef int check_usable(self) except -1

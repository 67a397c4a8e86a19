# What other Cython modules may see of the executor: cimport it to add a backend over a pool.
from libc.stdint cimport uint64_t
from posix.types cimport pid_t

from kvnative._lower cimport Descriptors
from kvnative._native cimport kvn_backend, kvn_backend_vtable, kvn_pool, kvn_task


cdef class ThreadPool:
    # Owned; outlives every Backend that was made with this object among its owners.
    cdef kvn_pool *pool


cdef class Backend:
    # What `handle` points into or was made from: the pool, the wrapped backend, mapped memory. It
    # stands before the handle because it must be there as long as the handle is used.
    cdef object owners
    cdef kvn_backend *handle  # owned; destroyed with this object, before `owners` is let go
    cdef pid_t pid            # of the process that made it

    # Takes over `handle`; NULL raises from errno, naming `what` could not be made.
    @staticmethod
    cdef Backend adopt(kvn_backend *handle, object owners, str what)
    cdef const kvn_backend_vtable *calls(self) except NULL
    # NativeError in a forked child.
    cdef int check_process(self) except -1


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

# Declarations for Cython modules that add a backend over a ThreadPool.
from posix.types cimport pid_t

from kvnative._native cimport kvn_backend, kvn_backend_vtable, kvn_pool


cdef class ThreadPool:
    # Owned; every Backend that uses it has this object among its owners.
    cdef kvn_pool *pool
    cdef pid_t pid  # of the process that made it
    cdef object _tuning

    # Return the pool for a backend; NativeError in a forked child.
    cdef kvn_pool *usable(self) except NULL


cdef class Backend:
    # Objects that `handle` uses: the pool, the wrapped backend, mapped memory. Declared before the
    # handle because they must outlive it.
    cdef object owners
    cdef kvn_backend *handle  # owned; destroyed with this object, before `owners` is released
    cdef pid_t pid            # of the process that made it

    # Take ownership of `handle`. If it is NULL, raise from errno, with `what` in the message.
    @staticmethod
    cdef Backend adopt(kvn_backend *handle, object owners, str what)
    cdef const kvn_backend_vtable *calls(self) except NULL
    # Raise NativeError in a forked child.
    cdef int check_process(self) except -1

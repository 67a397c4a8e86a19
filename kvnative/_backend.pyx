"""Backends, which move bytes, and the pool of threads that they share."""

cimport cython
from libc.errno cimport ENOMEM, errno
from libc.stdint cimport uint64_t, uintptr_t
from libc.string cimport memset
from posix.unistd cimport getpid

from kvnative cimport _native
from kvnative._native cimport *
from kvnative._tuning cimport fill_tuning

import os

from kvnative._tuning import builtin_tuning

__all__ = [
    "KVN_CANCELLED", "KVN_DENIED", "KVN_DEVICE_MEMORY", "KVN_FAILED", "KVN_INVALID",
    "KVN_NO_DEVICE_MEMORY", "KVN_NO_MEMORY", "KVN_OK", "KVN_PEER_GONE", "KVN_PENDING",
    "KVN_REVOKED", "KVN_SUSPECT_REMOTE", "KVN_TIMEOUT", "KVN_UNMAPPED", "KVN_UNSUPPORTED",
    "MAX_STRIPES", "Backend", "CallError", "NativeError", "ThreadPool", "host_backend",
    "node_of", "striped",
]

# Constants of status.h under the same names.
globals().update(
    KVN_OK=_native.KVN_OK, KVN_PENDING=_native.KVN_PENDING, KVN_TIMEOUT=_native.KVN_TIMEOUT,
    KVN_CANCELLED=_native.KVN_CANCELLED, KVN_INVALID=_native.KVN_INVALID,
    KVN_NO_MEMORY=_native.KVN_NO_MEMORY, KVN_PEER_GONE=_native.KVN_PEER_GONE,
    KVN_DENIED=_native.KVN_DENIED, KVN_UNMAPPED=_native.KVN_UNMAPPED,
    KVN_UNSUPPORTED=_native.KVN_UNSUPPORTED, KVN_FAILED=_native.KVN_FAILED,
    KVN_DEVICE_MEMORY=_native.KVN_DEVICE_MEMORY,
    KVN_SUSPECT_REMOTE=_native.KVN_SUSPECT_REMOTE,
    KVN_NO_DEVICE_MEMORY=_native.KVN_NO_DEVICE_MEMORY, KVN_REVOKED=_native.KVN_REVOKED,
)

MAX_STRIPES = <int>KVN_MAX_STRIPES


class NativeError(RuntimeError):
    """An object is closed or belongs to a parent process, or a resource is exhausted.

    Attributes:
        errno: error number of the system, or 0.
    """

    def __init__(self, message="", number=0):
        super().__init__(message)
        self.errno = number


class CallError(NativeError):
    """A failed call of a vendor's library; the message has the call and the library's text.

    Attributes:
        code: error number of the library, or 0.
        status: one of the KVN_ constants.
    """

    def __init__(self, message, code=0, status=KVN_FAILED):
        super().__init__(message)
        self.code = code
        self.status = status


cdef unsigned fill_nodes(object nodes, kvn_numa_node *each) except? 0xBAD:
    cdef unsigned count = 0
    if len(nodes) > KVN_MAX_NODES:
        raise ValueError(f"nodes has {len(nodes)} nodes: expected at most {KVN_MAX_NODES}")
    memset(each, 0, len(nodes) * sizeof(kvn_numa_node))
    for number, processors in nodes.items():
        if not processors:
            raise ValueError(f"nodes[{number}] has no processor")
        each[count].number = number
        for processor in processors:
            if not 0 <= processor < CPU_SETSIZE:
                raise ValueError(f"nodes[{number}] has processor {processor}: expected 0 to"
                                 f" {CPU_SETSIZE - 1}")
            CPU_SET(processor, &each[count].processors)
        count += 1
    return count


def node_of(address):
    """Return the NUMA node of the page at `address`; None: the page does not exist yet.

    Raise OSError if the kernel does not tell, as in some containers.
    """
    cdef uint64_t place = address
    cdef void *page = <void *><uintptr_t>place
    cdef int number = -1
    if kvn_numa_ask_kernel(1, &page, &number) != 0:
        raise OSError(errno, os.strerror(errno))
    return number if number >= 0 else None


@cython.final
@cython.auto_pickle(False)
@cython.no_gc
cdef class ThreadPool:
    """A fixed number of copying threads, shared by any number of backends.

    Idle threads sleep. A thread that waits for a task copies too, in place of one of them.

    Args:
        threads: number of threads, 1 to 64; None: that of the tuning.
        tuning: thresholds and piece sizes; None: the built-in ones, with one thread for each core
            that this process may use, at most 16.
        nodes: NUMA nodes and the processors of each, over which the threads are spread. A thread
            first moves what goes to memory of its node. None: the system chooses where threads run.
    """

    def __cinit__(self, threads=None, tuning=None, nodes=None):
        cdef kvn_tuning native
        cdef kvn_numa_node each[KVN_MAX_NODES]
        cdef unsigned num_nodes = fill_nodes(nodes or {}, each)
        if tuning is None:
            tuning = builtin_tuning()
        if threads is None:
            threads = tuning.threads
        elif isinstance(threads, bool) or not hasattr(threads, "__index__"):
            raise TypeError(f"threads = {threads!r}: expected an int or None")
        if not 1 <= threads <= KVN_MAX_THREADS:
            raise ValueError(f"threads = {threads!r}: expected 1 to {KVN_MAX_THREADS}")
        self.pool = kvn_pool_create(threads, each, num_nodes)
        if self.pool is NULL:
            raise NativeError(f"no pool of {threads} threads: {os.strerror(errno)}", errno)
        self.pid = getpid()
        fill_tuning(tuning, &native)
        kvn_pool_tune(self.pool, &native)
        self._tuning = tuning

    @property
    def tuning(self):
        """Thresholds and piece sizes of copies."""
        return self._tuning

    cdef kvn_pool *usable(self) except NULL:
        if self.pid != getpid():
            raise NativeError(f"the thread pool belongs to process {self.pid}, and its threads do"
                              f" not exist in process {getpid()}, forked from it: make a new pool"
                              f" there")
        return self.pool

    def __dealloc__(self):
        with nogil:
            kvn_pool_destroy(self.pool)

    @property
    def threads(self) -> int:
        """Number of threads."""
        return kvn_pool_threads(self.pool)

    @property
    def looks(self) -> int:
        """Number of times that a thread has polled for the next job before it slept."""
        return kvn_pool_looks(self.usable())

    def __repr__(self):
        return f"<ThreadPool of {self.threads} threads>"


@cython.final
@cython.auto_pickle(False)
@cython.no_gc_clear
cdef class Backend:
    """A way to move bytes, made by `host_backend`, a transport, a device, or a wrapper."""

    def __init__(self, *args, **kwargs):
        raise TypeError("a Backend comes from host_backend(), a wrapper or a link")

    @staticmethod
    cdef Backend adopt(kvn_backend *handle, object owners, str what):
        cdef int error = errno
        cdef Backend self
        if handle is NULL:
            raise MemoryError() if error == ENOMEM else NativeError(
                f"{what}: {os.strerror(error)} (errno {error})", error)
        self = Backend.__new__(Backend)
        self.owners = owners
        self.handle = handle
        self.pid = getpid()
        return self

    cdef const kvn_backend_vtable *calls(self) except NULL:
        if self.handle is NULL:
            raise TypeError("a Backend comes from host_backend(), a wrapper or a link")
        return self.handle.vtable

    cdef int check_process(self) except -1:
        if self.pid != getpid():
            raise NativeError(f"the backend {self.name} and its executors belong to process"
                              f" {self.pid}; process {getpid()} was forked from it and must make"
                              f" its own")
        return 0

    def __dealloc__(self):
        # A forked child lacks the threads, and mutexes may be locked: it leaks the backend.
        if self.handle is not NULL and self.pid == getpid():
            with nogil:  # a backend of UCX waits for its progress thread
                self.handle.vtable.destroy(self.handle)

    @property
    def name(self) -> str:
        """Name of the backend, or of its outermost wrapper."""
        return self.calls().name.decode()

    def __repr__(self):
        return f"<Backend {self.name}>"


def host_backend(ThreadPool pool not None) -> Backend:
    """Return a backend that copies memory of this process.

    Args:
        pool: copies large batches; the submitting thread copies small ones.
    """
    return Backend.adopt(kvn_host_create(pool.usable()), pool, "host_backend")


def striped(backends, *, min_nbytes: int) -> Backend:
    """Return a backend that splits a large batch into contiguous stripes, one for each backend.

    Args:
        backends: 1 to 16 backends that reach the same memory.
        min_nbytes: minimum size of a stripe. A batch of less than twice as much goes to the first
            backend.
    """
    cdef kvn_backend *inner[KVN_MAX_STRIPES]
    cdef Backend backend
    cdef Py_ssize_t count = 0
    owners = tuple(backends)
    if not 1 <= len(owners) <= KVN_MAX_STRIPES:
        raise ValueError(f"{len(owners)} backends: expected 1 to {<int>KVN_MAX_STRIPES}")
    if not 1 <= min_nbytes < 2**64:
        raise ValueError(f"min_nbytes = {min_nbytes}: expected 1 to 2**64 - 1 bytes")
    for item in owners:
        backend = <Backend?>item
        backend.check_process()
        backend.calls()
        inner[count] = backend.handle
        count += 1
    return Backend.adopt(kvn_striped_create(inner, count, min_nbytes), owners, "striped")

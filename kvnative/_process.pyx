"""Another process on this host: held so that it cannot be mistaken, and its memory reached."""

cimport cython
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint64_t, uintptr_t
from libc.string cimport memcpy

from kvnative._backend cimport Backend, ThreadPool
from kvnative._host cimport check, kvn_failure, kvn_word, unsigned, words_in
from kvnative._lower cimport Descriptors
from kvnative._lower_c cimport kvn_columns
from kvnative._native cimport KVN_OK, kvn_backend, KVN_PEER_GET, KVN_PEER_PUT
from kvnative._task cimport Revocable

__all__ = ["Peer", "process_backend"]

cdef dict DIRECTIONS = {"get": KVN_PEER_GET, "put": KVN_PEER_PUT}


def process_backend(ThreadPool pool not None, int pid, str direction):
    """Moves bytes between this process and process `pid` with process_vm_readv and writev.

    With direction "get" source addresses are the other process's, with "put" destinations. It goes
    by the pid alone: hold the process by a `Peer`, and check that before and after each transfer.
    ValueError for another direction or an impossible pid; NativeError for the pool of a process
    that this one was forked from; MemoryError.
    """
    if direction not in DIRECTIONS:
        raise ValueError(f"direction is {direction!r}; it must be 'get' or 'put'")
    if pid < 1:
        raise ValueError(f"pid is {pid}; it must be at least 1")
    cdef kvn_backend *backend = kvn_process_create(pool.usable(), pid, DIRECTIONS[direction])
    return Backend.adopt(backend, pool, "process backend")


@cython.final
cdef class Peer:
    """Holds the living process `pid` by a pidfd, so that a later process of that pid is not it.

    Compare its start time (`/proc/<pid>/stat`) with the expected one, then `attach` its
    generation table.
    ProcessLookupError when there is no such process; PermissionError where /proc hides it.
    """

    def __cinit__(self):
        self.peer.pidfd = self.peer.proc = -1

    def __init__(self, int pid):
        cdef kvn_failure failure
        if self.peer.pidfd >= 0:
            raise TypeError("a peer is held once")
        check(kvn_peer_open(pid, &self.peer, &failure), &failure)

    cdef int check_open(self) except -1:
        if self.peer.pidfd < 0:
            raise ValueError("the peer is closed")
        return 0

    @cython.critical_section
    def attach(self, int generations_fd, inode, num_slots):
        """Maps the peer's generation table, read-only.

        ProcessLookupError when the peer has exited, closed the table or executes another program;
        PermissionError when the system refuses access; ValueError when it is not such a table.
        """
        cdef uint64_t number = unsigned("inode", inode), slots = unsigned("num_slots", num_slots)
        cdef kvn_failure failure
        self.check_open()
        if self.peer.generations.memory.address is not NULL:
            raise ValueError("the peer's generation table is attached already")
        check(kvn_peer_attach(&self.peer, generations_fd, number, slots, &failure), &failure)

    @cython.critical_section
    def check(self, bytes words not None):
        """Index of the first word whose slot no longer has its generation, or -1 when all have.

        ProcessLookupError or PermissionError as `attach`; TypeError or ValueError for what are no
        words: bytes, of each its slot and its generation in 8. Everything that was read from the
        peer before the call was read while it lived and had those generations. Mapped memory says
        so; the system is asked only where it does not.
        """
        cdef kvn_failure failure
        self.check_open()
        cdef int64_t stale = self.first_stale(words)
        check(kvn_peer_check(&self.peer, &failure), &failure)
        return stale

    cdef int64_t first_stale(self, bytes words) except -2:
        cdef uint64_t count = 0, stale
        if self.peer.generations.memory.address is NULL:
            raise ValueError("the peer's generation table is not attached")
        cdef const kvn_word *each = words_in(words, &count)
        stale = kvn_generations_first_stale(&self.peer.generations, each, count)
        return <int64_t>stale if stale < count else -1

    @cython.critical_section
    def copy(self, Descriptors descriptors not None, bytes words not None,
             Revocable here not None):
        """Moves descriptors by plain copies, in this thread and with the GIL, between two checks.

        The addresses are of this process: what is read of the peer is mapped here, and written to
        `here`. Returns "done"; "refused", if the first check finds what `check` would, or that
        `here` was revoked, and nothing moved; or "lost", if the second one does.
        """
        cdef kvn_columns columns
        cdef size_t i
        self.check_open()
        if here.revocation() is not None or not self.is_good(words):
            return "refused"
        columns = descriptors.hold_columns()
        for i in range(columns.count):
            memcpy(<void *><uintptr_t>columns.dst[i], <const void *><uintptr_t>columns.src[i],
                   columns.nbytes[i])
        descriptors.release()
        return "done" if self.is_good(words) else "lost"

    cdef bint is_good(self, bytes words) except -1:
        cdef kvn_failure failure
        return (self.first_stale(words) < 0
                and kvn_peer_check(&self.peer, &failure) == KVN_OK)

    @cython.critical_section
    def probe(self, address):
        """Reads one byte at `address` of the peer by process_vm_readv.

        PermissionError or another OSError when the system does not allow that, ProcessLookupError
        when the peer has exited, ValueError when the address is not mapped there.
        """
        cdef uint64_t where = unsigned("address", address)
        cdef kvn_failure failure
        self.check_open()
        check(kvn_peer_probe(&self.peer, where, &failure), &failure)

    @cython.critical_section
    def take_descriptor(self, int fd):
        """Returns a descriptor here for what descriptor `fd` of the peer is; the caller closes it.

        PermissionError for who may not attach to the peer; ProcessLookupError when it has exited;
        ValueError when it has no such descriptor; OSError where the kernel cannot (Linux 5.6 can).
        """
        cdef kvn_failure failure
        cdef int taken = -1
        self.check_open()
        check(kvn_peer_take_descriptor(&self.peer, fd, &taken, &failure), &failure)
        return taken

    @property
    def pid(self):
        return self.peer.pid

    @property
    def pidfd(self):
        """Polls readable once the process has exited; closed by `close`, and -1 from there on."""
        return self.peer.pidfd

    @property
    def closed(self):
        return self.peer.pidfd < 0

    @cython.critical_section
    def close(self):
        """Lets go of the process; idempotent."""
        kvn_peer_close(&self.peer)

    def __dealloc__(self):
        kvn_peer_close(&self.peer)

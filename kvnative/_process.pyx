"""Another process on this host: a hold on its identity, and access to its memory."""

cimport cython
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint64_t, uintptr_t
from libc.string cimport memcpy

from kvnative._backend cimport Backend, ThreadPool
from kvnative._crossing cimport peer_direction
from kvnative._host cimport check, kvn_failure, kvn_word, unsigned, words_in
from kvnative._lower cimport Descriptors
from kvnative._lower_c cimport kvn_columns
from kvnative._native cimport KVN_OK, kvn_backend
from kvnative._task cimport Revocable

__all__ = ["Peer", "process_backend"]


def process_backend(ThreadPool pool not None, int pid, str direction):
    """Return a backend that moves bytes from or to process `pid` by process_vm_readv and writev.

    Source addresses belong to the other process for direction "get", destinations for "put". The
    backend knows only the pid: hold the process by a `Peer`, and check the peer before and after
    each transfer. Raise NativeError if `pool` belongs to the process that this one was forked from.
    """
    cdef int way = peer_direction(direction)
    if pid < 1:
        raise ValueError(f"pid is {pid}; it must be at least 1")
    cdef kvn_backend *backend = kvn_process_create(pool.usable(), pid, way)
    return Backend.adopt(backend, pool, "process backend")


@cython.final
cdef class Peer:
    """A process, held by its pidfd, which a later process with the same pid does not share.

    Compare its start time (`/proc/<pid>/stat`) with the expected one, then `attach` its generation
    table. Raise ProcessLookupError if the process does not exist, PermissionError if /proc hides
    it.
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
        """Map the peer's generation table, read-only.

        Raise ProcessLookupError if the peer has exited, closed the table or executes another
        program; PermissionError if the system refuses access; ValueError for another kind of file.
        """
        cdef uint64_t number = unsigned("inode", inode), slots = unsigned("num_slots", num_slots)
        cdef kvn_failure failure
        self.check_open()
        if self.peer.generations.memory.address is not NULL:
            raise ValueError("the peer's generation table is attached already")
        check(kvn_peer_attach(&self.peer, generations_fd, number, slots, &failure), &failure)

    @cython.critical_section
    def check(self, bytes words not None):
        """Return the index of the first word whose slot has another generation now, or -1.

        A result of -1 means that all reads from the peer before this call saw valid memory: the
        peer lived, and its slots had these generations. The check reads mapped memory, and asks the
        system only if necessary. Raise ProcessLookupError or PermissionError like `attach`.

        Args:
            words: 16 bytes each: slot and generation.
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
             Revocable here not None, bint by_address=False):
        """Copy in this thread with the GIL held, and check the peer before and after.

        Sources are memory of the peer, destinations are `here`.

        Args:
            words: registrations of the peer.
            by_address: sources have addresses of the peer, and the system copies at most 64
                descriptors from there; otherwise they are mapped in this process.

        Returns:
            "done"; "refused" if the first check fails, `here` was revoked or the system does not
            copy every byte; or "lost" if the second check fails.
        """
        cdef kvn_columns columns
        cdef size_t i
        cdef bint moved = True
        self.check_open()
        if here.revocation() is not None or not self.is_good(words):
            return "refused"
        columns = descriptors.hold_columns()
        if by_address:
            moved = kvn_process_read_now(self.peer.pid, &columns)
        else:
            for i in range(columns.count):
                memcpy(<void *><uintptr_t>columns.dst[i], <const void *><uintptr_t>columns.src[i],
                       columns.nbytes[i])
        descriptors.release()
        if not moved:
            return "refused"
        return "done" if self.is_good(words) else "lost"

    cdef bint is_good(self, bytes words) except -1:
        cdef kvn_failure failure
        return (self.first_stale(words) < 0
                and kvn_peer_check(&self.peer, &failure) == KVN_OK)

    @cython.critical_section
    def probe(self, address):
        """Read one byte at `address` of the peer by process_vm_readv.

        Raise PermissionError or another OSError if the system forbids that, ProcessLookupError if
        the peer has exited, ValueError if the address is not mapped there.
        """
        cdef uint64_t where = unsigned("address", address)
        cdef kvn_failure failure
        self.check_open()
        check(kvn_peer_probe(&self.peer, where, &failure), &failure)

    @cython.critical_section
    def take_descriptor(self, int fd):
        """Return a duplicate of descriptor `fd` of the peer, which the caller closes.

        Raise PermissionError if this process may not attach to the peer; ProcessLookupError if the
        peer has exited; ValueError if it has no such descriptor; OSError before Linux 5.6.
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
        """Descriptor that polls readable once the process has exited; -1 after `close`."""
        return self.peer.pidfd

    @property
    def closed(self):
        return self.peer.pidfd < 0

    @cython.critical_section
    def close(self):
        """Release the process; idempotent."""
        kvn_peer_close(&self.peer)

    def __dealloc__(self):
        kvn_peer_close(&self.peer)

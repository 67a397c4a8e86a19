"""Writes to memory of another process: the writer announces them, the owner waits for them."""

cimport cython
from libc.stdint cimport int64_t, uint64_t, uintptr_t

from kvnative._backend cimport Backend, ThreadPool
from kvnative._host cimport (
    GenerationTable, check, kvn_arena, kvn_failure, kvn_generations_release, kvn_word, unsigned,
    words_in
)
from kvnative._native cimport kvn_backend, kvn_host_create, kvn_now_ns, kvn_pool

from typing import NamedTuple

__all__ = ["Ticket", "WriteGuard", "Writer", "WriterTable"]

cdef extern from "kvnative/backend.h" nogil:
    enum:
        KVN_PEER_PUT


cdef extern from "process/process.h" nogil:
    kvn_backend *kvn_process_create(kvn_pool *pool, int pid, int direction)

cdef extern from "host/pooled.h" nogil:
    void kvn_pooled_set_guard(kvn_backend *self, kvn_guard *guard)

cdef extern from "process/guarded.h" nogil:
    kvn_backend *kvn_guarded_create(kvn_backend *inner, kvn_guard *guard)

cdef extern from "host/writers.h" nogil:
    ctypedef struct kvn_writers:
        kvn_arena memory
        uint64_t num_entries
        char *gates
    ctypedef struct kvn_ticket:
        uint64_t entry
        uint64_t place
        uint64_t number
        int pid
    ctypedef struct kvn_writer:
        int pid
        kvn_arena table
    int kvn_writers_create(uint64_t num_entries, kvn_writers *out, kvn_failure *failure)
    void kvn_writers_hide(kvn_writers *writers)
    void kvn_writers_close(kvn_writers *writers)
    enum:
        KVN_WRITER_TICKETS
    bint kvn_writers_are_idle(kvn_writers *writers)
    uint64_t kvn_writers_drain(kvn_writers *writers, int64_t deadline_ns, uint64_t *next,
                               kvn_ticket *left)
    bint kvn_writers_has(const kvn_writers *writers, const kvn_ticket *ticket)
    int kvn_writer_open(int pid, int generations_fd, uint64_t generations_inode, uint64_t num_slots,
                        int table_fd, uint64_t table_inode, uint64_t num_entries, uint64_t gates,
                        kvn_writer *out, kvn_failure *failure)
    void kvn_writer_close(kvn_writer *writer)
    kvn_guard *kvn_guard_create(kvn_writer *writer, const kvn_word *words, uint64_t count)


class Ticket(NamedTuple):
    """An announced write that has not finished, and that the owner cannot stop.

    Attributes:
        pid: process that writes.
        entry, place, number: position in the writer table.
    """

    pid: int
    entry: int
    place: int
    number: int


@cython.final
cdef class WriterTable:
    """The table in which peers of this process announce their writes to its memory.

    Args:
        num_entries: 1 to 65,536, one for each peer. An entry takes a page of address space, and a
            page of memory once a peer uses it.
    """

    cdef kvn_writers writers
    cdef object __weakref__

    def __cinit__(self):
        self.writers.memory.fd = -1

    def __init__(self, num_entries=4096):
        if self.writers.memory.address is not NULL:
            raise TypeError("a writer table is made once")
        cdef uint64_t entries = unsigned("num_entries", num_entries)
        cdef kvn_failure failure
        check(kvn_writers_create(entries, &self.writers, &failure), &failure)

    @property
    def fd(self):
        return self.writers.memory.fd

    @property
    def inode(self):
        return self.writers.memory.inode

    @property
    def num_entries(self):
        return self.writers.num_entries

    @property
    def address(self):
        """Address of the entries for peers that write by address."""
        return <uintptr_t>self.writers.gates

    def drain(self, double timeout_s):
        """Wait until all announced writes have ended, for at most `timeout_s` seconds.

        Call it after the release of the registration, when no peer announces a new write to it.
        Does not wait for dead peers. Late peers can no longer write by address.

        Returns:
            The tickets of late peers that have mapped the memory. Do not use the memory again while
            `stands` returns True for one of them.
        """
        return self.tickets_after(timeout_s)

    cdef list tickets_after(self, double timeout_s):
        cdef kvn_ticket left[KVN_WRITER_TICKETS]
        if kvn_writers_are_idle(&self.writers):
            return []
        cdef int64_t deadline_ns = kvn_now_ns() + <int64_t>(timeout_s * 1e9)
        cdef uint64_t following = 0, count, i
        cdef list late = []
        while True:
            with nogil:
                count = kvn_writers_drain(&self.writers, deadline_ns, &following, left)
            if count == 0:
                return late
            for i in range(count):
                late.append(Ticket(left[i].pid, left[i].entry, left[i].place, left[i].number))

    def end_leases(self, GenerationTable generations not None, leases, double timeout_s):
        """Release the `leases` (slots and generations) that have not ended, then `drain`.

        Raise ValueError if the generation table is closed.
        """
        cdef uint64_t slot, generation
        cdef kvn_failure failure
        for slot, generation in leases:
            with cython.critical_section(generations):  # no other thread closes it meanwhile
                generations.check_open()
                # A failure means that the lease ended before, which is fine.
                kvn_generations_release(&generations.table, slot, generation, &failure)
        return self.tickets_after(timeout_s)

    def stands(self, ticket):
        """Return whether the peer lives, as the same program, and has not finished the write."""
        cdef kvn_ticket given
        given.pid, given.entry, given.place, given.number = ticket
        return kvn_writers_has(&self.writers, &given)

    @cython.critical_section
    def close(self):
        """Close the descriptor, so that no new peer finds the table; idempotent.

        Peers that have mapped the table still announce there: its memory lives as long as this
        object.
        """
        kvn_writers_hide(&self.writers)

    def __dealloc__(self):
        kvn_writers_close(&self.writers)


@cython.final
cdef class WriteGuard:
    """The right to write to some registrations of a peer; made by `Writer.guarded`."""

    def __dealloc__(self):
        kvn_guard_destroy(self.guard)


@cython.final
cdef class Writer:
    """This process's entry in the writer table of process `pid`.

    The entry is given back once this object and all backends made of it are gone. Raise
    ProcessLookupError, PermissionError or another OSError if the peer has exited, closed its table,
    or cannot be reached; ValueError for another kind of file; MemoryError if all entries are taken.
    """

    cdef kvn_writer writer

    def __cinit__(self):
        self.writer.table.fd = -1

    def __init__(self, int pid, *, int generations_fd, generations_inode, num_slots, int table_fd,
                 table_inode, num_entries, address):
        if self.writer.table.address is not NULL:
            raise TypeError("a writer is made once")
        cdef uint64_t inode = unsigned("generations_inode", generations_inode)
        cdef uint64_t slots = unsigned("num_slots", num_slots)
        cdef uint64_t table = unsigned("table_inode", table_inode)
        cdef uint64_t entries = unsigned("num_entries", num_entries)
        cdef uint64_t gates = unsigned("address", address)
        cdef kvn_failure failure
        check(kvn_writer_open(pid, generations_fd, inode, slots, table_fd, table, entries, gates,
                              &self.writer, &failure), &failure)

    cdef kvn_guard *guard(self, bytes words) except NULL:
        cdef uint64_t count = 0
        cdef const kvn_word *each = words_in(words, &count)
        cdef kvn_guard *made = kvn_guard_create(&self.writer, each, count)
        if made is NULL:
            raise MemoryError()
        return made

    def guarded(self, bytes words not None):
        """Return a guard that announces single writes to the mapped registrations `words`."""
        cdef WriteGuard made = WriteGuard.__new__(WriteGuard)
        made.guard = self.guard(words)
        made.writer = self
        return made

    def mapped(self, ThreadPool pool not None, bytes words not None):
        """Return a backend that copies to the registrations `words`, which are mapped here."""
        cdef Backend backend = Backend.adopt(kvn_host_create(pool.usable()),
                                             (pool, self), "host backend")
        kvn_pooled_set_guard(backend.handle, self.guard(words))
        return backend

    def by_address(self, ThreadPool pool not None, bytes words not None):
        """Return a backend that writes to the registrations `words` by process_vm_writev."""
        cdef Backend backend = Backend.adopt(
            kvn_process_create(pool.usable(), self.writer.pid, KVN_PEER_PUT), (pool, self),
            "process backend")
        kvn_pooled_set_guard(backend.handle, self.guard(words))
        return backend

    def around(self, Backend inner not None, bytes words not None):
        """Return a backend that announces each batch that `inner` writes to mapped memory."""
        inner.calls()
        inner.check_process()
        return Backend.adopt(
            kvn_guarded_create(inner.handle, self.guard(words)), (inner, self),
            "guarded backend")

    def __dealloc__(self):
        kvn_writer_close(&self.writer)

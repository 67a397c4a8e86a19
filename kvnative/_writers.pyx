"""Who writes to memory of another process: announced by the writer, awaited by the owner."""

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
    """A piece that process `pid` has announced, has not finished, and cannot be kept from writing.

    Attributes:
        pid: of the peer.
        entry, place, number: where it stands in the table.
    """

    pid: int
    entry: int
    place: int
    number: int


@cython.final
cdef class WriterTable:
    """The table in which the peers of this process announce what they write to its memory.

    MemoryError, OSError where it cannot be had; ValueError for another number of entries than 1 to
    65,536. An entry is a page of address space, and of memory once a peer has it.
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
        """Of the entries as peers write to them by address."""
        return <uintptr_t>self.writers.gates

    def drain(self, double timeout_s):
        """Wait until what is announced now is written, for at most `timeout_s` seconds.

        Call it when the registration is released: then nobody announces anything new for it. Peers
        that are dead are not waited for; the writes by address of those that are late are cut off.

        Returns:
            The tickets that stand of peers that have mapped what they write to. What they write to
            must not be used again while `stands` says so.
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
        """Releases what of `leases` has not ended, slots and generations; then drains as `drain`.

        ValueError: that table is closed.
        """
        cdef uint64_t slot, generation
        cdef kvn_failure failure
        for slot, generation in leases:
            with cython.critical_section(generations):  # nobody closes it meanwhile
                generations.check_open()
                # Of one that has ended before it says so, which is of no use here.
                kvn_generations_release(&generations.table, slot, generation, &failure)
        return self.tickets_after(timeout_s)

    def stands(self, ticket):
        """Whether its peer lives, as the same program, and has not finished the piece."""
        cdef kvn_ticket given
        given.pid, given.entry, given.place, given.number = ticket
        return kvn_writers_has(&self.writers, &given)

    @cython.critical_section
    def close(self):
        """Close its descriptor, so that no peer finds it any more; idempotent.

        The table itself goes with this object: peers may still announce there.
        """
        kvn_writers_hide(&self.writers)

    def __dealloc__(self):
        kvn_writers_close(&self.writers)


@cython.final
cdef class WriteGuard:
    """Made by `Writer.guarded`, which it keeps."""

    def __dealloc__(self):
        kvn_guard_destroy(self.guard)


@cython.final
cdef class Writer:
    """This process as a writer to the memory of process `pid`: an entry of that one's table.

    It goes back when neither this object nor a backend of it is left. ProcessLookupError,
    PermissionError or another OSError when the peer has exited, closed its table, or is not to be
    reached; ValueError for what is no such table; MemoryError when all entries are taken.
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
        """What announces writes to memory of the peer that is mapped here, one by one."""
        cdef WriteGuard made = WriteGuard.__new__(WriteGuard)
        made.guard = self.guard(words)
        made.writer = self
        return made

    def mapped(self, ThreadPool pool not None, bytes words not None):
        """Plain copies to memory of the peer that is mapped here: these of its registrations."""
        cdef Backend backend = Backend.adopt(kvn_host_create(pool.usable()),
                                             (pool, self), "host backend")
        kvn_pooled_set_guard(backend.handle, self.guard(words))
        return backend

    def by_address(self, ThreadPool pool not None, bytes words not None):
        """process_vm_writev to the peer's own addresses in these of its registrations."""
        cdef Backend backend = Backend.adopt(
            kvn_process_create(pool.usable(), self.writer.pid, KVN_PEER_PUT), (pool, self),
            "process backend")
        kvn_pooled_set_guard(backend.handle, self.guard(words))
        return backend

    def around(self, Backend inner not None, bytes words not None):
        """What `inner` writes to memory of the peer that is mapped here, batch by batch."""
        inner.calls()
        inner.check_process()
        return Backend.adopt(
            kvn_guarded_create(inner.handle, self.guard(words)), (inner, self),
            "guarded backend")

    def __dealloc__(self):
        kvn_writer_close(&self.writer)

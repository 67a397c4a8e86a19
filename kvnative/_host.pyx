"""Memory of this host: arenas that a peer can map, the generations of registrations, checks."""

cimport cython
from cpython.buffer cimport (
    PyBUF_ANY_CONTIGUOUS,
    PyBUF_WRITABLE,
    PyBuffer_FillInfo,
    PyBuffer_Release,
    PyObject_GetBuffer,
)
from libc.errno cimport EFBIG
from libc.stdint cimport int64_t, uint64_t, uintptr_t

from kvnative._crossing cimport acquire_columns, release_columns

__all__ = [
    "ARENA_PAGES",
    "Arena",
    "GenerationTable",
    "PageWalk",
    "Pin",
    "check_memory",
    "check_ranges",
    "page_use",
]

cdef extern from "kvnative/status.h" nogil:
    int KVN_OK, KVN_INVALID, KVN_UNMAPPED, KVN_UNSUPPORTED, KVN_NO_MEMORY

ARENA_PAGES = {
    "auto": KVN_PAGES_AUTO, "small": KVN_PAGES_SMALL, "hugetlb": KVN_PAGES_HUGETLB
}
MAPS_SOURCES = {"auto": KVN_MAPS_AUTO, "query": KVN_MAPS_QUERY, "text": KVN_MAPS_TEXT}


cdef int check(int status, const kvn_failure *failure) except -1 nogil:
    if status != KVN_OK:
        with gil:
            raise_named(status, failure, "")
    return 0


cdef int raise_named(int status, const kvn_failure *failure, str name) except -1:
    message = name + failure.message.decode("utf-8", "replace")
    if status == KVN_INVALID or status == KVN_UNMAPPED:
        raise ValueError(message)
    if status == KVN_NO_MEMORY and failure.code != EFBIG:  # EFBIG: the caller names the limit
        raise MemoryError(message)
    raise OSError(failure.code, message)


cdef kvn_maps_source source_named(str via) except *:
    if via not in MAPS_SOURCES:
        raise ValueError(f"via is {via!r}; it must be one of {', '.join(map(repr, MAPS_SOURCES))}")
    return MAPS_SOURCES[via]


cdef const kvn_word *words_in(bytes words, uint64_t *count) except NULL:
    cdef uint64_t nbytes = len(words)
    if nbytes % sizeof(kvn_word) != 0:
        raise ValueError(f"words have {nbytes} bytes; each has {sizeof(kvn_word)}")
    count[0] = nbytes // sizeof(kvn_word)
    return <const kvn_word *><const char *>words


cdef uint64_t unsigned(str name, value) except? 0xBAD:
    if not 0 <= value < 1 << 64:
        raise ValueError(f"{name} is {value}; it must be in [0, 2**64)")
    return value


def check_memory(address, nbytes, bint writable=False, *, str via="auto"):
    """Raise ValueError unless [address, address + nbytes) of this process is mapped memory.

    Every byte must be readable, and writable if `writable` is set. The check asks the kernel and
    dereferences nothing, so that a wrong address never ends the process. `via` selects the
    interface: "query" (PROCMAP_QUERY, Linux 6.11), "text" (/proc/self/maps), or "auto", the first
    of them that the kernel has. Raise OSError if /proc is not readable.
    """
    cdef uint64_t start = unsigned("address", address), size = unsigned("nbytes", nbytes)
    cdef kvn_maps_source source = source_named(via)
    cdef kvn_failure failure
    with nogil:
        check(kvn_mapping_check(start, size, writable, source, &failure), &failure)


def check_ranges(addresses, nbytes, bint writable=False, *, str name="range", uint64_t first=0,
                 str via="auto"):
    """Check several ranges like check_memory(), at little more than the cost of one.

    Args:
        addresses, nbytes: contiguous uint64 columns of the same length.
        name, first: messages number the ranges from "{name} {first}" on.
    """
    cdef kvn_maps_source source = source_named(via)
    cdef Py_buffer columns[2]
    cdef kvn_failure failure
    cdef uint64_t failed = 0
    cdef int status
    acquire_columns(columns, (addresses, nbytes), ("addresses", "nbytes"))
    with nogil:
        status = kvn_mapping_check_all(
            <const uint64_t *>columns[0].buf, <const uint64_t *>columns[1].buf,
            columns[0].shape[0], writable, source, &failed, &failure)
    release_columns(columns, 2)
    if status != KVN_OK:
        raise_named(status, &failure, f"{name} {first + failed}: ")


@cython.final
cdef class Arena:
    """Zeroed memory of `nbytes` bytes in a sealed memfd, which a peer on this host can map.

    The buffer protocol is supported: `memoryview(arena)` and `numpy.frombuffer(arena, dtype)` view
    the arena without copying, and keep it open.

    Args:
        nbytes: size in bytes; ValueError if the system cannot map that size.
        prefault: populate all pages now. Otherwise each page costs a fault at its first use.
        name: shown in /proc/<pid>/maps; at most 240 bytes.
        pages: "auto" uses huge pages if `prefault` is set and the system has them, or if the system
            chooses them itself; "small"; or "hugetlb" for reserved huge pages, which are always
            populated; `nbytes` is then rounded up to whole pages.
        node: NUMA node of the pages; -1 leaves the choice to the system.
    """

    cdef kvn_arena arena
    cdef Py_ssize_t exports  # live buffers; the mapping must outlive them
    cdef object __weakref__

    def __cinit__(self):
        self.arena.fd = -1

    def __init__(self, nbytes, *, bint prefault=False, str name="kvplan", str pages="auto",
                 int node=-1):
        if self.arena.address is not NULL:
            raise TypeError("an arena is made once")
        cdef uint64_t size = unsigned("nbytes", nbytes)
        cdef bytes label = name.encode()
        cdef kvn_failure failure
        if len(label) > 240 or b"\0" in label:
            raise ValueError(f"name is {name!r}; it must have at most 240 bytes, and no NUL")
        if pages not in ARENA_PAGES:
            raise ValueError(
                f"pages is {pages!r}; it must be one of {', '.join(map(repr, ARENA_PAGES))}"
            )
        cdef kvn_arena_pages kind = ARENA_PAGES[pages]
        cdef const char *title = label
        with nogil:
            check(kvn_arena_create(title, size, 0, kind, node, &self.arena, &failure), &failure)
        if prefault:
            self.populate()

    @staticmethod
    def of_peer(int pid, int fd, inode, nbytes, *, bint writable):
        """Map the arena behind descriptor `fd` of process `pid`, with this inode and size.

        Raise ValueError for another file, or for a file without a seal on its size, which could
        shrink during a copy; PermissionError, ProcessLookupError or OSError from the system.
        """
        cdef Arena self = Arena.__new__(Arena)
        cdef uint64_t size = unsigned("nbytes", nbytes), number = unsigned("inode", inode)
        cdef kvn_failure failure
        with nogil:
            check(kvn_arena_import(pid, fd, number, size, writable, &self.arena,
                                   &failure), &failure)
        return self

    def populate(self):
        """Populate and map every page now; raise MemoryError if memory is short."""
        cdef kvn_failure failure
        cdef int status
        with memoryview(self):  # keeps it open
            with nogil:
                status = kvn_arena_populate(&self.arena, &failure)
        check(status, &failure)

    cdef int check_open(self) except -1:
        if self.arena.address is NULL:
            raise ValueError("the arena is closed")
        return 0

    @property
    def address(self):
        """Address of the first byte in this process; ValueError once closed."""
        self.check_open()
        return <uintptr_t>self.arena.address

    @property
    def nbytes(self):
        return self.arena.nbytes

    @property
    def inode(self):
        """Inode of the memfd, the same in every process that maps the arena."""
        return self.arena.inode

    @property
    def fd(self):
        """Descriptor by which peers find the memfd; -1 for a peer's arena. ValueError if closed."""
        self.check_open()
        return self.arena.fd

    @property
    def writable(self):
        return bool(self.arena.writable)

    @property
    def pages(self):
        """Kind of pages: "auto", "small" or "hugetlb"; a peer's arena has "auto" or "hugetlb"."""
        return next(name for name, kind in ARENA_PAGES.items() if kind == self.arena.pages)

    @property
    def closed(self):
        return self.arena.address is NULL

    def close(self):
        """Unmap the memory; idempotent. Raise BufferError while a buffer is exported."""
        with cython.critical_section(self):
            if self.exports:
                raise BufferError(
                    f"the arena has {self.exports} exported buffer(s), so it cannot be closed"
                )
            kvn_arena_close(&self.arena)

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        with cython.critical_section(self):
            self.check_open()
            PyBuffer_FillInfo(
                buffer, self, self.arena.address, <Py_ssize_t>self.arena.nbytes,
                not self.arena.writable, flags
            )
            self.exports += 1

    def __releasebuffer__(self, Py_buffer *buffer):
        with cython.critical_section(self):
            self.exports -= 1

    def __buffer__(self, int flags, /):
        """Return `memoryview(self)`, like all types with buffers since Python 3.12 (PEP 688)."""
        return memoryview(self)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    def __dealloc__(self):
        kvn_arena_close(&self.arena)

    def __repr__(self):
        if self.closed:
            return f"<Arena of {self.nbytes} bytes, closed>"
        access = "" if self.writable else ", read-only"
        return f"<Arena of {self.nbytes} bytes at {self.address:#x}{access}>"


@cython.final
cdef class PageWalk:
    """A walk over the pages of an arena of `nbytes` bytes, advanced by one thread at a time.

    The walk maps pages that the owner has populated; a hole stays one, because mapping it would
    allocate memory. With `collapse`, which is for the owner, it makes a huge page of each populated
    2 MiB. Any thread may stop it.
    """

    cdef kvn_walk walk

    def __cinit__(self, nbytes, *, bint collapse=False):
        cdef uint64_t size = unsigned("nbytes", nbytes)
        cdef kvn_failure failure
        check(
            kvn_walk_begin(
                &self.walk, size, KVN_WALK_COLLAPSE if collapse else KVN_WALK_MAP, &failure
            ),
            &failure,
        )

    def advance(self, Arena arena not None, double seconds):
        """Continue until the pass ends, `seconds` are over, or the walk is stopped.

        Return the number of newly done bytes. The thread sleeps half of the time, in turns of
        less than 1 ms. Raise NotImplementedError if the kernel cannot do it, which completes the
        walk; ValueError if the arena is closed.
        """
        cdef kvn_failure failure
        cdef uint64_t advanced = 0
        cdef int64_t budget = <int64_t>(seconds * 1e9)
        cdef int status
        if arena.arena.nbytes != self.walk.nbytes:
            raise ValueError(f"arena has {arena.nbytes} bytes; the walk is of {self.walk.nbytes}")
        with memoryview(arena):  # keeps it open
            with nogil:
                status = kvn_walk_advance(
                    &self.walk, <char *>arena.arena.address, budget, &advanced, &failure
                )
        if status == KVN_UNSUPPORTED:
            raise NotImplementedError(failure.message.decode())
        check(status, &failure)
        return advanced

    def again(self):
        """Begin another pass, over the remaining holes."""
        kvn_walk_again(&self.walk)

    def stop(self):
        """Stop the walk; a step that has begun ends within 1 ms."""
        self.walk.stopped = True

    @property
    def stopped(self):
        return bool(self.walk.stopped)

    @property
    def is_pass_over(self):
        return self.walk.next == self.walk.num_chunks

    @property
    def is_complete(self):
        """True if the last pass found no hole."""
        return self.walk.left == 0

    def __dealloc__(self):
        kvn_walk_end(&self.walk)


def page_use(address, nbytes):
    """Return how many bytes of [address, address + nbytes) are present, mapped, and in huge pages.

    Use of mapped bytes causes no fault. The last two numbers are None before Linux 6.7. A call
    takes up to 30 ms for each GiB. Raise ValueError if a part of the range is not mapped memory.
    """
    cdef uint64_t start = unsigned("address", address), size = unsigned("nbytes", nbytes)
    cdef kvn_page_use found
    cdef kvn_failure failure
    with nogil:
        check(kvn_pages_look(start, size, &found, &failure), &failure)
    if not found.has_mapped:
        return found.present, None, None
    return found.present, found.mapped, found.huge


@cython.final
cdef class Pin:
    """A hold on the contiguous buffer of `exporter`, such as a NumPy array, bytearray or Arena.

    The exporter can neither move, resize nor free the buffer until `release`. Raise BufferError if
    the buffer is not contiguous, or not writable though `writable` is set; TypeError for an object
    without a buffer.

    Attributes:
        address, nbytes, writable: the buffer.
    """

    cdef Py_buffer buffer
    cdef bint held
    cdef readonly object address
    cdef readonly object nbytes
    cdef readonly bint writable

    def __init__(self, exporter, *, bint writable=False):
        if self.held:
            raise TypeError("a pin is made once")
        PyObject_GetBuffer(
            exporter, &self.buffer, PyBUF_ANY_CONTIGUOUS | (PyBUF_WRITABLE if writable else 0)
        )
        self.held = True
        self.address = <uintptr_t>self.buffer.buf
        self.nbytes = self.buffer.len
        self.writable = not self.buffer.readonly

    def release(self):
        """Release the buffer; idempotent."""
        with cython.critical_section(self):
            if self.held:
                self.held = False
                PyBuffer_Release(&self.buffer)

    def __dealloc__(self):
        if self.held:
            PyBuffer_Release(&self.buffer)


@cython.final
cdef class GenerationTable:
    """The generations of this process's registrations and leases, which its peers map.

    The table has `num_slots` slots for registrations, followed by `num_leases` for leases. Call
    `take` before a range is published and `release` before its memory is freed: no transfer that
    ends later succeeds at a peer. One thread at a time may take or release.
    """

    def __cinit__(self):
        self.table.memory.fd = -1

    def __init__(self, num_slots=65536, num_leases=0):
        if self.table.memory.address is not NULL:
            raise TypeError("a generation table is made once")
        cdef uint64_t slots = unsigned("num_slots", num_slots)
        cdef uint64_t leases = unsigned("num_leases", num_leases)
        cdef kvn_failure failure
        check(kvn_generations_create(slots, leases, &self.table, &failure), &failure)

    cdef int check_open(self) except -1:
        if self.table.memory.address is NULL:
            raise ValueError("the generation table is closed")
        return 0

    @cython.critical_section
    def take(self, bint is_lease=False, *, deadline_ns=0):
        """Return slot and generation of a new registration or lease; MemoryError if all are taken.

        Peers treat it as released once CLOCK_MONOTONIC has reached `deadline_ns`; 0 means never.
        """
        cdef uint64_t slot, generation
        cdef uint64_t deadline = unsigned("deadline_ns", deadline_ns)
        cdef kvn_failure failure
        self.check_open()
        check(kvn_generations_take(&self.table, is_lease, deadline, &slot, &generation, &failure),
              &failure)
        return slot, generation

    @cython.critical_section
    def renew(self, slot, generation, deadline_ns):
        """Replace the deadline; ValueError if the slot has another generation."""
        cdef uint64_t number = unsigned("slot", slot), expected = unsigned("generation", generation)
        cdef uint64_t deadline = unsigned("deadline_ns", deadline_ns)
        cdef kvn_failure failure
        self.check_open()
        check(kvn_generations_renew(&self.table, number, expected, deadline, &failure), &failure)

    @cython.critical_section
    def release(self, slot, generation):
        """End a registration or lease; ValueError if the slot has another generation."""
        cdef uint64_t number = unsigned("slot", slot), expected = unsigned("generation", generation)
        cdef kvn_failure failure
        self.check_open()
        check(kvn_generations_release(&self.table, number, expected, &failure), &failure)

    @property
    def fd(self):
        self.check_open()
        return self.table.memory.fd

    @property
    def inode(self):
        return self.table.memory.inode

    @property
    def address(self):
        self.check_open()
        return <uintptr_t>self.table.memory.address

    @property
    def num_slots(self):
        return self.table.num_slots

    @property
    def closed(self):
        return self.table.memory.address is NULL

    @cython.critical_section
    def close(self):
        """Close the descriptor by which peers find the table; idempotent."""
        kvn_generations_close(&self.table)

    def __dealloc__(self):
        kvn_generations_close(&self.table)

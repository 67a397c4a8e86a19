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


cdef int check(int status, const kvn_failure *failure) except -1:
    return check_named(status, failure, "")


cdef int check_named(int status, const kvn_failure *failure, str name) except -1:
    if status == KVN_OK:
        return 0
    message = name + failure.message.decode("utf-8", "replace")
    if status == KVN_INVALID or status == KVN_UNMAPPED:
        raise ValueError(message)
    if status == KVN_NO_MEMORY and failure.code != EFBIG:  # whose number says which limit it was
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
    """Raises ValueError unless [address, address + nbytes) of this process is mapped memory.

    Every byte must be readable, and writable if asked. The kernel is asked; nothing is
    dereferenced, so a wrong address is an error and never a crash. `via` chooses how: "query"
    (PROCMAP_QUERY, Linux 6.11), "text" (/proc/self/maps), or "auto": the first that there is.
    OSError where /proc cannot be asked.
    """
    cdef uint64_t start = unsigned("address", address), size = unsigned("nbytes", nbytes)
    cdef kvn_maps_source source = source_named(via)
    cdef kvn_failure failure
    cdef int status
    with nogil:
        status = kvn_mapping_check(start, size, writable, source, &failure)
    check(status, &failure)


def check_ranges(addresses, nbytes, bint writable=False, *, str name="range", uint64_t first=0,
                 str via="auto"):
    """As check_memory() of each range, for little more than the price of one.

    Args:
        addresses, nbytes: contiguous uint64 columns of one length.
        name, first: messages call the ranges "{name} {first}", and so on.
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
        check_named(status, &failure, f"{name} {first + failed}: ")


@cython.final
cdef class Arena:
    """Zeroed memory of `nbytes` bytes in a sealed memfd, which a peer on this host can map.

    Supports the buffer protocol: `memoryview(arena)` and `numpy.frombuffer(arena, dtype)` view it
    without copying, and keep it open. `prefault` makes all of it present at once (MemoryError where
    that is too much); otherwise pages come at first use, each at the price of a fault. `name` shows
    in /proc/<pid>/maps. ValueError for a size that cannot be, MemoryError, OSError.

    `pages`: "auto": huge ones where `prefault` makes them and the system has them, or where it
    gives them by itself; "small"; or "hugetlb": those that the administrator has reserved, all of
    which are present then, and `nbytes` is rounded up to whole ones. `node`: of NUMA, where pages
    come from; -1: as the system does.
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
        cdef int status
        with nogil:
            status = kvn_arena_create(title, size, 0, kind, node, &self.arena, &failure)
        check(status, &failure)
        if prefault:
            self.populate()

    @staticmethod
    def of_peer(int pid, int fd, inode, nbytes, *, bint writable):
        """Maps the arena that is descriptor `fd` of process `pid`, with just this inode and size.

        ValueError where it is another file, or not sealed against a change of size: then it could
        shrink under a copy. PermissionError, ProcessLookupError, OSError: as the system says.
        """
        cdef Arena self = Arena.__new__(Arena)
        cdef uint64_t size = unsigned("nbytes", nbytes), number = unsigned("inode", inode)
        cdef kvn_failure failure
        cdef int status
        with nogil:
            status = kvn_arena_import(pid, fd, number, size, writable, &self.arena, &failure)
        check(status, &failure)
        return self

    def populate(self):
        """Makes every page present, and mapped here, now. MemoryError where there is too little."""
        cdef kvn_failure failure
        cdef int status
        with memoryview(self):  # nobody closes it meanwhile
            with nogil:
                status = kvn_arena_populate(&self.arena, &failure)
        check(status, &failure)

    cdef int check_open(self) except -1:
        if self.arena.address is NULL:
            raise ValueError("the arena is closed")
        return 0

    @property
    def address(self):
        """Of the first byte, in this process. ValueError when closed."""
        self.check_open()
        return <uintptr_t>self.arena.address

    @property
    def nbytes(self):
        return self.arena.nbytes

    @property
    def inode(self):
        """The memfd's: the same in every process that maps the arena."""
        return self.arena.inode

    @property
    def fd(self):
        """The memfd, by which peers find it; -1 for a peer's arena. ValueError when closed."""
        self.check_open()
        return self.arena.fd

    @property
    def writable(self):
        return bool(self.arena.writable)

    @property
    def pages(self):
        """As it was made: "auto", "small" or "hugetlb"; of a peer's arena "auto" or "hugetlb"."""
        return next(name for name, kind in ARENA_PAGES.items() if kind == self.arena.pages)

    @property
    def closed(self):
        return self.arena.address is NULL

    def close(self):
        """Unmaps the memory. BufferError while a buffer is exported; closing twice is fine."""
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
        """Return `memoryview(self)`: what Python 3.12 gives every type with buffers (PEP 688)."""
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
    """How far the pages of an arena of `nbytes` bytes have come; one thread at a time advances it.

    They are mapped here as far as they are there (populating a hole would allocate it); or with
    `collapse` each 2 MiB that are wholly there are made one huge page, which is for their owner.
    Any thread may stop it. MemoryError.
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
        """Goes on until the end of a pass, `seconds` are over, or it is stopped.

        Half of the time it sleeps, in turns of less than 1 ms. Returns bytes that were done.
        NotImplementedError: this kernel cannot; nothing is left to do then. ValueError: closed.
        """
        cdef kvn_failure failure
        cdef uint64_t advanced = 0
        cdef int64_t budget = <int64_t>(seconds * 1e9)
        cdef int status
        if arena.arena.nbytes != self.walk.nbytes:
            raise ValueError(f"arena has {arena.nbytes} bytes; the walk is of {self.walk.nbytes}")
        with memoryview(arena):  # nobody closes it meanwhile
            with nogil:
                status = kvn_walk_advance(
                    &self.walk, <char *>arena.arena.address, budget, &advanced, &failure
                )
        if status == KVN_UNSUPPORTED:
            raise NotImplementedError(failure.message.decode())
        check(status, &failure)
        return advanced

    def again(self):
        """Begins another pass, over what was not there."""
        kvn_walk_again(&self.walk)

    def stop(self):
        """A step that is under way, of less than 1 ms, is the last."""
        self.walk.stopped = True

    @property
    def stopped(self):
        return bool(self.walk.stopped)

    @property
    def is_pass_over(self):
        return self.walk.next == self.walk.num_chunks

    @property
    def is_complete(self):
        """Whether all that there can be is done: nothing was a hole when it was looked at."""
        return self.walk.left == 0

    def __dealloc__(self):
        kvn_walk_end(&self.walk)


def page_use(address, nbytes):
    """What of the pages of [address, address + nbytes) of this process is there, in bytes.

    Three numbers: present in memory; mapped here, so that it is used without a fault; and by huge
    pages of those. The last two are None where the kernel does not say (before Linux 6.7). Takes up
    to 30 ms for each GiB. ValueError: not mapped all through.
    """
    cdef uint64_t start = unsigned("address", address), size = unsigned("nbytes", nbytes)
    cdef kvn_page_use found
    cdef kvn_failure failure
    cdef int status
    with nogil:
        status = kvn_pages_look(start, size, &found, &failure)
    check(status, &failure)
    if not found.has_mapped:
        return found.present, None, None
    return found.present, found.mapped, found.huge


@cython.final
cdef class Pin:
    """Holds the contiguous buffer of `exporter` (NumPy array, bytearray, Arena...) where it is.

    While it is held, its exporter can neither move, resize nor free it. `address`, `nbytes` and
    `writable` say what it is. BufferError where it is not contiguous, or `writable` is asked for
    and it is not; TypeError for what has no buffer.
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
        """Lets go; idempotent."""
        with cython.critical_section(self):
            if self.held:
                self.held = False
                PyBuffer_Release(&self.buffer)

    def __dealloc__(self):
        if self.held:
            PyBuffer_Release(&self.buffer)


@cython.final
cdef class GenerationTable:
    """The generation table that this process shows to its peers: a generation for each slot.

    Those of leases, at most `num_leases`, follow those of `num_slots` registrations.
    `take` before a range is published to a peer, `release` before the memory is freed: from then on
    no peer reports a success for it. One thread at a time takes or releases.
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
        """(slot, generation) of a new registration or lease. MemoryError: all slots are taken.

        Once CLOCK_MONOTONIC has reached `deadline_ns`, peers that map the table find it released;
        0: never.
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
        """Gives it another deadline, as of `take`. ValueError: it is not the slot's present one."""
        cdef uint64_t number = unsigned("slot", slot), expected = unsigned("generation", generation)
        cdef uint64_t deadline = unsigned("deadline_ns", deadline_ns)
        cdef kvn_failure failure
        self.check_open()
        check(kvn_generations_renew(&self.table, number, expected, deadline, &failure), &failure)

    @cython.critical_section
    def release(self, slot, generation):
        """Ends a registration. ValueError when it is not the slot's present one."""
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
        """Close the table's descriptor; idempotent. Peers then find nothing under its number."""
        kvn_generations_close(&self.table)

    def __dealloc__(self):
        kvn_generations_close(&self.table)

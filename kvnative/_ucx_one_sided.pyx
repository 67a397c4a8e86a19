"""UCX's one-sided transfers: memory that peers reach, and backends that reach theirs."""

cimport cython
from cpython.buffer cimport PyBuffer_Release
from libc.stdint cimport uint64_t
from libc.stdlib cimport calloc, free

from kvnative._backend cimport Backend
from kvnative._crossing cimport acquire_uint64
from kvnative._host cimport kvn_failure, unsigned
from kvnative._native cimport KVN_PEER_GET, KVN_PEER_PUT, kvn_backend
from kvnative._ucx cimport (
    UcxEnd,
    UcxNativeLink,
    check_ucx,
    kvn_ucx_end_is_forked,
)

__all__ = ["UcxRegion", "UcxRegions", "one_sided_backend"]

cdef dict DIRECTIONS = {"get": KVN_PEER_GET, "put": KVN_PEER_PUT}
# Of memory, as UCX names them.
cdef dict KINDS = {
    "host": KVN_UCS_MEMORY_HOST, "cuda": KVN_UCS_MEMORY_CUDA, "rocm": KVN_UCS_MEMORY_ROCM,
}


cdef int memory_type(str name, kind) except -1:
    if kind not in KINDS:
        raise ValueError(f"{name} is {kind!r}; it must be one of {', '.join(KINDS)}")
    return KINDS[kind]


@cython.final
@cython.auto_pickle(False)
@cython.no_gc_clear
cdef class UcxRegions:
    """The memory that an end's UCX knows. An end has one of these, in mode "one_sided".

    Args:
        end: of mode "one_sided".

    Raises:
        ValueError: the end has another mode.
    """

    def __init__(self, UcxEnd end not None):
        cdef kvn_failure failure
        cdef int status
        if self.made:
            raise TypeError("UcxRegions are made once")
        end.check_made()
        if end.mode != "one_sided":
            raise ValueError(f"end has the mode {end.mode!r}; it must be 'one_sided'")
        with nogil:
            status = kvn_ucx_mover_create(end.end, &self.mover, &failure)
        check_ucx(status, &failure)
        self.end = end
        kvn_ucx_regions_init(&self.regions, end.end)
        self.made = True

    cdef int check_made(self) except -1:
        if not self.made:
            raise TypeError("the UcxRegions were not made")
        return self.end.check_made()

    def map(self, address, nbytes, *, kind="host", object owner=None) -> UcxRegion:
        """Make memory known, which may take a second for each few gigabytes with RDMA.

        Mapped once, however often it is asked for.

        Args:
            address, nbytes: the range; it stays allocated until released.
            kind: of memory: "host", "cuda" or "rocm".
            owner: kept as long as the region.

        Raises:
            ValueError: no such range or kind.
            UcxError: UCX refuses: the memory is not mapped, or may not be locked.
        """
        cdef uint64_t start = unsigned("address", address), size = unsigned("nbytes", nbytes)
        cdef UcxRegion made = UcxRegion.__new__(UcxRegion)
        cdef int type_ = memory_type("kind", kind)
        cdef kvn_failure failure
        cdef int status
        self.check_made()
        with nogil:
            status = kvn_ucx_region_use(&self.regions, start, size, type_, &made.region,
                                        &failure)
        check_ucx(status, &failure)
        made.regions = self
        made.owner = owner
        made.address = start
        made.nbytes = size
        made.kind = kind
        made.rkey = made.region.key[:made.region.key_nbytes]
        return made

    def __dealloc__(self):
        if self.made and not kvn_ucx_end_is_forked(self.end.end):
            with nogil:
                kvn_ucx_regions_fini(&self.regions)

    def __repr__(self):
        return f"<UcxRegions of {self.end!r}>"


@cython.final
@cython.auto_pickle(False)
@cython.no_gc_clear
cdef class UcxRegion:
    """A range that UCX knows; made by `UcxRegions.map`.

    Attributes:
        regions: those that it is of.
        address, nbytes, kind: as given.
        rkey: what a peer's UCX needs to reach it.
    """

    def __init__(self, *args, **kwargs):
        raise TypeError("a UcxRegion comes from UcxRegions.map()")

    @property
    def released(self) -> bool:
        """Whether it was."""
        return self.region is NULL

    def release(self) -> None:
        """Say that it is not used any more; idempotent, nothing in a forked child.

        Transfers of this end that use it keep it mapped until they are through. A peer that
        reaches for it afterwards loses its link: take it off the board before.
        """
        cdef kvn_ucx_region *region = self.region
        if region is NULL or kvn_ucx_end_is_forked(self.regions.end.end):
            return
        self.region = NULL
        with nogil:
            kvn_ucx_region_drop(&self.regions.regions, region)
        self.owner = None

    def __dealloc__(self):
        if self.region is not NULL and not kvn_ucx_end_is_forked(self.regions.end.end):
            with nogil:
                kvn_ucx_region_drop(&self.regions.regions, self.region)

    def __repr__(self):
        return (f"<UcxRegion [{self.address:#x}, {self.address + self.nbytes:#x}) of"
                f" {self.kind} memory{', released' if self.released else ''}>")


# What one_sided_backend is given, as C takes it.
@cython.final
@cython.internal
@cython.no_gc
cdef class Choice:
    cdef kvn_ucx_one_sided_options options
    cdef kvn_ucx_range *ranges
    cdef kvn_ucx_packed_key *keys
    cdef list packed  # bytes that `keys` shows

    cdef int take_ranges(self, dict columns) except -1:
        cdef Py_buffer views[5]
        cdef const uint64_t *words
        cdef int taken = 0
        cdef Py_ssize_t count = 0, i, field
        try:
            for name, column in columns.items():
                acquire_uint64(&views[taken], column, name)
                taken += 1
                if taken > 1 and views[taken - 1].shape[0] != count:
                    raise ValueError(f"{name}: expected {count} items, as in addresses, got"
                                     f" {views[taken - 1].shape[0]}")
                count = views[0].shape[0]
            self.ranges = <kvn_ucx_range *>calloc(count + 1, sizeof(kvn_ucx_range))
            if self.ranges is NULL:
                raise MemoryError
            for field in range(5):
                words = <const uint64_t *>views[field].buf
                for i in range(count):
                    (<uint64_t *>&self.ranges[i])[field] = words[i]
        finally:
            for i in range(taken):
                PyBuffer_Release(&views[i])
        self.options.ranges = self.ranges
        self.options.num_ranges = count
        return 0

    cdef int take_keys(self, list rkeys) except -1:
        cdef bytes key
        cdef Py_ssize_t i
        self.packed = rkeys
        self.keys = <kvn_ucx_packed_key *>calloc(len(rkeys) + 1, sizeof(kvn_ucx_packed_key))
        if self.keys is NULL:
            raise MemoryError
        for i, item in enumerate(rkeys):
            if not isinstance(item, bytes) or not item:
                raise TypeError(f"rkeys[{i}]: expected bytes that are not empty, got {item!r}")
            key = item
            self.keys[i].bytes = <const char *>key
            self.keys[i].nbytes = len(key)
        self.options.keys = self.keys
        self.options.num_keys = len(rkeys)
        return 0

    def __dealloc__(self):
        free(self.ranges)
        free(self.keys)


def one_sided_backend(UcxNativeLink link not None, str direction not None,
                      UcxRegions regions not None, *, addresses, nbytes, slots, generations, keys,
                      rkeys, board_address, board_slots, bytes board_rkey not None,
                      local="host") -> Backend:
    """Return a backend whose remote addresses are the peer's.

    Before and after its bytes a transfer reads from the peer's board the words of those ranges that
    it uses; if one is not its generation, the transfer ends with KVN_UNMAPPED.

    Args:
        link: connected.
        direction: "get", from the peer, or "put".
        regions: of the link's end. Local memory need not be in one; with RDMA it then is slower.
        addresses, nbytes, slots, generations: of the peer's ranges, columns of uint64. Remote
            memory that lies in none of them is refused.
        keys: for each range, which of `rkeys` opens it; uint64.
        rkeys: of the peer's regions.
        board_address, board_slots, board_rkey: the peer's board: a word of 8 bytes for each slot.
        local: kind of the local memory that is in no region: "host", "cuda" or "rocm".

    Raises:
        TypeError, ValueError: arguments that do not fit together.
        UcxError: the link has failed, or UCX refuses a key.
    """
    cdef Choice choice = Choice.__new__(Choice)
    cdef kvn_backend *backend = NULL
    cdef kvn_failure failure
    cdef int status
    if direction not in DIRECTIONS:
        raise ValueError(f"direction is {direction!r}; it must be 'get' or 'put'")
    link.check_made()
    regions.check_made()
    if link.end is not regions.end:
        raise ValueError("link and regions are of two ends; they must be of one")
    choice.take_ranges({"addresses": addresses, "nbytes": nbytes, "slots": slots,
                        "generations": generations, "keys": keys})
    choice.take_keys([*rkeys, board_rkey])
    choice.options.direction = DIRECTIONS[direction]
    choice.options.board = unsigned("board_address", board_address)
    choice.options.board_slots = unsigned("board_slots", board_slots)
    choice.options.board_key = choice.options.num_keys - 1
    choice.options.local_type = memory_type("local", local)
    with nogil:
        status = kvn_ucx_one_sided_create(regions.mover, &regions.regions, link.link,
                                          &choice.options, &backend, &failure)
    check_ucx(status, &failure)
    return Backend.adopt(backend, (link, regions), "one_sided_backend")

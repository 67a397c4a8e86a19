"""Backends that move bytes over an endpoint of UCX."""

cimport cython
from libc.stdint cimport uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport strncpy

from kvnative._backend cimport Backend
from kvnative._crossing cimport acquire_columns, kvn_failure, peer_direction, release_columns
from kvnative._host cimport unsigned
from kvnative._native cimport kvn_backend
from kvnative._ucx cimport (
    UcxEndpoint, check_ucx, kvn_ucx_endpoint, kvn_ucx_regions, memory_type
)

__all__ = ["ucx_backend", "ucx_leased"]

cdef extern from "ucx/transfer.h" nogil:
    ctypedef struct kvn_ucx_peer_range:
        uint64_t address
        uint64_t nbytes
        uint64_t slot
        uint64_t generation
        uint64_t key

    ctypedef struct kvn_ucx_lease:
        uint64_t slot
        uint64_t generation
        char name[128]

cdef extern from "ucx/backend.h" nogil:
    ctypedef struct kvn_ucx_packed_key:
        const void *bytes
        size_t nbytes
    ctypedef struct kvn_ucx_backend_options:
        int direction
        const kvn_ucx_peer_range *ranges
        uint64_t num_ranges
        const kvn_ucx_packed_key *keys
        uint64_t num_keys
        int local_type

    int kvn_ucx_backend_create(
        kvn_ucx_regions *regions, kvn_ucx_endpoint *endpoint,
        const kvn_ucx_backend_options *options, kvn_backend **out, kvn_failure *failure
    )
    int kvn_ucx_backend_create_leased(
        const kvn_backend *whole, const kvn_ucx_lease *leases, uint64_t num_leases,
        kvn_backend **out, kvn_failure *failure
    )


# The arguments of ucx_backend as C structs.
@cython.final
@cython.internal
@cython.no_gc
cdef class BackendOptions:
    cdef kvn_ucx_backend_options options
    cdef kvn_ucx_peer_range *ranges
    cdef kvn_ucx_packed_key *keys
    cdef list packed  # bytes that `keys` points to

    cdef int take_ranges(self, tuple columns) except -1:
        cdef Py_buffer views[5]
        cdef const uint64_t *words
        cdef Py_ssize_t count, i, field
        acquire_columns(views, columns, ("addresses", "nbytes", "slots", "generations", "keys"))
        try:
            count = views[0].shape[0]
            self.ranges = <kvn_ucx_peer_range *>calloc(count + 1, sizeof(kvn_ucx_peer_range))
            if self.ranges is NULL:
                raise MemoryError
            for field in range(5):
                words = <const uint64_t *>views[field].buf
                for i in range(count):
                    (<uint64_t *>&self.ranges[i])[field] = words[i]
        finally:
            release_columns(views, 5)
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


def ucx_backend(UcxEndpoint endpoint not None, str direction not None, *, addresses, nbytes, slots,
                generations, keys, rkeys, local="host") -> Backend:
    """Return a backend whose remote addresses are memory of the peer.

    A transfer reads the generations of its ranges before and after its bytes, and ends with
    KVN_UNMAPPED if one differs from `generations`.

    Args:
        endpoint: a connected endpoint.
        direction: "get" from the peer, or "put".
        addresses, nbytes, slots, generations: columns of uint64: the peer's ranges. Other remote
            memory is refused.
        keys: uint64 index into `rkeys` of each range.
        rkeys: keys of the peer's regions.
        local: type of local memory outside of all regions: "host" or "cuda". Host memory
            outside of regions is slower with RDMA.
    """
    cdef BackendOptions taken = BackendOptions.__new__(BackendOptions)
    cdef kvn_backend *backend = NULL
    cdef kvn_failure failure
    taken.options.direction = peer_direction(direction)
    endpoint.check_made()
    taken.take_ranges((addresses, nbytes, slots, generations, keys))
    taken.take_keys(list(rkeys))
    taken.options.local_type = memory_type("local", local)
    with nogil:
        check_ucx(kvn_ucx_backend_create(&endpoint.worker.regions, endpoint.endpoint,
                                         &taken.options, &backend, &failure), &failure)
    return Backend.adopt(backend, endpoint, "ucx_backend")


def ucx_leased(Backend backend not None, leases) -> Backend:
    """Return a backend that reaches the same memory with leases.

    Its transfers also read the generations of the leases before and after their bytes, and end with
    KVN_UNMAPPED if one differs.

    Args:
        backend: result of `ucx_backend`.
        leases: slot, generation and name for messages of each lease of the peer.
    """
    cdef kvn_ucx_lease *taken
    cdef kvn_backend *made = NULL
    cdef kvn_failure failure
    cdef bytes text
    cdef const char *name_
    cdef Py_ssize_t i
    cdef int status
    given = tuple(leases)
    backend.calls()
    backend.check_process()
    taken = <kvn_ucx_lease *>calloc(len(given) + 1, sizeof(kvn_ucx_lease))
    if taken is NULL:
        raise MemoryError
    try:
        for i, (slot, generation, name) in enumerate(given):
            taken[i].slot = unsigned("slot", slot)
            taken[i].generation = unsigned("generation", generation)
            text = name.encode(errors="replace")
            name_ = text
            strncpy(taken[i].name, name_, sizeof(taken[i].name) - 1)
        status = kvn_ucx_backend_create_leased(backend.handle, taken, len(given), &made, &failure)
    finally:
        free(taken)
    check_ucx(status, &failure)
    return Backend.adopt(made, backend, "ucx_leased")

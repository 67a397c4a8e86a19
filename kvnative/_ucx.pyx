"""UCX: its library, found at run time; a worker, its endpoints, and memory that peers reach."""

cimport cython
from libc.math cimport INFINITY
from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport strncpy

from kvnative._backend cimport Backend
from kvnative._crossing cimport (
    acquire_columns, kvn_failure, raise_failure, release_columns
)
from kvnative._host cimport unsigned
from kvnative._native cimport (
    KVN_CANCELLED,
    KVN_FOREVER,
    KVN_PEER_GET,
    KVN_PEER_PUT,
    kvn_backend,
)

import atexit
import os
import threading
import weakref

from kvnative._backend import CallError, NativeError

__all__ = ["UcxEndpoint", "UcxError", "UcxLibrary", "UcxRegion", "UcxWorker", "ucx_backend",
           "ucx_leased"]

# As in the environment; either form is understood.
PREFIX = "UCX_"

cdef dict DIRECTIONS = {"get": KVN_PEER_GET, "put": KVN_PEER_PUT}
# Of memory, as UCX names them.
cdef dict KINDS = {
    "host": KVN_UCS_MEMORY_HOST, "cuda": KVN_UCS_MEMORY_CUDA, "rocm": KVN_UCS_MEMORY_ROCM,
}
cdef dict LIBRARIES = {}  # file -> UcxLibrary: a library is never closed
cdef object OPENING = threading.Lock()  # opening may change the environment for a while
# A child that is forked meanwhile would find it locked for ever.
os.register_at_fork(before=OPENING.acquire, after_in_parent=OPENING.release,
                    after_in_child=OPENING.release)
cdef object WORKERS = weakref.WeakSet()


class UcxError(CallError):
    """A call of UCX failed, or a link did. `code` is a ucs_status_t or an errno."""


cdef int check_ucx(int status, const kvn_failure *failure) except -1:
    return raise_failure(UcxError, status, failure)


@atexit.register
def close_all():
    """Stop the threads before UCX's own destructors run."""
    for worker in list(WORKERS):
        worker.close()


@cython.final
@cython.auto_pickle(False)
cdef class UcxLibrary:
    """The UCX libraries of this process.

    Attributes:
        path: the file of libucp; another one than was asked for where the process had one before.
        version: (1, 22, 0), say.
    """

    cdef kvn_ucx_library library
    cdef readonly str path
    cdef readonly tuple version

    def __init__(self, *args, **kwargs):
        raise TypeError("a UcxLibrary comes from UcxLibrary.load()")

    @staticmethod
    def load(path: str) -> UcxLibrary:
        """Open the library, or return the one that is open.

        Args:
            path: the file of libucp, or its name for the loader's own search.
        """
        cdef kvn_failure failure
        cdef UcxLibrary self = UcxLibrary.__new__(UcxLibrary)
        cdef bytes encoded = os.fsencode(path)
        cdef const char *file = encoded
        cdef int status
        with OPENING:
            known = LIBRARIES.get(path)
            if known is not None:
                return known
            # With the GIL, if there is one: then no other thread sets os.environ meanwhile.
            status = kvn_ucx_library_open(file, &self.library, &failure)
            check_ucx(status, &failure)
            self.path = os.fsdecode(<bytes>self.library.path)
            self.version = tuple(<int>self.library.version[i] for i in range(3))
            # By whatever name, it is one: it counts its workers.
            LIBRARIES[path] = LIBRARIES.setdefault(self.path, self)
            return LIBRARIES[path]


cdef dict encoded_settings(settings):
    found = {}
    for name, value in settings.items():
        bare = name.removeprefix(PREFIX)
        if not bare or "\0" in name or "\0" in value:
            raise ValueError(f"a setting is {name!r}={value!r}; it must be a name of UCX's, such as"
                             f" UCX_NET_DEVICES, and text")
        found[bare.encode()] = value.encode()
    return found


cdef void stop_worker(kvn_ucx_worker *worker) noexcept nogil:
    kvn_ucx_endpoints_close(worker)
    kvn_ucx_worker_stop(worker)


cdef int64_t deadline_in(double timeout_ms) noexcept nogil:
    if timeout_ms == INFINITY:
        return KVN_FOREVER
    return kvn_now_ns() + <int64_t>(min(timeout_ms, 1e12) * 1e6)


cdef int memory_type(str name, kind) except -1:
    if kind not in KINDS:
        raise ValueError(f"{name} is {kind!r}; it must be one of {', '.join(KINDS)}")
    return KINDS[kind]


@cython.final
@cython.auto_pickle(False)
@cython.no_gc_clear
cdef class UcxWorker:
    """A context of UCX and its worker, with a thread that progresses it when no caller does.

    Making one takes up to 400 ms and does not hold the GIL.

    Args:
        settings: of UCX, with or without UCX_ before the name; they override the environment.
        name: for UCX's own tools.

    Attributes:
        address: of the worker; a peer makes an endpoint of it.
        transports: what UCX found to use, "rc_mlx5/mlx5_0:1 cma/memory" say.
    """

    cdef UcxLibrary library
    cdef kvn_ucx_worker *worker
    cdef kvn_ucx_regions regions
    cdef readonly bytes address
    cdef readonly str transports
    cdef object __weakref__

    def __init__(self, UcxLibrary library not None, *, settings=(), str name not None=""):
        cdef kvn_failure failure
        cdef int status
        cdef size_t count
        cdef kvn_ucx_setting *array
        cdef bytes label = name.encode()
        cdef const char *title = label
        if self.worker is not NULL:
            raise TypeError("a UcxWorker is made once")
        given = encoded_settings(dict(settings))
        count = len(given)
        self.library = library
        array = <kvn_ucx_setting *>calloc(count + 1, sizeof(kvn_ucx_setting))
        if array is NULL:
            raise MemoryError
        try:
            for i, (key, value) in enumerate(given.items()):
                array[i].name = <const char *>key
                array[i].value = <const char *>value
            with OPENING, nogil:
                status = kvn_ucx_worker_create(&library.library, array, count, title, &self.worker,
                                               &failure)
        finally:
            free(array)
        check_ucx(status, &failure)
        kvn_ucx_regions_init(&self.regions, self.worker)
        self.address = (<const char *>self.worker.address)[:self.worker.address_nbytes]
        self.transports = (<bytes>self.worker.transports).decode("utf-8", "replace")
        WORKERS.add(self)

    cdef int check_made(self) except -1:
        if self.worker is NULL:
            raise TypeError("the UcxWorker was not made")
        if kvn_ucx_worker_is_forked(self.worker):
            raise NativeError("UCX does not work in a process forked from the one that opened it:"
                              " start such processes with the method spawn")
        return 0

    def map(self, address, nbytes, *, kind="host", object owner=None) -> UcxRegion:
        """Register memory with UCX, which may take a second for each few gigabytes with RDMA.

        A range is mapped once, however often it is asked for.

        Args:
            address, nbytes: the range; it stays allocated until released.
            kind: of memory: "host", "cuda" or "rocm".
            owner: kept as long as the region.
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
        made.holder = self
        made.owner = owner
        made.address = start
        made.nbytes = size
        made.kind = kind
        made.rkey = made.region.key[:made.region.key_nbytes]
        return made

    def tickets(self) -> UcxRegion:
        """Register what owners read to see what this process is writing to their memory."""
        return self.map(<uintptr_t>self.worker.tickets, KVN_UCX_TICKETS * sizeof(uint64_t))

    def endpoint(self, bytes address not None, *, generations_address, num_slots,
                 bytes generations_rkey not None, tickets_address, bytes tickets_rkey not None,
                 uint32_t tag) -> UcxEndpoint:
        """Make an endpoint to a peer; connect() it before use.

        What the peer publishes is believed: UCX ends the process for an address that it cannot
        read.

        Args:
            address: of the peer's worker.
            generations_address, num_slots, generations_rkey: the peer's generation table: a word of
                8 bytes for each slot, 1 at least.
            tickets_address, tickets_rkey: its `tickets`.
            tag: 32 bits, by which the peer knows what is written to its memory.
        """
        cdef UcxEndpoint made = UcxEndpoint.__new__(UcxEndpoint)
        cdef kvn_failure failure
        cdef kvn_ucx_remote remote
        cdef int status
        self.check_made()
        if not address or not generations_rkey or not tickets_rkey:
            raise ValueError("address, generations_rkey and tickets_rkey must have at least 1 byte")
        remote.address = <const char *>address
        remote.address_nbytes = len(address)
        remote.generations = unsigned("generations_address", generations_address)
        remote.num_slots = unsigned("num_slots", num_slots)
        if remote.num_slots == 0:
            raise ValueError("num_slots is 0; it must be at least 1")
        remote.generations_key = <const char *>generations_rkey
        remote.generations_key_nbytes = len(generations_rkey)
        remote.tickets = unsigned("tickets_address", tickets_address)
        remote.tickets_key = <const char *>tickets_rkey
        remote.tickets_key_nbytes = len(tickets_rkey)
        remote.tag = tag
        made.worker = self
        with nogil:
            status = kvn_ucx_endpoint_create(self.worker, &remote, &made.endpoint, &failure)
        check_ucx(status, &failure)
        return made

    def close(self) -> None:
        """Fail its endpoints and stop its thread. Idempotent; nothing in a forked child."""
        if self.worker is not NULL:
            with nogil:
                stop_worker(self.worker)

    def __dealloc__(self):
        if self.worker is not NULL and not kvn_ucx_worker_is_forked(self.worker):
            with nogil:
                stop_worker(self.worker)
                kvn_ucx_regions_fini(&self.regions)
                kvn_ucx_worker_release(self.worker)


@cython.final
@cython.auto_pickle(False)
@cython.no_gc_clear
cdef class UcxEndpoint:
    """The way to a peer; made by `UcxWorker.endpoint`, closed with the last reference to it.

    Attributes:
        worker: this side's.
    """

    cdef readonly UcxWorker worker
    cdef kvn_ucx_endpoint *endpoint
    cdef object __weakref__

    def __init__(self, *args, **kwargs):
        raise TypeError("a UcxEndpoint comes from UcxWorker.endpoint()")

    cdef int check_made(self) except -1:
        if self.endpoint is NULL:
            raise TypeError("the UcxEndpoint was not made")
        return self.worker.check_made()

    def connect(self, timeout_ms: float) -> None:
        """Return when the peer's generation table was read."""
        cdef kvn_failure failure
        cdef int64_t deadline
        cdef int status
        self.check_made()
        if not timeout_ms > 0:
            raise ValueError(f"timeout_ms is {timeout_ms:g}; it must be > 0")
        deadline = deadline_in(timeout_ms)
        with nogil:
            status = kvn_ucx_endpoint_connect(self.endpoint, deadline, &failure)
        check_ucx(status, &failure)

    @property
    def connected(self) -> bool:
        """The peer's generation table was read, and the endpoint has not failed."""
        self.check_made()
        return self.endpoint.state == KVN_UCX_CONNECTED

    @property
    def failure(self) -> tuple[int, str] | None:
        """Status and reason once it has failed; close() is a failure too (KVN_CANCELLED)."""
        cdef kvn_failure why
        self.check_made()
        if not kvn_ucx_endpoint_has_failed(self.endpoint, &why):
            return None
        return why.status, why.message.decode("utf-8", "replace")

    @property
    def death_fd(self) -> int:
        """A file that becomes readable when it fails. The endpoint's: duplicate it to keep it."""
        self.check_made()
        return self.endpoint.death_fd

    @property
    def transport(self) -> str:
        """What of UCX reads and writes memory, such as "rc_mlx5/mlx5_0:1"; "" until connected."""
        self.check_made()
        if self.endpoint.state != KVN_UCX_CONNECTED:
            return ""
        return (<bytes>self.endpoint.transport).decode("utf-8", "replace")

    def writing(self, uint32_t tag, timeout_ms: float) -> frozenset[tuple[int, int]]:
        """What the peer is writing to memory of this process now, as it has announced.

        Args:
            tag: of this process, that the peer's endpoint was made with.
            timeout_ms: that reading it may take.

        Returns:
            A ticket for each transfer; no other one is ever equal to it.
        """
        cdef uint64_t words[KVN_UCX_TICKETS]
        cdef kvn_failure failure
        cdef int64_t deadline = deadline_in(timeout_ms)
        cdef int status
        self.check_made()
        with nogil:
            status = kvn_ucx_endpoint_read_tickets(self.endpoint, deadline, words, &failure)
        check_ucx(status, &failure)
        return frozenset((i, words[i]) for i in range(KVN_UCX_TICKETS)
                         if words[i] and words[i] >> 32 == tag)

    def close(self, str reason not None="the endpoint was closed") -> None:
        """Fail with that reason. Idempotent."""
        cdef bytes text = reason.encode()
        cdef const char *why = text
        self.check_made()
        with nogil:
            kvn_ucx_endpoint_fail(self.endpoint, KVN_CANCELLED, 0, why)

    def __dealloc__(self):
        if self.endpoint is not NULL and not kvn_ucx_worker_is_forked(self.worker.worker):
            with nogil:
                kvn_ucx_endpoint_fail(self.endpoint, KVN_CANCELLED, 0, "the endpoint was dropped")
                kvn_ucx_endpoint_release(self.endpoint)


@cython.final
@cython.auto_pickle(False)
@cython.no_gc_clear
cdef class UcxRegion:
    """A range that UCX knows; made by `UcxWorker.map`.

    Attributes:
        address, nbytes, kind: as given.
        rkey: what a peer's UCX needs to reach it.
    """

    cdef UcxWorker holder  # None once it is released
    cdef object owner
    cdef kvn_ucx_region *region  # NULL once it is released
    cdef readonly uint64_t address
    cdef readonly uint64_t nbytes
    cdef readonly str kind
    cdef readonly bytes rkey

    def __init__(self, *args, **kwargs):
        raise TypeError("a UcxRegion comes from UcxWorker.map()")

    @property
    def worker(self) -> UcxWorker | None:
        """Whose it is; None once released."""
        with cython.critical_section(self):
            worker = self.holder
        return worker

    @property
    def released(self) -> bool:
        """Whether it was."""
        return self.region is NULL

    def release(self) -> None:
        """Say that it is not used any more; idempotent, nothing in a forked child.

        Transfers of this worker that use it keep it mapped until they are through. A peer that
        reaches for it afterwards loses its endpoint: end its generation before.
        """
        cdef kvn_ucx_region *region = NULL
        cdef UcxWorker worker
        with cython.critical_section(self):
            worker = self.holder
            if worker is not None and not kvn_ucx_worker_is_forked(worker.worker):
                region, self.region = self.region, NULL
        if region is NULL:
            return
        with nogil:
            kvn_ucx_region_drop(&worker.regions, region)
        with cython.critical_section(self):
            self.holder = self.owner = None

    def __dealloc__(self):
        if self.region is not NULL and not kvn_ucx_worker_is_forked(self.holder.worker):
            with nogil:
                kvn_ucx_region_drop(&self.holder.regions, self.region)

    def __repr__(self):
        return (f"<UcxRegion [{self.address:#x}, {self.address + self.nbytes:#x}) of"
                f" {self.kind} memory{', released' if self.released else ''}>")


# What ucx_backend is given, as C takes it.
@cython.final
@cython.internal
@cython.no_gc
cdef class BackendOptions:
    cdef kvn_ucx_backend_options options
    cdef kvn_ucx_peer_range *ranges
    cdef kvn_ucx_packed_key *keys
    cdef list packed  # bytes that `keys` shows

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
    """Return a backend whose remote addresses are the peer's.

    Before and after its bytes a transfer reads the generations of the ranges that it uses; if one
    is not as given here, the transfer ends with KVN_UNMAPPED.

    Args:
        endpoint: connected.
        direction: "get", from the peer, or "put".
        addresses, nbytes, slots, generations: of the peer's ranges, columns of uint64. Remote
            memory that lies in none of them is refused.
        keys: for each range, which of `rkeys` opens it; uint64.
        rkeys: of the peer's regions.
        local: kind of the local memory that is in no region: "host", "cuda" or "rocm". Host memory
            need not be in one; with RDMA it then is slower.
    """
    cdef BackendOptions taken = BackendOptions.__new__(BackendOptions)
    cdef kvn_backend *backend = NULL
    cdef kvn_failure failure
    cdef int status
    if direction not in DIRECTIONS:
        raise ValueError(f"direction is {direction!r}; it must be 'get' or 'put'")
    endpoint.check_made()
    taken.take_ranges((addresses, nbytes, slots, generations, keys))
    taken.take_keys(list(rkeys))
    taken.options.direction = DIRECTIONS[direction]
    taken.options.local_type = memory_type("local", local)
    with nogil:
        status = kvn_ucx_backend_create(&endpoint.worker.regions, endpoint.endpoint,
                                        &taken.options, &backend, &failure)
    check_ucx(status, &failure)
    return Backend.adopt(backend, endpoint, "ucx_backend")


def ucx_leased(Backend backend not None, leases) -> Backend:
    """Return a backend that reaches the same, and whose transfers are made with leases.

    They read the generations of those beside the ranges', before and after their bytes, and end
    with KVN_UNMAPPED if one is not as given here.

    Args:
        backend: of `ucx_backend`.
        leases: of the peer: a slot, a generation, and what messages call it, of each.
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

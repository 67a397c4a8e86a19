"""UCX: its library, opened at run time; workers, endpoints, and memory that peers reach."""

cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free

from kvnative._crossing cimport kvn_failure, raise_failure
from kvnative._host cimport unsigned
from kvnative._native cimport KVN_CANCELLED, KVN_OK
from kvnative._report cimport deadline_of

import atexit
import os
import threading
import weakref

from kvnative._backend import CallError, NativeError

__all__ = ["UcxEndpoint", "UcxError", "UcxLibrary", "UcxRegion", "UcxWorker"]

# Settings may have this prefix, like environment variables.
PREFIX = "UCX_"

# Memory types, as UCX names them.
cdef dict KINDS = {"host": KVN_UCS_MEMORY_HOST, "cuda": KVN_UCS_MEMORY_CUDA}
cdef dict LIBRARIES = {}  # file -> UcxLibrary: a library is never closed
cdef object OPENING = threading.Lock()  # opening may change the environment for a while
# Otherwise a child that is forked meanwhile would find OPENING locked.
os.register_at_fork(before=OPENING.acquire, after_in_parent=OPENING.release,
                    after_in_child=OPENING.release)
cdef object WORKERS = weakref.WeakSet()


class UcxError(CallError):
    """A failed call of UCX or a failed link. `code` is a ucs_status_t or an errno."""


cdef int check_ucx(int status, const kvn_failure *failure) except -1 nogil:
    if status != KVN_OK:
        with gil:
            raise_failure(UcxError, status, failure)
    return 0


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
        path: file of libucp. A library that the process had before replaces the requested one.
        version: such as (1, 22, 0).
    """

    def __init__(self, *args, **kwargs):
        raise TypeError("a UcxLibrary comes from UcxLibrary.load()")

    @staticmethod
    def load(path: str) -> UcxLibrary:
        """Open the library, or return the one that is open.

        Args:
            path: file of libucp, or a name that the loader searches.
        """
        cdef kvn_failure failure
        cdef UcxLibrary self = UcxLibrary.__new__(UcxLibrary)
        cdef bytes encoded = os.fsencode(path)
        cdef const char *file = encoded
        with OPENING:
            known = LIBRARIES.get(path)
            if known is not None:
                return known
            # With the GIL held, so that no other thread changes os.environ meanwhile.
            check_ucx(kvn_ucx_library_open(file, &self.library, &failure), &failure)
            self.path = os.fsdecode(<bytes>self.library.path)
            self.version = tuple(<int>self.library.version[i] for i in range(3))
            # One object for all names of the file, because it counts its workers.
            LIBRARIES[path] = LIBRARIES.setdefault(self.path, self)
            return LIBRARIES[path]


cdef dict encoded_settings(settings):
    found = {}
    for name, value in settings.items():
        bare = name.removeprefix(PREFIX)
        if not bare or "\0" in name or "\0" in value:
            raise ValueError(f"settings: {name!r}={value!r} must be a name of UCX, such as"
                             f" UCX_NET_DEVICES, and text without NUL")
        found[bare.encode()] = value.encode()
    return found


cdef void stop_worker(kvn_ucx_worker *worker) noexcept nogil:
    kvn_ucx_endpoints_close(worker)
    kvn_ucx_worker_stop(worker)


cdef int memory_type(str name, kind) except -1:
    if kind not in KINDS:
        raise ValueError(f"{name} is {kind!r}; it must be one of {', '.join(KINDS)}")
    return KINDS[kind]


@cython.final
@cython.auto_pickle(False)
@cython.no_gc_clear
cdef class UcxWorker:
    """A context and worker of UCX, with a thread that progresses it while no caller does.

    The constructor takes up to 400 ms and does not hold the GIL.

    Args:
        settings: settings of UCX, with or without the prefix UCX_; they override the environment.
        name: shown by UCX's tools.

    Attributes:
        address: address from which a peer makes an endpoint.
        transports: transports that UCX selected, such as "rc_mlx5/mlx5_0:1 cma/memory".
    """

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
        """Register memory with UCX; with RDMA that may take a second for a few gigabytes.

        A second call for the same range uses the first mapping.

        Args:
            address, nbytes: range, which must stay allocated until the region is released.
            kind: type of memory: "host" or "cuda".
            owner: kept alive as long as the region.
        """
        cdef uint64_t start = unsigned("address", address), size = unsigned("nbytes", nbytes)
        cdef UcxRegion made = UcxRegion.__new__(UcxRegion)
        cdef int type_ = memory_type("kind", kind)
        cdef kvn_failure failure
        self.check_made()
        with nogil:
            check_ucx(kvn_ucx_region_use(&self.regions, start, size, type_, &made.region,
                                         &failure), &failure)
        made.holder = self
        made.owner = owner
        made.address = start
        made.nbytes = size
        made.kind = kind
        made.rkey = made.region.key[:made.region.key_nbytes]
        return made

    def tickets(self) -> UcxRegion:
        """Register the tickets by which owners see the writes of this process to their memory."""
        return self.map(<uintptr_t>self.worker.tickets, KVN_UCX_TICKETS * sizeof(uint64_t))

    def endpoint(self, bytes address not None, *, generations_address, num_slots,
                 bytes generations_rkey not None, tickets_address, bytes tickets_rkey not None,
                 uint32_t tag) -> UcxEndpoint:
        """Make an endpoint to a peer; connect() it before use.

        The arguments come from the peer and are not checked: UCX ends the process if it cannot read
        an address.

        Args:
            address: address of the peer's worker.
            generations_address, num_slots, generations_rkey: the peer's generation table: a word of
                8 bytes for each of at least 1 slot.
            tickets_address, tickets_rkey: the peer's `tickets`.
            tag: 32 bits that mark tickets of writes to this peer's memory.
        """
        cdef UcxEndpoint made = UcxEndpoint.__new__(UcxEndpoint)
        cdef kvn_failure failure
        cdef kvn_ucx_remote remote
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
            check_ucx(kvn_ucx_endpoint_create(self.worker, &remote, &made.endpoint,
                                              &failure), &failure)
        return made

    def close(self) -> None:
        """Fail the endpoints and stop the thread. Idempotent; no effect in a forked child."""
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
    """A connection to a peer, made by `UcxWorker.endpoint` and closed with its last reference.

    Attributes:
        worker: worker of this process.
    """

    def __init__(self, *args, **kwargs):
        raise TypeError("a UcxEndpoint comes from UcxWorker.endpoint()")

    cdef int check_made(self) except -1:
        if self.endpoint is NULL:
            raise TypeError("the UcxEndpoint was not made")
        return self.worker.check_made()

    def connect(self, timeout_ms: float) -> None:
        """Connect, and return once the peer's generation table was read."""
        cdef kvn_failure failure
        cdef int64_t deadline
        self.check_made()
        if not timeout_ms > 0:
            raise ValueError(f"timeout_ms is {timeout_ms:g}; it must be > 0")
        deadline = deadline_of(timeout_ms)
        with nogil:
            check_ucx(kvn_ucx_endpoint_connect(self.endpoint, deadline, &failure), &failure)

    @property
    def connected(self) -> bool:
        """True if the peer's generation table was read and the endpoint has not failed."""
        self.check_made()
        return self.endpoint.state == KVN_UCX_CONNECTED

    @property
    def failure(self) -> tuple[int, str] | None:
        """Status and reason of a failure, or None. close() counts as one (KVN_CANCELLED)."""
        cdef kvn_failure why
        self.check_made()
        if not kvn_ucx_endpoint_has_failed(self.endpoint, &why):
            return None
        return why.status, why.message.decode("utf-8", "replace")

    @property
    def death_fd(self) -> int:
        """Descriptor, owned by the endpoint, that polls readable once the endpoint has failed."""
        self.check_made()
        return self.endpoint.death_fd

    @property
    def transport(self) -> str:
        """Transport that moves the bytes, such as "rc_mlx5/mlx5_0:1"; "" until connected."""
        self.check_made()
        if self.endpoint.state != KVN_UCX_CONNECTED:
            return ""
        return (<bytes>self.endpoint.transport).decode("utf-8", "replace")

    def writing(self, uint32_t tag, timeout_ms: float) -> frozenset[tuple[int, int]]:
        """Read the tickets of the peer's current writes to memory of this process.

        Args:
            tag: tag of this process, with which the peer made its endpoint.
            timeout_ms: timeout of the read.

        Returns:
            A unique ticket for each transfer.
        """
        cdef uint64_t words[KVN_UCX_TICKETS]
        cdef kvn_failure failure
        cdef int64_t deadline = deadline_of(timeout_ms)
        self.check_made()
        with nogil:
            check_ucx(kvn_ucx_endpoint_read_tickets(self.endpoint, deadline, words,
                                                    &failure), &failure)
        return frozenset((i, words[i]) for i in range(KVN_UCX_TICKETS)
                         if words[i] and words[i] >> 32 == tag)

    def close(self, str reason not None="the endpoint was closed") -> None:
        """Fail the endpoint with `reason`. Idempotent."""
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
    """A registered range of memory, made by `UcxWorker.map`.

    Attributes:
        address, nbytes, kind: as given to `map`.
        rkey: key with which a peer reaches the range.
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
        """Worker of the region; None once released."""
        with cython.critical_section(self):
            worker = self.holder
        return worker

    @property
    def released(self) -> bool:
        """True once `release` was called."""
        return self.region is NULL

    def release(self) -> None:
        """Release the region; idempotent, no effect in a forked child.

        Transfers in flight of this worker keep the range mapped until they end. A peer that uses it
        later loses its endpoint, so end its generation first.
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

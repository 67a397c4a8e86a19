"""The native side of the transport tcp: service threads, links, and their backends."""

cimport cython
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport strncpy
from posix.types cimport pid_t
from posix.unistd cimport close, getpid

from kvnative._backend cimport Backend
from kvnative._crossing cimport (
    acquire_columns, peer_direction, raise_failure, release_columns
)
from kvnative._device cimport Device, kvn_device
from kvnative._host cimport kvn_failure, unsigned
from kvnative._native cimport KVN_FAILED, KVN_INVALID, KVN_OK, kvn_backend

import threading
import weakref

from kvnative._backend import CallError, NativeError

__all__ = [
    "MAX_CONNECTIONS", "MAX_THREADS", "MAX_TRANSFER_LEASES", "TcpError", "TcpNativeLink",
    "TcpService", "check_encryption", "tcp_backend",
]

MAX_CONNECTIONS = <int>KVN_TCP_MAX_CONNECTIONS
MAX_TRANSFER_LEASES = 32  # of one transfer: each of its requests has all of them
MAX_THREADS = <int>KVN_TCP_MAX_THREADS

cdef tuple COLUMNS = ("slots", "generations", "addresses", "nbytes")
cdef uint64_t MOST = <uint64_t>-1


class TcpError(CallError):
    """A failed call of the system. `code` is its `errno`."""

    def __init__(self, message, code=0, status=KVN_FAILED):
        super().__init__(message, code, status)
        self.errno = code


def check_encryption() -> None:
    """Raise if the system's libcrypto, which encrypted links need, cannot be loaded."""
    cdef kvn_tcp_crypto crypto
    cdef kvn_failure failure
    if kvn_tcp_crypto_open(&crypto, &failure) != KVN_OK:
        raise_failure(TcpError, failure.status, &failure)


@cython.final
@cython.auto_pickle(False)
@cython.no_gc_clear
cdef class TcpService:
    """Threads that serve peers, and the table of ranges that peers may reach.

    A forked child cannot use it.

    Args:
        threads: number of threads, 1 to 16.
        max_ranges: maximum number of simultaneous ranges, 1 to 2**32 - 1.
        device: device whose memory may also move, through buffers of the host.
        name: name of the threads; tools show at most 15 bytes.
    """

    cdef kvn_tcp_service *service
    cdef Device device  # None: host memory only
    cdef pid_t pid
    cdef object mutex  # held while links are made and closed
    cdef set links  # weak references
    cdef object __weakref__

    def __init__(self, int threads, *, max_ranges: int, Device device=None, name: str = "kvplan"):
        cdef kvn_failure failure
        cdef kvn_device *copies = NULL
        cdef uint64_t rows = unsigned("max_ranges", max_ranges)
        cdef bytes encoded = name.encode()[:15]
        cdef const char *shown = encoded
        cdef int status = KVN_INVALID
        if self.service is not NULL:
            raise TypeError("a service is made once")
        if not 1 <= threads <= <int>KVN_TCP_MAX_THREADS:
            raise ValueError(f"threads is {threads}; it must be in [1, {MAX_THREADS}]")
        if not 1 <= rows < 2**32:
            raise ValueError(f"max_ranges is {rows}; it must be in [1, 2**32)")
        if device is not None:
            device.check_usable()
            copies = &device.device
        self.device = device
        self.mutex = threading.RLock()
        self.links = set()  # not a WeakSet, which other threads could change while `close` iterates
        self.pid = getpid()
        with nogil:
            status = kvn_tcp_service_create(threads, <uint32_t>rows, copies, shown, &self.service,
                                            &failure)
        if status != KVN_OK:
            raise_failure(TcpError, failure.status, &failure)

    cdef int check_open(self) except -1:
        if self.service is NULL:
            raise NativeError("the service is closed")
        self.check_process()
        return 0

    cdef int check_process(self) except -1:
        if self.pid != getpid():
            raise NativeError(f"the service belongs to process {self.pid}; this is its forked child"
                              f" {getpid()}, which needs one of its own")
        return 0

    cdef int check_device(self, bint on_device) except -1:
        if on_device and self.device is None:
            raise ValueError("on_device is True; the service has no device")
        return 0

    cdef object lock(self):
        """Return the mutex, except in a forked child, where it may be locked by no thread."""
        self.check_process()
        return self.mutex

    def add_range(self, slot: int, address: int, nbytes: int, bint writable, generation: int,
                  *, bint on_device=False, int64_t deadline_ns=0) -> None:
        """Let peers read [address, address + nbytes), and write to it if `writable`.

        Args:
            slot: a free slot below `max_ranges`.
            generation: distinguishes the range from earlier ones of the slot.
            on_device: the range is memory of the service's device.
            deadline_ns: CLOCK_MONOTONIC time from which on the range is refused; 0: never.
        """
        cdef kvn_tcp_row row
        cdef kvn_failure failure
        cdef uint64_t place = unsigned("slot", slot)
        cdef int status = KVN_INVALID
        row.address = unsigned("address", address)
        row.nbytes = unsigned("nbytes", nbytes)
        row.generation = unsigned("generation", generation)
        row.writable = writable
        row.is_on_device = on_device
        row.deadline_ns = deadline_ns
        self.check_device(on_device)
        with self.lock():
            self.check_open()
            status = kvn_tcp_table_add(kvn_tcp_service_table(self.service), place, &row, &failure)
        if status != KVN_OK:
            raise_failure(TcpError, failure.status, &failure)

    def renew_range(self, slot: int, int64_t deadline_ns) -> None:
        """Replace the deadline of a range."""
        cdef uint64_t place = unsigned("slot", slot)
        cdef bint was_there = False
        with self.lock():
            self.check_open()
            was_there = kvn_tcp_table_renew(
                kvn_tcp_service_table(self.service), place, deadline_ns
            )
        if not was_there:
            raise ValueError(f"slot {place} holds no range")

    def remove_range(self, slot: int) -> None:
        """Remove a range: after the return no byte of it is read or written for a peer."""
        cdef uint64_t place = unsigned("slot", slot)
        cdef kvn_tcp_table *table
        cdef bint was_there = False
        with self.lock():
            self.check_open()
            table = kvn_tcp_service_table(self.service)
            with nogil:
                was_there = kvn_tcp_table_remove(table, place)
        if not was_there:
            raise ValueError(f"slot {place} holds no range")

    def link(self, clients, servers, *, str peer, bytes secret=None, bint dials=False
             ) -> TcpNativeLink:
        """Make a link over connected, non-blocking stream sockets, which are closed on failure.

        Args:
            clients: descriptors of 1 to 16 sockets for requests of this side.
            servers: descriptors of as many sockets for requests of the peer.
            peer: name of the peer in messages.
            secret: 32 bytes that both ends share, to encrypt all traffic.
            dials: True on the side that has opened the sockets.
        """
        cdef int asks[KVN_TCP_MAX_CONNECTIONS]
        cdef int answers[KVN_TCP_MAX_CONNECTIONS]
        cdef kvn_failure failure
        cdef TcpNativeLink made = TcpNativeLink.__new__(TcpNativeLink)
        cdef const uint8_t *key = NULL
        cdef unsigned int count
        cdef int status = KVN_INVALID
        cdef bint are_taken = False
        first, second = list(clients), list(servers)
        try:
            with self.lock():
                self.check_open()
                count = len(first)
                if not 1 <= len(first) <= MAX_CONNECTIONS or len(second) != len(first):
                    raise ValueError(f"{len(first)} sockets to ask and {len(second)} to answer:"
                                     f" expected as many of each, 1 to {MAX_CONNECTIONS}")
                if secret is not None:
                    if len(secret) != KVN_TCP_SECRET_NBYTES:
                        raise ValueError(f"secret has {len(secret)} bytes; it must have"
                                         f" {KVN_TCP_SECRET_NBYTES}")
                    key = <const uint8_t *><const char *>secret
                for i in range(count):
                    asks[i], answers[i] = first[i], second[i]
                are_taken = True
                status = kvn_tcp_link_create(self.service, asks, answers, count, key, dials,
                                             &made.link, &failure)
                if status == KVN_OK:
                    made.service = self
                    made.peer = peer
                    self.links.add(weakref.ref(made, self.links.discard))
        finally:
            if not are_taken:
                for descriptor in {*first, *second}:
                    close(descriptor)
        if status != KVN_OK:
            raise_failure(TcpError, failure.status, &failure)
        return made

    def close(self) -> None:
        """End all links and threads; after the return no memory is touched. Idempotent."""
        cdef kvn_tcp_service *service = NULL
        if self.service is NULL or self.pid != getpid():
            return
        with self.mutex:
            for held in list(self.links):
                link = held()
                if link is not None:
                    link.close("the transport is closed")
            service, self.service = self.service, NULL
        if service is not NULL:
            with nogil:
                kvn_tcp_service_destroy(service)

    def __dealloc__(self):
        # Links hold the service, so none is left.
        if self.service is not NULL and self.pid == getpid():
            with nogil:
                kvn_tcp_service_destroy(self.service)


@cython.final
@cython.auto_pickle(False)
@cython.no_gc_clear
cdef class TcpNativeLink:
    """Connections to one peer; made by `TcpService.link`."""

    cdef TcpService service  # outlives the link
    cdef kvn_tcp_link *link
    cdef str peer
    cdef object __weakref__

    def __init__(self, *args, **kwargs):
        raise TypeError("a TcpNativeLink comes from TcpService.link()")

    cdef int check_made(self) except -1:
        if self.link is NULL:
            raise TypeError("a TcpNativeLink comes from TcpService.link()")
        return self.service.check_open()

    @property
    def connections(self) -> int:
        """Number of pairs of connections."""
        self.check_made()
        return kvn_tcp_link_connections(self.link)

    @property
    def is_up(self) -> bool:
        """True until the link fails or is closed."""
        return self.link is not NULL and kvn_tcp_link_is_up(self.link)

    @property
    def death_fd(self) -> int:
        """Descriptor, owned by the link, that polls readable once the link has failed; else -1."""
        if self.link is NULL:
            return -1
        return kvn_tcp_link_death(self.link)

    @property
    def failure(self) -> tuple[int, str] | None:
        """Status (KVN_PEER_GONE) and message if the link has failed; None if not, or closed."""
        cdef kvn_failure why
        if self.link is NULL or not kvn_tcp_link_has_failed(self.link, &why):
            return None
        return why.status, why.message.decode("utf-8", "replace")

    def close(self, reason: str) -> None:
        """Close the link: transfers in flight end with `reason`, and touch no memory afterwards.

        Idempotent; no effect in a forked child.
        """
        cdef bytes encoded = reason.encode("utf-8", "replace")
        cdef const char *why = encoded
        if self.link is NULL or self.service.pid != getpid():
            return
        with self.service.mutex:
            if self.service.service is NULL:
                return
            with nogil:
                kvn_tcp_link_close(self.link, why)

    def __dealloc__(self):
        if self.link is NULL or self.service.pid != getpid():
            return
        with nogil:  # waits for a thread of the service
            kvn_tcp_link_close(self.link, b"the link was dropped")
            kvn_tcp_link_destroy(self.link)

    def __repr__(self):
        return f"<TcpNativeLink to {self.peer}>"


def tcp_backend(TcpNativeLink link not None, int index, str direction not None, slots, generations,
                addresses, nbytes, *, bint on_device=False, leases=(),
                str leases_name="") -> Backend:
    """Return a backend whose remote addresses are memory of the link's peer.

    The peer ends a transfer with KVN_UNMAPPED if it has removed or unmapped a range, or registered
    it read-only. The first backend of a connection whose local side is on a device pins 2 MiB.

    Args:
        link: a link.
        index: number of the connection that moves the bytes.
        direction: "get" from the peer, or "put".
        slots, generations, addresses, nbytes: columns of uint64: ranges of the peer, as given to
            its `TcpService.add_range`. A descriptor outside of them ends with KVN_UNMAPPED.
        on_device: the local side is memory of the service's device, not of the host.
        leases: slot and generation of up to 32 leases that the peer checks with each request.
        leases_name: name of the leases in messages.
    """
    cdef Py_buffer columns[4]
    cdef kvn_tcp_known known
    cdef kvn_backend *backend
    cdef const kvn_device *device = NULL
    cdef kvn_failure failure
    cdef int status
    cdef Backend made
    link.check_made()
    cdef int way = peer_direction(direction)
    if not 0 <= index < link.connections:
        raise ValueError(f"index is {index}; the link has {link.connections} connections")
    link.service.check_device(on_device)
    if on_device:
        device = &link.service.device.device
        with nogil:  # may wait for the device
            status = kvn_tcp_link_stage(link.link, index, &failure)
        if status != KVN_OK:
            raise_failure(CallError, status, &failure)  # of the device
    known.places = NULL
    known.ranges = NULL
    acquire_columns(columns, (slots, generations, addresses, nbytes), COLUMNS)
    try:
        read_known(&known, <const uint64_t *>columns[0].buf, <const uint64_t *>columns[1].buf,
                   <const uint64_t *>columns[2].buf, <const uint64_t *>columns[3].buf,
                   columns[0].shape[0], leases)
        name_leases(&known, leases_name.encode(errors="replace"))
        backend = kvn_tcp_backend_create(kvn_tcp_link_client(link.link, index), way, device, &known)
        made = Backend.adopt(backend, link, "tcp backend")
        known.places = NULL  # owned by the backend now
        known.ranges = NULL
        return made
    finally:
        free(known.places)
        free(known.ranges)
        release_columns(columns, 4)


cdef int read_known(kvn_tcp_known *known, const uint64_t *slots, const uint64_t *generations,
                    const uint64_t *addresses, const uint64_t *nbytes, size_t count,
                    leases) except -1:
    cdef size_t i
    if len(leases) > MAX_TRANSFER_LEASES:
        raise ValueError(f"{len(leases)} leases; there may be at most {MAX_TRANSFER_LEASES}")
    known.count = count
    known.num_leases = <uint32_t>len(leases)
    known.places = <kvn_interval *>calloc(count + 1, sizeof(kvn_interval))
    known.ranges = <kvn_tcp_range *>calloc(count + len(leases) + 1, sizeof(kvn_tcp_range))
    if known.places is NULL or known.ranges is NULL:
        raise MemoryError(f"no memory for {count} ranges")
    for i in range(count):
        if nbytes[i] == 0 or addresses[i] > MOST - (nbytes[i] - 1) or slots[i] >> 32:
            raise ValueError(f"range {i}: slot {slots[i]}, {nbytes[i]} bytes at {addresses[i]:#x};"
                             " expected a slot below 2**32, 1 byte or more, and an end up to 2**64")
        known.places[i].first = addresses[i]
        known.places[i].last = addresses[i] + (nbytes[i] - 1)
        known.places[i].index = i
        known.ranges[i].slot = <uint32_t>slots[i]
        known.ranges[i].generation = generations[i]
    for number, (slot, generation) in enumerate(leases):
        known.ranges[count + <size_t>number].slot = <uint32_t>slot
        known.ranges[count + <size_t>number].generation = <uint64_t>generation
    kvn_intervals_sort(known.places, count)
    return 0


cdef int name_leases(kvn_tcp_known *known, bytes name) except -1:
    cdef const char *text = name
    strncpy(known.leases, text, sizeof(known.leases) - 1)
    known.leases[sizeof(known.leases) - 1] = 0
    return 0

"""One-sided transfers between Ascend devices by HCCL."""

cimport cython
from libc.stdint cimport uint32_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset, strncpy
from posix.unistd cimport getpid

from kvnative._backend cimport Backend
from kvnative._crossing cimport peer_direction
from kvnative._device cimport Device
from kvnative._hccl_memory cimport (
    Guards,
    HcclLibrary,
    Region,
    Staging,
    check_arguments,
    check_device,
    check_hccl,
    kvn_hixl_endpoint,
)
from kvnative._host cimport kvn_failure, unsigned
from kvnative._native cimport KVN_OK, KVN_PENDING

import math
import threading
from typing import NamedTuple

__all__ = ["HIXL_MAX_BATCH", "NUM_TICKETS", "Communicator", "HixlPeer", "Tickets"]

NUM_TICKETS = KVN_HCCL_TICKETS
HIXL_MAX_BATCH = KVN_CLIENT_MAX_OPERATIONS  # descriptors of one operation over HIXL

# In the order of kvn_communicator_state.
cdef tuple STATES = ("open", "preparing", "ready", "failed", "closed")


class HixlPeer(NamedTuple):
    """The peer of a communicator over HIXL.

    Attributes:
        local, remote: Network ports of both devices, `ENDPOINT_NBYTES` bytes each.
        address, port: Where the server of the peer listens.
    """

    local: bytes
    remote: bytes
    address: str
    port: int


cdef int copy_endpoint(kvn_hixl_endpoint *out, bytes packed) except -1:
    cdef const char *content = packed
    if len(packed) != sizeof(kvn_hixl_endpoint):
        raise ValueError(f"an endpoint of {len(packed)} bytes; expected"
                         f" {sizeof(kvn_hixl_endpoint)}")
    memcpy(out, content, sizeof(kvn_hixl_endpoint))
    return 0


cdef uint32_t optional_number(str name, value, int most) except? 0xBAD:
    if value is None:
        return KVN_HCCL_NOT_SET
    if not 0 <= value <= most:
        raise ValueError(f"{name} is {value}; it must be None or in [0, {most}]")
    return value


cdef int whole_seconds(timeout_ms) except -1:
    if not timeout_ms > 0:
        raise ValueError(f"timeout_ms is {timeout_ms}; it must be > 0")
    return <int>min(max(1, math.ceil(min(timeout_ms, 1e12) / 1000)), 0x7FFFFFFF)


@cython.final
@cython.auto_pickle(False)
@cython.no_gc_clear
cdef class Tickets:
    """The tickets by which one device announces puts with leases to the owners of the memory.

    Args:
        address: NUM_TICKETS words of 8 bytes on the device, all 0, in a region that is bound to
            each communicator. An owner reads there its tag << 32 and a number for each put.
        owner: kept alive as long as this object.
    """

    def __init__(self, address, object owner=None):
        self.tickets.address = unsigned("address", address)
        self.owner = owner


@cython.final
@cython.auto_pickle(False)
@cython.no_gc_clear
cdef class Communicator:
    """A connection to one device of a peer: bind, prepare, backend, close.

    Args:
        rank_table: JSON, the same at both ends.
        rank, remote_rank: ranks of this process and of the peer in the table.
        name: 1 to 127 bytes, the same at both ends and unique on the device.
        max_batch: descriptors of one operation: 256 on A2 and A3, 64 on 950, 128 over HIXL.
        traffic_class: RDMA traffic class, 0 to 255, or None for HCCL's choice.
        service_level: RDMA service level, 0 to 7, or None for HCCL's choice.
        peer: needed by HIXL's library, which uses neither the table nor the ranks.
    """

    def __init__(self, HcclLibrary library not None, Device device not None,
                 str rank_table not None, int rank, int remote_rank, str name not None, *,
                 int max_batch, traffic_class=None, service_level=None, peer=None):
        cdef kvn_communicator_options options
        cdef kvn_hixl_peer hixl
        cdef kvn_failure failure
        cdef bytes table = rank_table.encode(), label = name.encode(), ip
        if self.communicator is not NULL:
            raise TypeError("a Communicator is made once")
        if rank < 0 or remote_rank < 0 or rank == remote_rank:
            raise ValueError(f"rank is {rank} and remote_rank {remote_rank}; they must be two"
                             f" numbers >= 0")
        cdef int most = KVN_HCCL_MAX_BATCH if peer is None else KVN_CLIENT_MAX_OPERATIONS
        if not 1 <= max_batch <= most:
            raise ValueError(f"max_batch is {max_batch}; it must be in [1, {most}]")
        check_device(device)
        if library.hccl.is_client_server is not (peer is not None):
            raise TypeError(f"peer is {peer!r} for {library}; HIXL needs one, HCCL has none")
        memset(&hixl, 0, sizeof(hixl))
        if peer is not None:
            copy_endpoint(&hixl.local, peer.local)
            copy_endpoint(&hixl.remote, peer.remote)
            ip = peer.address.encode()
            hixl.ip = ip
            hixl.port = peer.port
        options.max_batch = max_batch
        options.peer = &hixl
        options.rank_table = table
        options.name = label
        options.rank = rank
        options.remote_rank = remote_rank
        options.traffic_class = optional_number("traffic_class", traffic_class, 255)
        options.service_level = optional_number("service_level", service_level, 7)
        self.library = library
        self.device = device
        self.bound = []
        self.lock = threading.Lock()
        self.name = name
        self.rank = rank
        self.remote_rank = remote_rank
        with nogil:
            check_arguments(kvn_communicator_create(&library.hccl, &device.device, &options,
                                                    &self.communicator, &failure), &failure)

    cdef int check_made(self) except -1:
        if self.communicator is NULL:
            raise TypeError("the Communicator was not made")
        self.library.acl.check_process()
        return 0

    @property
    def state(self) -> str:
        """State: "open", "preparing", "ready", "failed" (in prepare) or "closed"."""
        self.check_made()
        return STATES[kvn_communicator_state_of(self.communicator)]

    @property
    def disturbed(self) -> bool:
        """True once an operation failed in HCCL or was stopped; a new communicator is safer."""
        self.check_made()
        return kvn_communicator_is_disturbed(self.communicator)

    def disturb(self) -> None:
        """Mark it as disturbed, so that its user makes a new one."""
        self.check_made()
        kvn_communicator_disturb(self.communicator)

    @property
    def regions(self) -> tuple[Region, ...]:
        """Bound regions."""
        with self.lock:
            return tuple(self.bound)

    def bind(self, Region region not None) -> None:
        """Let transfers of both sides use a region. Call it before `prepare`."""
        cdef kvn_failure failure
        cdef int status
        self.check_made()
        with self.lock:  # before the call, after which a signal handler may raise
            self.bound.append(region)
        with nogil:
            status = kvn_communicator_bind(self.communicator, &region.region, &failure)
        if status != KVN_OK:
            with self.lock:
                if region in self.bound:
                    self.bound.remove(region)
        check_hccl(status, &failure)

    def unbind(self, Region region not None) -> None:
        """Unbind a region, so that it can be closed. Waits for a `prepare` in progress.

        A peer that still uses the region fails, or on some links does not notice; guards detect
        that.
        """
        cdef kvn_failure failure
        cdef int status
        self.check_made()
        with nogil:
            status = kvn_communicator_unbind(self.communicator, &region.region, &failure)
        with self.lock:
            if region in self.bound:
                self.bound.remove(region)
        check_hccl(status, &failure)

    def prepare(self, timeout_ms) -> None:
        """Connect to the peer, which must call prepare too. May be called once.

        Args:
            timeout_ms: timeout for the peer, rounded up to whole seconds for HCCL.
        """
        cdef kvn_failure failure
        cdef int status, seconds = whole_seconds(timeout_ms)
        self.check_made()
        with nogil:
            status = kvn_communicator_prepare(self.communicator, seconds, &failure)
        self.let_go()
        check_hccl(status, &failure)

    def backend(self, str direction not None, Guards guards=None, Staging staging=None,
                str local not None="device", leases=(), Tickets tickets=None,
                uint32_t tag=0) -> Backend:
        """Return a backend whose remote addresses are memory of the peer.

        Each remote range must lie in one region of the peer, and each local range in a region that
        is bound here. A batch of any size is issued as a whole and waited for once.

        Args:
            direction: "get" from the peer, or "put".
            guards: words that the transfer compares after its data.
            staging: memory to copy through, so that local memory need not be bound.
            local: kind of local memory: "device" or "host".
            leases: names for messages of the leases that the last guards belong to.
            tickets: announce a put to the owner; the guards are then also compared before the data.
            tag: tag of the owner.
        """
        cdef kvn_transfer_options options
        cdef kvn_lease_name *names = NULL
        cdef bytes text
        cdef const char *name
        cdef Py_ssize_t i
        self.check_made()
        options.direction = peer_direction(direction)
        if local not in ("device", "host"):
            raise ValueError(f"local is {local!r}; it must be 'device' or 'host'")
        if staging is not None and staging.region not in self.regions:
            raise ValueError("the region of staging is not bound to the communicator")
        options.guard_addresses = NULL if guards is None else guards.words
        options.num_guards = 0 if guards is None else guards.count
        options.guard_words = options.guard_addresses
        if guards is not None:
            options.guard_words = guards.words + guards.count
        options.staging = NULL if staging is None else &staging.staging
        options.local_on_device = local == "device"
        given = tuple(leases)
        if len(given) > options.num_guards:
            raise ValueError(f"leases: {len(given)}; there are {options.num_guards} guards")
        names = <kvn_lease_name *>calloc(len(given) + 1, sizeof(kvn_lease_name))
        if names is NULL:
            raise MemoryError()
        try:
            for i, item in enumerate(given):
                text = item.encode(errors="replace")
                name = text
                strncpy(names[i].text, name, sizeof(names[i].text) - 1)
            options.lease_names = names
            options.num_leases = <uint32_t>len(given)
            options.tickets = NULL if tickets is None else &tickets.tickets
            options.tag = tag
            return Backend.adopt(kvn_transfer_create(self.communicator, &options),
                                 (self, staging, tickets), f"communicator {self.name}")
        finally:
            free(names)

    def cancel(self, str message not None) -> None:
        """Give up the peer without waiting.

        Transfers that are queued, running or submitted later end with KVN_PEER_GONE and `message`.
        """
        cdef bytes text = message.encode()
        cdef const char *why = text
        self.check_made()
        with nogil:
            kvn_communicator_cancel(self.communicator, why)

    def close(self) -> None:
        """Unbind all regions and end the connection; idempotent, no effect in a forked child.

        Waits for the running transfer. If another thread is in `prepare`, the call returns at once,
        and that thread closes the connection when HCCL returns.
        """
        cdef kvn_failure failure
        cdef int status
        if self.communicator is NULL or self.library.acl.pid != getpid():
            return
        with nogil:
            status = kvn_communicator_close(self.communicator, &failure)
        self.let_go()
        if status != KVN_PENDING:
            check_hccl(status, &failure)

    # A closed communicator has no bound regions.
    cdef int let_go(self) except -1:
        if kvn_communicator_state_of(self.communicator) == KVN_COMM_CLOSED:
            with self.lock:
                self.bound.clear()
        return 0

    def __dealloc__(self):
        cdef kvn_failure ignored
        if self.communicator is NULL:
            return
        if self.library.acl.pid == getpid():
            with nogil:
                kvn_communicator_close(self.communicator, &ignored)
        with nogil:
            kvn_communicator_destroy(self.communicator)

    def __repr__(self):
        return f"<Communicator {self.name}: rank {self.rank} to {self.remote_rank}>"

"""HCCL's or HIXL's library, and memory for its transfers: regions, staging memory, guards."""

cimport cython
from libc.stdint cimport uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy
from posix.unistd cimport getpid

from kvnative._acl cimport AclLibrary
from kvnative._crossing cimport (
    acquire_columns, library_path, missing_calls, raise_failure, release_columns
)
from kvnative._device cimport Device, DeviceBuffer
from kvnative._host cimport kvn_failure, unsigned
from kvnative._native cimport KVN_OK, KVN_UNSUPPORTED

import os
import threading

from kvnative._device import DeviceError
from kvnative.ascend_files import (
    HCCL_NAMES, HIXL_NAMES, candidates, driver_version, max_registered
)

__all__ = [
    "ENDPOINT_NBYTES", "MAX_GUARDS", "Guards", "HcclError", "HcclLibrary", "Region", "Server",
    "Staging"
]

ENDPOINT_NBYTES = sizeof(kvn_hixl_endpoint)

MAX_GUARDS = KVN_MAX_GUARDS

cdef dict LIBRARIES = {}  # path -> HcclLibrary: a library is never closed
LIBRARIES_LOCK = threading.Lock()


class HcclError(DeviceError):
    """A failed call of HCCL, or of ACL on its behalf."""


cdef int check_hccl(int status, const kvn_failure *failure) except -1 nogil:
    if status != KVN_OK:
        with gil:
            raise HcclError(failure.message.decode("utf-8", "replace"), failure.code, status)
    return 0


cdef int check_arguments(int status, const kvn_failure *failure) except -1 nogil:
    if status != KVN_OK:
        with gil:
            raise_failure(HcclError, status, failure)
    return 0


cdef int check_device(Device device) except -1:
    if not isinstance(device.library, AclLibrary):
        raise TypeError(f"device is {device!r}; it must be an Ascend device")
    return device.check_usable()


@cython.final
@cython.auto_pickle(False)
@cython.no_gc_clear
cdef class HcclLibrary:
    """The HCCL or the HIXL library of this process.

    Attributes:
        acl: ACL library of the same toolkit.
        path: file of the library.
        missing: names of calls of other versions that this one lacks.
    """

    def __init__(self, *args, **kwargs):
        raise TypeError("a HcclLibrary comes from HcclLibrary.load()")

    @staticmethod
    def load(AclLibrary acl not None, path: str | None = None, *,
             bint client_server=False) -> HcclLibrary:
        """Open the library, or return the one that is open.

        Args:
            acl: ACL library of the same toolkit.
            path: file of the library, folder of a toolkit, or a name that the loader searches; None
                searches the folder of the ACL library, then the places of the toolkit.
            client_server: open HIXL's library, whose servers and clients make connections.
        """
        acl.check_process()
        names = HIXL_NAMES if client_server else HCCL_NAMES
        near = candidates(names, os.path.dirname(acl.path) or None) if path is None else []
        files = [file for group in [*near, *candidates(names, path)] for file in group]
        tried = []
        for file in dict.fromkeys(files):
            try:
                return HcclLibrary.open_file(acl, file, client_server)
            except HcclError as error:
                tried.append(f"{file}: {error}")
        reasons = "; ".join(tried) or f"{path} has neither {' nor '.join(names)}"
        name = "HIXL" if client_server else "HCCL"
        raise HcclError(f"no {name} library: {reasons}", 0, KVN_UNSUPPORTED)

    @staticmethod
    cdef HcclLibrary open_file(AclLibrary acl, str file, bint client_server):
        cdef kvn_failure failure
        cdef HcclLibrary self = HcclLibrary.__new__(HcclLibrary)
        cdef bytes encoded = os.fsencode(file), soc_name = acl.soc_name().encode()
        cdef const char *place = encoded
        cdef const char *soc = soc_name
        cdef int status
        self.acl = acl
        with nogil:
            if client_server:
                status = kvn_hixl_open(place, &acl.library.calls, &self.hccl, &failure)
            else:
                status = kvn_hccl_open(place, &acl.library.calls, soc, &self.hccl, &failure)
            check_hccl(status, &failure)
        driver = driver_version()
        version = (driver or "").encode()
        most = max_registered(driver)
        kvn_hccl_set_driver(&self.hccl, version, most["host"], most["device"])
        if client_server:
            self.path = library_path(&self.hccl.hixl, &kvn_hixl_symbols) or file
            self.missing = missing_calls(&self.hccl.hixl, &kvn_hixl_symbols)
        else:
            self.path = library_path(&self.hccl.calls, &kvn_hccl_symbols) or file
            self.missing = missing_calls(&self.hccl.calls, &kvn_hccl_symbols)
        with LIBRARIES_LOCK:
            return LIBRARIES.setdefault((acl.path, os.path.realpath(self.path)), self)

    @property
    def driver(self) -> str:
        """Version of the driver (HDK), such as "25.5.0", or ""."""
        return (<const char *>self.hccl.driver).decode(errors="replace")

    def check_host(self, Device device not None, address, nbytes) -> None:
        """Raise if HCCL could not map these host pages when it connects; it maps them now."""
        cdef uint64_t start = unsigned("address", address), size = unsigned("nbytes", nbytes)
        cdef kvn_failure failure
        check_device(device)
        with nogil:
            check_hccl(kvn_acl_try_map(&device.device, start, size, &failure), &failure)

    def registered(self, int device_id) -> tuple[int, int]:
        """Return the bytes of host and of device memory that are registered with a device."""
        cdef uint64_t nbytes[2]
        kvn_hccl_registered(&self.hccl, device_id, nbytes)
        return nbytes[0], nbytes[1]

    @property
    def generation(self) -> str:
        """Interface by which memory is registered; the classes hide the difference.

        "global": once, then bound to communicators (A2, A3). "per_comm": with each communicator, in
        bind and prepare (950). "client_server": with the server of the device, and with each
        client (HIXL).
        """
        if self.hccl.is_client_server:
            return "client_server"
        return "per_comm" if self.hccl.is_per_comm else "global"

    def __repr__(self):
        return f"<HcclLibrary {self.path}, {self.generation}>"


@cython.final
@cython.auto_pickle(False)
@cython.no_gc_clear
cdef class Server:
    """HIXL's server of a device: peers' clients reach the memory of all its regions.

    Open it before the first region of the device, and close it after the last. It listens for TCP
    connections, which HIXL does not authenticate.

    Args:
        endpoints: network ports of the device, ENDPOINT_NBYTES bytes each.
        address, port: where it listens; an IP address, and a port that is free.
    """

    def __init__(self, HcclLibrary library not None, Device device not None,
                 bytes endpoints not None, str address not None, uint32_t port):
        cdef bytes text = address.encode()
        cdef const char *ip = text
        cdef const char *packed = endpoints
        cdef uint32_t count = <uint32_t>(len(endpoints) // sizeof(kvn_hixl_endpoint))
        cdef kvn_failure failure
        if self.made:
            raise TypeError("a Server is made once")
        if not library.hccl.is_client_server:
            raise TypeError(f"{library} has no servers")
        if not endpoints or len(endpoints) % sizeof(kvn_hixl_endpoint):
            raise ValueError(f"endpoints: {len(endpoints)} bytes; expected a multiple of"
                             f" {sizeof(kvn_hixl_endpoint)}")
        check_device(device)
        self.library = library
        self.device = device
        with nogil:
            check_arguments(
                kvn_hixl_server_open(&library.hccl, &device.device,
                                     <const kvn_hixl_endpoint *>packed, count, ip, port,
                                     &self.server, &failure),
                &failure)
        self.made = True

    def close(self) -> None:
        """End all connections of peers; idempotent, no effect in a forked child."""
        cdef kvn_failure failure
        if not self.made or self.library.acl.pid != getpid():
            return
        with nogil:
            check_hccl(kvn_hixl_server_close(&self.server, &failure), &failure)

    def __dealloc__(self):
        cdef kvn_failure ignored
        if self.made and self.library.acl.pid == getpid():
            with nogil:
                kvn_hixl_server_close(&self.server, &ignored)

    def __repr__(self):
        return f"<Server of {self.device!r}>"


@cython.final
@cython.auto_pickle(False)
@cython.no_gc_clear
cdef class Region:
    """A range of device memory or pinned host memory that is registered with HCCL.

    Args:
        address, nbytes: the range.
        on_device: the range is memory of `device`, not host memory that is pinned for it.
        owner: `DeviceBuffer` or `Pinned` that is kept alive as long as the region.
    """

    def __init__(self, HcclLibrary library not None, Device device not None, address, nbytes, *,
                 bint on_device, object owner=None):
        cdef uint64_t start = unsigned("address", address), size = unsigned("nbytes", nbytes)
        cdef kvn_failure failure
        if self.made:
            raise TypeError("a Region is made once")
        check_device(device)
        self.library = library
        self.device = device
        self.owner = owner
        with nogil:
            check_arguments(kvn_region_open(&library.hccl, &device.device, start, size, on_device,
                                            &self.region, &failure), &failure)
        self.made = True

    @property
    def address(self) -> int:
        """Address of the first byte."""
        return self.region.address

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.region.nbytes

    @property
    def on_device(self) -> bool:
        """True for device memory, False for host memory."""
        return self.region.on_device

    @property
    def closed(self) -> bool:
        """True once it was deregistered."""
        return not self.region.is_open

    def close(self) -> None:
        """Deregister the range; idempotent, no effect in a forked child."""
        cdef kvn_failure failure
        cdef int status
        if not self.made or self.library.acl.pid != getpid():
            return
        with nogil:
            status = kvn_region_close(&self.region, &failure)
        with cython.critical_section(self):  # so that two threads do not both release the owner
            if not self.region.is_open:
                self.owner = None
        check_hccl(status, &failure)

    def __dealloc__(self):
        cdef kvn_failure ignored
        if self.made and self.library.acl.pid == getpid():
            with nogil:
                kvn_region_close(&self.region, &ignored)

    def __repr__(self):
        kind = "device" if self.on_device else "host"
        end = self.address + self.nbytes
        return (f"<Region [{self.address:#x}, {end:#x}) of {kind} memory"
                f"{', closed' if self.closed else ''}>")


@cython.final
@cython.auto_pickle(False)
@cython.no_gc
cdef class Guards:
    """Words by which a peer shows that its memory is still registered.

    A transfer reads its guards after its data, in stream order. If one differs, the transfer ends
    with KVN_UNMAPPED and confirms no descriptor.

    Args:
        addresses: uint64 addresses of words of 8 bytes in memory that the peer has bound; copied.
        expected: uint64 values of the words; copied.
    """

    def __init__(self, addresses, expected):
        cdef Py_buffer columns[2]
        if self.words is not NULL:
            raise TypeError("Guards are made once")
        acquire_columns(columns, (addresses, expected), ("addresses", "expected"))
        try:
            if not 1 <= columns[0].shape[0] <= KVN_MAX_GUARDS:
                raise ValueError(f"addresses: expected 1 to {KVN_MAX_GUARDS} items, got"
                                 f" {columns[0].shape[0]}")
            self.words = <uint64_t *>malloc(2 * columns[0].len)
            if self.words is NULL:
                raise MemoryError()
            self.count = <uint32_t>columns[0].shape[0]
            memcpy(self.words, columns[0].buf, columns[0].len)
            memcpy(self.words + self.count, columns[1].buf, columns[1].len)
        finally:
            release_columns(columns, 2)

    def __len__(self) -> int:
        return self.count

    def __dealloc__(self):
        free(self.words)


@cython.final
@cython.auto_pickle(False)
@cython.no_gc_clear
cdef class Staging:
    """Device memory through which transfers copy local memory that HCCL cannot access.

    This is host memory, or device memory that is not bound to the communicator. One object serves
    any number of communicators: bind `region` to each before its prepare.

    Args:
        slot_nbytes: size of a slot and of the chunks of a transfer, 4096 to 2**30. A transfer uses
            two slots: HCCL moves one chunk while the device copies another.
        buffer_sets: number of simultaneous transfers, 1 to 64. Others wait for their turn, until
            their deadline.

    Attributes:
        region: the whole memory.
    """

    def __init__(self, HcclLibrary library not None, Device device not None, *,
                 slot_nbytes=8 << 20, buffer_sets=2):
        cdef uint64_t size = unsigned("slot_nbytes", slot_nbytes)
        cdef uint64_t num_sets = unsigned("buffer_sets", buffer_sets)
        cdef kvn_failure failure
        cdef DeviceBuffer buffer
        if self.made:
            raise TypeError("Staging is made once")
        check_arguments(kvn_staging_check(size, num_sets, &failure), &failure)
        buffer = device.allocate(2 * size * num_sets)
        self.device = device
        self.region = Region(library, device, buffer.address, buffer.nbytes, on_device=True,
                             owner=buffer)
        with nogil:
            check_hccl(kvn_staging_open(&device.device, <uintptr_t>buffer.start, size,
                                        <uint32_t>num_sets, &self.staging, &failure), &failure)
        self.made = True

    @property
    def nbytes(self) -> int:
        """Size of the whole memory in bytes."""
        return self.region.nbytes

    @property
    def closed(self) -> bool:
        """True once it was closed."""
        return not self.staging.is_open

    def close(self) -> None:
        """Free the memory; idempotent, no effect in a forked child."""
        cdef kvn_failure failure
        cdef int status = KVN_OK
        if not self.made or self.device.library.pid != getpid():
            return
        if self.region.region.num_bound == 0:
            # Before the region, which frees the memory: a transfer may use it even if the region
            # was unbound meanwhile.
            with nogil:
                status = kvn_staging_close(&self.staging, &failure)
            if self.staging.is_open:
                check_hccl(status, &failure)
        self.region.close()
        check_hccl(status, &failure)

    def __dealloc__(self):
        cdef kvn_failure ignored
        if not self.made:
            return
        if self.device.library.pid == getpid():
            with nogil:
                kvn_staging_close(&self.staging, &ignored)
        kvn_staging_free(&self.staging)

    def __repr__(self):
        return f"<Staging of {self.staging.num_sets} x 2 x {self.staging.slot_nbytes} bytes>"

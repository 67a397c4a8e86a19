# The native side of the transport tcp, as C has it.
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from kvnative._device cimport kvn_device
from kvnative._host cimport kvn_failure
from kvnative._native cimport kvn_backend

cdef extern from "core/intervals.h" nogil:
    ctypedef struct kvn_interval:
        uint64_t first
        uint64_t last
        uint64_t reach
        uint64_t index
    void kvn_intervals_sort(kvn_interval *items, size_t count)

cdef extern from "tcp/wire.h" nogil:
    ctypedef struct kvn_tcp_range:
        uint32_t slot
        uint32_t reserved
        uint64_t generation

cdef extern from "tcp/table.h" nogil:
    enum:
        KVN_TCP_MAX_THREADS
    ctypedef struct kvn_tcp_row:
        uint64_t address
        uint64_t nbytes
        uint64_t generation
        bint writable
        bint is_on_device
        int64_t deadline_ns
    ctypedef struct kvn_tcp_table:
        pass
    int kvn_tcp_table_add(kvn_tcp_table *self, uint64_t slot, const kvn_tcp_row *row,
                          kvn_failure *failure)
    bint kvn_tcp_table_remove(kvn_tcp_table *self, uint64_t slot)
    bint kvn_tcp_table_renew(kvn_tcp_table *self, uint64_t slot, int64_t deadline_ns)

cdef extern from "tcp/cipher.h" nogil:
    enum:
        KVN_TCP_SECRET_NBYTES
    ctypedef struct kvn_tcp_crypto:
        pass
    int kvn_tcp_crypto_open(kvn_tcp_crypto *out, kvn_failure *failure)

cdef extern from "tcp/service.h" nogil:
    ctypedef struct kvn_tcp_service:
        pass
    int kvn_tcp_service_create(unsigned num_threads, uint32_t num_rows,
                               kvn_device *device, const char *name,
                               kvn_tcp_service **out, kvn_failure *failure)
    void kvn_tcp_service_destroy(kvn_tcp_service *self)
    kvn_tcp_table *kvn_tcp_service_table(kvn_tcp_service *self)

cdef extern from "tcp/client.h" nogil:
    ctypedef struct kvn_tcp_known:
        kvn_interval *places
        kvn_tcp_range *ranges
        size_t count
        uint32_t num_leases
        char leases[128]
    ctypedef struct kvn_tcp_client:
        pass

cdef extern from "tcp/link.h" nogil:
    enum:
        KVN_TCP_MAX_CONNECTIONS
    ctypedef struct kvn_tcp_link:
        pass
    int kvn_tcp_link_create(kvn_tcp_service *service, const int *clients, const int *servers,
                            unsigned count, const uint8_t *secret, bint dials,
                            kvn_tcp_link **out, kvn_failure *failure)
    unsigned kvn_tcp_link_connections(const kvn_tcp_link *self)
    kvn_tcp_client *kvn_tcp_link_client(kvn_tcp_link *self, unsigned index)
    int kvn_tcp_link_stage(kvn_tcp_link *self, unsigned index, kvn_failure *failure)
    int kvn_tcp_link_death(kvn_tcp_link *self)
    bint kvn_tcp_link_is_up(const kvn_tcp_link *self)
    bint kvn_tcp_link_has_failed(kvn_tcp_link *self, kvn_failure *why)
    void kvn_tcp_link_close(kvn_tcp_link *self, const char *why)
    void kvn_tcp_link_destroy(kvn_tcp_link *self)
    kvn_backend *kvn_tcp_backend_create(kvn_tcp_client *client, int direction,
                                        const kvn_device *device, const kvn_tcp_known *known)

/* One-sided access to memory of a peer by UCX: a get or put for each descriptor, many in flight. */
#ifndef KVN_UCX_BACKEND_H
#define KVN_UCX_BACKEND_H

#include "ucx/transfer.h"

/* A key that the peer's UCX has packed. */
typedef struct kvn_ucx_packed_key {
    const void *bytes;
    size_t nbytes;
} kvn_ucx_packed_key;

typedef struct kvn_ucx_backend_options {
    kvn_direction direction; /* KVN_PEER_GET or KVN_PEER_PUT */
    const kvn_ucx_peer_range *ranges; /* copied, like the fields below */
    uint64_t num_ranges;
    const kvn_ucx_packed_key *keys;
    uint64_t num_keys;
    int local_type; /* KVN_UCS_MEMORY_ of local memory outside of regions */
} kvn_ucx_backend_options;

/* The endpoint must be connected. The regions of its worker must outlive the backend. */
int kvn_ucx_backend_create(kvn_ucx_regions *regions, kvn_ucx_endpoint *endpoint,
                           const kvn_ucx_backend_options *options, kvn_backend **out,
                           kvn_failure *failure);

/* Reaches the same memory as `whole`, which must outlive it. `leases` are copied. Transfers end with KVN_UNMAPPED once
 * the peer has ended one of the leases. KVN_INVALID if `whole` is another kind of backend. */
int kvn_ucx_backend_create_leased(const kvn_backend *whole, const kvn_ucx_lease *leases, uint64_t num_leases,
                                  kvn_backend **out, kvn_failure *failure);

#endif

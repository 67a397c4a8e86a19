/* The tickets of a peer: the writes to memory of this process that it has announced (core/announce.h). */
#ifndef KVN_UCX_TICKETS_H
#define KVN_UCX_TICKETS_H

#include "ucx/endpoint.h"

/* Reads the tickets of the peer. Fails with KVN_TIMEOUT, or because the endpoint has failed or is not connected. */
int kvn_ucx_endpoint_read_tickets(kvn_ucx_endpoint *self, int64_t deadline_ns,
                                  uint64_t out[KVN_UCX_TICKETS], kvn_failure *failure);

#endif

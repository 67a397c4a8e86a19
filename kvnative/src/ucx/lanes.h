/* The transport by which an endpoint reads and writes the memory of its peer. */
#ifndef KVN_UCX_LANES_H
#define KVN_UCX_LANES_H

#include "ucx/endpoint.h"

/* With the progress lock: sets the transport of an endpoint that UCX has made. KVN_UNSUPPORTED: no lane moves bytes by
 * itself, but only by messages to the peer. */
int kvn_ucx_find_transport(kvn_ucx_endpoint *self, kvn_failure *failure);

#endif

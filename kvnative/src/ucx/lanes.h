/* The transport by which an endpoint reads and writes the memory of its peer. */
#ifndef KVN_UCX_LANES_H
#define KVN_UCX_LANES_H

#include "ucx/library.h"

#define KVN_UCX_TRANSPORT_ROOM 128 /* such as "rc_mlx5/mlx5_0:1" */

/* Writes the transport of an endpoint to `out`. Call it with the progress lock. KVN_UNSUPPORTED: the lanes move bytes
 * only by messages to the peer. */
int kvn_ucx_find_transport(const kvn_ucx_library *library, kvn_ucp_ep_h endpoint, char out[KVN_UCX_TRANSPORT_ROOM],
                           kvn_failure *failure);

#endif

/* Moves device memory through pinned host memory, which a socket reaches, in pieces of one batch each.
 * While the socket is busy with one slot, the device fills or empties the other. Each call waits for the copies that it
 * has begun: between two calls none is in flight. */
#ifndef KVN_TCP_STAGE_H
#define KVN_TCP_STAGE_H

#include "device/copier.h"
#include "tcp/stream.h"

/* Makes the slots; the stream frees them. KVN_OK, KVN_NO_MEMORY, or the device's failure to allocate pinned memory. */
int kvn_tcp_stage_create(kvn_copier *copier, kvn_tcp_stage **out, kvn_failure *failure);

#endif

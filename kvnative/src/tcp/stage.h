/* Moves memory of a device through pinned host memory, which a socket reaches, piece by piece, each in one batch.
 * While the socket is busy with one slot, the device fills or empties the other. Each call waits for the copies that it
 * has begun: between two calls none is in flight. */
#ifndef KVN_TCP_STAGE_H
#define KVN_TCP_STAGE_H

#include "device/channel.h"
#include "tcp/stream.h"

/* Copies for all connections of a service; it must stay in place. */
struct kvn_tcp_copier {
    kvn_device *device; /* outlives the copier */
    kvn_channel *channel;
    kvn_backend *to_host, *to_device;
};

/* KVN_OK, or the failure of the thread that copies. */
int kvn_tcp_copier_init(kvn_tcp_copier *self, kvn_device *device, kvn_failure *failure);
/* Accepts a zeroed copier. Free all stages first. */
void kvn_tcp_copier_fini(kvn_tcp_copier *self);

/* Makes the slots; the stream frees them. KVN_OK, KVN_NO_MEMORY, or the device's failure to allocate pinned memory. */
int kvn_tcp_stage_create(kvn_tcp_copier *copier, kvn_tcp_stage **out, kvn_failure *failure);

#endif

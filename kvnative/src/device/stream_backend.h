/* The common part of backends that move bytes by streams of a device: copies, and HCCL's one-sided operations. The
 * struct of such a backend has a `kvn_stream_backend` as its first member and fills in `move`. All calls of the vtable
 * but `destroy` are shared. None is made in a forked child: `Backend` (_backend.pyx) refuses them there.
 *
 * A batch of any size is one request. It is split between descriptors into at most one shard for each channel, and the
 * thread of one channel moves the whole shard. */
#ifndef KVN_DEVICE_STREAM_BACKEND_H
#define KVN_DEVICE_STREAM_BACKEND_H

#include "device/channel.h"
#include "kvnative/backend.h"

#define KVN_MAX_CHANNELS 16
/* Maximum number of batches that wait on streams for their gates. Each has a thread and a stream. */
#define KVN_ORDERED_CHANNELS 4

typedef struct kvn_stream_backend kvn_stream_backend;

/* Moves one shard, on the channel's thread: issues all copies, then waits with kvn_channel_synchronize or, to stop when
 * the `look` of the batch's end says so, with kvn_stream_request_synchronize.
 * Returns KVN_OK when every byte has arrived; KVN_CANCELLED when it stopped because *stop was set (check it between
 * calls that may take long; the message of `fault`, if any, is reported); or a failure with `fault` filled in. The
 * caller waits for work that a failure leaves on the stream, before it reports anything. `shard->first` is the index
 * of the first descriptor in the task, for messages. */
typedef int (*kvn_stream_move)(kvn_stream_backend *self, kvn_channel *channel,
                               const kvn_columns *shard, const atomic_int *stop,
                               kvn_channel_fault *fault);

struct kvn_stream_backend {
    kvn_backend base;          /* has the vtable below */
    kvn_backend_vtable vtable; /* own name and destroy; the rest is shared */
    kvn_stream_move move;
    kvn_channel **channels; /* owned by the caller, as the array is */
    unsigned num_channels;
    pthread_mutex_t mutex; /* guards `ordered` */
    /* One for each batch that waits for its gate on a stream, so that no other batch has to wait behind it. Created
     * when first needed; NULL before that. */
    kvn_channel *ordered[KVN_ORDERED_CHANNELS];
    atomic_bool taken[KVN_ORDERED_CHANNELS]; /* by a request that has no outcome */
    uint64_t shard_cost;      /* bytes: the minimum of a shard, if there are several */
    uint64_t descriptor_cost; /* bytes that are added to those of each descriptor */
};

/* Fills in the common part, with shards of 1 MiB or more. Returns 0 or an errno. `name` must outlive the backend.
 * `vtable.orders` is false. The backend may set it if all work of `move` is on the channel's stream, where abort_stream
 * stops it, or comes after kvn_stream_request_await. It then takes up to KVN_ORDERED_CHANNELS batches before their
 * gates have opened, and further ones after that. */
int kvn_stream_backend_init(kvn_stream_backend *self, const char *name,
                            void (*destroy)(kvn_backend *self), kvn_channel **channels,
                            unsigned num_channels, kvn_stream_move move);
/* Call it when no request is left. */
void kvn_stream_backend_end(kvn_stream_backend *self);

#endif

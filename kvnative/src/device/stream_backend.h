/* The backends that move bytes by streams of a device: copies, HCCL's one-sided operations. Such a backend is
 * a `kvn_stream_backend` (first member of its own struct) with its `move` filled in; all calls of the vtable
 * but `destroy` are shared. None comes in a forked child: `Backend` refuses there.
 *
 * A batch of any size is one request. It is cut at descriptors into at most one shard for each channel, and
 * each shard is moved whole by one channel's thread. */
#ifndef KVN_DEVICE_STREAM_BACKEND_H
#define KVN_DEVICE_STREAM_BACKEND_H

#include "device/channel.h"
#include "kvnative/backend.h"

#define KVN_MAX_CHANNELS 16
/* Maximum of batches that wait on streams for their gates at one time. Each has a thread and a stream. */
#define KVN_ORDERED_CHANNELS 4

typedef struct kvn_stream_backend kvn_stream_backend;

/* Moves one shard, on the channel's thread: issues all of it, then waits with kvn_channel_synchronize, or, to be
 * told of what the batch's end finds meanwhile, with kvn_stream_request_synchronize.
 * Returns KVN_OK when every byte has arrived; KVN_CANCELLED when it stopped because *stop was set (look at
 * it between calls that may take long; the fault's message, if any, is reported with it); or a failure with
 * `fault` filled in. Should it leave work on the stream when it fails, that is waited for before anything is
 * reported. `shard->first` is the index of its first descriptor in the task: for messages. */
typedef int (*kvn_stream_move)(kvn_stream_backend *self, kvn_channel *channel,
                               const kvn_columns *shard, const atomic_int *stop,
                               kvn_channel_fault *fault);

struct kvn_stream_backend {
    kvn_backend base;          /* its vtable is the next */
    kvn_backend_vtable vtable; /* own name and destroy, the rest is shared */
    kvn_stream_move move;
    kvn_channel **channels; /* not owned, nor the array */
    unsigned num_channels;
    pthread_mutex_t mutex; /* guards `ordered` */
    /* For batches that come after something, one on each, so that no other stands behind them; NULL before the
     * first. */
    kvn_channel *ordered[KVN_ORDERED_CHANNELS];
    atomic_bool taken[KVN_ORDERED_CHANNELS]; /* by a request that has no outcome */
    uint64_t shard_cost;      /* no shard is cheaper than that, if there are several */
    uint64_t descriptor_cost; /* of a descriptor, in bytes, besides its own */
};

/* Fills in what is shared: shards of 1 MiB or more. 0, or an errno. `name` outlives it. A batch that comes
 * after something is given to it when that has come; it can set `vtable.orders` instead if all that `move` does
 * is on the channel's stream, where abort_stream stops it, or waits with kvn_stream_request_await. Then it takes
 * as many as it has channels for, and further ones when what they come after has come. */
int kvn_stream_backend_init(kvn_stream_backend *self, const char *name,
                            void (*destroy)(kvn_backend *self), kvn_channel **channels,
                            unsigned num_channels, kvn_stream_move move);
/* No request is left. */
void kvn_stream_backend_end(kvn_stream_backend *self);

#endif

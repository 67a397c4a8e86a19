/* The vtable of every backend that moves bytes by streams of a device: ACL's copies, HCCL's one-sided
 * operations. Such a backend is a `kvn_streamed` (first member of its own struct) with its `move`
 * filled in; all calls of the vtable but `destroy` are shared.
 *
 * A batch of any size is one request. It is cut at descriptors into at most one part for each
 * channel, and each part is moved whole by one channel's thread. */
#ifndef KVN_STREAMED_H
#define KVN_STREAMED_H

#include "device/channel.h"
#include "kvnative/backend.h"

#define KVN_MAX_CHANNELS 16

typedef struct kvn_streamed kvn_streamed;

/* Moves one part, on the channel's thread: issues all of it, then waits with kvn_channel_synchronize.
 * Returns KVN_OK when every byte has arrived; KVN_CANCELLED when it stopped because *stop was set
 * (look at it between calls that may take long; the fault's message, if any, is told with it); or a
 * failure with `fault` filled in. Should it leave work on the stream when it fails, that is waited for
 * before anything is reported. `part->first` is the index of its first descriptor in the task: for
 * messages. */
typedef int (*kvn_stream_move)(kvn_streamed *self, kvn_channel *channel, const kvn_columns *part,
                               const atomic_int *stop, kvn_channel_fault *fault);

struct kvn_streamed {
    kvn_backend base;       /* vtable: own name and destroy, the rest kvn_streamed_* */
    kvn_stream_move move;
    kvn_channel **channels; /* not owned, nor the array */
    unsigned num_channels;
    uint64_t part_cost;       /* no part is cheaper than that, if there are several */
    uint64_t descriptor_cost; /* of a descriptor, in bytes, besides its own */
};

/* Fills in what is shared: parts of 1 MiB or more. 0, or an errno. */
int kvn_streamed_init(kvn_streamed *self, const kvn_backend_vtable *vtable,
                      kvn_channel **channels, unsigned num_channels, kvn_stream_move move);

int kvn_streamed_submit(kvn_backend *self, const kvn_columns *batch, kvn_request **out,
                        kvn_report *report);
int kvn_streamed_poll(kvn_backend *self, kvn_request *request, kvn_report *report);
int kvn_streamed_wait(kvn_backend *self, kvn_request *request, int64_t deadline_ns,
                      kvn_report *report);
int kvn_streamed_abort(kvn_backend *self, kvn_request *request, int why, kvn_report *report);
void kvn_streamed_release(kvn_backend *self, kvn_request *request);

/* The shared rows of such a vtable: KVN_STREAMED_VTABLE("acl", destroy) */
#define KVN_STREAMED_VTABLE(name_, destroy_)                                                       \
    {                                                                                              \
        .name = (name_), .submit = kvn_streamed_submit, .poll = kvn_streamed_poll,                 \
        .wait = kvn_streamed_wait, .abort = kvn_streamed_abort,                                    \
        .release = kvn_streamed_release, .destroy = (destroy_)                                     \
    }

#endif

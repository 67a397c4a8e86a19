/* A batch on its way over channels of a device: its shards, one for each channel, and their outcome. */
#ifndef KVN_DEVICE_STREAM_REQUEST_H
#define KVN_DEVICE_STREAM_REQUEST_H

#include <pthread.h>

#include "device/channel.h"
#include "kvnative/backend.h"

/* The part of a request that one channel moves. */
typedef struct kvn_stream_shard {
    kvn_channel_job job; /* first: the channel's thread gets it as that */
    kvn_request *request;
    kvn_channel *channel;
    kvn_columns columns;
    uint64_t offset; /* index of its first descriptor in the batch */
} kvn_stream_shard;

/* A batch on its way over channels: its shards, and their outcome. */
struct kvn_request {
    struct kvn_stream_backend *self;
    pthread_mutex_t mutex; /* guards `report`, `remark`, `open`, `why` and `failing` */
    pthread_cond_t changed;
    atomic_int stop;        /* running shards look at it */
    atomic_bool finished;   /* read without the mutex by poll; `report` is stable then */
    atomic_bool is_held;    /* its gate was not seen open yet */
    atomic_uint_fast64_t moved;
    uint64_t count;
    uint64_t total;
    kvn_batch_end *end; /* NULL: none */
    atomic_int_fast64_t looked_ns; /* time of the last poll; guarded by the mutex */
    int why;       /* why it was given up; KVN_OK while it was not */
    bool failing;  /* a shard has failed: no further one begins */
    unsigned open; /* shards without an outcome */
    atomic_bool *taken; /* that its channel is; NULL where it shares them */
    unsigned num_shards;
    char remark[128]; /* the message of a shard that was stopped; "" for none */
    kvn_report report;
    kvn_stream_shard shards[];
};

/* For at most `shards` shards, without any yet; NULL without memory. */
kvn_request *kvn_stream_request_create(struct kvn_stream_backend *self, const kvn_columns *batch, uint64_t total,
                                       unsigned shards);
/* Sets the outcome. The caller holds the mutex, or the request has no shard yet. */
void kvn_stream_request_finish(kvn_request *request);
/* A shard is over. `fault` says how much of it has arrived where `status` is not KVN_OK. */
void kvn_stream_shard_settle(kvn_stream_shard *it, int status, kvn_channel_fault *fault);
/* Returns true if no further shard may begin. */
bool kvn_stream_request_is_given_up(kvn_request *request);
/* After a failed shard: shards that have not begun are dropped. */
void kvn_stream_request_fail_others(kvn_request *request);
/* In `move` of a backend, before what could not be stopped on the stream: waits for what the shard, which is the one
 * that it was given, comes after, and then for all that was issued. KVN_CANCELLED when *stop was set, or why it
 * never comes, or must not be waited for any more. */
int kvn_stream_request_await(kvn_channel *channel, const kvn_columns *columns, const atomic_int *stop,
                             kvn_channel_fault *fault);
/* As kvn_channel_synchronize, in `move`; or why no byte of the batch may be touched any more. */
int kvn_stream_request_synchronize(kvn_channel *channel, const kvn_columns *columns, const atomic_int *stop,
                                   kvn_channel_fault *fault);
/* In `move`, between calls that issue its work: KVN_OK, or why no byte of the batch may be touched any more. It
 * is cheap: the batch's end is asked now and then. */
int kvn_stream_request_look(const kvn_columns *columns, kvn_failure *why);

/* Calls of the vtable. */
int kvn_stream_request_poll(kvn_backend *self, kvn_request *request, kvn_report *report);
int kvn_stream_request_wait(kvn_backend *self, kvn_request *request, int64_t deadline_ns, kvn_report *report);
int kvn_stream_request_abort(kvn_backend *self, kvn_request *request, int why, kvn_report *report);
void kvn_stream_request_cancel_held(kvn_backend *self, kvn_request *request);
void kvn_stream_request_release(kvn_backend *self, kvn_request *request);

#endif

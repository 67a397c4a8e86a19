/* A batch in flight over channels of a device: its shards, one for each channel, and their outcome. */
#ifndef KVN_DEVICE_STREAM_REQUEST_H
#define KVN_DEVICE_STREAM_REQUEST_H

#include <pthread.h>

#include "device/channel.h"
#include "kvnative/backend.h"

/* The part of a request that one channel moves. */
typedef struct kvn_stream_shard {
    kvn_channel_job job; /* first, because the channel's thread gets its address */
    kvn_request *request;
    kvn_channel *channel;
    kvn_columns columns;
    uint64_t offset; /* index of its first descriptor in the batch */
} kvn_stream_shard;

struct kvn_request {
    struct kvn_stream_backend *self;
    pthread_mutex_t mutex; /* guards `report`, `remark`, `open`, `why` and `failing` */
    pthread_cond_t changed;
    atomic_int stop;        /* checked by running shards */
    atomic_bool finished;   /* read without the mutex by poll; `report` is stable then */
    atomic_bool is_held;    /* its gate has not been seen open yet */
    atomic_uint_fast64_t moved;
    uint64_t count;
    uint64_t total;
    kvn_batch_end *end; /* NULL: none */
    atomic_int_fast64_t looked_ns; /* time of the latest `look`; written with the mutex held */
    int why;       /* the status of an abort, else KVN_OK */
    bool failing;  /* a shard has failed: no further one begins */
    unsigned open; /* number of shards without an outcome */
    atomic_bool *taken; /* the flag of its exclusive channel; NULL if it shares channels */
    unsigned num_shards;
    char remark[128]; /* the message of a stopped shard; "": none */
    kvn_report *report;
    kvn_stream_shard shards[];
};

/* Makes a request with room for `shards` shards, which writes its outcome to `report`. NULL: no memory. */
kvn_request *kvn_stream_request_create(struct kvn_stream_backend *self, const kvn_columns *batch, uint64_t total,
                                       unsigned shards, kvn_report *report);
/* Sets the outcome. The caller holds the mutex, or the request has no shards. */
void kvn_stream_request_finish(kvn_request *request);
/* Call it when a shard has ended. If `status` is not KVN_OK, `fault` says how much of the shard has arrived. */
void kvn_stream_shard_settle(kvn_stream_shard *it, int status, kvn_channel_fault *fault);
/* True if no further shard may begin. */
bool kvn_stream_request_is_given_up(kvn_request *request);
/* Drops the shards that have not begun, after one has failed. */
void kvn_stream_request_fail_others(kvn_request *request);
/* Called by `move`, with its own shard, before it issues work that abort_stream cannot stop: waits for the gate of the
 * shard, then for the work that was issued. KVN_CANCELLED: *stop was set. Other failures: the gate never opens, or
 * the bytes of the batch must not be touched any longer. */
int kvn_stream_request_await(kvn_channel *channel, const kvn_columns *columns, const atomic_int *stop,
                             kvn_channel_fault *fault);
/* Called by `move`: like kvn_channel_synchronize, but fails if the bytes of the batch must no longer be touched. */
int kvn_stream_request_synchronize(kvn_channel *channel, const kvn_columns *columns, const atomic_int *stop,
                                   kvn_channel_fault *fault);
/* Called by `move` between calls that issue work: KVN_OK, or the reason why the bytes of the batch must no longer be
 * touched. Cheap: it calls `look` of the batch's end only every few milliseconds. */
int kvn_stream_request_look(const kvn_columns *columns, kvn_failure *why);

/* Calls of the vtable. */
int kvn_stream_request_poll(kvn_backend *self, kvn_request *request, uint64_t *bytes_done);
int kvn_stream_request_wait(kvn_backend *self, kvn_request *request, int64_t deadline_ns);
int kvn_stream_request_abort(kvn_backend *self, kvn_request *request, int why);
void kvn_stream_request_cancel_held(kvn_backend *self, kvn_request *request);
void kvn_stream_request_release(kvn_backend *self, kvn_request *request);

#endif

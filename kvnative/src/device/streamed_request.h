/* A batch on its way over channels: its parts, and what they come to. For streamed.c alone. */
#ifndef KVN_STREAMED_REQUEST_H
#define KVN_STREAMED_REQUEST_H

#include "device/streamed.h"

/* What one channel moves of a request. */
typedef struct kvn_part {
    kvn_channel_job job; /* first: the channel's thread gets it as that */
    kvn_request *request;
    kvn_channel *channel;
    kvn_columns columns;
    uint64_t offset; /* index of its first descriptor in the batch */
} kvn_part;

struct kvn_request {
    kvn_streamed *self;
    pthread_mutex_t mutex; /* guards `report`, `remark`, `open`, `why` and `failing` */
    pthread_cond_t changed;
    atomic_int stop;        /* running parts look at it */
    atomic_bool finished;   /* read without the mutex by poll; `report` is stable then */
    atomic_uint_fast64_t moved;
    uint64_t count;
    uint64_t total;
    int why;       /* why it was given up: KVN_TIMEOUT or KVN_CANCELLED; KVN_OK while it was not */
    bool failing;  /* a part has failed: no further one begins */
    unsigned open; /* parts not settled */
    unsigned num_parts;
    char remark[128]; /* what a part that was stopped has to say; "" for nothing */
    kvn_report report;
    kvn_part parts[];
};

/* For at most `parts` parts; NULL without memory. */
kvn_request *kvn_request_create(kvn_streamed *self, const kvn_columns *batch, uint64_t total,
                                unsigned parts);
/* Cuts the batch at descriptors, into parts of about equal cost, at most `wanted`, and gives them to
 * the channels, beginning with the one that has least to do. */
void kvn_request_begin(kvn_request *request, const kvn_columns *batch, uint64_t cost,
                       unsigned wanted);
/* Takes back the parts that have not begun. The caller has a part that is open, or is in a call on the
 * request: it stays. */
void kvn_request_drop_queued(kvn_request *request);
/* After the outcome, once. */
void kvn_request_free(kvn_request *request);

#endif

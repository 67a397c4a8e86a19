/* Backends that wrap another one to make it fail on any machine. They have the same kind of vtable,
 * compose in any order, and do not own the inner backend, which must outlive them.
 * All creators return NULL with errno set (EINVAL, ENOMEM) on failure. */
#ifndef KVN_TESTS_WRAPPERS_H
#define KVN_TESTS_WRAPPERS_H

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>

#include "core/report.h"
#include "kvnative/backend.h"

/* Descriptor `descriptor` of every task fails with `status` (< 0), `code` and a message. Earlier
 * descriptors are moved, this one and later ones are not. With `at_submit`, its batch is refused as
 * a whole; then KVN_PENDING as well is allowed. */
kvn_backend *kvn_fail_at_create(kvn_backend *inner, uint64_t descriptor, int status, int code,
                                bool at_submit);

/* No batch is reported as over before `nanoseconds` after its submission. A batch that is aborted
 * earlier is unconfirmed, even if the inner backend has moved it. */
kvn_backend *kvn_delay_create(kvn_backend *inner, int64_t nanoseconds);

/* No batch is reported as over before kvn_hold_let_go, unless it is aborted. After that none is held. */
kvn_backend *kvn_hold_create(kvn_backend *inner);
void kvn_hold_let_go(kvn_backend *self);

/* Moves at most `bytes_per_second` (> 0), over all batches together. */
kvn_backend *kvn_limit_bandwidth_create(kvn_backend *inner, double bytes_per_second);

/* Passes on at most `max_batch` (>= 1) descriptors at a time, and the next ones when those are moved. */
kvn_backend *kvn_limit_batch_create(kvn_backend *inner, uint64_t max_batch);

/* In the first batch that has `descriptor` and the next one, each is written where the other belongs, and
 * the batch is reported as moved. Both must have the same size. */
kvn_backend *kvn_swap_at_create(kvn_backend *inner, uint64_t descriptor);

/* Pretends that streams wait for batches: block_stream returns KVN_PENDING `pending` times (< 0: until the batch
 * is over) and then `status`, with code 7 and a message that names the stream. */
kvn_backend *kvn_streams_create(kvn_backend *inner, int pending, int status);

/* Polls each batch inside of its `end`, when no outcome may be known yet. kvn_early_ends_seen returns the number of
 * batches that were polled, and how many of them were over: not those that end inside of `submit`. */
kvn_backend *kvn_early_ends_create(kvn_backend *inner);
unsigned kvn_early_ends_seen(kvn_backend *self, unsigned *early);

/* Writes a line of JSON to `fd` when a call of the vtable returns: call, request (the number of the
 * batch), first, count, nbytes, status, us (CLOCK_MONOTONIC, microseconds). */
kvn_backend *kvn_trace_create(kvn_backend *inner, int fd);

/* ---- shared by the wrappers ---- */

typedef struct kvn_wrapper {
    kvn_backend base;
    kvn_backend *inner;
} kvn_wrapper;

static inline kvn_backend *kvn_inner(const kvn_backend *self)
{
    return ((const kvn_wrapper *)self)->inner;
}
/* Returns zeroed memory for a wrapper that begins with a kvn_wrapper. */
static inline void *kvn_wrapper_alloc(size_t nbytes, const kvn_backend_vtable *vtable,
                                      kvn_backend *inner)
{
    kvn_wrapper *self = calloc(1, nbytes);

    if (self) {
        self->base.vtable = vtable;
        self->inner = inner;
    }
    return self;
}
/* A batch whose outcome differs from the inner backend's, or comes later. A thread of its own makes the outcome. */
typedef struct kvn_wrapper_batch {
    void (*run)(struct kvn_wrapper_batch *self); /* returns when the report is complete */
    kvn_columns columns;
    kvn_report *report;
    pthread_t thread;
    pthread_mutex_t mutex; /* guards the fields below */
    pthread_cond_t changed;
    bool is_over;
    int why; /* KVN_OK, or why it was aborted */
} kvn_wrapper_batch;

/* Starts the thread. The batch is zeroed except for `run`. Returns 0 or an errno. */
int kvn_wrapper_batch_begin(kvn_wrapper_batch *self, const kvn_columns *columns, kvn_report *report);
/* Sleeps until `until_ns`, or until the batch is aborted. Returns why, or KVN_OK. */
int kvn_wrapper_batch_sleep(kvn_wrapper_batch *self, int64_t until_ns);
/* For calls of the vtable. */
int kvn_wrapper_batch_wait(kvn_wrapper_batch *self, int64_t deadline_ns);
void kvn_wrapper_batch_stop(kvn_wrapper_batch *self, int why);
void kvn_wrapper_batch_end(kvn_wrapper_batch *self);
static inline void kvn_wrapper_destroy(kvn_backend *self) { free(self); }
/* Refuses a batch for lack of memory. */
static inline int kvn_wrapper_no_memory(kvn_report *report, uint64_t count, size_t nbytes)
{
    return kvn_report_refuse(report, count, KVN_NO_MEMORY, ENOMEM,
                             "no memory for a request (%zu bytes)", nbytes);
}

#endif

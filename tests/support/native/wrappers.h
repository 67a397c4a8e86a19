/* Backends that wrap an inner backend and make it fail, on any machine. They can wrap each other. The inner backend
 * must outlive the wrapper. On failure, kvn_*_create returns NULL and sets errno to EINVAL or ENOMEM. */
#ifndef KVN_TESTS_WRAPPERS_H
#define KVN_TESTS_WRAPPERS_H

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>

#include "core/report.h"
#include "kvnative/backend.h"

/* Makes descriptor number `descriptor` of each task fail with `status` (< 0), `code` and a message. The descriptors
 * before it are moved; this one and later ones are not. `at_submit` refuses the whole batch of the descriptor; then
 * `status` may also be KVN_PENDING. */
kvn_backend *kvn_fail_at_create(kvn_backend *inner, uint64_t descriptor, int status, int code,
                                bool at_submit);

/* Delays each outcome until `nanoseconds` after the submission. All descriptors of a batch that is aborted earlier are
 * unconfirmed, even if the inner backend has moved them. */
kvn_backend *kvn_delay_create(kvn_backend *inner, int64_t nanoseconds);

/* Delays each outcome until kvn_hold_let_go or the abort of the batch. After kvn_hold_let_go, delays none. */
kvn_backend *kvn_hold_create(kvn_backend *inner);
void kvn_hold_let_go(kvn_backend *self);

/* Limits all batches together to `bytes_per_second` (> 0). */
kvn_backend *kvn_limit_bandwidth_create(kvn_backend *inner, double bytes_per_second);

/* Passes at most `max_batch` (>= 1) descriptors at a time to the inner backend. */
kvn_backend *kvn_limit_batch_create(kvn_backend *inner, uint64_t max_batch);

/* Swaps the destinations of `descriptor` and the next descriptor in the first batch that has both, and reports success.
 * Both descriptors must have the same size. */
kvn_backend *kvn_swap_at_create(kvn_backend *inner, uint64_t descriptor);

/* Pretends that streams can wait for batches: block_stream returns KVN_PENDING `pending` times (< 0: until the
 * outcome), and then `status`, with code 7 and a message that names the stream. */
kvn_backend *kvn_streams_create(kvn_backend *inner, int pending, int status);

/* Polls each batch inside of its `end`, when no outcome may be known yet. kvn_early_ends_seen returns the number of
 * polled batches; *early is the number of those that had an outcome. Batches that end inside of `submit` are not
 * polled. */
kvn_backend *kvn_early_ends_create(kvn_backend *inner);
unsigned kvn_early_ends_seen(kvn_backend *self, unsigned *early);

/* Writes a line of JSON to `fd` after each call of the vtable: call, request (the number of the batch), first, count,
 * nbytes, status, us (CLOCK_MONOTONIC, microseconds). */
kvn_backend *kvn_trace_create(kvn_backend *inner, int fd);

/* ---- common code of the wrappers ---- */

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
/* A batch whose outcome differs from that of the inner backend, or comes later. Its own thread completes the report. */
typedef struct kvn_wrapper_batch {
    void (*run)(struct kvn_wrapper_batch *self); /* returns when the report is complete */
    kvn_columns columns;
    kvn_report *report;
    pthread_t thread;
    pthread_mutex_t mutex; /* guards the fields below */
    pthread_cond_t changed;
    bool is_over;
    int why; /* KVN_OK, or the reason of the abort */
} kvn_wrapper_batch;

/* Starts the thread. All fields but `run` must be zero. Returns 0 or an errno. */
int kvn_wrapper_batch_begin(kvn_wrapper_batch *self, const kvn_columns *columns, kvn_report *report);
/* Sleeps until `until_ns` or the abort of the batch. Returns KVN_OK, or the reason of the abort. */
int kvn_wrapper_batch_sleep(kvn_wrapper_batch *self, int64_t until_ns);
/* The calls below implement those of the vtable: wait, abort and release. */
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

/* Backends that wrap another one, so that every failure can be had on any machine. They have the
 * same vtable, compose in any order, and do not own what they wrap: the inner backend outlives them.
 * All creators return NULL with errno set (EINVAL, ENOMEM) on failure. */
#ifndef KVN_TESTS_WRAPPERS_H
#define KVN_TESTS_WRAPPERS_H

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>

#include "core/report.h"
#include "kvnative/backend.h"

/* Descriptor `descriptor` of every task fails with `status` (< 0), `code` and a message that says so.
 * Those before it are moved, it and those after are not. If `at_submit`, the batch that has it is
 * refused, and nothing of that is moved. */
kvn_backend *kvn_fail_at_create(kvn_backend *inner, uint64_t descriptor, int status, int code,
                                bool at_submit);

/* No batch is known to be through before `nanoseconds` after its submission. One that is aborted
 * before is not confirmed, whatever the inner backend has moved. */
kvn_backend *kvn_delay_create(kvn_backend *inner, int64_t nanoseconds);

/* No batch is known to be through before kvn_hold_let_go, unless it is aborted; from then on none is held. */
kvn_backend *kvn_hold_create(kvn_backend *inner);
void kvn_hold_let_go(kvn_backend *self);

/* Moves at most `bytes_per_second` (> 0), over all batches together. */
kvn_backend *kvn_limit_bandwidth_create(kvn_backend *inner, double bytes_per_second);

/* Hands on at most `max_batch` (>= 1) descriptors at a time, the next when those are moved. */
kvn_backend *kvn_limit_batch_create(kvn_backend *inner, uint64_t max_batch);

/* Of the first batch that has descriptors `descriptor` and the next one, each is written where the other
 * belongs; both have as many bytes. It is reported as moved. */
kvn_backend *kvn_swap_at_create(kvn_backend *inner, uint64_t descriptor);

/* Lets streams wait for batches, in words alone: block_stream says KVN_PENDING `pending` times (< 0: until the
 * batch is over) and then `status`, with code 7 and a message that names the stream. */
kvn_backend *kvn_streams_create(kvn_backend *inner, int pending, int status);

/* Writes one JSON object a line to `fd` when a call of the vtable returns: call, request (a number
 * of its own for each batch), first, count, nbytes, status, us (CLOCK_MONOTONIC, microseconds). */
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
/* Zeroed memory for a wrapper that begins with a kvn_wrapper. */
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
/* Tells the end of a batch whose outcome is not the inner backend's, or comes later: by a thread of its own, which
 * waits for it. */
typedef struct kvn_wrapper_end {
    kvn_backend *backend; /* NULL: nobody wants to know */
    kvn_request *request;
    kvn_batch_end *end;
    pthread_t thread;
} kvn_wrapper_end;

/* `end` may be NULL. 0, or an errno. */
int kvn_wrapper_end_begin(kvn_wrapper_end *self, kvn_backend *backend, kvn_request *request, kvn_batch_end *end);
/* Before the request is released. */
void kvn_wrapper_end_join(const kvn_wrapper_end *self);
static inline void kvn_wrapper_destroy(kvn_backend *self) { free(self); }
/* Refuses a batch for want of memory. */
static inline int kvn_wrapper_no_memory(kvn_report *report, uint64_t count, size_t nbytes)
{
    return kvn_report_refuse(report, count, KVN_NO_MEMORY, ENOMEM,
                             "no memory for a request (%zu bytes)", nbytes);
}

#endif

/* limit_bandwidth and limit_batch: pass a batch to the inner backend slice by slice. With limit_bandwidth each slice
 * waits until its scheduled time. Slices of all batches share one schedule, so the limit is that of the backend. */
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <time.h>

#include "core/columns.h"
#include "core/report.h"
#include "core/thread.h"
#include "wrappers.h"

#define SLICE_SECONDS 0.002 /* of a slice at the limit; the longest delay of an abort */
#define MOST_NS 1000000000000000 /* of a slice; eleven days, far from overflow */
#define TICK_NS 2000000     /* between two checks for an abort, while the inner backend moves a slice */

typedef struct bandwidth {
    kvn_wrapper wrapper;
    double bytes_per_second; /* 0: no limit */
    uint64_t slice_nbytes;
    uint64_t slice_count; /* most descriptors of a slice */
    pthread_mutex_t mutex;
    int64_t free_ns; /* end of the last scheduled slice */
} bandwidth;

/* Only the thread of the batch uses these fields, except `moved`. */
typedef struct bandwidth_request {
    kvn_wrapper_batch batch; /* first, because its address is cast to the request */
    bandwidth *self;
    uint64_t cursor; /* the first descriptor with unmoved bytes */
    uint64_t skip;   /* moved bytes of that descriptor */
    _Atomic uint64_t moved;
    uint64_t total;
    kvn_columns slice; /* count 0: no slice is scheduled */
    uint64_t slice_nbytes;
    uint64_t part[3]; /* dst, src and nbytes of a slice that is part of one descriptor */
    int64_t due_ns;
    kvn_report of_slice;
    bool settled;
} bandwidth_request;

/* ---- slices ---- */

/* The slice is one or more whole descriptors, or a part of a descriptor that is larger than a slice. */
static void cut_slice(const bandwidth *self, bandwidth_request *request)
{
    const kvn_columns *batch = &request->batch.columns;
    uint64_t at = request->cursor, end = at, taken = 0;
    uint64_t left = batch->nbytes[at] - request->skip;

    if (request->skip > 0 || left > self->slice_nbytes) {
        taken = left < self->slice_nbytes ? left : self->slice_nbytes;
        request->part[0] = batch->dst[at] + request->skip;
        request->part[1] = batch->src[at] + request->skip;
        request->part[2] = taken;
        request->slice = (kvn_columns){&request->part[0], &request->part[1], &request->part[2], 1,
                                       batch->first + at, batch->caller, batch->after, NULL};
    } else {
        while (end < batch->count && end - at < self->slice_count &&
               batch->nbytes[end] <= self->slice_nbytes - taken)
            taken += batch->nbytes[end++];
        request->slice = kvn_columns_slice(batch, at, end);
        request->slice.end = NULL;
    }
    request->slice_nbytes = taken;
}

static void schedule_slice(bandwidth_request *request)
{
    bandwidth *self = request->self;
    int64_t now = kvn_now_ns();
    double nanoseconds;

    cut_slice(self, request);
    request->due_ns = 0;
    if (self->bytes_per_second == 0)
        return;
    nanoseconds = (double)request->slice_nbytes / self->bytes_per_second * 1e9;
    pthread_mutex_lock(&self->mutex);
    if (self->free_ns < now)
        self->free_ns = now;
    self->free_ns += nanoseconds < MOST_NS ? (int64_t)nanoseconds : MOST_NS;
    request->due_ns = self->free_ns;
    pthread_mutex_unlock(&self->mutex);
}

static bool is_part(const bandwidth_request *request)
{
    return request->slice.dst == &request->part[0];
}

/* Converts the report of the last slice to that of the batch. */
static void settle(bandwidth_request *request)
{
    const uint64_t count = request->batch.columns.count, end = request->cursor + request->slice.count;
    kvn_report *outcome = request->batch.report, *slice = &request->of_slice;

    *outcome = *slice;
    outcome->bytes_done = request->moved;
    for (uint32_t i = 0; i < outcome->num_unconfirmed; i++) {
        outcome->unconfirmed[i].first += request->cursor;
        outcome->unconfirmed[i].last += request->cursor;
    }
    if (outcome->failed != KVN_NO_DESCRIPTOR)
        outcome->failed += request->cursor;
    if (outcome->status != KVN_OK)
        kvn_report_add_span(outcome, end, count);
    kvn_report_merge_spans(outcome);
    if (outcome->failed == KVN_NO_DESCRIPTOR && kvn_is_given_up(outcome->status))
        kvn_report_abandoned(outcome, outcome->status, count, request->total);
    request->settled = true;
}

static void settle_between(bandwidth_request *request, int status)
{
    kvn_report_begin(&request->of_slice);
    request->of_slice.status = status;
    request->slice.count = 0;
    settle(request);
}

/* Moves the cursor to the end of a moved slice. */
static void advance(bandwidth_request *request)
{
    if (is_part(request)) {
        request->skip += request->slice_nbytes;
        if (request->skip == request->batch.columns.nbytes[request->cursor]) {
            request->skip = 0;
            request->cursor++;
        }
    } else {
        request->cursor += request->slice.count;
    }
    request->slice.count = 0;
    if (request->cursor == request->batch.columns.count)
        settle_between(request, KVN_OK);
}

/* Moves a slice in the inner backend, and aborts the slice if the batch is aborted. */
static void move_slice(bandwidth_request *request)
{
    kvn_backend *inner = request->self->wrapper.inner;
    kvn_request *moving;
    int why = KVN_OK;

    if (inner->vtable->submit(inner, &request->slice, &moving, &request->of_slice) == KVN_OK) {
        while (why == KVN_OK && inner->vtable->wait(inner, moving, kvn_now_ns() + TICK_NS) == KVN_PENDING)
            why = kvn_wrapper_batch_sleep(&request->batch, 0);
        if (why != KVN_OK)
            inner->vtable->abort(inner, moving, why);
        inner->vtable->release(inner, moving);
    }
    request->moved += request->of_slice.bytes_done;
    if (request->of_slice.status == KVN_OK)
        advance(request);
    else
        settle(request);
}

static void move_all(kvn_wrapper_batch *batch)
{
    bandwidth_request *request = (bandwidth_request *)batch;

    if (batch->columns.count == 0)
        settle_between(request, KVN_OK);
    while (!request->settled) {
        int why;

        schedule_slice(request);
        why = kvn_wrapper_batch_sleep(batch, request->due_ns);
        if (why != KVN_OK)
            settle_between(request, why);
        else
            move_slice(request);
    }
}

/* ---- the vtable ---- */

static int bandwidth_submit(kvn_backend *base, const kvn_columns *batch, kvn_request **out,
                            kvn_report *report)
{
    bandwidth_request *request = calloc(1, sizeof *request);

    *out = NULL;
    if (!request)
        return kvn_wrapper_no_memory(report, batch->count, sizeof *request);
    request->batch.run = move_all;
    request->self = (bandwidth *)base;
    kvn_columns_total(batch, &request->total);
    if (kvn_wrapper_batch_begin(&request->batch, batch, report) != 0) {
        free(request);
        return kvn_wrapper_no_memory(report, batch->count, sizeof *request);
    }
    *out = (kvn_request *)request;
    return KVN_OK;
}

static int bandwidth_poll(kvn_backend *base, kvn_request *handle, uint64_t *bytes_done)
{
    bandwidth_request *request = (bandwidth_request *)handle;

    (void)base;
    *bytes_done = request->moved;
    return kvn_wrapper_batch_wait(&request->batch, 0);
}

static int bandwidth_wait(kvn_backend *base, kvn_request *handle, int64_t deadline_ns)
{
    (void)base;
    return kvn_wrapper_batch_wait(&((bandwidth_request *)handle)->batch, deadline_ns);
}

static int bandwidth_abort(kvn_backend *base, kvn_request *handle, int why)
{
    bandwidth_request *request = (bandwidth_request *)handle;

    (void)base;
    kvn_wrapper_batch_stop(&request->batch, why);
    return kvn_wrapper_batch_wait(&request->batch, KVN_FOREVER);
}

static void bandwidth_release(kvn_backend *base, kvn_request *handle)
{
    (void)base;
    kvn_wrapper_batch_end(&((bandwidth_request *)handle)->batch);
    free(handle);
}

static void bandwidth_destroy(kvn_backend *base)
{
    pthread_mutex_destroy(&((bandwidth *)base)->mutex);
    free(base);
}

#define SLICING_VTABLE(name_)                                                                      \
    {                                                                                              \
        .name = (name_), .submit = bandwidth_submit, .poll = bandwidth_poll,                       \
        .wait = bandwidth_wait, .abort = bandwidth_abort, .release = bandwidth_release,            \
        .destroy = bandwidth_destroy                                                               \
    }

static const kvn_backend_vtable BANDWIDTH_VTABLE = SLICING_VTABLE("limit_bandwidth");
static const kvn_backend_vtable BATCH_VTABLE = SLICING_VTABLE("limit_batch");

static kvn_backend *create(kvn_backend *inner, const kvn_backend_vtable *vtable,
                           double bytes_per_second, uint64_t slice_nbytes, uint64_t slice_count)
{
    bandwidth *self = kvn_wrapper_alloc(sizeof *self, vtable, inner);

    if (!self)
        return NULL;
    self->bytes_per_second = bytes_per_second;
    self->slice_nbytes = slice_nbytes;
    self->slice_count = slice_count;
    pthread_mutex_init(&self->mutex, NULL);
    return &self->wrapper.base;
}

kvn_backend *kvn_limit_bandwidth_create(kvn_backend *inner, double bytes_per_second)
{
    double slice = bytes_per_second * SLICE_SECONDS;

    if (!(bytes_per_second > 0) || isinf(bytes_per_second)) {
        errno = EINVAL;
        return NULL;
    }
    return create(inner, &BANDWIDTH_VTABLE, bytes_per_second,
                  slice < 1 ? 1 : slice > (1 << 20) ? 1 << 20 : (uint64_t)slice, UINT64_MAX);
}

kvn_backend *kvn_limit_batch_create(kvn_backend *inner, uint64_t max_batch)
{
    if (max_batch < 1) {
        errno = EINVAL;
        return NULL;
    }
    return create(inner, &BATCH_VTABLE, 0, UINT64_MAX, max_batch);
}

/* limit_bandwidth and limit_batch: pass a batch to the inner backend slice by slice. With limit_bandwidth each slice
 * waits until it is due; slices of all batches share one schedule, so the limit holds for the whole backend. */
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

#define SLICE_SECONDS 0.002 /* of the limit; an abort waits at most that long */
#define MOST_NS 1000000000000000 /* of one slice: eleven days, far from overflow */
#define TICK_NS 2000000     /* how often a driver inside the inner backend looks for an abort */

typedef struct bandwidth {
    kvn_wrapper wrapper;
    double bytes_per_second; /* 0: no limit */
    uint64_t slice_nbytes;
    uint64_t slice_count; /* descriptors */
    pthread_mutex_t mutex;
    int64_t free_ns; /* end of the slices that are scheduled so far */
} bandwidth;

/* One thread at a time drives a request (`driven`); it owns all fields but these six. */
typedef struct bandwidth_request {
    kvn_wrapper_end end;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    bool driven;
    bool over;   /* settled, and no thread writes the outcome any more */
    int give_up; /* KVN_OK, or why no slice may begin */

    kvn_columns batch;
    uint64_t cursor; /* first descriptor that is not moved completely */
    uint64_t skip;   /* moved bytes of that descriptor */
    _Atomic uint64_t moved; /* other threads read it */
    uint64_t total;
    kvn_columns slice; /* count 0: none is scheduled */
    uint64_t slice_nbytes;
    uint64_t part[3]; /* dst, src and nbytes of a slice that is part of one descriptor */
    int64_t due_ns;
    kvn_request *inner;
    bool settled;
    kvn_report outcome;
} bandwidth_request;

/* ---- slices; by the driver ---- */

/* Takes whole descriptors, or a part of one that is larger than a slice. */
static void cut_slice(const bandwidth *self, bandwidth_request *request)
{
    const kvn_columns *batch = &request->batch;
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
    }
    request->slice_nbytes = taken;
}

static void schedule_slice(bandwidth *self, bandwidth_request *request)
{
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

static void settle(bandwidth_request *request, const kvn_report *slice)
{
    kvn_report *outcome = &request->outcome;
    uint64_t end = request->cursor + request->slice.count;

    kvn_report_copy(outcome, slice);
    outcome->bytes_done = request->moved;
    for (uint32_t i = 0; i < outcome->num_unconfirmed; i++) {
        outcome->unconfirmed[i].first += request->cursor;
        outcome->unconfirmed[i].last += request->cursor;
    }
    if (outcome->failed != KVN_NO_DESCRIPTOR)
        outcome->failed += request->cursor;
    if (outcome->status != KVN_OK)
        kvn_report_add_span(outcome, end, request->batch.count);
    kvn_report_merge_spans(outcome);
    if (outcome->failed == KVN_NO_DESCRIPTOR &&
        kvn_is_given_up(outcome->status))
        kvn_report_abandoned(outcome, outcome->status, request->batch.count, request->total);
    request->settled = true;
}

static void settle_between(bandwidth_request *request, int status)
{
    kvn_report nothing;

    kvn_report_begin(&nothing);
    nothing.status = status;
    request->slice.count = 0;
    settle(request, &nothing);
}

/* Begins the next slice behind one that is moved. */
static void advance(bandwidth_request *request)
{
    if (is_part(request)) {
        request->skip += request->slice_nbytes;
        if (request->skip == request->batch.nbytes[request->cursor]) {
            request->skip = 0;
            request->cursor++;
        }
    } else {
        request->cursor += request->slice.count;
    }
    request->slice.count = 0;
    if (request->cursor == request->batch.count)
        settle_between(request, KVN_OK);
}

static void absorb(kvn_backend *inner, bandwidth_request *request, const kvn_report *slice)
{
    if (request->inner)
        inner->vtable->release(inner, request->inner);
    request->inner = NULL;
    request->moved += slice->bytes_done;
    if (slice->status == KVN_OK)
        advance(request);
    else
        settle(request, slice);
}

/* ---- driving ---- */

/* Returns the reason to stop, or KVN_OK at `until_ns`. */
static int sleep_or_give_up(bandwidth_request *request, int64_t until_ns)
{
    int why;

    pthread_mutex_lock(&request->mutex);
    while (request->give_up == KVN_OK && kvn_now_ns() < until_ns)
        kvn_cond_wait(&request->changed, &request->mutex, until_ns);
    why = request->give_up;
    pthread_mutex_unlock(&request->mutex);
    return why;
}

static void stop(kvn_backend *inner, bandwidth_request *request, int why)
{
    kvn_report slice;

    if (request->inner) {
        inner->vtable->abort(inner, request->inner, why, &slice);
        absorb(inner, request, &slice);
    }
    if (!request->settled)
        settle_between(request, why);
}

/* Moves slices that are due until all are settled or the deadline has passed. */
static void drive(bandwidth *self, bandwidth_request *request, int64_t deadline_ns)
{
    kvn_backend *inner = self->wrapper.inner;
    kvn_report slice;

    while (!request->settled) {
        int64_t now, until;
        int why;

        if (request->slice.count == 0)
            schedule_slice(self, request);
        until = request->due_ns < deadline_ns ? request->due_ns : deadline_ns;
        why = sleep_or_give_up(request, until);
        if (why != KVN_OK) {
            stop(inner, request, why);
            return;
        }
        now = kvn_now_ns();
        if (now < request->due_ns)
            return; /* the deadline came first */
        if (!request->inner &&
            inner->vtable->submit(inner, &request->slice, &request->inner, &slice) != KVN_OK) {
            absorb(inner, request, &slice);
            return;
        }
        until = now + TICK_NS < deadline_ns ? now + TICK_NS : deadline_ns;
        if (inner->vtable->wait(inner, request->inner, until, &slice) != KVN_PENDING)
            absorb(inner, request, &slice);
        else if (now >= deadline_ns)
            return;
    }
}

/* Drives, or waits for the thread that does. */
static int drive_until(bandwidth *self, bandwidth_request *request, int64_t deadline_ns,
                       kvn_report *report)
{
    int64_t now = kvn_now_ns();

    pthread_mutex_lock(&request->mutex);
    while (request->driven && !request->over && now < deadline_ns) {
        kvn_cond_wait(&request->changed, &request->mutex, deadline_ns);
        now = kvn_now_ns();
    }
    if (request->over) {
        kvn_report_copy(report, &request->outcome);
        pthread_mutex_unlock(&request->mutex);
        return report->status;
    }
    if (request->driven) {
        kvn_report_begin(report);
        report->bytes_done = request->moved;
        pthread_mutex_unlock(&request->mutex);
        return KVN_PENDING;
    }
    request->driven = true;
    pthread_mutex_unlock(&request->mutex);
    drive(self, request, deadline_ns);
    if (request->settled) {
        kvn_report_copy(report, &request->outcome);
    } else {
        kvn_report_begin(report);
        report->bytes_done = request->moved;
    }
    pthread_mutex_lock(&request->mutex);
    request->driven = false;
    request->over = request->settled;
    pthread_cond_broadcast(&request->changed);
    pthread_mutex_unlock(&request->mutex);
    return report->status;
}

/* ---- the vtable ---- */

static void bandwidth_release(kvn_backend *base, kvn_request *handle);

static int bandwidth_submit(kvn_backend *base, const kvn_columns *batch, kvn_request **out,
                            kvn_report *report)
{
    bandwidth_request *request = calloc(1, sizeof *request);

    *out = NULL;
    if (!request)
        return kvn_wrapper_no_memory(report, batch->count, sizeof *request);
    pthread_mutex_init(&request->mutex, NULL);
    kvn_cond_init(&request->changed);
    request->batch = *batch;
    request->batch.end = NULL;
    kvn_columns_total(batch, &request->total);
    if (batch->count == 0)
        settle_between(request, KVN_OK);
    *out = (kvn_request *)request;
    if (kvn_wrapper_end_begin(&request->end, base, *out, batch->end) == 0)
        return KVN_OK;
    bandwidth_release(base, *out);
    *out = NULL;
    return kvn_wrapper_no_memory(report, batch->count, sizeof *request);
}

static int bandwidth_poll(kvn_backend *base, kvn_request *handle, kvn_report *report)
{
    return drive_until((bandwidth *)base, (bandwidth_request *)handle, 0, report);
}

static int bandwidth_wait(kvn_backend *base, kvn_request *handle, int64_t deadline_ns,
                          kvn_report *report)
{
    return drive_until((bandwidth *)base, (bandwidth_request *)handle, deadline_ns, report);
}

static int bandwidth_abort(kvn_backend *base, kvn_request *handle, int why, kvn_report *report)
{
    bandwidth_request *request = (bandwidth_request *)handle;

    pthread_mutex_lock(&request->mutex);
    if (request->give_up == KVN_OK)
        request->give_up = why;
    pthread_cond_broadcast(&request->changed);
    pthread_mutex_unlock(&request->mutex);
    return drive_until((bandwidth *)base, request, KVN_FOREVER, report);
}

static void bandwidth_release(kvn_backend *base, kvn_request *handle)
{
    bandwidth_request *request = (bandwidth_request *)handle;

    (void)base;
    kvn_wrapper_end_join(&request->end);
    pthread_cond_destroy(&request->changed);
    pthread_mutex_destroy(&request->mutex);
    free(request);
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

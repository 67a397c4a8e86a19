/* delay: adds latency. The inner backend moves the batch at once; the outcome is held back. */
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <time.h>

#include "core/columns.h"
#include "core/report.h"
#include "core/thread.h"
#include "wrappers.h"

typedef struct delay {
    kvn_wrapper wrapper;
    int64_t nanoseconds;
} delay;

typedef struct delay_request {
    kvn_wrapper_end end;
    kvn_request *inner;
    uint64_t count;
    uint64_t total;
    int64_t due_ns;
    pthread_mutex_t mutex;
    pthread_cond_t aborted;
    int why; /* KVN_OK, or why it was aborted before it was due */
} delay_request;

static int delay_abort(kvn_backend *base, kvn_request *handle, int why, kvn_report *report);
static void delay_release(kvn_backend *base, kvn_request *handle);

static int delay_submit(kvn_backend *base, const kvn_columns *batch, kvn_request **out,
                        kvn_report *report)
{
    delay_request *request = calloc(1, sizeof *request);
    kvn_columns quiet = *batch;
    int status;

    *out = NULL;
    if (!request)
        return kvn_wrapper_no_memory(report, batch->count, sizeof *request);
    quiet.end = NULL;
    request->count = batch->count;
    kvn_columns_total(batch, &request->total);
    request->due_ns = kvn_now_ns() + ((delay *)base)->nanoseconds;
    status = kvn_inner(base)->vtable->submit(kvn_inner(base), &quiet, &request->inner, report);
    if (status != KVN_OK) {
        free(request);
        return status;
    }
    pthread_mutex_init(&request->mutex, NULL);
    kvn_cond_init(&request->aborted);
    *out = (kvn_request *)request;
    if (kvn_wrapper_end_begin(&request->end, base, *out, batch->end) == 0)
        return KVN_OK;
    delay_abort(base, *out, KVN_CANCELLED, report);
    delay_release(base, *out);
    *out = NULL;
    return kvn_wrapper_no_memory(report, batch->count, sizeof *request);
}

/* Hides the inner backend's report until it is due. The caller holds the mutex. */
static int held_back(const delay_request *request, kvn_report *report)
{
    if (report->status == KVN_PENDING)
        return KVN_PENDING;
    if (request->why != KVN_OK) {
        report->num_unconfirmed = 0;
        kvn_report_add_span(report, 0, request->count);
        if (report->failed == KVN_NO_DESCRIPTOR)
            kvn_report_abandoned(report, request->why, request->count, request->total);
    } else if (kvn_now_ns() < request->due_ns) {
        uint64_t bytes_done = report->bytes_done;
        kvn_report_begin(report);
        report->bytes_done = bytes_done;
    }
    return report->status;
}

static int delay_poll(kvn_backend *base, kvn_request *handle, kvn_report *report)
{
    delay_request *request = (delay_request *)handle;

    kvn_inner(base)->vtable->poll(kvn_inner(base), request->inner, report);
    pthread_mutex_lock(&request->mutex);
    held_back(request, report);
    pthread_mutex_unlock(&request->mutex);
    return report->status;
}

static void sleep_until_due(delay_request *request, int64_t deadline_ns)
{
    int64_t until_ns = request->due_ns < deadline_ns ? request->due_ns : deadline_ns;

    pthread_mutex_lock(&request->mutex);
    while (request->why == KVN_OK && kvn_now_ns() < until_ns)
        kvn_cond_wait(&request->aborted, &request->mutex, until_ns);
    pthread_mutex_unlock(&request->mutex);
}

static int delay_wait(kvn_backend *base, kvn_request *handle, int64_t deadline_ns,
                      kvn_report *report)
{
    delay_request *request = (delay_request *)handle;
    int status =
        kvn_inner(base)->vtable->wait(kvn_inner(base), request->inner, deadline_ns, report);

    if (status == KVN_PENDING)
        return status;
    sleep_until_due(request, deadline_ns);
    return delay_poll(base, handle, report);
}

static int delay_abort(kvn_backend *base, kvn_request *handle, int why, kvn_report *report)
{
    delay_request *request = (delay_request *)handle;

    pthread_mutex_lock(&request->mutex);
    if (request->why == KVN_OK && kvn_now_ns() < request->due_ns) {
        request->why = why;
        pthread_cond_broadcast(&request->aborted);
    }
    pthread_mutex_unlock(&request->mutex);
    kvn_inner(base)->vtable->abort(kvn_inner(base), request->inner, why, report);
    return delay_poll(base, handle, report);
}

static void delay_release(kvn_backend *base, kvn_request *handle)
{
    delay_request *request = (delay_request *)handle;

    kvn_wrapper_end_join(&request->end);
    kvn_inner(base)->vtable->release(kvn_inner(base), request->inner);
    pthread_cond_destroy(&request->aborted);
    pthread_mutex_destroy(&request->mutex);
    free(request);
}

static const kvn_backend_vtable DELAY_VTABLE = {
    .name = "delay",
    .submit = delay_submit,
    .poll = delay_poll,
    .wait = delay_wait,
    .abort = delay_abort,
    .release = delay_release,
    .destroy = kvn_wrapper_destroy,
};

kvn_backend *kvn_delay_create(kvn_backend *inner, int64_t nanoseconds)
{
    delay *self;

    if (nanoseconds < 0) {
        errno = EINVAL;
        return NULL;
    }
    self = kvn_wrapper_alloc(sizeof *self, &DELAY_VTABLE, inner);
    if (!self)
        return NULL;
    self->nanoseconds = nanoseconds;
    return &self->wrapper.base;
}

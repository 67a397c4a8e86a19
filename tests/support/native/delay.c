/* delay: adds latency. The inner backend moves the batch at once; the outcome comes later. */
#include <errno.h>
#include <stdlib.h>

#include "core/columns.h"
#include "core/report.h"
#include "core/thread.h"
#include "wrappers.h"

typedef struct delay {
    kvn_wrapper wrapper;
    int64_t nanoseconds;
} delay;

typedef struct delay_request {
    kvn_wrapper_batch batch; /* first, because its address is cast to the request */
    kvn_backend *inner_backend;
    kvn_request *inner;
    kvn_report of_inner; /* valid until the release, because the inner backend may read its report */
    uint64_t total;
    int64_t due_ns;
} delay_request;

static void make_outcome(kvn_wrapper_batch *batch)
{
    delay_request *request = (delay_request *)batch;
    kvn_report *report = batch->report;
    int why;

    request->inner_backend->vtable->wait(request->inner_backend, request->inner, KVN_FOREVER);
    why = kvn_wrapper_batch_sleep(batch, request->due_ns);
    *report = request->of_inner;
    if (why == KVN_OK)
        return;
    report->num_unconfirmed = 0;
    kvn_report_add_span(report, 0, batch->columns.count);
    if (report->failed == KVN_NO_DESCRIPTOR)
        kvn_report_abandoned(report, why, batch->columns.count, request->total);
}

static int delay_submit(kvn_backend *base, const kvn_columns *batch, kvn_request **out,
                        kvn_report *report)
{
    delay_request *request = calloc(1, sizeof *request);
    kvn_backend *inner = kvn_inner(base);
    kvn_columns quiet = *batch;
    int status;

    *out = NULL;
    if (!request)
        return kvn_wrapper_no_memory(report, batch->count, sizeof *request);
    quiet.end = NULL;
    kvn_columns_total(batch, &request->total);
    request->batch.run = make_outcome;
    request->inner_backend = inner;
    request->due_ns = kvn_now_ns() + ((delay *)base)->nanoseconds;
    status = inner->vtable->submit(inner, &quiet, &request->inner, &request->of_inner);
    if (status != KVN_OK) {
        *report = request->of_inner;
    } else if (kvn_wrapper_batch_begin(&request->batch, batch, report) != 0) {
        inner->vtable->abort(inner, request->inner, KVN_CANCELLED);
        inner->vtable->release(inner, request->inner);
        status = kvn_wrapper_no_memory(report, batch->count, sizeof *request);
    }
    if (status == KVN_OK)
        *out = (kvn_request *)request;
    else
        free(request);
    return status;
}

static int delay_poll(kvn_backend *base, kvn_request *handle, uint64_t *bytes_done)
{
    delay_request *request = (delay_request *)handle;

    kvn_inner(base)->vtable->poll(kvn_inner(base), request->inner, bytes_done);
    return kvn_wrapper_batch_wait(&request->batch, 0);
}

static int delay_wait(kvn_backend *base, kvn_request *handle, int64_t deadline_ns)
{
    (void)base;
    return kvn_wrapper_batch_wait(&((delay_request *)handle)->batch, deadline_ns);
}

static int delay_abort(kvn_backend *base, kvn_request *handle, int why)
{
    delay_request *request = (delay_request *)handle;

    kvn_wrapper_batch_stop(&request->batch, why);
    kvn_inner(base)->vtable->abort(kvn_inner(base), request->inner, why);
    return kvn_wrapper_batch_wait(&request->batch, KVN_FOREVER);
}

static void delay_release(kvn_backend *base, kvn_request *handle)
{
    delay_request *request = (delay_request *)handle;

    kvn_wrapper_batch_end(&request->batch);
    kvn_inner(base)->vtable->release(kvn_inner(base), request->inner);
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

/* hold: the inner backend moves a batch at once; the outcome comes when the test calls kvn_hold_let_go. */
#include "core/columns.h"
#include "core/list.h"
#include "core/report.h"
#include "core/thread.h"
#include "wrappers.h"

typedef struct hold {
    kvn_wrapper wrapper;
    pthread_mutex_t mutex; /* guards the fields below, and the requests */
    pthread_cond_t changed;
    kvn_list held;
    bool is_open;
} hold;

typedef struct hold_request {
    kvn_node node; /* in `held` until the outcome */
    kvn_request *inner;
    kvn_batch_end *end;
    kvn_report *report;
    uint64_t count;
    uint64_t total;
} hold_request;

/* The caller holds the mutex. */
static void let_go(hold *self, hold_request *request, int why)
{
    kvn_backend *inner = kvn_inner(&self->wrapper.base);
    kvn_report *report = request->report;

    if (!kvn_list_is_in(&request->node))
        return;
    kvn_list_remove(&request->node);
    if (why == KVN_OK) {
        inner->vtable->wait(inner, request->inner, KVN_FOREVER);
    } else {
        inner->vtable->abort(inner, request->inner, why);
        report->num_unconfirmed = 0;
        kvn_report_add_span(report, 0, request->count);
        kvn_report_abandoned(report, why, request->count, request->total);
    }
    if (request->end)
        request->end->call(request->end, report->status);
    pthread_cond_broadcast(&self->changed);
}

static int hold_submit(kvn_backend *base, const kvn_columns *batch, kvn_request **out, kvn_report *report)
{
    hold *self = (hold *)base;
    kvn_columns quiet = *batch;
    hold_request *request = calloc(1, sizeof *request);
    int status;

    *out = NULL;
    if (!request)
        return kvn_wrapper_no_memory(report, batch->count, sizeof *request);
    request->report = report;
    request->count = batch->count;
    request->end = batch->end;
    kvn_columns_total(batch, &request->total);
    quiet.end = NULL;
    status = kvn_inner(base)->vtable->submit(kvn_inner(base), &quiet, &request->inner, report);
    if (status != KVN_OK) {
        free(request);
        return status;
    }
    pthread_mutex_lock(&self->mutex);
    kvn_list_push_back(&self->held, &request->node);
    if (self->is_open)
        let_go(self, request, KVN_OK);
    pthread_mutex_unlock(&self->mutex);
    *out = (kvn_request *)request;
    return KVN_OK;
}

/* The caller holds the mutex. */
static int outcome(const hold_request *request)
{
    return kvn_list_is_in(&request->node) ? KVN_PENDING : request->report->status;
}

static int hold_wait(kvn_backend *base, kvn_request *handle, int64_t deadline_ns)
{
    hold *self = (hold *)base;
    hold_request *request = (hold_request *)handle;
    int status;

    pthread_mutex_lock(&self->mutex);
    while (kvn_list_is_in(&request->node) && kvn_cond_wait(&self->changed, &self->mutex, deadline_ns))
        ;
    status = outcome(request);
    pthread_mutex_unlock(&self->mutex);
    return status;
}

static int hold_poll(kvn_backend *base, kvn_request *handle, uint64_t *bytes_done)
{
    *bytes_done = 0;
    return hold_wait(base, handle, 0);
}

static int hold_abort(kvn_backend *base, kvn_request *handle, int why)
{
    hold *self = (hold *)base;
    hold_request *request = (hold_request *)handle;
    int status;

    pthread_mutex_lock(&self->mutex);
    let_go(self, request, why);
    status = outcome(request);
    pthread_mutex_unlock(&self->mutex);
    return status;
}

static void hold_release(kvn_backend *base, kvn_request *handle)
{
    hold *self = (hold *)base;
    hold_request *request = (hold_request *)handle;

    pthread_mutex_lock(&self->mutex); /* waits for a thread inside of let_go */
    pthread_mutex_unlock(&self->mutex);
    kvn_inner(base)->vtable->release(kvn_inner(base), request->inner);
    free(request);
}

static void hold_destroy(kvn_backend *base)
{
    hold *self = (hold *)base;

    pthread_cond_destroy(&self->changed);
    pthread_mutex_destroy(&self->mutex);
    free(self);
}

static const kvn_backend_vtable HOLD_VTABLE = {
    .name = "hold",
    .submit = hold_submit,
    .poll = hold_poll,
    .wait = hold_wait,
    .abort = hold_abort,
    .release = hold_release,
    .destroy = hold_destroy,
};

kvn_backend *kvn_hold_create(kvn_backend *inner)
{
    hold *self = kvn_wrapper_alloc(sizeof *self, &HOLD_VTABLE, inner);

    if (!self)
        return NULL;
    pthread_mutex_init(&self->mutex, NULL);
    kvn_cond_init(&self->changed);
    kvn_list_init(&self->held);
    return &self->wrapper.base;
}

void kvn_hold_let_go(kvn_backend *base)
{
    hold *self = (hold *)base;
    kvn_node *first;

    pthread_mutex_lock(&self->mutex);
    self->is_open = true;
    while ((first = kvn_list_first(&self->held)))
        let_go(self, KVN_LISTED(first, hold_request, node), KVN_OK);
    pthread_mutex_unlock(&self->mutex);
}

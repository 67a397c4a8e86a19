/* Announces each batch of another backend to the owner of the memory. */
#include "process/guarded.h"

#include <errno.h>
#include <stdlib.h>

#include "core/report.h"

typedef struct guarded {
    kvn_backend base;          /* its vtable is the next field */
    kvn_backend_vtable vtable; /* `orders` and block_stream are those of the inner backend */
    kvn_backend *inner;
    kvn_guard *guard;
} guarded;

typedef struct guarded_request {
    kvn_batch_end end; /* the first field: the inner backend passes its address to the functions below */
    kvn_batch_end *outer; /* the batch's own; NULL: none */
    guarded *self;
    kvn_request *inner;
    kvn_announcement announced;
} guarded_request;

static kvn_backend *inner_of(const kvn_backend *base) { return ((const guarded *)base)->inner; }

/* Called by the inner backend at the end of the batch, so that the owner need not wait until the caller polls. */
static void leave_at_once(kvn_batch_end *end, int status)
{
    guarded_request *request = (guarded_request *)end;

    kvn_guard_leave(request->self->guard, &request->announced);
    if (request->outer)
        request->outer->call(request->outer, status);
}

/* Called by the inner backend, on one thread at a time. Only this function touches the announcement until the batch
 * is over. */
static int look(kvn_batch_end *end, kvn_failure *why)
{
    guarded_request *request = (guarded_request *)end;

    return kvn_guard_renew(request->self->guard, &request->announced, why);
}

/* Announces the batch. KVN_PENDING: it is not announced, and must not be submitted. Neither a batch that will wait for
 * an event nor the thread that opens gates waits for a place in the writer table. */
static int enter(guarded_request *request, const kvn_columns *batch, kvn_report *report)
{
    kvn_guard *guard = request->self->guard;
    const bool hurries = batch->after || batch->caller == KVN_CALLER_HURRIES;
    kvn_fault fault = {0};
    const int status = hurries ? kvn_guard_enter_now(guard, batch->first, &request->announced, &fault)
                               : kvn_guard_enter(guard, false, batch->first, &request->announced, &fault);

    if (batch->after && status != KVN_OK)
        return KVN_PENDING; /* a failure is reported after the event */
    if (status != KVN_OK && status != KVN_PENDING)
        kvn_report_refuse(report, batch->count, status, 0, "%s", fault.message);
    return status;
}

static int guarded_submit(kvn_backend *base, const kvn_columns *batch, kvn_request **out,
                          kvn_report *report)
{
    guarded *self = (guarded *)base;
    guarded_request *request = calloc(1, sizeof *request);
    kvn_columns announced = *batch;
    int status;

    *out = NULL;
    if (!request)
        return kvn_report_refuse(report, batch->count, KVN_NO_MEMORY, ENOMEM,
                                 "no memory for a request (%zu bytes)", sizeof *request);
    request->end = (kvn_batch_end){.call = leave_at_once, .look = look};
    request->outer = batch->end;
    request->self = self;
    announced.end = &request->end;
    status = enter(request, batch, report);
    if (status == KVN_OK) {
        status = self->inner->vtable->submit(self->inner, &announced, &request->inner, report);
        if (status != KVN_OK)
            kvn_guard_leave(self->guard, &request->announced);
    }
    if (status == KVN_OK)
        *out = (kvn_request *)request;
    else
        free(request);
    return status;
}

static int guarded_poll(kvn_backend *base, kvn_request *handle, uint64_t *bytes_done)
{
    return inner_of(base)->vtable->poll(inner_of(base), ((guarded_request *)handle)->inner, bytes_done);
}

static int guarded_wait(kvn_backend *base, kvn_request *handle, int64_t deadline_ns)
{
    return inner_of(base)->vtable->wait(inner_of(base), ((guarded_request *)handle)->inner, deadline_ns);
}

static int guarded_abort(kvn_backend *base, kvn_request *handle, int why)
{
    return inner_of(base)->vtable->abort(inner_of(base), ((guarded_request *)handle)->inner, why);
}

static void guarded_cancel_held(kvn_backend *base, kvn_request *handle)
{
    kvn_backend *inner = inner_of(base);

    if (inner->vtable->cancel_held)
        inner->vtable->cancel_held(inner, ((guarded_request *)handle)->inner);
}

static int guarded_block_stream(kvn_backend *base, kvn_request *handle, void *stream, int64_t deadline_ns,
                                kvn_failure *why)
{
    kvn_backend *inner = inner_of(base);

    return inner->vtable->block_stream(inner, ((guarded_request *)handle)->inner, stream, deadline_ns, why);
}

static void guarded_release(kvn_backend *base, kvn_request *handle)
{
    guarded_request *request = (guarded_request *)handle;

    inner_of(base)->vtable->release(inner_of(base), request->inner);
    free(request);
}

static void guarded_destroy(kvn_backend *base)
{
    kvn_guard_destroy(((guarded *)base)->guard);
    free(base);
}

static const kvn_backend_vtable GUARDED_VTABLE = {
    .name = "guarded",
    .submit = guarded_submit,
    .poll = guarded_poll,
    .wait = guarded_wait,
    .abort = guarded_abort,
    .cancel_held = guarded_cancel_held,
    .block_stream = guarded_block_stream,
    .release = guarded_release,
    .destroy = guarded_destroy,
};

kvn_backend *kvn_guarded_create(kvn_backend *inner, kvn_guard *guard)
{
    guarded *self = malloc(sizeof *self);

    if (!self) {
        kvn_guard_destroy(guard);
        return NULL;
    }
    *self = (guarded){.vtable = GUARDED_VTABLE, .inner = inner, .guard = guard};
    self->vtable.orders = inner->vtable->orders;
    self->base.vtable = &self->vtable;
    if (!inner->vtable->block_stream)
        self->vtable.block_stream = NULL;
    return &self->base;
}

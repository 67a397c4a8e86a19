#include "process/guarded.h"

#include <errno.h>
#include <stdlib.h>

#include "core/report.h"
#include "core/wrappers.h"

typedef struct guarded {
    kvn_wrapper wrapper;
    kvn_guard *guard;
} guarded;

typedef struct guarded_request {
    kvn_request *inner;
    kvn_announcement announced;
    atomic_bool left;
} guarded_request;

/* Passes the status through; with an outcome the batch is not announced any more. */
static int leave_at_end(kvn_backend *base, guarded_request *request, int status)
{
    if (status != KVN_PENDING && !atomic_exchange(&request->left, true))
        kvn_guard_leave(((guarded *)base)->guard, &request->announced);
    return status;
}

static int guarded_submit(kvn_backend *base, const kvn_columns *batch, kvn_request **out,
                          kvn_report *report)
{
    guarded *self = (guarded *)base;
    guarded_request *request = calloc(1, sizeof *request);
    kvn_fault fault = {0};
    int status;

    *out = NULL;
    if (!request)
        return kvn_wrapper_no_memory(report, batch->count, sizeof *request);
    status = kvn_guard_enter(self->guard, false, batch->first, &request->announced, &fault);
    if (status != KVN_OK) {
        kvn_report_refuse(report, batch->count, status, 0, "%s", fault.message);
    } else {
        status = kvn_inner(base)->vtable->submit(kvn_inner(base), batch, &request->inner, report);
        if (status != KVN_OK)
            leave_at_end(base, request, status);
    }
    if (status == KVN_OK)
        *out = (kvn_request *)request;
    else
        free(request);
    return status;
}

static int guarded_poll(kvn_backend *base, kvn_request *handle, kvn_report *report)
{
    guarded_request *request = (guarded_request *)handle;
    kvn_backend *inner = kvn_inner(base);

    return leave_at_end(base, request, inner->vtable->poll(inner, request->inner, report));
}

static int guarded_wait(kvn_backend *base, kvn_request *handle, int64_t deadline_ns,
                        kvn_report *report)
{
    guarded_request *request = (guarded_request *)handle;
    kvn_backend *inner = kvn_inner(base);

    return leave_at_end(base, request,
                        inner->vtable->wait(inner, request->inner, deadline_ns, report));
}

static int guarded_abort(kvn_backend *base, kvn_request *handle, int why, kvn_report *report)
{
    guarded_request *request = (guarded_request *)handle;
    kvn_backend *inner = kvn_inner(base);

    return leave_at_end(base, request, inner->vtable->abort(inner, request->inner, why, report));
}

static void guarded_release(kvn_backend *base, kvn_request *handle)
{
    guarded_request *request = (guarded_request *)handle;

    kvn_inner(base)->vtable->release(kvn_inner(base), request->inner);
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
    .release = guarded_release,
    .destroy = guarded_destroy,
};

kvn_backend *kvn_guarded_create(kvn_backend *inner, kvn_guard *guard)
{
    guarded *self = kvn_wrapper_alloc(sizeof *self, &GUARDED_VTABLE, inner);

    if (self)
        self->guard = guard;
    else
        kvn_guard_destroy(guard);
    return self ? &self->wrapper.base : NULL;
}

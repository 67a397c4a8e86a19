/* early_ends: counts the batches that have an outcome before their `end` has returned. */
#include <stdatomic.h>

#include "wrappers.h"

typedef struct early_ends {
    kvn_wrapper wrapper;
    atomic_uint seen, early;
} early_ends;

typedef struct early_request {
    kvn_batch_end end; /* first, because the inner backend passes its address back */
    kvn_batch_end *outer;
    early_ends *self;
    kvn_request *_Atomic inner; /* NULL until `submit` has returned */
} early_request;

static void look_at_end(kvn_batch_end *end, int status)
{
    early_request *it = (early_request *)end;
    kvn_backend *inner = kvn_inner(&it->self->wrapper.base);
    kvn_request *request = atomic_load(&it->inner);
    uint64_t bytes_done;

    if (it->outer)
        it->outer->call(it->outer, status);
    if (!request)
        return;
    if (inner->vtable->poll(inner, request, &bytes_done) != KVN_PENDING)
        atomic_fetch_add(&it->self->early, 1);
    atomic_fetch_add(&it->self->seen, 1);
}

static int early_submit(kvn_backend *base, const kvn_columns *batch, kvn_request **out, kvn_report *report)
{
    kvn_columns ours = *batch;
    early_request *it = calloc(1, sizeof *it);
    kvn_request *inner = NULL;
    int status;

    *out = NULL;
    if (!it)
        return kvn_wrapper_no_memory(report, batch->count, sizeof *it);
    it->end.call = look_at_end;
    it->outer = batch->end;
    it->self = (early_ends *)base;
    ours.end = &it->end;
    status = kvn_inner(base)->vtable->submit(kvn_inner(base), &ours, &inner, report);
    if (status != KVN_OK) {
        free(it);
        return status;
    }
    atomic_store(&it->inner, inner);
    *out = (kvn_request *)it;
    return KVN_OK;
}

static int early_poll(kvn_backend *base, kvn_request *request, uint64_t *bytes_done)
{
    return kvn_inner(base)->vtable->poll(kvn_inner(base), ((early_request *)request)->inner, bytes_done);
}

static int early_wait(kvn_backend *base, kvn_request *request, int64_t deadline_ns)
{
    return kvn_inner(base)->vtable->wait(kvn_inner(base), ((early_request *)request)->inner, deadline_ns);
}

static int early_abort(kvn_backend *base, kvn_request *request, int why)
{
    return kvn_inner(base)->vtable->abort(kvn_inner(base), ((early_request *)request)->inner, why);
}

static void early_release(kvn_backend *base, kvn_request *request)
{
    kvn_inner(base)->vtable->release(kvn_inner(base), ((early_request *)request)->inner);
    free(request);
}

static const kvn_backend_vtable EARLY_ENDS_VTABLE = {
    .name = "early_ends",
    .submit = early_submit,
    .poll = early_poll,
    .wait = early_wait,
    .abort = early_abort,
    .release = early_release,
    .destroy = kvn_wrapper_destroy,
};

kvn_backend *kvn_early_ends_create(kvn_backend *inner)
{
    early_ends *self = kvn_wrapper_alloc(sizeof *self, &EARLY_ENDS_VTABLE, inner);

    return self ? &self->wrapper.base : NULL;
}

unsigned kvn_early_ends_seen(kvn_backend *self, unsigned *early)
{
    *early = atomic_load(&((early_ends *)self)->early);
    return atomic_load(&((early_ends *)self)->seen);
}

#include "core/wrappers.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>

#include "core/report.h"

/* ---- shared ---- */

void *kvn_wrapper_alloc(size_t nbytes, const kvn_backend_vtable *vtable, kvn_backend *inner)
{
    kvn_wrapper *self = calloc(1, nbytes);

    if (self) {
        self->base.vtable = vtable;
        self->inner = inner;
    }
    return self;
}

void kvn_wrapper_capabilities(const kvn_backend *self, kvn_capabilities *out)
{
    kvn_inner(self)->vtable->capabilities(kvn_inner(self), out);
}

void kvn_wrapper_destroy(kvn_backend *self) { free(self); }

int kvn_wrapper_no_memory(kvn_report *report, uint64_t count, size_t nbytes)
{
    return kvn_report_refuse(report, count, KVN_NO_MEMORY, ENOMEM,
                             "no memory for a request (%zu bytes)", nbytes);
}

/* ---- limit_batch: requests are the inner backend's own ---- */

typedef struct limit_batch {
    kvn_wrapper wrapper;
    uint64_t max_batch;
    uint64_t max_nbytes;
} limit_batch;

static uint64_t smaller(uint64_t a, uint64_t b) { return a < b ? a : b; }

static void limit_capabilities(const kvn_backend *base, kvn_capabilities *out)
{
    const limit_batch *self = (const limit_batch *)base;

    kvn_wrapper_capabilities(base, out);
    out->max_batch = smaller(out->max_batch, self->max_batch);
    out->max_nbytes = smaller(out->max_nbytes, self->max_nbytes);
}

static int limit_submit(kvn_backend *base, const kvn_columns *batch, kvn_request **out,
                        kvn_report *report)
{
    kvn_capabilities limits;

    *out = NULL;
    limit_capabilities(base, &limits);
    if (batch->count > limits.max_batch)
        return kvn_report_refuse(report, batch->count, KVN_INVALID, 0,
                                 "a batch of %zu descriptors: at most %" PRIu64 " are taken",
                                 batch->count, limits.max_batch);
    for (size_t i = 0; i < batch->count; i++)
        if (batch->nbytes[i] > limits.max_nbytes)
            return kvn_report_refuse(report, batch->count, KVN_INVALID, 0,
                                     "descriptor %" PRIu64 " is %" PRIu64
                                     " bytes: at most %" PRIu64 " are taken",
                                     batch->first + i, batch->nbytes[i], limits.max_nbytes);
    return kvn_inner(base)->vtable->submit(kvn_inner(base), batch, out, report);
}

static int limit_poll(kvn_backend *self, kvn_request *request, kvn_report *report)
{
    return kvn_inner(self)->vtable->poll(kvn_inner(self), request, report);
}

static int limit_wait(kvn_backend *self, kvn_request *request, int64_t deadline_ns,
                      kvn_report *report)
{
    return kvn_inner(self)->vtable->wait(kvn_inner(self), request, deadline_ns, report);
}

static int limit_abort(kvn_backend *self, kvn_request *request, int why, kvn_report *report)
{
    return kvn_inner(self)->vtable->abort(kvn_inner(self), request, why, report);
}

static void limit_release(kvn_backend *self, kvn_request *request)
{
    kvn_inner(self)->vtable->release(kvn_inner(self), request);
}

static const kvn_backend_vtable LIMIT_BATCH_VTABLE = {
    .name = "limit_batch",
    .capabilities = limit_capabilities,
    .submit = limit_submit,
    .poll = limit_poll,
    .wait = limit_wait,
    .abort = limit_abort,
    .release = limit_release,
    .destroy = kvn_wrapper_destroy,
};

kvn_backend *kvn_limit_batch_create(kvn_backend *inner, uint64_t max_batch, uint64_t max_nbytes)
{
    limit_batch *self;

    if (max_batch < 1 || max_nbytes < 1) {
        errno = EINVAL;
        return NULL;
    }
    self = kvn_wrapper_alloc(sizeof *self, &LIMIT_BATCH_VTABLE, inner);
    if (!self)
        return NULL;
    self->max_batch = max_batch;
    self->max_nbytes = max_nbytes;
    return &self->wrapper.base;
}

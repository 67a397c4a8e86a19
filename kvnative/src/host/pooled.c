/* The common part of backends that move batches with a pool of threads. */
#include "host/pooled.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/report.h"

struct kvn_request {
    kvn_job job;
};

static kvn_pooled *pooled(const kvn_backend *self) { return (kvn_pooled *)self; }

void kvn_pooled_init(kvn_pooled *self, const kvn_backend_vtable *vtable, kvn_pool *pool,
                     kvn_move move)
{
    memset(self, 0, sizeof *self);
    self->base.vtable = vtable;
    self->pool = pool;
    self->move = move;
    self->piece = (kvn_piece_limits){.descriptors = UINT64_MAX, .nbytes = KVN_PIECE_TUNED};
}

void kvn_pooled_fini(kvn_pooled *self) { kvn_guard_destroy(self->guard); }

void kvn_pooled_set_guard(kvn_backend *self, kvn_guard *guard) { pooled(self)->guard = guard; }

int kvn_pooled_submit(kvn_backend *base, const kvn_columns *batch, kvn_request **out,
                      kvn_report *report)
{
    kvn_pooled *self = pooled(base);
    kvn_request *request;
    uint64_t total;

    *out = NULL;
    if (!kvn_columns_total(batch, &total))
        return kvn_report_refuse(report, batch->count, KVN_INVALID, 0,
                                 "the sizes of %zu descriptors add up to more than 2**64 - 1 bytes",
                                 batch->count);
    request = malloc(sizeof *request);
    if (!request)
        return kvn_report_refuse(report, batch->count, KVN_NO_MEMORY, ENOMEM,
                                 "no memory for a request (%zu bytes)", sizeof *request);
    kvn_job_init(&request->job, batch, self->move, self, self->piece, report);
    if (total <= self->inline_nbytes && batch->caller != KVN_CALLER_HURRIES)
        kvn_job_run(&request->job, total);
    else
        kvn_job_submit(&request->job, self->pool, total);
    *out = request;
    return KVN_OK;
}

int kvn_pooled_poll(kvn_backend *self, kvn_request *request, uint64_t *bytes_done)
{
    (void)self;
    return kvn_job_poll(&request->job, bytes_done);
}

int kvn_pooled_wait(kvn_backend *self, kvn_request *request, int64_t deadline_ns)
{
    (void)self;
    return kvn_job_wait(&request->job, deadline_ns);
}

int kvn_pooled_abort(kvn_backend *self, kvn_request *request, int why)
{
    (void)self;
    return kvn_job_abort(&request->job, why);
}

void kvn_pooled_release(kvn_backend *self, kvn_request *request)
{
    (void)self;
    kvn_job_release(&request->job);
    free(request);
}

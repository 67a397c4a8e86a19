/* swap_at: silently swaps the destinations of two descriptors, in the first batch that has both. */
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "core/report.h"
#include "wrappers.h"

typedef struct swap_at {
    kvn_wrapper wrapper;
    uint64_t descriptor;
    atomic_bool done;
} swap_at;

typedef struct swap_request {
    kvn_request *inner;
    uint64_t *dst; /* used while the batch moves; NULL: the batch is unchanged */
} swap_request;

static int swap_submit(kvn_backend *base, const kvn_columns *batch, kvn_request **out,
                       kvn_report *report)
{
    swap_at *self = (swap_at *)base;
    const uint64_t at = self->descriptor - batch->first;
    kvn_columns changed = *batch;
    swap_request *request = calloc(1, sizeof *request);
    int status;

    *out = NULL;
    if (!request)
        return kvn_wrapper_no_memory(report, batch->count, sizeof *request);
    if (self->descriptor >= batch->first && at + 1 < batch->count &&
        !atomic_exchange(&self->done, true)) {
        request->dst = malloc(batch->count * sizeof *request->dst);
        if (!request->dst) {
            free(request);
            return kvn_wrapper_no_memory(report, batch->count, batch->count * sizeof *request->dst);
        }
        memcpy(request->dst, batch->dst, batch->count * sizeof *request->dst);
        request->dst[at] = batch->dst[at + 1];
        request->dst[at + 1] = batch->dst[at];
        changed.dst = request->dst;
    }
    status = kvn_inner(base)->vtable->submit(kvn_inner(base), &changed, &request->inner, report);
    if (status == KVN_OK) {
        *out = (kvn_request *)request;
    } else {
        free(request->dst);
        free(request);
    }
    return status;
}

static int swap_poll(kvn_backend *base, kvn_request *handle, uint64_t *bytes_done)
{
    return kvn_inner(base)->vtable->poll(kvn_inner(base), ((swap_request *)handle)->inner, bytes_done);
}

static int swap_wait(kvn_backend *base, kvn_request *handle, int64_t deadline_ns)
{
    return kvn_inner(base)->vtable->wait(kvn_inner(base), ((swap_request *)handle)->inner,
                                         deadline_ns);
}

static int swap_abort(kvn_backend *base, kvn_request *handle, int why)
{
    return kvn_inner(base)->vtable->abort(kvn_inner(base), ((swap_request *)handle)->inner, why);
}

static void swap_release(kvn_backend *base, kvn_request *handle)
{
    swap_request *request = (swap_request *)handle;

    kvn_inner(base)->vtable->release(kvn_inner(base), request->inner);
    free(request->dst);
    free(request);
}

static const kvn_backend_vtable SWAP_AT_VTABLE = {
    .name = "swap_at",
    .submit = swap_submit,
    .poll = swap_poll,
    .wait = swap_wait,
    .abort = swap_abort,
    .release = swap_release,
    .destroy = kvn_wrapper_destroy,
};

kvn_backend *kvn_swap_at_create(kvn_backend *inner, uint64_t descriptor)
{
    swap_at *self = kvn_wrapper_alloc(sizeof *self, &SWAP_AT_VTABLE, inner);

    if (!self)
        return NULL;
    self->descriptor = descriptor;
    return &self->wrapper.base;
}

/* streams: a backend that pretends that a stream can wait for its requests, or reports why not. */
#include <stdatomic.h>

#include "core/failure.h"
#include "wrappers.h"

typedef struct streams {
    kvn_wrapper wrapper;
    atomic_int pending; /* number of further calls that return KVN_PENDING; < 0: all calls before the outcome */
    int status;
} streams;

static int streams_submit(kvn_backend *base, const kvn_columns *batch, kvn_request **out, kvn_report *report)
{
    return kvn_inner(base)->vtable->submit(kvn_inner(base), batch, out, report);
}

static int streams_poll(kvn_backend *base, kvn_request *request, uint64_t *bytes_done)
{
    return kvn_inner(base)->vtable->poll(kvn_inner(base), request, bytes_done);
}

static int streams_wait(kvn_backend *base, kvn_request *request, int64_t deadline_ns)
{
    return kvn_inner(base)->vtable->wait(kvn_inner(base), request, deadline_ns);
}

static int streams_abort(kvn_backend *base, kvn_request *request, int why)
{
    return kvn_inner(base)->vtable->abort(kvn_inner(base), request, why);
}

static int streams_block_stream(kvn_backend *base, kvn_request *request, void *stream, int64_t deadline_ns,
                                kvn_failure *why)
{
    streams *self = (streams *)base;
    const int pending = atomic_load(&self->pending);

    if (pending < 0)
        return streams_wait(base, request, deadline_ns) == KVN_PENDING ? KVN_PENDING : KVN_OK;
    if (pending > 0) {
        atomic_store(&self->pending, pending - 1);
        return KVN_PENDING;
    }
    return self->status == KVN_OK ? KVN_OK
                                  : kvn_fail(why, self->status, 7, "no stream %p", stream);
}

static void streams_release(kvn_backend *base, kvn_request *request)
{
    kvn_inner(base)->vtable->release(kvn_inner(base), request);
}

static const kvn_backend_vtable STREAMS_VTABLE = {
    .name = "streams",
    .submit = streams_submit,
    .poll = streams_poll,
    .wait = streams_wait,
    .abort = streams_abort,
    .block_stream = streams_block_stream,
    .release = streams_release,
    .destroy = kvn_wrapper_destroy,
};

kvn_backend *kvn_streams_create(kvn_backend *inner, int pending, int status)
{
    streams *self = kvn_wrapper_alloc(sizeof *self, &STREAMS_VTABLE, inner);

    if (!self)
        return NULL;
    atomic_init(&self->pending, pending);
    self->status = status;
    return &self->wrapper.base;
}

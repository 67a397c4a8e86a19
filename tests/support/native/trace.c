/* trace: writes a line of JSON for each call. */
#include <errno.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/columns.h"
#include "core/failure.h"
#include "core/report.h"
#include "core/thread.h"
#include "wrappers.h"

typedef struct trace {
    kvn_wrapper wrapper;
    kvn_backend_vtable vtable; /* has the calls that the inner vtable has */
    int fd;
    atomic_uint_fast64_t requests; /* the number of requests so far */
} trace;

typedef struct trace_request {
    kvn_request *inner;
    uint64_t number;
    uint64_t first;
    uint64_t count;
    uint64_t nbytes;
} trace_request;

/* Writes a line by one write(), so that lines of several threads do not mix. Ignores errors. */
static void write_line(trace *self, const char *call, const trace_request *request, int status)
{
    char line[256];
    int length = snprintf(line, sizeof line,
                          "{\"call\": \"%s\", \"backend\": \"%s\", \"request\": %" PRIu64
                          ", \"first\": %" PRIu64 ", \"count\": %" PRIu64 ", \"nbytes\": %" PRIu64
                          ", \"status\": %d, \"us\": %.3f}\n",
                          call, self->wrapper.inner->vtable->name, request->number, request->first,
                          request->count, request->nbytes, status, (double)kvn_now_ns() / 1e3);

    if (write(self->fd, line, (size_t)length) != length)
        return;
}

static int trace_submit(kvn_backend *base, const kvn_columns *batch, kvn_request **out,
                        kvn_report *report)
{
    trace *self = (trace *)base;
    trace_request *request = calloc(1, sizeof *request);
    int status;

    *out = NULL;
    if (!request)
        return kvn_wrapper_no_memory(report, batch->count, sizeof *request);
    request->number = atomic_fetch_add(&self->requests, 1);
    request->first = batch->first;
    request->count = batch->count;
    kvn_columns_total(batch, &request->nbytes);
    status = kvn_inner(base)->vtable->submit(kvn_inner(base), batch, &request->inner, report);
    write_line(self, "submit", request, status);
    if (status == KVN_OK)
        *out = (kvn_request *)request;
    else
        free(request);
    return status;
}

static int trace_poll(kvn_backend *base, kvn_request *handle, uint64_t *bytes_done)
{
    trace_request *request = (trace_request *)handle;
    int status = kvn_inner(base)->vtable->poll(kvn_inner(base), request->inner, bytes_done);

    write_line((trace *)base, "poll", request, status);
    return status;
}

static int trace_wait(kvn_backend *base, kvn_request *handle, int64_t deadline_ns)
{
    trace_request *request = (trace_request *)handle;
    int status =
        kvn_inner(base)->vtable->wait(kvn_inner(base), request->inner, deadline_ns);

    write_line((trace *)base, "wait", request, status);
    return status;
}

static int trace_abort(kvn_backend *base, kvn_request *handle, int why)
{
    trace_request *request = (trace_request *)handle;
    int status = kvn_inner(base)->vtable->abort(kvn_inner(base), request->inner, why);

    write_line((trace *)base, "abort", request, status);
    return status;
}

static int trace_block_stream(kvn_backend *base, kvn_request *handle, void *stream, int64_t deadline_ns,
                              kvn_failure *why)
{
    trace_request *request = (trace_request *)handle;
    int status = kvn_inner(base)->vtable->block_stream(kvn_inner(base), request->inner, stream, deadline_ns, why);

    write_line((trace *)base, "block_stream", request, status);
    return status;
}

static void trace_release(kvn_backend *base, kvn_request *handle)
{
    trace_request *request = (trace_request *)handle;

    kvn_inner(base)->vtable->release(kvn_inner(base), request->inner);
    write_line((trace *)base, "release", request, KVN_OK);
    free(request);
}

static const kvn_backend_vtable TRACE_VTABLE = {
    .name = "trace",
    .submit = trace_submit,
    .poll = trace_poll,
    .wait = trace_wait,
    .abort = trace_abort,
    .block_stream = trace_block_stream,
    .release = trace_release,
    .destroy = kvn_wrapper_destroy,
};

kvn_backend *kvn_trace_create(kvn_backend *inner, int fd)
{
    trace *self;

    if (fd < 0) {
        errno = EINVAL;
        return NULL;
    }
    self = kvn_wrapper_alloc(sizeof *self, &TRACE_VTABLE, inner);
    if (!self)
        return NULL;
    self->vtable = TRACE_VTABLE;
    if (!inner->vtable->block_stream)
        self->vtable.block_stream = NULL;
    self->wrapper.base.vtable = &self->vtable;
    self->fd = fd;
    return &self->wrapper.base;
}

/* fail_at: passes the batch up to the failing descriptor to the inner backend, and then fails; or refuses the whole
 * batch. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "core/report.h"
#include "wrappers.h"

typedef struct fail_at {
    kvn_wrapper wrapper;
    uint64_t descriptor;
    int status;
    int code;
    bool at_submit;
} fail_at;

typedef struct fault_request {
    kvn_batch_end end;    /* first, because the inner backend passes its address back */
    kvn_batch_end *outer; /* `end` of the batch; NULL: none */
    const fail_at *self;
    kvn_report *report;
    kvn_request *inner; /* NULL: no descriptor precedes the fault */
    uint64_t fault;     /* index in the batch; the batch's count if the descriptor is in another batch */
    uint64_t count;
} fault_request;

static int refuse(const fail_at *self, uint64_t fault, uint64_t count, kvn_report *report)
{
    kvn_report_refuse(report, count, self->status, self->code,
                      "descriptor %" PRIu64 " was made to be refused with status %d, code %d",
                      self->descriptor, self->status, self->code);
    report->failed = fault;
    return self->status;
}

/* Adds the fault to the report of the descriptors before it. */
static void add_fault(const fault_request *request)
{
    const fail_at *self = request->self;
    kvn_report *report = request->report;

    kvn_report_add_span(report, request->fault, request->count);
    kvn_report_merge_spans(report);
    if (report->status != KVN_OK)
        return;
    report->status = self->status;
    report->code = self->code;
    report->failed = request->fault;
    snprintf(report->message, sizeof report->message,
             "descriptor %" PRIu64 " was made to fail with status %d, code %d",
             self->descriptor, self->status, self->code);
}

static void fault_end(kvn_batch_end *end, int status)
{
    fault_request *request = (fault_request *)end;

    (void)status;
    if (request->fault < request->count)
        add_fault(request);
    if (request->outer)
        request->outer->call(request->outer, request->report->status);
}

static int fault_submit(kvn_backend *base, const kvn_columns *batch, kvn_request **out,
                        kvn_report *report)
{
    const fail_at *self = (const fail_at *)base;
    kvn_columns before = *batch;
    fault_request *request;
    int status;

    *out = NULL;
    if (self->descriptor >= batch->first && self->descriptor - batch->first < batch->count)
        before.count = self->descriptor - batch->first;
    if (self->at_submit && before.count < batch->count && self->status == KVN_PENDING)
        return KVN_PENDING; /* without a report */
    if (self->at_submit && before.count < batch->count)
        return refuse(self, before.count, batch->count, report);
    request = calloc(1, sizeof *request);
    if (!request)
        return kvn_wrapper_no_memory(report, batch->count, sizeof *request);
    request->fault = before.count;
    request->count = batch->count;
    request->self = self;
    request->report = report;
    request->end.call = fault_end;
    request->outer = batch->end;
    before.end = &request->end;
    if (before.count > 0 || batch->count == 0) {
        status = kvn_inner(base)->vtable->submit(kvn_inner(base), &before, &request->inner, report);
        if (status != KVN_OK) {
            kvn_report_add_span(report, before.count, batch->count);
            kvn_report_merge_spans(report);
            free(request);
            return status;
        }
    } else {
        kvn_report_begin(report);
        report->status = KVN_OK;
        fault_end(&request->end, KVN_OK);
    }
    *out = (kvn_request *)request;
    return KVN_OK;
}

static int fault_poll(kvn_backend *base, kvn_request *handle, uint64_t *bytes_done)
{
    fault_request *request = (fault_request *)handle;

    if (request->inner)
        return kvn_inner(base)->vtable->poll(kvn_inner(base), request->inner, bytes_done);
    *bytes_done = 0;
    return request->report->status;
}

static int fault_wait(kvn_backend *base, kvn_request *handle, int64_t deadline_ns)
{
    fault_request *request = (fault_request *)handle;

    if (request->inner)
        return kvn_inner(base)->vtable->wait(kvn_inner(base), request->inner, deadline_ns);
    return request->report->status;
}

static int fault_abort(kvn_backend *base, kvn_request *handle, int why)
{
    fault_request *request = (fault_request *)handle;

    if (request->inner)
        return kvn_inner(base)->vtable->abort(kvn_inner(base), request->inner, why);
    return request->report->status;
}

static void fault_release(kvn_backend *base, kvn_request *handle)
{
    fault_request *request = (fault_request *)handle;

    if (request->inner)
        kvn_inner(base)->vtable->release(kvn_inner(base), request->inner);
    free(request);
}

static const kvn_backend_vtable FAIL_AT_VTABLE = {
    .name = "fail_at",
    .submit = fault_submit,
    .poll = fault_poll,
    .wait = fault_wait,
    .abort = fault_abort,
    .release = fault_release,
    .destroy = kvn_wrapper_destroy,
};

kvn_backend *kvn_fail_at_create(kvn_backend *inner, uint64_t descriptor, int status, int code,
                                bool at_submit)
{
    fail_at *self;

    if (status >= KVN_OK && !(at_submit && status == KVN_PENDING)) {
        errno = EINVAL;
        return NULL;
    }
    self = kvn_wrapper_alloc(sizeof *self, &FAIL_AT_VTABLE, inner);
    if (!self)
        return NULL;
    self->descriptor = descriptor;
    self->status = status;
    self->code = code;
    self->at_submit = at_submit;
    return &self->wrapper.base;
}

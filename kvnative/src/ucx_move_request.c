/* The requests of the one-sided backend: checked and begun, waited for, given up. */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "job.h"
#include "report.h"
#include "ucx_mover.h"

#define ABORT_NS INT64_C(500000000) /* for what is in flight to end by itself */

/* ---- submit ---- */

static void forget(kvn_request *request)
{
    kvn_ucx_atlas_let_go(request->atlas);
    free(request->uses);
    free(request);
}

/* Notes which ranges the batch uses. `where`: a number for each range, UINT64_MAX at first. */
static int look_up(kvn_request *request, uint64_t *where, kvn_report *report)
{
    const kvn_ucx_one_sided *self = request->self;
    const kvn_columns *batch = &request->batch;
    const uint64_t *remotes = self->direction == KVN_PEER_GET ? batch->src : batch->dst;
    size_t hint = 0;

    for (uint64_t i = 0; i < batch->count; i++) {
        if (batch->nbytes[i] == 0)
            continue;
        const size_t range = kvn_ucx_range_of(self, remotes[i], batch->nbytes[i], &hint);
        if (range == KVN_NO_INTERVAL) {
            kvn_report_refuse(report, batch->count, KVN_INVALID, 0,
                              "descriptor %" PRIu64 ": remote memory [0x%" PRIx64 ", 0x%" PRIx64
                              ") lies in none of the ranges that the backend was made for",
                              batch->first + i, remotes[i], remotes[i] + batch->nbytes[i]);
            report->failed = i;
            return KVN_INVALID;
        }
        if (where[range] != UINT64_MAX)
            continue;
        where[range] = request->num_uses;
        request->uses[request->num_uses++] = (kvn_ucx_use){.range = range, .first = i};
    }
    return KVN_OK;
}

static int find_uses(kvn_request *request, kvn_report *report)
{
    const uint64_t count = request->self->num_ranges;
    uint64_t *where = malloc((count + 1) * sizeof *where);

    request->uses = malloc((count + 1) * sizeof *request->uses);
    if (!where || !request->uses) {
        free(where);
        return kvn_report_refuse(report, request->batch.count, KVN_NO_MEMORY, ENOMEM,
                                 "no memory for a transfer that uses %" PRIu64 " ranges", count);
    }
    memset(where, 0xff, count * sizeof *where);
    const int status = look_up(request, where, report);
    free(where);
    return status;
}

static kvn_request *create(kvn_ucx_one_sided *self, const kvn_columns *batch)
{
    kvn_request *request = malloc(sizeof *request);

    if (!request)
        return NULL;
    memset(request, 0, offsetof(kvn_request, report));
    request->self = self;
    request->batch = *batch;
    request->failed = KVN_NO_DESCRIPTOR;
    for (size_t i = 0; i < KVN_UCX_WINDOW; i++) {
        request->operations[i].next = request->free;
        request->free = &request->operations[i];
    }
    return request;
}

static void begin(kvn_ucx_end *end, kvn_ucx_errand *errand)
{
    kvn_request *request = (kvn_request *)((char *)errand - offsetof(kvn_request, beginning));

    (void)end;
    kvn_ucx_mover_begin(request->self->mover, request);
}

int kvn_ucx_move_submit(kvn_backend *base, const kvn_columns *batch, kvn_request **out,
                  kvn_report *report)
{
    kvn_ucx_one_sided *self = (kvn_ucx_one_sided *)base;
    kvn_request *request;
    kvn_failure why;
    uint64_t total;

    *out = NULL;
    if (kvn_ucx_link_has_failed(self->link, &why))
        return kvn_report_refuse(report, batch->count, KVN_PEER_GONE, why.code, "%s",
                                 why.message);
    if (!kvn_columns_total(batch, &total))
        return kvn_report_refuse(report, batch->count, KVN_INVALID, 0,
                                 "the descriptors have 2**64 bytes or more together");
    request = create(self, batch);
    if (!request)
        return kvn_report_refuse(report, batch->count, KVN_NO_MEMORY, ENOMEM,
                                 "no memory for a transfer");
    request->total = total;
    if (find_uses(request, report) != KVN_OK) {
        forget(request);
        return report->status;
    }
    request->atlas = kvn_ucx_atlas_hold(self->regions);
    request->beginning.run = begin;
    kvn_ucx_do(kvn_ucx_link_end(self->link), &request->beginning);
    *out = request;
    return KVN_OK;
}

/* ---- poll, wait, abort ---- */

static bool is_finished(void *context)
{
    return atomic_load(&((kvn_request *)context)->finished);
}

static void remember_error(kvn_ucx_one_sided *self, const kvn_report *report)
{
    pthread_mutex_lock(&self->error_mutex);
    memcpy(self->error, report->message, sizeof self->error);
    pthread_mutex_unlock(&self->error_mutex);
}

static int tell(kvn_request *request, kvn_report *report)
{
    if (is_finished(request)) {
        kvn_report_copy(report, &request->report);
        if (report->status != KVN_OK)
            remember_error(request->self, report);
    } else {
        kvn_report_begin(report);
        report->bytes_done = atomic_load_explicit(&request->moved, memory_order_relaxed);
    }
    return report->status;
}

int kvn_ucx_move_poll(kvn_backend *base, kvn_request *request, kvn_report *report)
{
    (void)base;
    return tell(request, report);
}

int kvn_ucx_move_wait(kvn_backend *base, kvn_request *request, int64_t deadline_ns,
                    kvn_report *report)
{
    const kvn_ucx_one_sided *self = (kvn_ucx_one_sided *)base;

    kvn_ucx_attend(kvn_ucx_link_end(self->link), is_finished, request, deadline_ns);
    return tell(request, report);
}

typedef struct giving_up {
    kvn_ucx_errand errand;
    kvn_request *request;
    int why;
} giving_up;

static void give_up(kvn_ucx_end *end, kvn_ucx_errand *errand)
{
    const giving_up *it = (giving_up *)errand;

    (void)end;
    if (!is_finished(it->request))
        kvn_ucx_mover_give_up(it->request, it->why);
}

int kvn_ucx_move_abort(kvn_backend *base, kvn_request *request, int why, kvn_report *report)
{
    const kvn_ucx_one_sided *self = (kvn_ucx_one_sided *)base;
    kvn_ucx_end *end = kvn_ucx_link_end(self->link);
    giving_up it = {.errand = {.run = give_up}, .request = request, .why = why};

    if (!is_finished(request)) {
        kvn_ucx_do_and_wait(end, &it.errand);
        if (!kvn_ucx_attend(end, is_finished, request, kvn_now_ns() + ABORT_NS)) {
            /* UCX ends everything on an endpoint that is closed by force. Until it has, memory may be
             * touched, and this must not return. */
            kvn_ucx_link_fail(self->link, why, 0,
                              "a transfer that was given up did not stop within 500 ms");
            kvn_ucx_attend(end, is_finished, request, KVN_FOREVER);
        }
    }
    return tell(request, report);
}

void kvn_ucx_move_release(kvn_backend *base, kvn_request *request)
{
    (void)base;
    forget(request);
}

#include "ucx/backend.h"

#include <errno.h>
#include <inttypes.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "core/clock.h"
#include "core/columns.h"
#include "core/report.h"
#include "ucx/transfer.h"

#define ABORT_NS INT64_C(500000000) /* for what is in flight to end by itself */

/* ---- submit ---- */

static void forget(kvn_request *request)
{
    kvn_ucx_snapshot_release(request->snapshot);
    free(request->uses);
    free(request);
}

/* Notes which ranges the batch uses. `where`: a number for each range, UINT64_MAX at first. */
static int look_up(kvn_request *request, uint64_t *where, kvn_report *report)
{
    const kvn_ucx_backend *self = request->self;
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

static kvn_request *create(kvn_ucx_backend *self, const kvn_columns *batch)
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

static void begin(kvn_ucx_work *work)
{
    kvn_ucx_begin_transfer((kvn_request *)((char *)work - offsetof(kvn_request, beginning)));
}

static int submit(kvn_backend *base, const kvn_columns *batch, kvn_request **out,
                  kvn_report *report)
{
    kvn_ucx_backend *self = (kvn_ucx_backend *)base;
    kvn_request *request;
    kvn_failure why;
    uint64_t total;

    *out = NULL;
    if (kvn_ucx_endpoint_has_failed(self->endpoint, &why))
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
    request->snapshot = kvn_ucx_snapshot_take(self->regions);
    request->beginning.run = begin;
    kvn_ucx_post(self->endpoint->worker, &request->beginning);
    *out = request;
    return KVN_OK;
}

/* ---- poll, wait, abort ---- */

static bool is_finished(const void *context)
{
    return atomic_load(&((const kvn_request *)context)->finished);
}

static int report_on(kvn_request *request, kvn_report *report)
{
    if (is_finished(request)) {
        kvn_report_copy(report, &request->report);
    } else {
        kvn_report_begin(report);
        report->bytes_done = atomic_load_explicit(&request->moved, memory_order_relaxed);
    }
    return report->status;
}

static int poll_request(kvn_backend *base, kvn_request *request, kvn_report *report)
{
    (void)base;
    return report_on(request, report);
}

static int wait_for(kvn_backend *base, kvn_request *request, int64_t deadline_ns,
                    kvn_report *report)
{
    const kvn_ucx_backend *self = (kvn_ucx_backend *)base;

    kvn_ucx_wait(self->endpoint->worker, is_finished, request, deadline_ns);
    return report_on(request, report);
}

typedef struct giving_up {
    kvn_ucx_work work;
    kvn_request *request;
    int why;
} giving_up;

static void give_up(kvn_ucx_work *work)
{
    const giving_up *it = (giving_up *)work;

    if (!is_finished(it->request))
        kvn_ucx_give_up_transfer(it->request, it->why);
}

static int abort_request(kvn_backend *base, kvn_request *request, int why, kvn_report *report)
{
    const kvn_ucx_backend *self = (kvn_ucx_backend *)base;
    kvn_ucx_worker *worker = self->endpoint->worker;
    giving_up it = {.work = {.run = give_up}, .request = request, .why = why};

    if (!is_finished(request)) {
        kvn_ucx_call(worker, &it.work);
        if (!kvn_ucx_wait(worker, is_finished, request, kvn_now_ns() + ABORT_NS)) {
            /* UCX ends everything on an endpoint that is closed by force. Until it has, memory may be
             * touched, and this must not return. */
            kvn_ucx_endpoint_fail(self->endpoint, why, 0,
                                  "a transfer that was given up did not stop within 500 ms");
            kvn_ucx_wait(worker, is_finished, request, KVN_FOREVER);
        }
    }
    return report_on(request, report);
}

static void release(kvn_backend *base, kvn_request *request)
{
    (void)base;
    forget(request);
}

/* ---- making and unmaking ---- */

typedef struct key_work {
    kvn_ucx_work work;
    kvn_ucx_backend *self;
    const kvn_ucx_backend_options *options;
    kvn_failure *failure;
} key_work;

static void destroy_keys(kvn_ucx_work *work)
{
    kvn_ucx_backend *self = ((key_work *)work)->self;

    for (uint64_t i = 0; i < self->num_keys; i++)
        self->endpoint->worker->calls->ucp_rkey_destroy(self->keys[i]);
}

static void unpack_keys(kvn_ucx_work *work)
{
    const key_work *it = (key_work *)work;
    kvn_ucx_backend *self = it->self;

    if (kvn_ucx_endpoint_has_failed(self->endpoint, it->failure))
        return;
    if (atomic_load(&self->endpoint->state) != KVN_UCX_CONNECTED) {
        kvn_fail(it->failure, KVN_INVALID, 0, "the endpoint is not connected");
        return;
    }
    for (; self->num_keys < it->options->num_keys; self->num_keys++) {
        const kvn_ucx_packed_key *packed = &it->options->keys[self->num_keys];
        if (kvn_ucx_unpack_key(self->endpoint, packed->bytes, packed->nbytes,
                               &self->keys[self->num_keys], it->failure) != KVN_OK)
            return;
    }
}

static void destroy(kvn_backend *base)
{
    kvn_ucx_backend *self = (kvn_ucx_backend *)base;
    key_work it = {.work = {.run = destroy_keys}, .self = self};

    if (self->num_keys)
        kvn_ucx_call(self->endpoint->worker, &it.work);
    kvn_ucx_endpoint_release(self->endpoint);
    free(self->ranges);
    free(self->places);
    free(self->keys);
    free(self);
}

static const kvn_backend_vtable vtable = {
    .name = "ucx",
    .submit = submit,
    .poll = poll_request,
    .wait = wait_for,
    .abort = abort_request,
    .release = release,
    .destroy = destroy,
};

static int check_range(const kvn_ucx_backend *self, const kvn_ucx_backend_options *options,
                       uint64_t i, kvn_failure *failure)
{
    const kvn_ucx_peer_range *it = &options->ranges[i];

    if (it->nbytes < 1 || it->address + (it->nbytes - 1) < it->address)
        return kvn_fail(failure, KVN_INVALID, 0,
                        "range %" PRIu64 " is at 0x%" PRIx64 " and has %" PRIu64
                        " bytes; it must have at least 1 and end at 2**64 or before",
                        i, it->address, it->nbytes);
    if (it->slot >= self->endpoint->board_slots)
        return kvn_fail(failure, KVN_INVALID, 0,
                        "slots: range %" PRIu64 " has %" PRIu64 "; the board has %" PRIu64, i,
                        it->slot, self->endpoint->board_slots);
    if (it->key >= options->num_keys)
        return kvn_fail(failure, KVN_INVALID, 0,
                        "keys: range %" PRIu64 " has %" PRIu64 "; there are %" PRIu64, i, it->key,
                        options->num_keys);
    return KVN_OK;
}

static int take_ranges(kvn_ucx_backend *self, const kvn_ucx_backend_options *options,
                       kvn_failure *failure)
{
    const uint64_t count = options->num_ranges;

    self->ranges = calloc(count + 1, sizeof *self->ranges);
    self->places = calloc(count + 1, sizeof *self->places);
    self->keys = calloc(options->num_keys + 1, sizeof *self->keys);
    if (!self->ranges || !self->places || !self->keys)
        return kvn_fail(failure, KVN_NO_MEMORY, ENOMEM, "no memory for %" PRIu64 " ranges", count);
    for (uint64_t i = 0; i < count; i++) {
        if (check_range(self, options, i, failure) != KVN_OK)
            return failure->status;
        self->ranges[i] = options->ranges[i];
        self->places[i] = (kvn_interval){
            .first = self->ranges[i].address,
            .last = self->ranges[i].address + (self->ranges[i].nbytes - 1),
            .index = i,
        };
    }
    kvn_intervals_sort(self->places, count);
    self->num_ranges = count;
    return KVN_OK;
}

int kvn_ucx_backend_create(kvn_ucx_regions *regions, kvn_ucx_endpoint *endpoint,
                           const kvn_ucx_backend_options *options, kvn_backend **out,
                           kvn_failure *failure)
{
    kvn_ucx_backend *self = calloc(1, sizeof *self);
    key_work it = {
        .work = {.run = unpack_keys}, .self = self, .options = options, .failure = failure};

    if (!self)
        return kvn_fail(failure, KVN_NO_MEMORY, ENOMEM, "no memory for a backend");
    failure->status = KVN_OK;
    self->base.vtable = &vtable;
    self->regions = regions;
    self->endpoint = endpoint;
    kvn_ucx_endpoint_hold(endpoint);
    self->direction = options->direction;
    self->local_type = options->local_type;
    if (take_ranges(self, options, failure) == KVN_OK)
        kvn_ucx_call(endpoint->worker, &it.work);
    if (failure->status != KVN_OK) {
        destroy(&self->base);
        return failure->status;
    }
    *out = &self->base;
    return KVN_OK;
}

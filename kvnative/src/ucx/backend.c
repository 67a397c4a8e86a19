/* A backend whose batches UCX transfers between this process and a peer. */
#include "ucx/backend.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "core/columns.h"
#include "core/report.h"
#include "core/thread.h"

#define ABORT_NS INT64_C(500000000) /* time for operations in flight to end */

typedef struct kvn_ucx_backend {
    kvn_backend base;
    kvn_ucx_regions *regions;
    kvn_ucx_route route;
    bool is_leased; /* only the leases are its own; the rest belongs to another backend */
} kvn_ucx_backend;

/* ---- submit ---- */

static void forget(kvn_request *request)
{
    kvn_ucx_snapshot_release(request->snapshot);
    free(request->uses);
    free(request);
}

/* Notes the uses of ranges by the batch. `where`: the index of the use of each range, initially UINT64_MAX. */
static int look_up(kvn_request *request, uint64_t *where, kvn_report *report)
{
    const kvn_ucx_route *route = request->route;
    const kvn_columns *batch = &request->batch;
    const uint64_t *remotes = route->direction == KVN_PEER_GET ? batch->src : batch->dst;
    size_t hint = 0;

    for (uint64_t i = 0; i < batch->count; i++) {
        if (batch->nbytes[i] == 0)
            continue;
        const size_t range = kvn_ucx_range_of(route, remotes[i], batch->nbytes[i], &hint);
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
        const kvn_ucx_peer_range *it = &route->ranges[range];
        request->uses[request->num_uses++] = (kvn_ucx_use){
            .range = it, .first = i, .slot = it->slot, .expected = it->generation};
    }
    return KVN_OK;
}

/* The words of leases follow those of the ranges. */
static int look_up_leases(kvn_request *request, kvn_report *report)
{
    const kvn_ucx_route *route = request->route;

    for (uint64_t i = 0; i < route->num_leases; i++) {
        const kvn_ucx_lease *it = &route->leases[i];
        /* No live lease has such a slot or generation, and memory after the table must not be read. */
        if (it->slot >= route->endpoint->remote.num_slots || it->generation % 2 == 0)
            return kvn_report_refuse(report, request->batch.count, KVN_UNMAPPED, 0,
                                     "%s was released or moved by the peer, or has expired", it->name);
        request->uses[request->num_uses++] = (kvn_ucx_use){
            .lease = it, .first = KVN_NO_DESCRIPTOR, .slot = it->slot, .expected = it->generation};
    }
    return KVN_OK;
}

static int find_uses(kvn_request *request, kvn_report *report)
{
    const uint64_t count = request->route->num_ranges, num_leases = request->route->num_leases;
    uint64_t *where = malloc((count + 1) * sizeof *where);

    request->uses = malloc((count + num_leases + 1) * sizeof *request->uses);
    if (!where || !request->uses) {
        free(where);
        return kvn_report_refuse(report, request->batch.count, KVN_NO_MEMORY, ENOMEM,
                                 "no memory for a transfer that uses %" PRIu64 " ranges", count);
    }
    memset(where, 0xff, count * sizeof *where);
    const int status = look_up(request, where, report);
    free(where);
    return status == KVN_OK ? look_up_leases(request, report) : status;
}

static kvn_request *create(const kvn_ucx_route *route, const kvn_columns *batch)
{
    kvn_request *request = malloc(sizeof *request);

    if (!request)
        return NULL;
    memset(request, 0, offsetof(kvn_request, report));
    request->route = route;
    request->batch = *batch;
    request->failed = KVN_NO_DESCRIPTOR;
    for (size_t i = 0; i < KVN_UCX_WINDOW; i++) {
        request->operations[i].next = request->free;
        request->free = &request->operations[i];
    }
    return request;
}

static int submit(kvn_backend *base, const kvn_columns *batch, kvn_request **out,
                  kvn_report *report)
{
    kvn_ucx_backend *self = (kvn_ucx_backend *)base;
    kvn_request *request;
    kvn_failure why;
    uint64_t total;

    *out = NULL;
    if (kvn_ucx_endpoint_has_failed(self->route.endpoint, &why))
        return kvn_report_refuse(report, batch->count, KVN_PEER_GONE, why.code, "%s",
                                 why.message);
    if (!kvn_columns_total(batch, &total))
        return kvn_report_refuse(report, batch->count, KVN_INVALID, 0,
                                 "the descriptors have 2**64 bytes or more in total");
    request = create(&self->route, batch);
    if (!request)
        return kvn_report_refuse(report, batch->count, KVN_NO_MEMORY, ENOMEM,
                                 "no memory for a transfer");
    request->total = total;
    request->report = report;
    if (find_uses(request, report) != KVN_OK) {
        forget(request);
        return report->status;
    }
    request->snapshot = kvn_ucx_snapshot_take(self->regions);
    kvn_ucx_post(self->route.endpoint->worker, &request->beginning, kvn_ucx_begin_transfer, request);
    *out = request;
    return KVN_OK;
}

/* ---- poll, wait, abort ---- */

static bool is_finished(const void *context)
{
    return atomic_load(&((const kvn_request *)context)->finished);
}

static int outcome(const kvn_request *request) { return is_finished(request) ? request->report->status : KVN_PENDING; }

static int poll_request(kvn_backend *base, kvn_request *request, uint64_t *bytes_done)
{
    (void)base;
    *bytes_done = atomic_load_explicit(&request->moved, memory_order_relaxed);
    return outcome(request);
}

static int wait_for(kvn_backend *base, kvn_request *request, int64_t deadline_ns)
{
    const kvn_ucx_backend *self = (kvn_ucx_backend *)base;

    kvn_ucx_wait(self->route.endpoint->worker, is_finished, request, deadline_ns);
    return outcome(request);
}

typedef struct giving_up {
    kvn_request *request;
    int why;
} giving_up;

static void give_up(void *context)
{
    const giving_up *it = context;

    if (!is_finished(it->request) && it->request->why == KVN_OK)
        it->request->why = it->why; /* no more operations are posted for it */
}

static int abort_request(kvn_backend *base, kvn_request *request, int why)
{
    const kvn_ucx_backend *self = (kvn_ucx_backend *)base;
    kvn_ucx_worker *worker = self->route.endpoint->worker;
    giving_up it = {.request = request, .why = why};

    if (!is_finished(request)) {
        kvn_ucx_call(worker, give_up, &it);
        if (!kvn_ucx_wait(worker, is_finished, request, kvn_now_ns() + ABORT_NS)) {
            /* UCX ends all operations of an endpoint that is closed by force. Wait for that, because they may touch
             * memory until then. */
            kvn_ucx_endpoint_fail(self->route.endpoint, why, 0,
                                  "an aborted transfer did not stop within 500 ms");
            kvn_ucx_wait(worker, is_finished, request, KVN_FOREVER);
        }
    }
    return outcome(request);
}

static void release(kvn_backend *base, kvn_request *request)
{
    (void)base;
    forget(request);
}

/* ---- making and unmaking ---- */

static void drop_keys(void *context)
{
    kvn_ucx_backend *self = context;

    kvn_ucx_keys_drop(self->route.endpoint, &self->route.keys);
}

typedef struct unpacking {
    kvn_ucx_backend *self;
    const kvn_ucx_backend_options *options;
    kvn_failure *failure;
} unpacking;

static void unpack_keys(void *context)
{
    const unpacking *it = context;
    kvn_ucx_backend *self = it->self;

    if (kvn_ucx_endpoint_has_failed(self->route.endpoint, it->failure))
        return;
    if (atomic_load(&self->route.endpoint->state) != KVN_UCX_CONNECTED) {
        kvn_fail(it->failure, KVN_INVALID, 0, "the endpoint is not connected");
        return;
    }
    kvn_ucx_keys *keys = &self->route.keys;
    kvn_ucx_keys_hold(self->route.endpoint, keys);
    for (; keys->count < it->options->num_keys; keys->count++) {
        const kvn_ucx_packed_key *packed = &it->options->keys[keys->count];
        if (kvn_ucx_unpack_key(self->route.endpoint, packed->bytes, packed->nbytes, &keys->items[keys->count],
                               it->failure) != KVN_OK)
            return;
    }
}

static void destroy(kvn_backend *base)
{
    kvn_ucx_backend *self = (kvn_ucx_backend *)base;

    if (self->is_leased) {
        free(self->route.leases);
        free(self);
        return;
    }
    kvn_ucx_call(self->route.endpoint->worker, drop_keys, self);
    kvn_ucx_endpoint_release(self->route.endpoint);
    free(self->route.ranges);
    free(self->route.places);
    free(self->route.keys.items);
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
    if (it->slot >= self->route.endpoint->remote.num_slots)
        return kvn_fail(failure, KVN_INVALID, 0,
                        "slots: range %" PRIu64 " has %" PRIu64 "; the generation table has %" PRIu64, i,
                        it->slot, self->route.endpoint->remote.num_slots);
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

    self->route.ranges = calloc(count + 1, sizeof *self->route.ranges);
    self->route.places = calloc(count + 1, sizeof *self->route.places);
    self->route.keys.items = calloc(options->num_keys + 1, sizeof *self->route.keys.items);
    if (!self->route.ranges || !self->route.places || !self->route.keys.items)
        return kvn_fail(failure, KVN_NO_MEMORY, ENOMEM, "no memory for %" PRIu64 " ranges", count);
    for (uint64_t i = 0; i < count; i++) {
        if (check_range(self, options, i, failure) != KVN_OK)
            return failure->status;
        self->route.ranges[i] = options->ranges[i];
        self->route.places[i] = (kvn_interval){
            .first = self->route.ranges[i].address,
            .last = self->route.ranges[i].address + (self->route.ranges[i].nbytes - 1),
            .index = i,
        };
    }
    kvn_intervals_sort(self->route.places, count);
    self->route.num_ranges = count;
    return KVN_OK;
}

int kvn_ucx_backend_create(kvn_ucx_regions *regions, kvn_ucx_endpoint *endpoint,
                           const kvn_ucx_backend_options *options, kvn_backend **out,
                           kvn_failure *failure)
{
    kvn_ucx_backend *self = calloc(1, sizeof *self);
    unpacking it = {.self = self, .options = options, .failure = failure};

    if (!self)
        return kvn_fail(failure, KVN_NO_MEMORY, ENOMEM, "no memory for a backend");
    failure->status = KVN_OK;
    self->base.vtable = &vtable;
    self->regions = regions;
    self->route.endpoint = endpoint;
    kvn_ucx_endpoint_hold(endpoint);
    self->route.direction = options->direction;
    self->route.local_type = options->local_type;
    if (take_ranges(self, options, failure) == KVN_OK)
        kvn_ucx_call(endpoint->worker, unpack_keys, &it);
    if (failure->status != KVN_OK) {
        destroy(&self->base);
        return failure->status;
    }
    *out = &self->base;
    return KVN_OK;
}

int kvn_ucx_backend_create_leased(const kvn_backend *whole, const kvn_ucx_lease *leases, uint64_t num_leases,
                                  kvn_backend **out, kvn_failure *failure)
{
    if (whole->vtable != &vtable)
        return kvn_fail(failure, KVN_INVALID, 0, "backend is %s; it must be one of ucx_backend",
                        whole->vtable->name);
    kvn_ucx_backend *self = malloc(sizeof *self);
    kvn_ucx_lease *copies = malloc((num_leases + 1) * sizeof *copies);
    if (!self || !copies) {
        free(self);
        free(copies);
        return kvn_fail(failure, KVN_NO_MEMORY, ENOMEM, "no memory for a backend");
    }
    *self = *(const kvn_ucx_backend *)whole;
    memcpy(copies, leases, num_leases * sizeof *copies);
    self->is_leased = true;
    self->route.leases = copies;
    self->route.num_leases = num_leases;
    *out = &self->base;
    return KVN_OK;
}

#include "device/streamed_request.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "core/clock.h"
#include "core/columns.h"
#include "core/report.h"

/* ---- what parts come to; with the request's mutex ---- */

static void note_failure(kvn_request *request, const kvn_part *piece, int status,
                         const kvn_channel_fault *fault)
{
    kvn_report *report = &request->report;
    const uint64_t failed = fault->failed < piece->columns.count ? piece->offset + fault->failed
                                                                 : KVN_NO_DESCRIPTOR;

    if (report->status != KVN_OK && failed >= report->failed)
        return; /* the first that is known counts */
    report->failed = failed;
    report->status = status;
    report->code = fault->code;
    memcpy(report->message, fault->message, sizeof report->message);
}

static void tell_abandoned(kvn_request *request)
{
    kvn_report *report = &request->report;
    size_t end;

    kvn_report_abandoned(report, request->why ? request->why : KVN_CANCELLED, request->count,
                         request->total);
    end = strlen(report->message);
    if (*request->remark)
        snprintf(report->message + end, sizeof report->message - end, "; %s", request->remark);
}

static void finish(kvn_request *request)
{
    kvn_report *report = &request->report;

    kvn_report_merge_spans(report);
    report->bytes_done = atomic_load_explicit(&request->moved, memory_order_relaxed);
    if (report->status == KVN_OK && report->num_unconfirmed > 0)
        tell_abandoned(request);
    atomic_store_explicit(&request->finished, true, memory_order_release);
    pthread_cond_broadcast(&request->changed);
}

/* ---- parts ---- */

/* `fault` says how much of the part has arrived where `status` is not KVN_OK. */
static void settle(kvn_part *piece, int status, kvn_channel_fault *fault)
{
    kvn_request *request = piece->request;
    const uint64_t count = piece->columns.count;
    kvn_columns confirmed = piece->columns;
    uint64_t nbytes;

    if (status != KVN_OK) {
        if (fault->confirmed >= count)
            fault->confirmed = count - 1; /* something of it failed, or was never begun */
        if (fault->confirmed > fault->failed)
            fault->confirmed = fault->failed;
        confirmed.count = fault->confirmed;
    }
    kvn_columns_total(&confirmed, &nbytes);
    atomic_fetch_add_explicit(&request->moved, nbytes, memory_order_relaxed);

    pthread_mutex_lock(&request->mutex);
    kvn_report_add_span(&request->report, piece->offset + confirmed.count, piece->offset + count);
    if (status != KVN_OK && status != KVN_CANCELLED)
        note_failure(request, piece, status, fault);
    if (status == KVN_CANCELLED && !*request->remark)
        snprintf(request->remark, sizeof request->remark, "%.127s", fault->message);
    if (--request->open == 0)
        finish(request);
    pthread_mutex_unlock(&request->mutex);
}

void kvn_request_drop_queued(kvn_request *request)
{
    kvn_channel_fault none;

    kvn_channel_fault_begin(&none);
    for (unsigned i = 0; i < request->num_parts; i++)
        if (kvn_channel_withdraw(request->parts[i].channel, &request->parts[i].job))
            settle(&request->parts[i], KVN_CANCELLED, &none);
}

/* Whether to begin no further part. */
static bool is_given_up(kvn_request *request)
{
    bool given_up;

    pthread_mutex_lock(&request->mutex);
    given_up = request->why != KVN_OK || request->failing;
    pthread_mutex_unlock(&request->mutex);
    return given_up;
}

static void fail_others(kvn_request *request)
{
    pthread_mutex_lock(&request->mutex);
    request->failing = true;
    pthread_mutex_unlock(&request->mutex);
    kvn_request_drop_queued(request);
}

/* On the channel's thread. */
static void run(kvn_channel_job *job, kvn_channel *channel)
{
    kvn_part *piece = (kvn_part *)job;
    kvn_request *request = piece->request;
    kvn_channel_fault fault, ignored;
    int status = KVN_CANCELLED;

    kvn_channel_fault_begin(&fault);
    if (!is_given_up(request))
        status = kvn_channel_ready(channel, &fault);
    if (status == KVN_OK) {
        status = request->self->move(request->self, channel, &piece->columns, &request->stop,
                                     &fault);
        if (kvn_channel_settle(channel)) {
            fault.confirmed = 0; /* what was issued may be dropped, whatever a wait has said */
            if (status == KVN_OK || fault.code == KVN_ACL_STREAM_ABORTED) {
                kvn_channel_fault_begin(&fault);
                status = KVN_CANCELLED;
            }
        }
        if (status != KVN_OK)
            kvn_channel_synchronize(channel, &request->stop, &ignored);
    } else {
        kvn_channel_settle(channel);
    }
    if (status != KVN_OK && status != KVN_CANCELLED)
        fail_others(request);
    settle(piece, status, &fault);
}

/* ---- the request ---- */

kvn_request *kvn_request_create(kvn_streamed *self, const kvn_columns *batch, uint64_t total,
                                unsigned parts)
{
    kvn_request *request = malloc(sizeof *request + parts * sizeof(kvn_part));

    if (!request)
        return NULL;
    memset(request, 0, offsetof(kvn_request, report));
    request->self = self;
    request->count = batch->count;
    request->total = total;
    pthread_mutex_init(&request->mutex, NULL);
    kvn_cond_init(&request->changed);
    kvn_report_begin(&request->report);
    request->report.status = KVN_OK;
    return request;
}

static void cut(kvn_request *request, const kvn_columns *batch, uint64_t cost, unsigned wanted)
{
    const kvn_streamed *self = request->self;
    uint64_t at = 0;

    while (at < batch->count) {
        kvn_part *piece = &request->parts[request->num_parts++];
        const uint64_t first = at, share = cost / (wanted - (request->num_parts - 1));
        uint64_t taken = 0;

        do
            taken += batch->nbytes[at++] + self->descriptor_cost;
        while (at < batch->count && (taken < share || request->num_parts == wanted));
        cost -= taken;
        piece->job = (kvn_channel_job){.run = run};
        piece->request = request;
        piece->offset = first;
        piece->columns = *batch;
        piece->columns.dst += first;
        piece->columns.src += first;
        piece->columns.nbytes += first;
        piece->columns.count = at - first;
        piece->columns.first += first;
    }
}

static void hand_out(kvn_request *request)
{
    kvn_streamed *self = request->self;
    unsigned best = 0, least = kvn_channel_load(self->channels[0]);

    for (unsigned i = 1; i < self->num_channels && least > 0; i++) {
        unsigned load = kvn_channel_load(self->channels[i]);
        if (load < least) {
            least = load;
            best = i;
        }
    }
    /* A part that fails at once looks at all of them. */
    request->open = request->num_parts;
    for (unsigned i = 0; i < request->num_parts; i++)
        request->parts[i].channel = self->channels[(best + i) % self->num_channels];
    for (unsigned i = 0; i < request->num_parts; i++)
        kvn_channel_submit(request->parts[i].channel, &request->parts[i].job);
}

void kvn_request_begin(kvn_request *request, const kvn_columns *batch, uint64_t cost,
                       unsigned wanted)
{
    cut(request, batch, cost, wanted);
    if (request->num_parts == 0)
        finish(request);
    else
        hand_out(request);
}

void kvn_request_free(kvn_request *request)
{
    /* Who finished the request may still hold the mutex; after this nobody looks at it. */
    pthread_mutex_lock(&request->mutex);
    pthread_mutex_unlock(&request->mutex);
    pthread_cond_destroy(&request->changed);
    pthread_mutex_destroy(&request->mutex);
    free(request);
}

#include "device/streamed.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>

#include "core/clock.h"
#include "core/columns.h"
#include "core/report.h"
#include "device/streamed_request.h"

#define PART_COST (1u << 20)
/* How long an abort lets the channels' threads find out themselves; they look every 10 ms. */
#define PATIENCE_NS 25000000

static kvn_streamed *streamed(const kvn_backend *self) { return (kvn_streamed *)self; }

int kvn_streamed_init(kvn_streamed *self, const kvn_backend_vtable *vtable, kvn_channel **channels,
                      unsigned num_channels, kvn_stream_move move)
{
    if (num_channels < 1 || num_channels > KVN_MAX_CHANNELS)
        return EINVAL;
    memset(self, 0, sizeof *self);
    self->base.vtable = vtable;
    self->move = move;
    self->channels = channels;
    self->num_channels = num_channels;
    self->part_cost = PART_COST;
    return 0;
}

static bool is_ours(const kvn_backend *self)
{
    return kvn_channel_is_ours(streamed(self)->channels[0]);
}

static int refuse_foreign(const kvn_backend *self, uint64_t count, kvn_report *report)
{
    return kvn_report_refuse(report, count, KVN_INVALID, 0,
                             "the channels of the backend %s belong to another process, from which "
                             "this one was forked", self->vtable->name);
}

/* ---- submit ---- */

/* In how many parts to move the batch, so that each is worth a channel. */
static unsigned num_parts_of(const kvn_streamed *self, const kvn_columns *batch, uint64_t cost)
{
    uint64_t parts = cost / self->part_cost;

    if (parts > self->num_channels)
        parts = self->num_channels;
    if (parts > batch->count)
        parts = batch->count;
    return parts > 1 ? (unsigned)parts : 1;
}

int kvn_streamed_submit(kvn_backend *base, const kvn_columns *batch, kvn_request **out,
                        kvn_report *report)
{
    kvn_streamed *self = streamed(base);
    uint64_t total, cost;
    unsigned parts;

    *out = NULL;
    if (!is_ours(base))
        return refuse_foreign(base, batch->count, report);
    if (!kvn_columns_total(batch, &total) ||
        __builtin_mul_overflow(batch->count, self->descriptor_cost, &cost) ||
        __builtin_add_overflow(cost, total, &cost))
        return kvn_report_refuse(report, batch->count, KVN_INVALID, 0,
                                 "the sizes of %zu descriptors add up to more than 2**64 - 1 bytes",
                                 batch->count);
    parts = num_parts_of(self, batch, cost);
    kvn_request *request = kvn_request_create(self, batch, total, parts);
    if (!request)
        return kvn_report_refuse(report, batch->count, KVN_NO_MEMORY, ENOMEM,
                                 "no memory for a request of %u parts", parts);
    *out = request;
    kvn_request_begin(request, batch, cost, parts);
    return KVN_OK;
}

/* ---- poll, wait, abort ---- */

int kvn_streamed_poll(kvn_backend *self, kvn_request *request, kvn_report *report)
{
    (void)self;
    if (!atomic_load_explicit(&request->finished, memory_order_acquire)) {
        kvn_report_begin(report);
        report->bytes_done = atomic_load_explicit(&request->moved, memory_order_relaxed);
        return KVN_PENDING;
    }
    kvn_report_copy(report, &request->report);
    return report->status;
}

int kvn_streamed_wait(kvn_backend *self, kvn_request *request, int64_t deadline_ns,
                      kvn_report *report)
{
    if (!is_ours(self))
        return refuse_foreign(self, request->count, report);
    pthread_mutex_lock(&request->mutex);
    while (!atomic_load_explicit(&request->finished, memory_order_relaxed))
        if (!kvn_cond_wait(&request->changed, &request->mutex, deadline_ns))
            break;
    pthread_mutex_unlock(&request->mutex);
    return kvn_streamed_poll(self, request, report);
}

int kvn_streamed_abort(kvn_backend *self, kvn_request *request, int why, kvn_report *report)
{
    if (!is_ours(self))
        return refuse_foreign(self, request->count, report);
    pthread_mutex_lock(&request->mutex);
    if (request->open > 0 && request->why == KVN_OK) {
        request->why = why;
        atomic_store(&request->stop, 1);
    }
    pthread_mutex_unlock(&request->mutex);
    /* Parts behind those of another request would only be dropped when their turn comes. */
    kvn_request_drop_queued(request);
    /* Again and again: a thread may have looked just before, and begun to wait just after. */
    while (kvn_streamed_wait(self, request, kvn_now_ns() + PATIENCE_NS, report) == KVN_PENDING)
        for (unsigned i = 0; i < request->num_parts; i++)
            kvn_channel_interrupt(request->parts[i].channel, &request->parts[i].job);
    return kvn_streamed_poll(self, request, report);
}

void kvn_streamed_release(kvn_backend *self, kvn_request *request)
{
    if (is_ours(self)) /* else the mutex may have been inherited locked */
        kvn_request_free(request);
}

/* The backend that spreads batches over the channels of a device. */
#include "device/stream_backend.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "core/columns.h"
#include "core/report.h"
#include "device/events.h"
#include "device/stream_request.h"

#define SHARD_COST (1u << 20)

static kvn_stream_backend *stream_backend(const kvn_backend *self)
{
    return (kvn_stream_backend *)self;
}

/* ---- a shard ---- */

/* Returns true if the failure is that of an aborted stream. */
static bool is_aborted(const kvn_channel *channel, const kvn_channel_fault *fault)
{
    return fault->why.code != 0 &&
           fault->why.code == kvn_channel_device(channel)->ops->aborted_code;
}

/* Makes later work on the stream wait for the event. Called on the channel's thread. */
static int order(kvn_channel *channel, const kvn_columns *columns, kvn_channel_fault *fault)
{
    const kvn_event *event = kvn_event_of(kvn_channel_device(channel), columns->after);

    return event ? kvn_event_order(event, kvn_channel_stream(channel), &fault->why) : KVN_OK;
}

/* Called by the channel's thread. */
static void run(kvn_channel_job *job, kvn_channel *channel)
{
    kvn_stream_shard *it = (kvn_stream_shard *)job;
    kvn_request *request = it->request;
    kvn_channel_fault fault, ignored;
    int status = KVN_CANCELLED;

    kvn_channel_fault_begin(&fault);
    if (!kvn_stream_request_is_given_up(request))
        status = kvn_channel_ready(channel, &fault);
    if (status == KVN_OK)
        status = order(channel, &it->columns, &fault);
    if (status == KVN_OK) {
        status = request->self->move(request->self, channel, &it->columns, &request->stop,
                                     &fault);
        if (kvn_channel_settle(channel)) {
            fault.confirmed = 0; /* issued work may be dropped, even if a wait has succeeded */
            if (status == KVN_OK || is_aborted(channel, &fault)) {
                kvn_channel_fault_begin(&fault);
                status = KVN_CANCELLED;
            }
        }
        /* Do not delay a known failure for an event that may never come. */
        if (status != KVN_OK && atomic_load(&request->is_held))
            atomic_store(&request->stop, 1);
        if (status != KVN_OK)
            kvn_channel_synchronize(channel, &request->stop, &ignored);
    } else {
        kvn_channel_settle(channel);
    }
    if (status != KVN_OK && status != KVN_CANCELLED)
        kvn_stream_request_fail_others(request);
    kvn_stream_shard_settle(it, status, &fault);
}

/* ---- streams for batches with a gate ---- */

/* Takes a channel without another such batch. KVN_PENDING: none is free now. Does not wait for the stream of a new
 * one, because the thread that opens gates also calls this. */
static int take_ordered(kvn_stream_backend *self, unsigned *out, kvn_failure *failure)
{
    unsigned it = 0;
    int status = KVN_OK;

    while (it < KVN_ORDERED_CHANNELS && atomic_exchange(&self->taken[it], true))
        it++;
    if (it == KVN_ORDERED_CHANNELS)
        return KVN_PENDING;
    pthread_mutex_lock(&self->mutex);
    if (!self->ordered[it])
        status = kvn_channel_begin(kvn_channel_device(self->channels[0]), &self->ordered[it], failure);
    pthread_mutex_unlock(&self->mutex);
    if (status != KVN_OK)
        atomic_store(&self->taken[it], false);
    *out = it;
    return status;
}

/* Frees the channel of a refused batch. */
static void give_ordered(kvn_stream_backend *self, const kvn_columns *batch, unsigned it)
{
    if (batch->after)
        atomic_store(&self->taken[it], false);
}

/* ---- a stream of the program that comes after a request ---- */

static int make_current(const kvn_device *device, void *context, kvn_failure *failure)
{
    return device->ops->get_context(device) == context ? KVN_OK
                                                       : device->ops->set_context(device, context, failure);
}

/* Makes a stream of context `theirs` wait for each shard, by one event of our context: a wait keeps the recording that
 * it found. */
static int order_stream(kvn_request *request, kvn_stream stream, void *theirs, kvn_failure *failure)
{
    const kvn_device *device = kvn_channel_device(request->shards[0].channel);
    void *event = NULL;
    kvn_failure ignored;
    int status = make_current(device, device->context, failure);

    if (status == KVN_OK)
        status = device->ops->create_event(device, &event, failure);
    for (unsigned i = 0; i < request->num_shards && status == KVN_OK; i++) {
        status = make_current(device, device->context, failure);
        if (status == KVN_OK)
            status = kvn_channel_record(request->shards[i].channel, &request->shards[i].job, event, failure);
        if (status != KVN_PENDING)
            continue;
        status = make_current(device, theirs, failure);
        if (status == KVN_OK)
            status = device->ops->wait_event(device, stream, event, failure);
    }
    if (event && make_current(device, device->context, &ignored) == KVN_OK)
        device->ops->destroy_event(device, event, &ignored);
    return status;
}

static int block_stream(kvn_backend *base, kvn_request *request, void *stream, int64_t deadline_ns,
                        kvn_failure *why)
{
    const kvn_device *device = kvn_channel_device(stream_backend(base)->channels[0]);
    void *previous = NULL;
    int status;

    if (device->ops->can_abort) /* an event on an aborted stream may never come */
        return kvn_fail(why, KVN_UNSUPPORTED, 0,
                        "no stream of %s can wait for a transfer, which may be aborted; wait for it on the host",
                        device->ops->runtime);
    for (unsigned i = 0; i < request->num_shards; i++)
        if (!kvn_channel_await_issued(request->shards[i].channel, &request->shards[i].job, deadline_ns))
            return KVN_PENDING;
    if (request->num_shards == 0)
        return KVN_OK;
    status = kvn_device_enter_stream(device, stream, &previous, why);
    if (status == KVN_OK) {
        status = order_stream(request, stream, device->ops->get_context(device), why);
        kvn_device_leave_stream(device, previous);
    }
    return status;
}

/* ---- submit ---- */

static void cut(kvn_request *request, const kvn_columns *batch, uint64_t cost, unsigned wanted)
{
    const kvn_stream_backend *self = request->self;
    uint64_t at = 0;

    while (at < batch->count) {
        kvn_stream_shard *it = &request->shards[request->num_shards++];
        const uint64_t first = at, share = cost / (wanted - (request->num_shards - 1));
        uint64_t taken = 0;

        do
            taken += batch->nbytes[at++] + self->descriptor_cost;
        while (at < batch->count && (taken < share || request->num_shards == wanted));
        cost -= taken;
        it->job = (kvn_channel_job){.run = run};
        it->request = request;
        it->offset = first;
        it->columns = kvn_columns_slice(batch, first, at);
    }
}

static void choose_channels(kvn_request *request)
{
    kvn_stream_backend *self = request->self;
    unsigned best = 0, least = kvn_channel_load(self->channels[0]);

    for (unsigned i = 1; i < self->num_channels && least > 0; i++) {
        unsigned load = kvn_channel_load(self->channels[i]);
        if (load < least) {
            least = load;
            best = i;
        }
    }
    for (unsigned i = 0; i < request->num_shards; i++)
        request->shards[i].channel = self->channels[(best + i) % self->num_channels];
}

/* Cuts the batch between descriptors into at most `wanted` shards of about equal cost, and gives them to the channels,
 * the least busy first; or gives it whole to `only`. */
static void begin(kvn_request *request, const kvn_columns *batch, uint64_t cost, unsigned wanted,
                  kvn_channel *only)
{
    cut(request, batch, cost, wanted);
    if (request->num_shards == 0) {
        kvn_stream_request_finish(request);
        return;
    }
    if (only)
        request->shards[0].channel = only;
    else
        choose_channels(request);
    /* Complete the request before the first submit: a shard that fails at once drops all others. */
    request->open = request->num_shards;
    for (unsigned i = 0; i < request->num_shards; i++)
        kvn_channel_submit(request->shards[i].channel, &request->shards[i].job);
}

/* The number of shards for which each is worth a channel. */
static unsigned num_shards_of(const kvn_stream_backend *self, const kvn_columns *batch, uint64_t cost)
{
    uint64_t shards = cost / self->shard_cost;

    if (shards > self->num_channels)
        shards = self->num_channels;
    if (shards > batch->count)
        shards = batch->count;
    return shards > 1 ? (unsigned)shards : 1;
}

static int submit(kvn_backend *base, const kvn_columns *batch, kvn_request **out,
                  kvn_report *report)
{
    kvn_stream_backend *self = stream_backend(base);
    kvn_failure failure;
    uint64_t total, cost;
    unsigned shards, ordered = 0;
    int status = KVN_OK;

    *out = NULL;
    if (batch->after)
        status = take_ordered(self, &ordered, &failure);
    if (status == KVN_PENDING)
        return status; /* without a message, because this is called repeatedly */
    if (status != KVN_OK)
        return kvn_report_refuse(report, batch->count, status, failure.code, "%s", failure.message);
    if (!kvn_columns_total(batch, &total) ||
        __builtin_mul_overflow(batch->count, self->descriptor_cost, &cost) ||
        __builtin_add_overflow(cost, total, &cost)) {
        give_ordered(self, batch, ordered);
        return kvn_report_refuse(report, batch->count, KVN_INVALID, 0,
                                 "the sizes of %zu descriptors add up to more than 2**64 - 1 bytes",
                                 batch->count);
    }
    shards = batch->after ? 1 : num_shards_of(self, batch, cost);
    kvn_request *request = kvn_stream_request_create(self, batch, total, shards, report);
    if (!request) {
        give_ordered(self, batch, ordered);
        return kvn_report_refuse(report, batch->count, KVN_NO_MEMORY, ENOMEM,
                                 "no memory for a request of %u shards", shards);
    }
    *out = request;
    if (batch->after)
        request->taken = &self->taken[ordered];
    begin(request, batch, cost, shards, batch->after ? self->ordered[ordered] : NULL);
    return KVN_OK;
}

/* ---- the backend ---- */

int kvn_stream_backend_init(kvn_stream_backend *self, const char *name,
                            void (*destroy)(kvn_backend *self), kvn_channel **channels,
                            unsigned num_channels, kvn_stream_move move)
{
    if (num_channels < 1 || num_channels > KVN_MAX_CHANNELS)
        return EINVAL;
    memset(self, 0, sizeof *self);
    self->vtable = (kvn_backend_vtable){
        .name = name,
        .submit = submit,
        .poll = kvn_stream_request_poll,
        .wait = kvn_stream_request_wait,
        .abort = kvn_stream_request_abort,
        .cancel_held = kvn_stream_request_cancel_held,
        .block_stream = block_stream,
        .release = kvn_stream_request_release,
        .destroy = destroy,
    };
    self->base.vtable = &self->vtable;
    pthread_mutex_init(&self->mutex, NULL);
    self->move = move;
    self->channels = channels;
    self->num_channels = num_channels;
    self->shard_cost = SHARD_COST;
    return 0;
}

void kvn_stream_backend_end(kvn_stream_backend *self)
{
    for (unsigned i = 0; i < KVN_ORDERED_CHANNELS; i++)
        kvn_channel_destroy(self->ordered[i]);
    pthread_mutex_destroy(&self->mutex);
}

#include "device/stream_backend.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "core/clock.h"
#include "core/columns.h"
#include "core/report.h"
#include "device/events.h"

#define SHARD_COST (1u << 20)
/* How long an abort lets the channels' threads find out themselves; they look every 10 ms. */
#define PATIENCE_NS 25000000
/* How often a batch's end is asked: so long it keeps its owner from what it has announced. */
#define LOOK_MS 5
#define LOOK_NS (LOOK_MS * 1000000)

/* What one channel moves of a request. */
typedef struct shard {
    kvn_channel_job job; /* first: the channel's thread gets it as that */
    kvn_request *request;
    kvn_channel *channel;
    kvn_columns columns;
    uint64_t offset; /* index of its first descriptor in the batch */
} shard;

/* A batch on its way over channels: its shards, and their outcome. */
struct kvn_request {
    kvn_stream_backend *self;
    pthread_mutex_t mutex; /* guards `report`, `remark`, `open`, `why` and `failing` */
    pthread_cond_t changed;
    atomic_int stop;        /* running shards look at it */
    atomic_bool finished;   /* read without the mutex by poll; `report` is stable then */
    atomic_bool is_held;    /* what it comes after has not come, as far as is known */
    atomic_uint_fast64_t moved;
    uint64_t count;
    uint64_t total;
    kvn_batch_end *end; /* NULL: none */
    atomic_int_fast64_t looked_ns; /* when it was asked last; changed with the mutex */
    int why;       /* why it was given up; KVN_OK while it was not */
    bool failing;  /* a shard has failed: no further one begins */
    unsigned open; /* shards without an outcome */
    atomic_bool *taken; /* that its channel is; NULL where it shares them */
    unsigned num_shards;
    char remark[128]; /* the message of a shard that was stopped; "" for none */
    kvn_report report;
    shard shards[];
};

static kvn_stream_backend *stream_backend(const kvn_backend *self)
{
    return (kvn_stream_backend *)self;
}

/* ---- outcomes of shards; with the request's mutex ---- */

static void note_failure(kvn_request *request, const shard *it, int status,
                         const kvn_channel_fault *fault)
{
    kvn_report *report = &request->report;
    const uint64_t failed = fault->failed < it->columns.count ? it->offset + fault->failed
                                                                 : KVN_NO_DESCRIPTOR;

    if (report->status != KVN_OK && failed >= report->failed)
        return; /* the first that is known counts */
    report->failed = failed;
    report->status = status;
    report->code = fault->why.code;
    memcpy(report->message, fault->why.message, sizeof report->message);
}

static void report_abandoned(kvn_request *request)
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
        report_abandoned(request);
    if (request->end)
        request->end->call(request->end);
    if (request->taken)
        atomic_store(request->taken, false);
    atomic_store_explicit(&request->finished, true, memory_order_release);
    pthread_cond_broadcast(&request->changed);
}

/* ---- shards ---- */

/* `fault` says how much of the shard has arrived where `status` is not KVN_OK. */
static void settle(shard *it, int status, kvn_channel_fault *fault)
{
    kvn_request *request = it->request;
    const uint64_t count = it->columns.count;
    kvn_columns confirmed = it->columns;
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
    kvn_report_add_span(&request->report, it->offset + confirmed.count, it->offset + count);
    if (status != KVN_OK && status != KVN_CANCELLED)
        note_failure(request, it, status, fault);
    if (status == KVN_CANCELLED && !*request->remark)
        snprintf(request->remark, sizeof request->remark, "%.127s", fault->why.message);
    if (--request->open == 0)
        finish(request);
    pthread_mutex_unlock(&request->mutex);
}

/* Takes back the shards that have not begun. The caller has a shard that is open, or is in a call on the
 * request: it stays. */
static void drop_queued(kvn_request *request)
{
    kvn_channel_fault none;

    kvn_channel_fault_begin(&none);
    for (unsigned i = 0; i < request->num_shards; i++)
        if (kvn_channel_dequeue(request->shards[i].channel, &request->shards[i].job))
            settle(&request->shards[i], KVN_CANCELLED, &none);
}

/* Whether to begin no further shard. */
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
    drop_queued(request);
}

/* Whether the failure is that of a stream which somebody aborted. */
static bool is_aborted(const kvn_channel *channel, const kvn_channel_fault *fault)
{
    return fault->why.code != 0 &&
           fault->why.code == kvn_channel_device(channel)->ops->aborted_code;
}

/* ---- what a batch comes after ---- */

/* On the channel's thread: what it puts on the stream from here on waits for that. */
static int order(kvn_channel *channel, const kvn_columns *columns, kvn_channel_fault *fault)
{
    const kvn_event *event = kvn_event_of(kvn_channel_device(channel), columns->after);

    return event ? kvn_event_order(event, kvn_channel_stream(channel), &fault->why) : KVN_OK;
}

/* A request at the gate of what it comes after. */
typedef struct held {
    kvn_gate_waiter waiter;
    kvn_request *request;
    int status;       /* KVN_PENDING while it is closed; with the request's mutex, as `why` */
    kvn_failure *why; /* it never opens */
} held;

static void open_gate(kvn_gate_waiter *waiter, int status, const kvn_failure *why)
{
    held *it = KVN_LISTED(&waiter->node, held, waiter.node);

    pthread_mutex_lock(&it->request->mutex);
    it->status = status;
    if (status != KVN_OK)
        kvn_fail(it->why, status, why->code, "the event that it comes after: %.200s", why->message);
    pthread_cond_broadcast(&it->request->changed);
    pthread_mutex_unlock(&it->request->mutex);
}

/* Until the gate opens, or the request is given up. A failure: no byte of it may move any more. */
static int wait_at_gate(kvn_request *request, kvn_gate *gate, kvn_failure *why)
{
    kvn_batch_end *end = request->end;
    held it = {.waiter = {.gate = gate, .open = open_gate}, .request = request, .status = KVN_PENDING, .why = why};
    int status = gate->enter(gate, &it.waiter, why);

    if (status != KVN_OK)
        return status;
    pthread_mutex_lock(&request->mutex);
    while (it.status == KVN_PENDING && !atomic_load(&request->stop) && status == KVN_OK)
        if (!kvn_cond_wait(&request->changed, &request->mutex, kvn_now_ns() + LOOK_NS) && end && end->look)
            status = end->look(end, why);
    if (it.status != KVN_PENDING && status == KVN_OK)
        status = it.status;
    pthread_mutex_unlock(&request->mutex);
    gate->leave(gate, &it.waiter);
    return status;
}

static kvn_request *request_of(const kvn_columns *columns)
{
    return ((const shard *)((const char *)columns - offsetof(shard, columns)))->request;
}

/* Whether its end is asked while it is on its way. */
static bool has_look(const kvn_request *request) { return request->end && request->end->look; }

int kvn_stream_backend_look(const kvn_columns *columns, kvn_failure *why)
{
    kvn_request *request = request_of(columns);
    int status = KVN_OK;
    int64_t now_ns;

    if (!has_look(request))
        return KVN_OK;
    now_ns = kvn_now_ns();
    if (now_ns - atomic_load_explicit(&request->looked_ns, memory_order_relaxed) < LOOK_NS)
        return KVN_OK;
    pthread_mutex_lock(&request->mutex);
    /* Another shard's thread may have asked meanwhile. */
    if (now_ns - atomic_load_explicit(&request->looked_ns, memory_order_relaxed) >= LOOK_NS) {
        atomic_store_explicit(&request->looked_ns, now_ns, memory_order_relaxed);
        status = request->end->look(request->end, why);
    }
    pthread_mutex_unlock(&request->mutex);
    if (status != KVN_OK)
        atomic_store(&request->stop, 1);
    return status;
}

int kvn_stream_backend_synchronize(kvn_channel *channel, const kvn_columns *columns, const atomic_int *stop,
                                   kvn_channel_fault *fault)
{
    const bool is_asked = has_look(request_of(columns));
    int gone = KVN_OK, status = KVN_PENDING;
    kvn_failure why;

    while (is_asked && status == KVN_PENDING && gone == KVN_OK && !atomic_load(stop)) {
        status = kvn_channel_poll(channel, LOOK_MS, fault);
        if (status == KVN_PENDING)
            gone = kvn_stream_backend_look(columns, &why);
    }
    if (status == KVN_PENDING)
        status = kvn_channel_synchronize(channel, stop, fault);
    if (gone == KVN_OK)
        return status;
    fault->why = why;
    return gone;
}

int kvn_stream_backend_await(kvn_channel *channel, const kvn_columns *columns, const atomic_int *stop,
                             kvn_channel_fault *fault)
{
    kvn_request *request = request_of(columns);
    kvn_failure why;
    int gone = KVN_OK, status;

    if (!atomic_load(&request->is_held))
        return KVN_OK;
    /* A runtime that can abort can wait, too, without asking again and again. */
    if (has_look(request) || !kvn_channel_device(channel)->ops->can_abort)
        gone = wait_at_gate(request, columns->after, &why);
    if (gone != KVN_OK)
        atomic_store(&request->stop, 1);
    status = kvn_stream_backend_synchronize(channel, columns, stop, fault);
    if (status == KVN_OK)
        atomic_store(&request->is_held, false);
    if (status == KVN_CANCELLED)
        snprintf(fault->why.message, sizeof fault->why.message, "the event that it comes after has not come");
    if (gone == KVN_OK)
        return status;
    fault->why = why;
    return gone;
}

/* A channel on which such a batch stands behind no other, taken for it. KVN_PENDING: there is none now. */
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
        status = kvn_channel_create(kvn_channel_device(self->channels[0]), &self->ordered[it], failure);
    pthread_mutex_unlock(&self->mutex);
    if (status != KVN_OK)
        atomic_store(&self->taken[it], false);
    *out = it;
    return status;
}

/* A batch that is refused needs it no more. */
static void give_ordered(kvn_stream_backend *self, const kvn_columns *batch, unsigned it)
{
    if (batch->after)
        atomic_store(&self->taken[it], false);
}

/* On the channel's thread. */
static void run(kvn_channel_job *job, kvn_channel *channel)
{
    shard *it = (shard *)job;
    kvn_request *request = it->request;
    kvn_channel_fault fault, ignored;
    int status = KVN_CANCELLED;

    kvn_channel_fault_begin(&fault);
    if (!is_given_up(request))
        status = kvn_channel_ready(channel, &fault);
    if (status == KVN_OK)
        status = order(channel, &it->columns, &fault);
    if (status == KVN_OK) {
        status = request->self->move(request->self, channel, &it->columns, &request->stop,
                                     &fault);
        if (kvn_channel_settle(channel)) {
            fault.confirmed = 0; /* what was issued may be dropped, whatever a wait has said */
            if (status == KVN_OK || is_aborted(channel, &fault)) {
                kvn_channel_fault_begin(&fault);
                status = KVN_CANCELLED;
            }
        }
        /* A failure that is known is not kept back for an event that may never come. */
        if (status != KVN_OK && atomic_load(&request->is_held))
            atomic_store(&request->stop, 1);
        if (status != KVN_OK)
            kvn_channel_synchronize(channel, &request->stop, &ignored);
    } else {
        kvn_channel_settle(channel);
    }
    if (status != KVN_OK && status != KVN_CANCELLED)
        fail_others(request);
    settle(it, status, &fault);
}

/* ---- a stream of the program that comes after a request ---- */

static int make_current(const kvn_device *device, void *context, kvn_failure *failure)
{
    return device->ops->get_context(device) == context ? KVN_OK
                                                       : device->ops->set_context(device, context, failure);
}

/* Behind each shard by one event of our context, as a wait keeps what it has met; the stream is one of `theirs`. */
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
                        kvn_report *report)
{
    const kvn_device *device = kvn_channel_device(stream_backend(base)->channels[0]);
    void *previous = NULL;
    kvn_failure failure;
    int status;

    if (device->ops->can_abort) /* who waits for an event on a stream that was aborted may wait for ever */
        return kvn_report_refuse(report, request->count, KVN_UNSUPPORTED, 0,
                                 "no stream of %s can wait for a transfer, which may be given up; wait for it on "
                                 "the host", device->ops->runtime);
    for (unsigned i = 0; i < request->num_shards; i++)
        if (!kvn_channel_await_issued(request->shards[i].channel, &request->shards[i].job, deadline_ns))
            return KVN_PENDING;
    if (request->num_shards == 0)
        return KVN_OK;
    status = kvn_device_enter_stream(device, stream, &previous, &failure);
    if (status == KVN_OK) {
        status = order_stream(request, stream, device->ops->get_context(device), &failure);
        kvn_device_leave_stream(device, previous);
    }
    return status == KVN_OK ? status
                            : kvn_report_refuse(report, request->count, status, failure.code, "%s", failure.message);
}

/* ---- the request ---- */

/* For at most `shards` shards; NULL without memory. */
static kvn_request *create_request(kvn_stream_backend *self, const kvn_columns *batch, uint64_t total,
                                   unsigned shards)
{
    kvn_request *request = malloc(sizeof *request + shards * sizeof(shard));

    if (!request)
        return NULL;
    memset(request, 0, offsetof(kvn_request, report));
    request->self = self;
    request->count = batch->count;
    request->total = total;
    request->end = batch->end;
    atomic_init(&request->looked_ns, has_look(request) ? kvn_now_ns() : 0);
    atomic_init(&request->is_held, batch->after != NULL);
    pthread_mutex_init(&request->mutex, NULL);
    kvn_cond_init(&request->changed);
    kvn_report_begin(&request->report);
    request->report.status = KVN_OK;
    return request;
}

static void cut(kvn_request *request, const kvn_columns *batch, uint64_t cost, unsigned wanted)
{
    const kvn_stream_backend *self = request->self;
    uint64_t at = 0;

    while (at < batch->count) {
        shard *it = &request->shards[request->num_shards++];
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

/* Cuts the batch at descriptors, into shards of about equal cost, at most `wanted`, and gives them to the
 * channels, beginning with the one that has least to do; or whole to `only`. */
static void begin(kvn_request *request, const kvn_columns *batch, uint64_t cost, unsigned wanted,
                  kvn_channel *only)
{
    cut(request, batch, cost, wanted);
    if (request->num_shards == 0) {
        finish(request);
        return;
    }
    if (only)
        request->shards[0].channel = only;
    else
        choose_channels(request);
    /* A shard that fails at once looks at all of them. */
    request->open = request->num_shards;
    for (unsigned i = 0; i < request->num_shards; i++)
        kvn_channel_submit(request->shards[i].channel, &request->shards[i].job);
}

/* ---- submit ---- */

/* In how many shards to move the batch, so that each is worth a channel. */
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
        return status; /* at once: it is asked again and again */
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
    kvn_request *request = create_request(self, batch, total, shards);
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

/* ---- poll, wait, abort ---- */

static int poll_request(kvn_backend *self, kvn_request *request, kvn_report *report)
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

static int wait_request(kvn_backend *self, kvn_request *request, int64_t deadline_ns,
                        kvn_report *report)
{
    pthread_mutex_lock(&request->mutex);
    while (!atomic_load_explicit(&request->finished, memory_order_relaxed))
        if (!kvn_cond_wait(&request->changed, &request->mutex, deadline_ns))
            break;
    pthread_mutex_unlock(&request->mutex);
    return poll_request(self, request, report);
}

static int abort_request(kvn_backend *self, kvn_request *request, int why, kvn_report *report)
{
    pthread_mutex_lock(&request->mutex);
    if (request->open > 0 && request->why == KVN_OK) {
        request->why = why;
        atomic_store(&request->stop, 1);
        pthread_cond_broadcast(&request->changed);
    }
    pthread_mutex_unlock(&request->mutex);
    /* Shards behind those of another request would else be dropped only when they begin. */
    drop_queued(request);
    /* Again and again: a thread may have looked just before, and begun to wait just after. */
    while (wait_request(self, request, kvn_now_ns() + PATIENCE_NS, report) == KVN_PENDING)
        for (unsigned i = 0; i < request->num_shards; i++)
            kvn_channel_interrupt(request->shards[i].channel, &request->shards[i].job);
    return poll_request(self, request, report);
}

static void withdraw_request(kvn_backend *self, kvn_request *request)
{
    (void)self;
    pthread_mutex_lock(&request->mutex);
    if (request->open > 0 && request->why == KVN_OK && atomic_load(&request->is_held)) {
        request->why = KVN_CANCELLED;
        atomic_store(&request->stop, 1);
        pthread_cond_broadcast(&request->changed);
    }
    pthread_mutex_unlock(&request->mutex);
}

static void release_request(kvn_backend *self, kvn_request *request)
{
    (void)self;
    /* Who finished the request may still hold the mutex; after this nobody looks at it. */
    pthread_mutex_lock(&request->mutex);
    pthread_mutex_unlock(&request->mutex);
    pthread_cond_destroy(&request->changed);
    pthread_mutex_destroy(&request->mutex);
    free(request);
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
        .poll = poll_request,
        .wait = wait_request,
        .abort = abort_request,
        .withdraw = withdraw_request,
        .block_stream = block_stream,
        .release = release_request,
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

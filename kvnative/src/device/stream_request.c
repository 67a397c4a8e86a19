/* Waits for the shards of a batch and for its gate, and merges the outcomes of the shards. */
#include "device/stream_request.h"

#include <stdlib.h>
#include <string.h>

#include "core/columns.h"
#include "core/report.h"
#include "core/thread.h"
#include "device/events.h"

/* Time that a wait polls before it sleeps: a few blocks arrive by then, and waking a thread takes as long. */
#define SPIN_NS 20000
/* Time that an abort gives the channels' threads to notice it; they check every 10 ms. */
#define PATIENCE_NS 25000000
/* Interval at which the end of a batch is polled: an owner may wait this long until an announcement is renewed. */
#define LOOK_MS 5
#define LOOK_NS (LOOK_MS * 1000000)

/* ---- outcomes; with the request's mutex ---- */

static void note_failure(kvn_request *request, const kvn_stream_shard *it, int status,
                         const kvn_channel_fault *fault)
{
    kvn_report *report = request->report;
    const uint64_t failed = fault->failed < it->columns.count ? it->offset + fault->failed
                                                                 : KVN_NO_DESCRIPTOR;

    if (report->status != KVN_OK && failed >= report->failed)
        return; /* the lowest known index counts */
    report->failed = failed;
    report->status = status;
    report->code = fault->why.code;
    memcpy(report->message, fault->why.message, sizeof report->message);
}

static void report_abandoned(kvn_request *request)
{
    kvn_report *report = request->report;
    size_t end;

    kvn_report_abandoned(report, request->why ? request->why : KVN_CANCELLED, request->count,
                         request->total);
    end = strlen(report->message);
    if (*request->remark)
        snprintf(report->message + end, sizeof report->message - end, "; %s", request->remark);
}

void kvn_stream_request_finish(kvn_request *request)
{
    kvn_report *report = request->report;

    kvn_report_merge_spans(report);
    report->bytes_done = atomic_load_explicit(&request->moved, memory_order_relaxed);
    if (report->status == KVN_OK && report->num_unconfirmed > 0)
        report_abandoned(request);
    if (request->end)
        request->end->call(request->end, report->status);
    if (request->taken)
        atomic_store(request->taken, false);
    atomic_store_explicit(&request->finished, true, memory_order_release);
    pthread_cond_broadcast(&request->changed);
}

/* ---- shards ---- */

void kvn_stream_shard_settle(kvn_stream_shard *it, int status, kvn_channel_fault *fault)
{
    kvn_request *request = it->request;
    const uint64_t count = it->columns.count;
    kvn_columns confirmed = it->columns;
    uint64_t nbytes;

    if (status != KVN_OK)
        confirmed.count = fault->confirmed;
    kvn_columns_total(&confirmed, &nbytes);
    atomic_fetch_add_explicit(&request->moved, nbytes, memory_order_relaxed);

    pthread_mutex_lock(&request->mutex);
    kvn_report_add_span(request->report, it->offset + confirmed.count, it->offset + count);
    if (status != KVN_OK && status != KVN_CANCELLED)
        note_failure(request, it, status, fault);
    if (status == KVN_CANCELLED && !*request->remark)
        snprintf(request->remark, sizeof request->remark, "%.127s", fault->why.message);
    if (--request->open == 0)
        kvn_stream_request_finish(request);
    pthread_mutex_unlock(&request->mutex);
}

/* Takes back the shards that have not begun. The caller has an open shard, or is in a call on the request, so the
 * request stays. */
static void drop_queued(kvn_request *request)
{
    kvn_channel_fault none;

    kvn_channel_fault_begin(&none);
    for (unsigned i = 0; i < request->num_shards; i++)
        if (kvn_channel_dequeue(request->shards[i].channel, &request->shards[i].job))
            kvn_stream_shard_settle(&request->shards[i], KVN_CANCELLED, &none);
}

bool kvn_stream_request_is_given_up(kvn_request *request)
{
    bool given_up;

    pthread_mutex_lock(&request->mutex);
    given_up = request->why != KVN_OK || request->failing;
    pthread_mutex_unlock(&request->mutex);
    return given_up;
}

void kvn_stream_request_fail_others(kvn_request *request)
{
    pthread_mutex_lock(&request->mutex);
    request->failing = true;
    pthread_mutex_unlock(&request->mutex);
    drop_queued(request);
}

/* ---- gates ---- */

/* A request that waits at its gate. */
typedef struct held {
    kvn_gate_waiter waiter;
    kvn_request *request;
    int status;       /* KVN_PENDING while the gate is closed; guarded by the request's mutex, like `why` */
    kvn_failure *why; /* the reason if the gate never opens */
} held;

static bool open_gate(kvn_gate_waiter *waiter, int status, const kvn_failure *why)
{
    held *it = KVN_LISTED(&waiter->node, held, waiter.node);

    pthread_mutex_lock(&it->request->mutex);
    it->status = status;
    if (status != KVN_OK)
        kvn_fail(it->why, status, why->code, "the event that it comes after: %.200s", why->message);
    pthread_cond_broadcast(&it->request->changed);
    pthread_mutex_unlock(&it->request->mutex);
    return true;
}

/* Waits until the gate opens or the request is aborted. After a failure, no byte of the request may move. */
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
    const char *shard = (const char *)columns - offsetof(kvn_stream_shard, columns);

    return ((const kvn_stream_shard *)shard)->request;
}

/* Returns true if the batch's end is polled while the request is in flight. */
static bool has_look(const kvn_request *request) { return request->end && request->end->look; }

int kvn_stream_request_look(const kvn_columns *columns, kvn_failure *why)
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
    /* Another shard's thread may have checked meanwhile. */
    if (now_ns - atomic_load_explicit(&request->looked_ns, memory_order_relaxed) >= LOOK_NS) {
        atomic_store_explicit(&request->looked_ns, now_ns, memory_order_relaxed);
        status = request->end->look(request->end, why);
    }
    pthread_mutex_unlock(&request->mutex);
    if (status != KVN_OK)
        atomic_store(&request->stop, 1);
    return status;
}

int kvn_stream_request_synchronize(kvn_channel *channel, const kvn_columns *columns, const atomic_int *stop,
                                   kvn_channel_fault *fault)
{
    const bool is_asked = has_look(request_of(columns));
    int gone = KVN_OK, status = KVN_PENDING;
    kvn_failure why;

    while (is_asked && status == KVN_PENDING && gone == KVN_OK && !atomic_load(stop)) {
        status = kvn_channel_poll(channel, LOOK_MS, fault);
        if (status == KVN_PENDING)
            gone = kvn_stream_request_look(columns, &why);
    }
    if (status == KVN_PENDING)
        status = kvn_channel_synchronize(channel, stop, fault);
    if (gone == KVN_OK)
        return status;
    fault->why = why;
    return gone;
}

int kvn_stream_request_await(kvn_channel *channel, const kvn_columns *columns, const atomic_int *stop,
                             kvn_channel_fault *fault)
{
    kvn_request *request = request_of(columns);
    kvn_failure why;
    int gone = KVN_OK, status;

    if (!atomic_load(&request->is_held))
        return KVN_OK;
    /* A runtime that can abort can also wait without repeated queries. */
    if (has_look(request) || !kvn_channel_device(channel)->ops->can_abort)
        gone = wait_at_gate(request, columns->after, &why);
    if (gone != KVN_OK)
        atomic_store(&request->stop, 1);
    status = kvn_stream_request_synchronize(channel, columns, stop, fault);
    if (status == KVN_OK)
        atomic_store(&request->is_held, false);
    if (status == KVN_CANCELLED)
        snprintf(fault->why.message, sizeof fault->why.message, KVN_GATE_IS_SHUT);
    if (gone == KVN_OK)
        return status;
    fault->why = why;
    return gone;
}

/* ---- the request ---- */

kvn_request *kvn_stream_request_create(struct kvn_stream_backend *self, const kvn_columns *batch, uint64_t total,
                                       unsigned shards, kvn_report *report)
{
    kvn_request *request = malloc(sizeof *request + shards * sizeof(kvn_stream_shard));

    if (!request)
        return NULL;
    memset(request, 0, sizeof *request);
    request->self = self;
    request->count = batch->count;
    request->total = total;
    request->end = batch->end;
    atomic_init(&request->looked_ns, has_look(request) ? kvn_now_ns() : 0);
    atomic_init(&request->is_held, batch->after != NULL);
    pthread_mutex_init(&request->mutex, NULL);
    kvn_cond_init(&request->changed);
    request->report = report;
    kvn_report_begin(report);
    report->status = KVN_OK;
    return request;
}

static int outcome(const kvn_request *request)
{
    return atomic_load_explicit(&request->finished, memory_order_acquire) ? request->report->status : KVN_PENDING;
}

int kvn_stream_request_poll(kvn_backend *self, kvn_request *request, uint64_t *bytes_done)
{
    (void)self;
    *bytes_done = atomic_load_explicit(&request->moved, memory_order_relaxed);
    return outcome(request);
}

static void spin_until_finished(const kvn_request *request, int64_t deadline_ns)
{
    const int64_t spun = kvn_now_ns() + SPIN_NS, until = deadline_ns < spun ? deadline_ns : spun;

    while (!atomic_load_explicit(&request->finished, memory_order_acquire) && kvn_now_ns() < until)
        ;
}

int kvn_stream_request_wait(kvn_backend *self, kvn_request *request, int64_t deadline_ns)
{
    (void)self;
    spin_until_finished(request, deadline_ns);
    pthread_mutex_lock(&request->mutex);
    while (!atomic_load_explicit(&request->finished, memory_order_relaxed))
        if (!kvn_cond_wait(&request->changed, &request->mutex, deadline_ns))
            break;
    pthread_mutex_unlock(&request->mutex);
    return outcome(request);
}

int kvn_stream_request_abort(kvn_backend *self, kvn_request *request, int why)
{
    pthread_mutex_lock(&request->mutex);
    if (request->open > 0 && request->why == KVN_OK) {
        request->why = why;
        atomic_store(&request->stop, 1);
        pthread_cond_broadcast(&request->changed);
    }
    pthread_mutex_unlock(&request->mutex);
    /* Otherwise shards queued behind another request would be dropped only at their turn. */
    drop_queued(request);
    /* Repeatedly, because a thread may have checked just before this, and begun to wait just after. */
    while (kvn_stream_request_wait(self, request, kvn_now_ns() + PATIENCE_NS) == KVN_PENDING)
        for (unsigned i = 0; i < request->num_shards; i++)
            kvn_channel_interrupt(request->shards[i].channel, &request->shards[i].job);
    return outcome(request);
}

void kvn_stream_request_cancel_held(kvn_backend *self, kvn_request *request)
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

void kvn_stream_request_release(kvn_backend *self, kvn_request *request)
{
    (void)self;
    /* The thread that finished the request may still hold the mutex. After this, no thread uses it. */
    pthread_mutex_lock(&request->mutex);
    pthread_mutex_unlock(&request->mutex);
    pthread_cond_destroy(&request->changed);
    pthread_mutex_destroy(&request->mutex);
    free(request);
}

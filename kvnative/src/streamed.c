#include "streamed.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "job.h"
#include "report.h"

#define PART_COST (1u << 20)
/* How long an abort lets the channels' threads find out themselves; they look every 10 ms. */
#define PATIENCE_NS 25000000

/* What one channel moves of a request. */
typedef struct part {
    kvn_channel_job job; /* first: the channel's thread gets it as that */
    kvn_request *request;
    kvn_channel *channel;
    kvn_columns columns;
    uint64_t offset; /* index of its first descriptor in the batch */
} part;

struct kvn_request {
    kvn_streamed *self;
    pthread_mutex_t mutex; /* guards `report`, `remark`, `open`, `why` and `failing` */
    pthread_cond_t changed;
    atomic_int stop;        /* running parts look at it */
    atomic_bool finished;   /* read without the mutex by poll; `report` is stable then */
    atomic_bool told;       /* the backend has kept the message of this request's failure */
    atomic_uint_fast64_t moved;
    uint64_t count;
    uint64_t total;
    int why;       /* why it was given up: KVN_TIMEOUT or KVN_CANCELLED; KVN_OK while it was not */
    bool failing;  /* a part has failed: no further one begins */
    unsigned open; /* parts not settled */
    unsigned num_parts;
    char remark[128]; /* what a part that was stopped has to say; "" for nothing */
    kvn_report report;
    part parts[];
};

static kvn_streamed *streamed(const kvn_backend *self) { return (kvn_streamed *)self; }

int kvn_streamed_init(kvn_streamed *self, const kvn_backend_vtable *vtable, kvn_channel **channels,
                      unsigned num_channels, kvn_direction direction, kvn_stream_move move)
{
    if (num_channels < 1 || num_channels > KVN_MAX_CHANNELS)
        return EINVAL;
    memset(self, 0, sizeof *self);
    self->base.vtable = vtable;
    self->move = move;
    self->channels = channels;
    self->num_channels = num_channels;
    self->part_cost = PART_COST;
    self->capabilities = (kvn_capabilities){
        .max_batch = UINT64_MAX,
        .max_nbytes = UINT64_MAX,
        .directions = direction,
        .asynchronous = 1,
    };
    return pthread_mutex_init(&self->error_mutex, NULL);
}

void kvn_streamed_fini(kvn_streamed *self) { pthread_mutex_destroy(&self->error_mutex); }

void kvn_streamed_capabilities(const kvn_backend *self, kvn_capabilities *out)
{
    *out = streamed(self)->capabilities;
}

/* ---- parts come back; with the request's mutex ---- */

static void note_failure(kvn_request *request, const part *piece, int status,
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

/* `fault` says how much of the part has arrived where `status` is not KVN_OK. */
static void settle(part *piece, int status, kvn_channel_fault *fault)
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

/* Takes back the parts that have not begun. The caller's own part is open, or it is in a call on the
 * request: it stays. */
static void drop_queued(kvn_request *request)
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
    drop_queued(request);
}

/* On the channel's thread. */
static void run(kvn_channel_job *job, kvn_channel *channel)
{
    part *piece = (part *)job;
    kvn_request *request = piece->request;
    kvn_channel_fault fault, ignored;
    int status = KVN_CANCELLED;

    kvn_channel_fault_begin(&fault);
    if (!is_given_up(request))
        status = kvn_channel_ready(channel, &fault);
    if (status == KVN_OK) {
        status = request->self->move(request->self, channel, &piece->columns, &request->stop,
                                     &fault);
        if (kvn_channel_settle(channel) &&
            (status == KVN_OK || fault.code == KVN_ACL_STREAM_ABORTED)) {
            kvn_channel_fault_begin(&fault); /* what was issued may be dropped, whatever it says */
            status = KVN_CANCELLED;
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

/* Cuts at descriptors, into parts of about equal cost, at most `wanted`. */
static void cut(kvn_request *request, const kvn_columns *batch, uint64_t cost, unsigned wanted)
{
    const kvn_streamed *self = request->self;
    uint64_t at = 0;

    while (at < batch->count) {
        part *piece = &request->parts[request->num_parts++];
        const uint64_t first = at, share = cost / (wanted - (request->num_parts - 1));
        uint64_t taken = 0;

        if (request->num_parts == wanted)
            at = batch->count;
        while (at < batch->count && taken < share)
            taken += batch->nbytes[at++] + self->descriptor_cost;
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

/* Beginning with the channel that has least to do. */
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

static int tell(kvn_streamed *self, int status, const kvn_report *report)
{
    if (status < 0) {
        pthread_mutex_lock(&self->error_mutex);
        memcpy(self->error, report->message, sizeof self->error);
        pthread_mutex_unlock(&self->error_mutex);
    }
    return status;
}

static kvn_request *make_request(kvn_streamed *self, const kvn_columns *batch, uint64_t total,
                                 unsigned parts)
{
    kvn_request *request = malloc(sizeof *request + parts * sizeof(part));

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
        return tell(self, kvn_report_refuse(report, batch->count, KVN_INVALID, 0,
                                            "the sizes of %zu descriptors add up to more than "
                                            "2**64 - 1 bytes", batch->count), report);
    parts = num_parts_of(self, batch, cost);
    kvn_request *request = make_request(self, batch, total, parts);
    if (!request)
        return tell(self, kvn_report_refuse(report, batch->count, KVN_NO_MEMORY, ENOMEM,
                                            "no memory for a request of %u parts", parts), report);
    *out = request;
    cut(request, batch, cost, parts);
    if (request->num_parts == 0)
        finish(request);
    else
        hand_out(request);
    return KVN_OK;
}

/* ---- poll, wait, abort ---- */

int kvn_streamed_poll(kvn_backend *self, kvn_request *request, kvn_report *report)
{
    if (!atomic_load_explicit(&request->finished, memory_order_acquire)) {
        kvn_report_begin(report);
        report->bytes_done = atomic_load_explicit(&request->moved, memory_order_relaxed);
        return KVN_PENDING;
    }
    kvn_report_copy(report, &request->report);
    if (report->status < 0 && !atomic_exchange(&request->told, true))
        tell(streamed(self), report->status, report);
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
    drop_queued(request);
    if (kvn_streamed_wait(self, request, kvn_now_ns() + PATIENCE_NS, report) == KVN_PENDING)
        for (unsigned i = 0; i < request->num_parts; i++)
            kvn_channel_interrupt(request->parts[i].channel, &request->parts[i].job);
    return kvn_streamed_wait(self, request, KVN_FOREVER, report);
}

void kvn_streamed_release(kvn_backend *self, kvn_request *request)
{
    if (!is_ours(self))
        return; /* the mutex may have been inherited locked */
    /* Who finished the request may still hold the mutex; after this nobody looks at it. */
    pthread_mutex_lock(&request->mutex);
    pthread_mutex_unlock(&request->mutex);
    pthread_cond_destroy(&request->changed);
    pthread_mutex_destroy(&request->mutex);
    free(request);
}

/* The text stays valid until the next call: for one caller at a time. */
const char *kvn_streamed_last_error(const kvn_backend *base)
{
    kvn_streamed *self = streamed(base);

    pthread_mutex_lock(&self->error_mutex);
    memcpy(self->error_shown, self->error, sizeof self->error);
    pthread_mutex_unlock(&self->error_mutex);
    return self->error_shown;
}

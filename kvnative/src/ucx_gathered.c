#include "ucx_gathered.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "report.h"
#include "ucx_request.h"
#include "ucx_serve_state.h"

/* How long sends that show the caller's memory are waited for before their link is failed, and after that
 * for UCX to give them up. */
#define PATIENCE_NS 500000000

static kvn_gathered *gathered(const kvn_backend *self) { return (kvn_gathered *)self; }

static kvn_ucx_end *end_of(const kvn_backend *self) { return gathered(self)->serve->end; }
static void capabilities(const kvn_backend *self, kvn_capabilities *out)
{
    *out = (kvn_capabilities){.max_batch = UINT64_MAX,
                              .max_nbytes = UINT64_MAX,
                              .directions = gathered(self)->direction,
                              .asynchronous = 1};
}

static int tell(kvn_gathered *self, int status, const kvn_report *report)
{
    if (status < 0) {
        pthread_mutex_lock(&self->error_mutex);
        memcpy(self->error, report->message, sizeof self->error);
        pthread_mutex_unlock(&self->error_mutex);
    }
    return status;
}

static int refuse_foreign(uint64_t count, kvn_report *report)
{
    return kvn_report_refuse(report, count, KVN_INVALID, 0,
                             "the link belongs to another process, from which this one was forked");
}

/* ---- submit ---- */

/* Adds the sizes up and looks each descriptor up; KVN_OK, or refuses. */
static int look_through(const kvn_gathered *self, const kvn_ucx_batch *batch, uint64_t first,
                        uint64_t *total, kvn_report *report)
{
    const kvn_ucx_remote *remote = &self->remote;
    uint32_t near = 0;
    bool wraps = false;

    *total = 0;
    for (uint64_t i = 0; i < batch->count; i++) {
        if (batch->nbytes[i] == 0)
            continue;
        wraps |= __builtin_add_overflow(*total, batch->nbytes[i], total);
        near = kvn_ucx_remote_find(remote, near, batch->remote[i], batch->nbytes[i]);
        if (near < remote->count)
            continue;
        kvn_report_refuse(report, batch->count, KVN_UNMAPPED, 0,
                          "descriptor %" PRIu64 ": %" PRIu64 " bytes at 0x%" PRIx64
                          " of the peer are in none of its %" PRIu32 " ranges", first + i,
                          batch->nbytes[i], batch->remote[i], remote->count);
        report->failed = i;
        return KVN_UNMAPPED;
    }
    if (wraps)
        return kvn_report_refuse(report, batch->count, KVN_INVALID, 0,
                                 "the sizes of %" PRIu64 " descriptors add up to more than 2**64 - 1 "
                                 "bytes", batch->count);
    return KVN_OK;
}

static kvn_request *create(kvn_gathered *self, const kvn_ucx_batch *batch, uint64_t total,
                           uint64_t first)
{
    kvn_request *request = malloc(sizeof *request);

    if (!request)
        return NULL;
    memset(request, 0, offsetof(kvn_request, report));
    request->self = self;
    request->batch = *batch;
    request->total = total;
    request->first = first;
    request->start.run = kvn_ucx_request_start;
    kvn_report_begin(&request->report);
    kvn_ucx_link_hold(self->link);
    return request;
}

static int submit(kvn_backend *base, const kvn_columns *columns, kvn_request **out,
                  kvn_report *report)
{
    kvn_gathered *self = gathered(base);
    const bool is_get = self->direction == KVN_PEER_GET;
    const kvn_ucx_batch batch = {.local = is_get ? columns->dst : columns->src,
                                 .remote = is_get ? columns->src : columns->dst,
                                 .nbytes = columns->nbytes,
                                 .count = columns->count};
    uint64_t total;
    int status;

    *out = NULL;
    if (kvn_ucx_end_is_forked(end_of(base)))
        return refuse_foreign(batch.count, report);
    status = look_through(self, &batch, columns->first, &total, report);
    if (status != KVN_OK)
        return tell(self, status, report);
    *out = create(self, &batch, total, columns->first);
    if (!*out)
        return tell(self, kvn_report_refuse(report, batch.count, KVN_NO_MEMORY, ENOMEM,
                                            "no memory for a request of %" PRIu64 " descriptors",
                                            batch.count), report);
    if (total == 0) {
        (*out)->report.status = KVN_OK;
        atomic_store(&(*out)->finished, true);
    } else {
        if (self->hands_over)
            kvn_ucx_hand_over(end_of(base), &(*out)->start);
        else
            kvn_ucx_do(end_of(base), &(*out)->start);
    }
    return KVN_OK;
}

/* ---- poll, wait, abort ---- */

static bool is_finished(void *context)
{
    return atomic_load_explicit(&((kvn_request *)context)->finished, memory_order_acquire);
}

/* When a request that is over may be left, whatever of it is in flight; KVN_FOREVER while it is not. */
static int64_t patience_of(kvn_request *request)
{
    const int64_t since = atomic_load(&request->over_since);

    return since ? since + PATIENCE_NS : KVN_FOREVER;
}

/* Ends what only waits for sends that do not end: fails their link, and a little later leaves them. Never
 * blocks. */
static void lose_patience(kvn_backend *self, kvn_request *request)
{
    kvn_ucx_link *link = gathered(self)->link;
    kvn_failure why;

    if (kvn_ucx_end_is_forked(end_of(self)) || is_finished(request) ||
        kvn_now_ns() < patience_of(request))
        return;
    if (!kvn_ucx_link_has_failed(link, &why)) {
        kvn_ucx_add(&gathered(self)->serve->stalled, 1);
        atomic_store(&request->over_since, kvn_now_ns());
        kvn_ucx_link_fail(link, KVN_PEER_GONE, 0,
                          "a push was given up, and the peer did not take what was under way");
    } else if (!atomic_exchange(&request->is_settled, true)) {
        request->start.run = kvn_ucx_request_leave;
        kvn_ucx_do(end_of(self), &request->start);
    }
}

static int look(kvn_backend *self, kvn_request *request, kvn_report *report)
{
    if (!atomic_load_explicit(&request->finished, memory_order_acquire)) {
        kvn_report_begin(report);
        report->bytes_done = atomic_load_explicit(&request->moved, memory_order_relaxed);
        return KVN_PENDING;
    }
    kvn_report_copy(report, &request->report);
    if (report->status < 0 && !atomic_exchange(&request->told, true))
        tell(gathered(self), report->status, report);
    return report->status;
}

static int poll(kvn_backend *self, kvn_request *request, kvn_report *report)
{
    lose_patience(self, request);
    return look(self, request, report);
}

/* Until it is finished or the deadline has passed. */
static void attend(kvn_backend *self, kvn_request *request, int64_t deadline_ns)
{
    while (!is_finished(request) && kvn_now_ns() < deadline_ns) {
        const int64_t look_ns = kvn_now_ns() + PATIENCE_NS;

        kvn_ucx_attend(end_of(self), is_finished, request,
                       look_ns < deadline_ns ? look_ns : deadline_ns);
        lose_patience(self, request);
    }
}

static int wait(kvn_backend *self, kvn_request *request, int64_t deadline_ns, kvn_report *report)
{
    if (kvn_ucx_end_is_forked(end_of(self)))
        return refuse_foreign(request->batch.count, report);
    attend(self, request, deadline_ns);
    return look(self, request, report);
}

typedef struct giving_up {
    kvn_ucx_errand errand; /* first */
    kvn_request *request;
    int why;
} giving_up;

static void give_up(kvn_ucx_end *end, kvn_ucx_errand *errand)
{
    kvn_request *request = ((giving_up *)errand)->request;

    (void)end;
    if (request->why != KVN_OK || request->is_over || is_finished(request))
        return;
    request->why = ((giving_up *)errand)->why;
    if (request->is_started) /* else it ends as soon as it is */
        kvn_ucx_request_end(request, request->why, 0, KVN_NO_DESCRIPTOR, "");
}

static int abort_request(kvn_backend *self, kvn_request *request, int why, kvn_report *report)
{
    kvn_ucx_end *end = end_of(self);
    giving_up it = {.errand = {.run = give_up}, .request = request, .why = why};

    if (kvn_ucx_end_is_forked(end))
        return refuse_foreign(request->batch.count, report);
    kvn_ucx_do_and_wait(end, &it.errand);
    attend(self, request, KVN_FOREVER);
    return look(self, request, report);
}

static void release(kvn_backend *self, kvn_request *request)
{
    if (!kvn_ucx_end_is_forked(end_of(self)))
        kvn_ucx_link_release(gathered(self)->link);
    free(request);
}

/* The text stays valid until the next call: for one caller at a time. */
static const char *last_error(const kvn_backend *base)
{
    kvn_gathered *self = gathered(base);

    pthread_mutex_lock(&self->error_mutex);
    memcpy(self->error_shown, self->error, sizeof self->error);
    pthread_mutex_unlock(&self->error_mutex);
    return self->error_shown;
}

/* ---- life ---- */

static void destroy(kvn_backend *base)
{
    kvn_gathered *self = gathered(base);

    kvn_ucx_remote_fini(&self->remote);
    pthread_mutex_destroy(&self->error_mutex);
    kvn_ucx_link_release(self->link);
    free(self);
}

static const kvn_backend_vtable vtable = {
    .name = "gathered",
    .capabilities = capabilities,
    .submit = submit,
    .poll = poll,
    .wait = wait,
    .abort = abort_request,
    .release = release,
    .last_error = last_error,
    .destroy = destroy,
};

kvn_backend *kvn_gathered_create(kvn_ucx_serve *serve, kvn_ucx_link *link, kvn_direction direction,
                                 const kvn_gathered_ranges *ranges, bool hands_over)
{
    kvn_gathered *self;
    int status;

    if (direction != KVN_PEER_GET && direction != KVN_PEER_PUT) {
        errno = EINVAL;
        return NULL;
    }
    self = calloc(1, sizeof *self);
    if (!self)
        return NULL;
    status = kvn_ucx_remote_init(&self->remote, ranges->slots, ranges->generations,
                                 ranges->addresses, ranges->nbytes, ranges->count);
    if (status != KVN_OK) {
        free(self);
        errno = status == KVN_NO_MEMORY ? ENOMEM : EINVAL;
        return NULL;
    }
    self->base.vtable = &vtable;
    self->serve = serve;
    self->link = link;
    self->direction = direction;
    self->hands_over = hands_over;
    pthread_mutex_init(&self->error_mutex, NULL);
    kvn_ucx_link_hold(link);
    return &self->base;
}

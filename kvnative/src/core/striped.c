/* Moves one batch over several backends at once. */
#include "core/striped.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "core/columns.h"
#include "core/report.h"
#include "core/thread.h"

typedef struct striped {
    kvn_backend base;
    uint64_t min_nbytes;
    size_t count;
    kvn_backend *inner[KVN_MAX_STRIPES];
} striped;

typedef struct stripe {
    kvn_batch_end end; /* first, because the inner backend passes its address back */
    kvn_request *whole;
    kvn_backend *inner;
    kvn_request *request; /* NULL: not submitted */
    uint64_t first, last; /* descriptors of the batch */
    atomic_int why; /* KVN_OK, or the status of an abort before its end */
    kvn_report report;
} stripe;

struct kvn_request {
    kvn_batch_end *end; /* the batch's; NULL: none */
    kvn_report *report;
    atomic_size_t num_open; /* stripes that have not ended */
    uint64_t count;
    uint64_t total;
    size_t num_stripes;
    stripe stripes[];
};

/* ---- the outcome, from the outcomes of all stripes ---- */

/* A stripe's own failure has precedence over that of a stripe that was aborted because of another. */
static bool says_more(int one, int all)
{
    return one < 0 && (all >= 0 || (kvn_is_given_up(all) && !kvn_is_given_up(one)));
}

static void take_failure(kvn_report *all, const stripe *it)
{
    const kvn_report *one = &it->report;

    all->status = one->status;
    all->code = one->code;
    all->failed = one->failed == KVN_NO_DESCRIPTOR ? KVN_NO_DESCRIPTOR : it->first + one->failed;
    memcpy(all->message, one->message, sizeof all->message);
}

/* Only reads the report of the stripe, as its backend does until the release. */
static void add(kvn_report *all, const stripe *it)
{
    const kvn_report *one = &it->report;
    const uint64_t first = it->first;
    const int why = atomic_load(&it->why);
    /* The abort may have broken the connection that all stripes use. */
    const bool is_broken = one->status == KVN_PEER_GONE && why != KVN_OK;

    all->bytes_done += one->bytes_done;
    for (uint32_t i = 0; i < one->num_unconfirmed; i++)
        kvn_report_add_span(all, first + one->unconfirmed[i].first, first + one->unconfirmed[i].last);
    if (!says_more(is_broken ? why : one->status, all->status))
        return;
    if (is_broken)
        all->status = why; /* end_stripe writes the message */
    else
        take_failure(all, it);
}

/* The last stripe to end ends the batch. */
static void end_stripe(kvn_batch_end *end, int status)
{
    kvn_request *request = ((stripe *)end)->whole;
    kvn_report *all = request->report;

    (void)status;
    if (atomic_fetch_sub(&request->num_open, 1) > 1)
        return;
    kvn_report_begin(all);
    all->status = KVN_OK;
    for (size_t i = 0; i < request->num_stripes; i++)
        add(all, &request->stripes[i]);
    kvn_report_merge_spans(all);
    if (kvn_is_given_up(all->status))
        kvn_report_abandoned(all, all->status, request->count, request->total);
    if (request->end)
        request->end->call(request->end, all->status);
}

/* ---- submit ---- */

/* Cuts the batch between descriptors into stripes of about equal size, at most one for each backend. A backend gets
 * none if the batch is small, or if a large descriptor has made an earlier stripe take its share too. */
static void cut_up(const striped *self, const kvn_columns *batch, kvn_request *request)
{
    const uint64_t most = request->total / self->min_nbytes;
    const size_t count = most < 1 ? 1 : most < self->count ? most : self->count;
    const uint64_t share = request->total / count;
    uint64_t first = 0, last = 0, cut = 0;

    request->num_stripes = 0;
    for (size_t n = 0; n < count; n++, first = last) {
        stripe *it = &request->stripes[request->num_stripes];

        while (n + 1 < count && last < batch->count && cut < share * (n + 1))
            cut += batch->nbytes[last++];
        if (n + 1 == count)
            last = batch->count;
        if (first == last && count > 1)
            continue;
        it->end = (kvn_batch_end){.call = end_stripe};
        it->whole = request;
        it->inner = self->inner[n];
        it->request = NULL;
        it->first = first;
        it->last = last;
        atomic_init(&it->why, KVN_OK);
        request->num_stripes++;
    }
}

static int submit_one(stripe *it, const kvn_columns *batch)
{
    kvn_columns part = kvn_columns_slice(batch, it->first, it->last);

    part.end = &it->end;
    if (it->first > 0 && part.caller == KVN_CALLER_WAITS) /* the caller waits in the first stripe; the others move
                                                           * meanwhile */
        part.caller = KVN_CALLER_RETURNS;
    return it->inner->vtable->submit(it->inner, &part, &it->request, &it->report);
}

static void let_go(kvn_request *request)
{
    for (size_t i = 0; i < request->num_stripes; i++) {
        const stripe *it = &request->stripes[i];
        if (it->request)
            it->inner->vtable->release(it->inner, it->request);
    }
    free(request);
}

typedef struct giving_up {
    stripe *it;
    int why;
    pthread_t thread;
    bool has_thread;
} giving_up;

static void *give_up_one(void *argument)
{
    const giving_up *self = argument;

    self->it->inner->vtable->abort(self->it->inner, self->it->request, self->why);
    return NULL;
}

/* Aborts all stripes at once, on threads, because each may take seconds to stop. */
static void give_up(kvn_request *request, int why)
{
    giving_up all[KVN_MAX_STRIPES];
    size_t count = 0;
    uint64_t bytes_done;

    for (size_t i = 0; i < request->num_stripes; i++) {
        stripe *it = &request->stripes[i];
        int open = KVN_OK;
        if (!it->request)
            continue;
        if (it->inner->vtable->poll(it->inner, it->request, &bytes_done) == KVN_PENDING)
            atomic_compare_exchange_strong(&it->why, &open, why);
        all[count++] = (giving_up){.it = it, .why = why};
    }
    for (size_t i = 1; i < count; i++)
        all[i].has_thread = kvn_thread_start(&all[i].thread, NULL, "kvn-give-up", give_up_one, &all[i]) == 0;
    for (size_t i = 0; i < count; i++)
        if (all[i].has_thread)
            pthread_join(all[i].thread, NULL);
        else
            give_up_one(&all[i]);
}

/* Stops all stripes after one was refused; some of their bytes may have moved. */
static int refuse(kvn_request *request, const stripe *refused)
{
    kvn_report *report = request->report;
    const uint64_t count = request->count;

    give_up(request, KVN_CANCELLED);
    kvn_report_begin(report);
    take_failure(report, refused);
    kvn_report_add_span(report, 0, count);
    let_go(request);
    return report->status;
}

static int submit(kvn_backend *base, const kvn_columns *batch, kvn_request **out, kvn_report *report)
{
    striped *self = (striped *)base;
    kvn_request *request;
    uint64_t total;
    int status;

    *out = NULL;
    if (!kvn_columns_total(batch, &total))
        return kvn_report_refuse(report, batch->count, KVN_INVALID, 0,
                                 "the descriptors have 2**64 bytes or more in total");
    request = malloc(sizeof *request + self->count * sizeof(stripe));
    if (!request)
        return kvn_report_refuse(report, batch->count, KVN_NO_MEMORY, ENOMEM,
                                 "no memory for a request (%zu bytes)", sizeof *request);
    request->end = batch->end;
    request->report = report;
    request->count = batch->count;
    request->total = total;
    cut_up(self, batch, request);
    atomic_init(&request->num_open, request->num_stripes); /* a refused stripe never ends, nor does the batch then */
    /* Submit the first one last: this thread may have to begin it, which takes a while. */
    for (size_t n = 1; n <= request->num_stripes; n++) {
        stripe *it = &request->stripes[n % request->num_stripes];

        status = submit_one(it, batch);
        if (status == KVN_PENDING)
            kvn_report_refuse(&it->report, it->last - it->first, KVN_FAILED, 0,
                              "the backend %s has not taken its stripe, and is not asked again",
                              it->inner->vtable->name);
        if (status != KVN_OK) {
            it->request = NULL;
            return refuse(request, it);
        }
    }
    *out = request;
    return KVN_OK;
}

/* ---- poll, wait, abort, release: the report is complete once all stripes have an outcome ---- */

static int poll(kvn_backend *base, kvn_request *request, uint64_t *bytes_done)
{
    bool is_pending = false;

    (void)base;
    *bytes_done = 0;
    for (size_t i = 0; i < request->num_stripes; i++) {
        const stripe *it = &request->stripes[i];
        uint64_t of_stripe;
        is_pending |= it->inner->vtable->poll(it->inner, it->request, &of_stripe) == KVN_PENDING;
        *bytes_done += of_stripe;
    }
    return is_pending ? KVN_PENDING : request->report->status;
}

static int wait(kvn_backend *base, kvn_request *request, int64_t deadline_ns)
{
    int status = KVN_OK;

    for (size_t i = 0; i < request->num_stripes && status != KVN_PENDING; i++) {
        const stripe *it = &request->stripes[i];
        status = it->inner->vtable->wait(it->inner, it->request, deadline_ns);
    }
    (void)base;
    return status == KVN_PENDING ? KVN_PENDING : request->report->status;
}

static int abort_all(kvn_backend *base, kvn_request *request, int why)
{
    give_up(request, why);
    (void)base;
    return request->report->status;
}

static void release(kvn_backend *base, kvn_request *request)
{
    (void)base;
    let_go(request);
}

static void destroy(kvn_backend *base) { free(base); }

static const kvn_backend_vtable vtable = {
    .name = "striped",
    .submit = submit,
    .poll = poll,
    .wait = wait,
    .abort = abort_all,
    .release = release,
    .destroy = destroy,
};

kvn_backend *kvn_striped_create(kvn_backend *const *inner, size_t count, uint64_t min_nbytes)
{
    if (count < 1 || count > KVN_MAX_STRIPES || min_nbytes < 1) {
        errno = EINVAL;
        return NULL;
    }
    striped *self = calloc(1, sizeof *self);
    if (!self)
        return NULL;
    self->base.vtable = &vtable;
    self->min_nbytes = min_nbytes;
    self->count = count;
    memcpy(self->inner, inner, count * sizeof *inner);
    return &self->base;
}

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
} stripe;

struct kvn_request {
    kvn_batch_end *end; /* the batch's; NULL: none */
    atomic_size_t num_open; /* stripes that have not ended */
    atomic_int status;      /* the status of a failed stripe */
    uint64_t count;
    uint64_t total;
    size_t num_stripes;
    stripe stripes[KVN_MAX_STRIPES];
};

/* ---- the outcome, from the outcomes of all stripes ---- */

/* A stripe's own failure has precedence over that of a stripe that was aborted because of another. */
static bool says_more(const kvn_report *one, const kvn_report *all)
{
    return one->status < 0 && (all->status >= 0 || (kvn_is_given_up(all->status) && !kvn_is_given_up(one->status)));
}

static void add(kvn_report *all, kvn_report *one, const stripe *it)
{
    const uint64_t first = it->first;
    const int why = atomic_load(&it->why);

    all->bytes_done += one->bytes_done;
    if (one->status == KVN_PENDING)
        return;
    /* The abort may have broken the connection that all stripes use. */
    if (one->status == KVN_PEER_GONE && why != KVN_OK) {
        one->status = why;
        one->code = 0;
        one->failed = KVN_NO_DESCRIPTOR;
    }
    for (uint32_t i = 0; i < one->num_unconfirmed; i++)
        kvn_report_add_span(all, first + one->unconfirmed[i].first, first + one->unconfirmed[i].last);
    if (!says_more(one, all))
        return;
    all->status = one->status;
    all->code = one->code;
    all->failed = one->failed == KVN_NO_DESCRIPTOR ? KVN_NO_DESCRIPTOR : first + one->failed;
    memcpy(all->message, one->message, sizeof all->message);
}

static int settle(const kvn_request *request, kvn_report *all)
{
    kvn_report_merge_spans(all);
    if (kvn_is_given_up(all->status))
        kvn_report_abandoned(all, all->status, request->count, request->total);
    return all->status;
}

/* Returns KVN_PENDING until all have an outcome. */
static int ask_all(kvn_request *request, kvn_report *report)
{
    bool is_pending = false;
    kvn_report one;

    kvn_report_begin(report);
    report->status = KVN_OK;
    for (size_t i = 0; i < request->num_stripes; i++) {
        const stripe *it = &request->stripes[i];
        is_pending |= it->inner->vtable->poll(it->inner, it->request, &one) == KVN_PENDING;
        add(report, &one, it);
    }
    if (!is_pending)
        return settle(request, report);
    const uint64_t bytes_done = report->bytes_done;
    kvn_report_begin(report);
    report->bytes_done = bytes_done;
    return KVN_PENDING;
}

/* ---- submit ---- */

/* The last stripe to end ends the batch. */
static void end_stripe(kvn_batch_end *end, int status)
{
    kvn_request *request = ((stripe *)end)->whole;

    if (status != KVN_OK)
        atomic_store(&request->status, status);
    if (atomic_fetch_sub(&request->num_open, 1) == 1)
        request->end->call(request->end, atomic_load(&request->status));
}

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
        *it = (stripe){.end = {.call = end_stripe},
                       .whole = request,
                       .inner = self->inner[n],
                       .first = first,
                       .last = last};
        atomic_init(&it->why, KVN_OK);
        request->num_stripes++;
    }
}

static int submit_one(stripe *it, const kvn_columns *batch, kvn_report *report)
{
    kvn_columns part = kvn_columns_slice(batch, it->first, it->last);

    if (batch->end)
        part.end = &it->end;
    if (it->first > 0 && part.caller == KVN_CALLER_WAITS) /* the caller waits in the first stripe; the others move
                                                           * meanwhile */
        part.caller = KVN_CALLER_RETURNS;
    return it->inner->vtable->submit(it->inner, &part, &it->request, report);
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
    kvn_report one;

    self->it->inner->vtable->abort(self->it->inner, self->it->request, self->why, &one);
    return NULL;
}

/* Aborts all stripes at once, on threads, because each may take seconds to stop. */
static void give_up(kvn_request *request, int why)
{
    giving_up all[KVN_MAX_STRIPES];
    size_t count = 0;
    kvn_report one;

    for (size_t i = 0; i < request->num_stripes; i++) {
        stripe *it = &request->stripes[i];
        int open = KVN_OK;
        if (!it->request)
            continue;
        if (it->inner->vtable->poll(it->inner, it->request, &one) == KVN_PENDING)
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
static int refuse(kvn_request *request, uint64_t first, kvn_report *report)
{
    const uint64_t count = request->count;

    give_up(request, KVN_CANCELLED);
    let_go(request);
    if (report->failed != KVN_NO_DESCRIPTOR)
        report->failed += first;
    report->num_unconfirmed = 0;
    kvn_report_add_span(report, 0, count);
    return report->status;
}

static int submit(kvn_backend *base, const kvn_columns *batch, kvn_request **out, kvn_report *report)
{
    striped *self = (striped *)base;
    kvn_request *request;
    uint64_t total;

    *out = NULL;
    if (!kvn_columns_total(batch, &total))
        return kvn_report_refuse(report, batch->count, KVN_INVALID, 0,
                                 "the descriptors have 2**64 bytes or more in total");
    request = malloc(sizeof *request);
    if (!request)
        return kvn_report_refuse(report, batch->count, KVN_NO_MEMORY, ENOMEM,
                                 "no memory for a request (%zu bytes)", sizeof *request);
    request->end = batch->end;
    request->count = batch->count;
    request->total = total;
    cut_up(self, batch, request);
    atomic_init(&request->num_open, request->num_stripes); /* a refused stripe never ends, nor does the batch then */
    atomic_init(&request->status, KVN_OK);
    /* Submit the first one last: this thread may have to begin it, which takes a while. */
    for (size_t n = 1; n <= request->num_stripes; n++) {
        stripe *it = &request->stripes[n % request->num_stripes];

        if (submit_one(it, batch, report) != KVN_OK) {
            it->request = NULL;
            return refuse(request, it->first, report);
        }
    }
    *out = request;
    return KVN_OK;
}

/* ---- poll, wait, abort, release ---- */

static int poll(kvn_backend *base, kvn_request *request, kvn_report *report)
{
    (void)base;
    return ask_all(request, report);
}

static int wait(kvn_backend *base, kvn_request *request, int64_t deadline_ns, kvn_report *report)
{
    kvn_report one;
    int status = KVN_OK;

    for (size_t i = 0; i < request->num_stripes && status != KVN_PENDING; i++) {
        const stripe *it = &request->stripes[i];
        status = it->inner->vtable->wait(it->inner, it->request, deadline_ns, &one);
    }
    (void)base;
    return ask_all(request, report);
}

static int abort_all(kvn_backend *base, kvn_request *request, int why, kvn_report *report)
{
    give_up(request, why);
    (void)base;
    return ask_all(request, report);
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

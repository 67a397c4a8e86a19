/* Takes the transfers of an end on, a few operations of each in turn, through their phases. All under the
 * end's turn. */
#include "ucx_mover.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>

#include "clock.h"
#include "report.h"

#define MAX_BYTES_IN_FLIGHT (UINT64_C(32) << 20)
#define POSTS_A_STEP 32
#define SERVE_NS 100000

struct kvn_ucx_mover {
    kvn_ucx_part part;
    kvn_request *head; /* those that move: whose step comes first */
    kvn_request *tail;
};

static void append(kvn_ucx_mover *self, kvn_request *request)
{
    request->next = NULL;
    request->previous = self->tail;
    if (self->tail)
        self->tail->next = request;
    else
        self->head = request;
    self->tail = request;
}

static void take_off(kvn_ucx_mover *self, kvn_request *request)
{
    if (request->previous)
        request->previous->next = request->next;
    else
        self->head = request->next;
    if (request->next)
        request->next->previous = request->previous;
    else
        self->tail = request->previous;
}

/* ---- the outcome ---- */

static bool is_stopping(const kvn_request *request)
{
    return request->why != KVN_OK || request->failure.status != KVN_OK;
}

void kvn_ucx_move_fail(kvn_request *request, uint64_t descriptor, const kvn_failure *failure)
{
    if (request->failure.status != KVN_OK)
        return;
    request->failure = *failure;
    request->failed = descriptor;
}

static void settle(kvn_request *request)
{
    kvn_report *report = &request->report;

    kvn_report_begin(report);
    report->status = KVN_OK;
    report->bytes_done = atomic_load_explicit(&request->moved, memory_order_relaxed);
    if (!is_stopping(request))
        return;
    kvn_report_add_span(report, 0, request->batch.count);
    if (request->why != KVN_OK) {
        kvn_report_abandoned(report, request->why, request->batch.count, request->total);
        return;
    }
    report->status = request->failure.status;
    report->code = request->failure.code;
    report->failed = request->failed;
    snprintf(report->message, sizeof report->message, "%s", request->failure.message);
}

static void finish(kvn_request *request)
{
    kvn_ucx_one_sided *self = request->self;
    kvn_ucx_end *end = kvn_ucx_link_end(self->link);

    take_off(self->mover, request);
    kvn_ucx_link_remove(self->link, &request->open);
    settle(request);
    atomic_store(&request->finished, true);
    kvn_ucx_notify(end);
}

/* ---- steps ---- */

static void compare_words(kvn_request *request)
{
    for (uint64_t i = 0; i < request->num_uses; i++) {
        const kvn_ucx_use *use = &request->uses[i];
        const kvn_ucx_range *range = &request->self->ranges[use->range];
        kvn_failure failure;

        if (use->word == range->generation)
            continue;
        kvn_fail(&failure, KVN_UNMAPPED, 0,
                 "the peer has deregistered [0x%" PRIx64 ", 0x%" PRIx64 ") %s (slot %" PRIu64
                 " of its board says %" PRIu64 ", expected %" PRIu64 ")",
                 range->address, range->address + range->nbytes,
                 request->phase == KVN_UCX_LOOKING_BEFORE ? "before" : "meanwhile", range->slot,
                 use->word, range->generation);
        kvn_ucx_move_fail(request, use->first, &failure);
        return;
    }
}

/* How many there are to post in this phase. */
static uint64_t num_steps(const kvn_request *request)
{
    switch (request->phase) {
    case KVN_UCX_MOVING: return request->batch.count;
    case KVN_UCX_FLUSHING: return request->self->direction == KVN_PEER_PUT ? 1 : 0;
    case KVN_UCX_LOOKING_BEFORE:
    case KVN_UCX_LOOKING_AFTER: return request->num_uses;
    default: return 0;
    }
}

static void advance(kvn_request *request)
{
    if (request->phase == KVN_UCX_LOOKING_BEFORE || request->phase == KVN_UCX_LOOKING_AFTER)
        compare_words(request);
    request->phase++;
    request->cursor = 0;
}

static void post(kvn_request *request, kvn_ucp_ep_h ep)
{
    switch (request->phase) {
    case KVN_UCX_MOVING: kvn_ucx_post_piece(request, ep); break;
    case KVN_UCX_FLUSHING: kvn_ucx_post_flush(request, ep); break;
    default: kvn_ucx_post_look(request, ep); break;
    }
}

/* A bounded step; how many things it did. The request may be gone afterwards. */
static unsigned step(kvn_request *request)
{
    kvn_ucp_ep_h ep = kvn_ucx_link_endpoint(request->self->link);
    unsigned count = 0;

    while (!is_stopping(request) && request->phase != KVN_UCX_THROUGH) {
        if (request->cursor == num_steps(request)) {
            if (request->in_flight > 0)
                return count;
            advance(request);
        } else if (!ep || count == POSTS_A_STEP || !request->free ||
                   request->bytes_in_flight >= MAX_BYTES_IN_FLIGHT) {
            return count; /* without an endpoint the link has failed, and will say so */
        } else {
            post(request, ep);
            count++;
        }
    }
    if (request->in_flight > 0)
        return count;
    finish(request);
    return count + 1;
}

static unsigned serve(kvn_ucx_part *part)
{
    kvn_ucx_mover *self = (kvn_ucx_mover *)part;
    kvn_request *last = self->tail, *request = self->head;
    unsigned count = 0;
    bool is_late = false;

    self->part.has_more = false;
    if (!request)
        return 0;
    const int64_t until = kvn_now_ns() + SERVE_NS;
    for (bool is_last = false; request && !is_last && !is_late; request = self->head) {
        is_last = request == last;
        is_late = !is_last && kvn_now_ns() > until; /* the others have not been looked at */
        take_off(self, request); /* to the end of the row */
        append(self, request);
        count += step(request);
    }
    count += is_late;
    self->part.has_more = count > 0;
    return count;
}

static void on_failed(kvn_ucx_open *open, const kvn_failure *why)
{
    kvn_request *request = (kvn_request *)((char *)open - offsetof(kvn_request, open));
    kvn_failure failure = *why;

    failure.status = KVN_PEER_GONE; /* whatever ended the link */
    kvn_ucx_move_fail(request, KVN_NO_DESCRIPTOR, &failure);
    if (request->in_flight == 0)
        finish(request);
}

void kvn_ucx_mover_begin(kvn_ucx_mover *self, kvn_request *request)
{
    request->open.on_failed = on_failed;
    append(self, request);
    if (kvn_ucx_link_add(request->self->link, &request->open, &request->failure) != KVN_OK)
        request->failure.status = KVN_PEER_GONE;
    step(request);
}

void kvn_ucx_mover_give_up(kvn_request *request, int why)
{
    if (request->why == KVN_OK)
        request->why = why;
    step(request);
}

static void destroy(kvn_ucx_part *part) { free(part); }

typedef struct adding {
    kvn_ucx_errand errand;
    kvn_ucx_mover *mover;
} adding;

static void add(kvn_ucx_end *end, kvn_ucx_errand *errand)
{
    kvn_ucx_end_add_part(end, &((adding *)errand)->mover->part);
}

int kvn_ucx_mover_create(kvn_ucx_end *end, kvn_ucx_mover **out, kvn_failure *failure)
{
    kvn_ucx_mover *self = calloc(1, sizeof *self);
    adding it = {.errand = {.run = add}, .mover = self};

    if (!self)
        return kvn_fail(failure, KVN_NO_MEMORY, ENOMEM, "no memory for a mover");
    self->part.serve = serve;
    self->part.destroy = destroy;
    kvn_ucx_do_and_wait(end, &it.errand);
    *out = self;
    return KVN_OK;
}

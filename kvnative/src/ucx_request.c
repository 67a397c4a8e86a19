#include "ucx_request.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "report.h"
#include "ucx_serve_state.h"

/* ---- the lines of a link ---- */

static kvn_ucx_line *line_of(kvn_request *request)
{
    return kvn_request_is_pull(request) ? &request->peer->pulls : &request->peer->pushes;
}

void kvn_ucx_request_line_up(kvn_request *request)
{
    kvn_ucx_line *line = line_of(request);

    if (!request->is_lined) {
        const bool is_first = kvn_request_is_small(request);

        request->next = is_first ? line->head : NULL;
        request->previous = is_first ? NULL : line->tail;
        *(request->next ? &request->next->previous : &line->tail) = request;
        *(request->previous ? &request->previous->next : &line->head) = request;
        request->is_lined = true;
    }
    kvn_ucx_peer_wake(request->peer);
}

static void unlink_from(kvn_ucx_line *line, kvn_request *request)
{
    *(request->next ? &request->next->previous : &line->tail) = request->previous;
    *(request->previous ? &request->previous->next : &line->head) = request->next;
}

void kvn_ucx_request_step_out(kvn_request *request)
{
    if (!request->is_lined)
        return;
    unlink_from(line_of(request), request);
    request->is_lined = false;
}

void kvn_ucx_line_turn(kvn_ucx_line *line, kvn_request *request)
{
    if (request == line->tail)
        return;
    unlink_from(line, request);
    request->next = NULL;
    request->previous = line->tail;
    line->tail->next = request;
    line->tail = request;
}

/* ---- the table of open requests ---- */

kvn_request *kvn_ucx_peer_request(kvn_ucx_peer *self, uint64_t id)
{
    const uint32_t place = (uint32_t)id;
    kvn_request *request = place < self->room ? self->requests[place] : NULL;

    return request && request->id == id ? request : NULL;
}

static bool make_room(kvn_ucx_peer *peer)
{
    const uint32_t room = peer->room > 0 ? 2 * peer->room : 16;
    kvn_request **requests = realloc(peer->requests, room * sizeof *requests);

    if (!requests)
        return false;
    memset(requests + peer->room, 0, (room - peer->room) * sizeof *requests);
    peer->next_place = peer->room;
    peer->requests = requests;
    peer->room = room;
    return true;
}

static bool enter(kvn_ucx_peer *peer, kvn_request *request)
{
    uint32_t looked = 0;

    while (looked < peer->room && peer->requests[peer->next_place]) {
        peer->next_place = (peer->next_place + 1) % peer->room;
        looked++;
    }
    if (looked == peer->room && !make_room(peer))
        return false;
    request->id = ++peer->serial << 32 | peer->next_place;
    peer->requests[peer->next_place] = request;
    peer->next_place = (peer->next_place + 1) % peer->room;
    return true;
}

/* ---- the outcome ---- */

static void add_spans(kvn_request *request)
{
    kvn_report *report = &request->report;

    if (report->status == KVN_OK)
        return;
    for (unsigned i = 0; i < KVN_GATHERED_WINDOW; i++) {
        const kvn_ucx_section *section = &request->parts[i].section;
        if (request->parts[i].is_open)
            kvn_report_add_span(report, section->from.index,
                                section->from.index + section->num_pieces);
    }
    kvn_report_add_span(report, kvn_request_is_pull(request) ? request->at.index : request->confirmed,
                        request->batch.count);
    kvn_report_merge_spans(report);
}

/* Whoever waits may see it, and release it. */
static void publish(kvn_request *request)
{
    kvn_ucx_end *end = request->self->serve->end;
    kvn_report *report = &request->report;

    add_spans(request);
    report->bytes_done = atomic_load_explicit(&request->moved, memory_order_relaxed);
    if (request->why != KVN_OK && report->status == request->why)
        kvn_report_abandoned(report, request->why, request->batch.count, request->total);
    if (request->peer)
        kvn_ucx_peer_let_go(request->peer);
    request->peer = NULL;
    atomic_store_explicit(&request->finished, true, memory_order_release);
    kvn_ucx_notify(end);
}

void kvn_ucx_request_end(kvn_request *request, int status, int code, uint64_t failed,
                         const char *message)
{
    kvn_report *report = &request->report;

    if (request->is_over)
        return;
    request->is_over = true;
    report->status = status;
    report->code = code;
    report->failed = failed;
    snprintf(report->message, sizeof report->message, "%s", message);
    if (request->peer) {
        kvn_ucx_request_step_out(request);
        request->peer->requests[(uint32_t)request->id] = NULL; /* nothing of it is written any more */
        kvn_ucx_link_remove(request->self->link, &request->open);
        request->in_flight++; /* it stays, whatever the cancellation brings about */
        if (kvn_request_is_pull(request))
            kvn_ucx_pull_forget(request);
        else
            kvn_ucx_push_forget(request);
        request->in_flight--;
    }
    if (request->in_flight == 0)
        publish(request);
    else
        atomic_store(&request->over_since, kvn_now_ns());
}

void kvn_ucx_request_landed(kvn_request *request)
{
    if (--request->in_flight == 0 && request->is_over && !atomic_exchange(&request->is_settled, true))
        publish(request);
}

void kvn_ucx_request_leave(kvn_ucx_end *end, kvn_ucx_errand *errand)
{
    kvn_request *request = (kvn_request *)((char *)errand - offsetof(kvn_request, start));
    kvn_ucx_message *message = request->self->serve->messages.flying;

    (void)end;
    for (; message; message = message->next)
        if (message->owner == request)
            message->owner = NULL;
    request->in_flight = 0;
    publish(request);
}

static const char *const REASONS[] = {
    [KVN_WIRE_NONE] = "for no reason",
    [KVN_WIRE_STALE] = "has deregistered it",
    [KVN_WIRE_OUTSIDE] = "has not registered all of it",
    [KVN_WIRE_UNMAPPED] = "has it registered, but not mapped",
    [KVN_WIRE_READ_ONLY] = "has registered it with writable=False",
    [KVN_WIRE_NO_MEMORY] = "has no memory for the request",
};

void kvn_ucx_request_refused(kvn_request *request, kvn_wire_reason reason, uint64_t failed)
{
    char message[256];

    if (failed >= request->batch.count)
        failed = 0; /* a peer that does not know; something of the request it was */
    snprintf(message, sizeof message,
             "descriptor %" PRIu64 ": %" PRIu64 " bytes at 0x%" PRIx64 " of the peer, which %s",
             request->first + failed, request->batch.nbytes[failed], request->batch.remote[failed],
             REASONS[reason]);
    kvn_ucx_request_end(request, reason == KVN_WIRE_NO_MEMORY ? KVN_FAILED : KVN_UNMAPPED, 0, failed,
                        message);
}

void kvn_ucx_request_unmapped(kvn_request *request, uint64_t failed)
{
    char message[256];

    snprintf(message, sizeof message,
             "descriptor %" PRIu64 ": local memory: %" PRIu64 " bytes at 0x%" PRIx64 " are not mapped",
             request->first + failed, request->batch.nbytes[failed], request->batch.local[failed]);
    kvn_ucx_request_end(request, KVN_UNMAPPED, EFAULT, failed, message);
}

/* Whatever it was, of a request it is the end of its link. */
static void on_link_failed(kvn_ucx_open *open, const kvn_failure *why)
{
    kvn_ucx_request_end((kvn_request *)open, KVN_PEER_GONE, why->code, KVN_NO_DESCRIPTOR,
                        why->message);
}

/* ---- beginning; cancelling ---- */

void kvn_ucx_request_start(kvn_ucx_end *end, kvn_ucx_errand *errand)
{
    kvn_request *request = (kvn_request *)((char *)errand - offsetof(kvn_request, start));
    kvn_ucx_link *link = request->self->link;
    kvn_failure failure;
    kvn_ucx_peer *peer;

    (void)end;
    request->is_started = true;
    if (request->why != KVN_OK) {
        kvn_ucx_request_end(request, request->why, 0, KVN_NO_DESCRIPTOR, "");
        return;
    }
    request->open.on_failed = on_link_failed;
    if (kvn_ucx_link_add(link, &request->open, &failure) != KVN_OK) {
        on_link_failed(&request->open, &failure);
        return;
    }
    if (!kvn_ucx_link_is_connected(link)) {
        kvn_ucx_link_remove(link, &request->open);
        kvn_ucx_request_end(request, KVN_INVALID, 0, KVN_NO_DESCRIPTOR,
                            "the link is not connected yet");
        return;
    }
    peer = kvn_ucx_peer_of(request->self->serve, link);
    if (!peer || !enter(peer, request)) {
        kvn_ucx_link_remove(link, &request->open);
        kvn_ucx_request_end(request, KVN_NO_MEMORY, 0, KVN_NO_DESCRIPTOR,
                            "no memory for a request on the link");
        return;
    }
    kvn_ucx_peer_hold(peer);
    request->peer = peer;
    kvn_ucx_request_line_up(request);
}

void kvn_ucx_request_cancel(kvn_ucx_peer *peer, uint64_t id, uint32_t of)
{
    kvn_ucx_message *message = kvn_ucx_message_take(&peer->serve->messages);

    if (!message)
        return; /* the peer goes on, for nobody */
    message->header.cancel = (kvn_wire_cancel){.request = id, .of = of};
    kvn_ucx_message_post(message, peer, KVN_WIRE_CANCEL, sizeof message->header.cancel);
}

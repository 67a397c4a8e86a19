/* Pushing: one message after another shows the caller's memory to UCX; every so often the peer is asked
 * how far it has got, which also bounds what is under way. */
#include <string.h>

#include "ucx_mapped.h"
#include "ucx_request.h"
#include "ucx_serve_state.h"

/* PUSHes in flight on one link: enough that the socket never runs dry. */
#define MOST_PUSH 4
/* The peer confirms at least so often. */
#define ASK_NBYTES (1u << 20)
/* On one link. The peer allows KVN_WIRE_ANSWERS and KVN_WIRE_PUSHES; failures are told besides. */
#define MOST_ASKS 24
#define MOST_OPEN 24
/* Pushes up to that size are copied whole. */
#define COPIED_NBYTES (16u << 10)

static const kvn_ucx_limits LIMITS = {
    .pieces = KVN_WIRE_PUSH_PIECES, .ranges = KVN_WIRE_RANGES, .nbytes = KVN_WIRE_DATA_NBYTES};

/* ---- sending ---- */

static bool may_push(const kvn_request *request)
{
    return request->at.index < request->batch.count && request->num_asks < KVN_GATHERED_WINDOW;
}

/* Puts the bytes of the section into the message, behind its tables. */
static void add_data(const kvn_request *request, const kvn_ucx_section *section,
                     kvn_ucx_message *message)
{
    const kvn_ucx_batch *batch = &request->batch;

    for (uint32_t i = 0; i < section->num_pieces; i++) {
        const uint64_t index = section->from.index + i, begin = i == 0 ? section->from.skip : 0;
        const uint64_t end =
            i == section->num_pieces - 1 ? section->last_end : batch->nbytes[index];
        const void *from = (const void *)(uintptr_t)(batch->local[index] + begin);

        if (request->total <= COPIED_NBYTES)
            kvn_ucx_message_copy(message, from, end - begin);
        else if (end > begin)
            kvn_ucx_message_add(message, from, end - begin);
    }
}

static void ask(kvn_request *request)
{
    const unsigned place = (request->first_ask + request->num_asks++) % KVN_GATHERED_WINDOW;

    request->asked_nbytes = request->cut_nbytes;
    request->asks[place] = (kvn_ucx_ask){.number = request->sequence,
                                         .confirmed = request->at.index,
                                         .moved = request->cut_nbytes};
    request->peer->num_asks++;
}

/* Cuts the next message and writes it. False: the request has ended, as no range holds the descriptor or its
 * memory is not mapped here. */
static bool write_push(kvn_request *request, kvn_ucx_message *message)
{
    uint8_t *table = kvn_ucx_message_reserve(message);
    kvn_wire_range ranges[KVN_WIRE_RANGES];
    kvn_ucx_section section;
    uint64_t unmapped;
    uint32_t flags = 0;
    size_t pieces;

    if (!kvn_ucx_cut(&request->self->remote, &request->batch, &request->at, &LIMITS,
                     (kvn_wire_piece *)table, ranges, &section)) {
        kvn_ucx_request_refused(request, KVN_WIRE_OUTSIDE, request->at.index);
        return false;
    }
    unmapped = kvn_ucx_first_unmapped(&request->batch, &section, 0, 0, section.nbytes);
    if (unmapped != KVN_NO_DESCRIPTOR) {
        kvn_ucx_request_unmapped(request, unmapped);
        return false;
    }
    pieces = section.num_pieces * sizeof(kvn_wire_piece);
    memcpy(table + pieces, ranges, section.num_ranges * sizeof *ranges);
    kvn_ucx_message_reserved(message, pieces + section.num_ranges * sizeof *ranges);
    add_data(request, &section, message);
    request->sequence++;
    request->cut_nbytes += section.nbytes;
    if (request->at.index == request->batch.count)
        flags = KVN_WIRE_ASK | KVN_WIRE_LAST;
    else if (request->cut_nbytes - request->asked_nbytes >= ASK_NBYTES)
        flags = KVN_WIRE_ASK;
    if (flags)
        ask(request);
    message->header.push = (kvn_wire_push){.request = request->id,
                                           .sequence = request->sequence - 1,
                                           .first = section.from.index,
                                           .num_pieces = section.num_pieces,
                                           .num_ranges = section.num_ranges,
                                           .flags = flags};
    return true;
}

static void on_push_through(kvn_ucx_message *message, int status)
{
    kvn_ucx_peer *peer = message->peer;

    (void)status; /* a failure is the link's, which tells the request */
    peer->num_push--;
    if (message->owner) /* else nobody waits for it any more */
        kvn_ucx_request_landed(message->owner);
    kvn_ucx_peer_wake(peer);
}

/* The first of the line of which the link takes a message; NULL for none. */
static kvn_request *find_next(const kvn_ucx_peer *peer)
{
    kvn_request *request = peer->pushes.head;

    if (peer->num_push >= MOST_PUSH || peer->num_asks >= MOST_ASKS)
        return NULL;
    while (request && !request->is_open && peer->num_open >= MOST_OPEN)
        request = request->next;
    return request;
}

unsigned kvn_ucx_push_step(kvn_ucx_peer *peer)
{
    kvn_request *request = find_next(peer);
    kvn_ucx_message *message;

    if (!request)
        return 0;
    message = kvn_ucx_message_take(&peer->serve->messages);
    if (!message) {
        kvn_ucx_peer_fail(peer);
        return 0;
    }
    if (!write_push(request, message)) {
        kvn_ucx_message_drop(message);
        return 1;
    }
    if (!request->is_open) {
        request->is_open = true;
        peer->num_open++;
    }
    kvn_ucx_line_turn(&peer->pushes, request);
    if (!may_push(request))
        kvn_ucx_request_step_out(request);
    message->owner = request;
    message->on_through = on_push_through;
    request->in_flight++;
    peer->num_push++;
    kvn_ucx_message_post(message, peer, KVN_WIRE_PUSH, sizeof message->header.push);
    return 1;
}

/* ---- what comes ---- */

void kvn_ucx_push_on_done(kvn_ucx_peer *peer, const kvn_wire_done *header)
{
    kvn_request *request = kvn_ucx_peer_request(peer, header->request);
    const kvn_ucx_ask *asked;

    if (!request || kvn_request_is_pull(request))
        return; /* it was given up */
    if (header->reason != KVN_WIRE_NONE) {
        kvn_ucx_request_refused(request, header->reason, header->failed);
        return;
    }
    asked = &request->asks[request->first_ask];
    if (request->num_asks == 0 || asked->number != header->number) {
        kvn_ucx_peer_refuse(peer, "DONE", "nobody asked for it");
        return;
    }
    request->first_ask = (request->first_ask + 1) % KVN_GATHERED_WINDOW;
    request->num_asks--;
    peer->num_asks--;
    request->confirmed = asked->confirmed;
    atomic_store_explicit(&request->moved, asked->moved, memory_order_relaxed);
    kvn_ucx_peer_wake(peer);
    if (request->confirmed == request->batch.count)
        kvn_ucx_request_end(request, KVN_OK, 0, KVN_NO_DESCRIPTOR, "");
    else if (request->at.index < request->batch.count)
        kvn_ucx_request_line_up(request);
}

void kvn_ucx_push_forget(kvn_request *request)
{
    kvn_ucx_peer *peer = request->peer;

    if (!request->is_open)
        return;
    request->is_open = false;
    peer->num_open--;
    peer->num_asks -= request->num_asks;
    request->num_asks = 0;
    if (request->report.status != KVN_OK)
        kvn_ucx_request_cancel(peer, request->id, KVN_WIRE_OF_PUSH);
    kvn_ucx_peer_wake(peer);
}

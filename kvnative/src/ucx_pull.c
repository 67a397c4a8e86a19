/* Pulling: parts of a request are asked for ahead, and the DATA that comes is copied where it belongs
 * while the end has the turn, so that nothing is written after a request was given up. */
#include <string.h>

#include "ucx_mapped.h"
#include "ucx_request.h"
#include "ucx_serve_state.h"

/* Bytes of a part: the smaller, the sooner the first comes and the fewer are lost with a failure. */
#define PART_NBYTES (16 * KVN_WIRE_DATA_NBYTES)
/* Parts in flight on a link: of large requests, and of small ones. KVN_WIRE_PARTS are allowed in all. */
static const unsigned MOST_PARTS[2] = {8, 32};

static const kvn_ucx_limits LIMITS = {
    .pieces = KVN_WIRE_PULL_PIECES, .ranges = KVN_WIRE_RANGES, .nbytes = PART_NBYTES};

/* ---- asking ---- */

static bool may_ask(const kvn_request *request)
{
    return request->at.index < request->batch.count &&
           !request->parts[request->next_part % KVN_GATHERED_WINDOW].is_open;
}

/* Cuts the next part and writes its tables. False: no range holds the descriptor. */
static bool write_pull(kvn_request *request, kvn_ucx_message *message, kvn_ucx_awaited *part)
{
    uint8_t *table = kvn_ucx_message_reserve(message);
    kvn_wire_range ranges[KVN_WIRE_RANGES];
    kvn_ucx_section *section = &part->section;
    size_t pieces;

    if (!kvn_ucx_cut(&request->self->remote, &request->batch, &request->at, &LIMITS,
                     (kvn_wire_piece *)table, ranges, section))
        return false;
    pieces = section->num_pieces * sizeof(kvn_wire_piece);
    memcpy(table + pieces, ranges, section->num_ranges * sizeof *ranges);
    kvn_ucx_message_reserved(message, pieces + section->num_ranges * sizeof *ranges);
    part->number = request->next_part++;
    part->received = 0;
    part->is_open = true;
    message->header.pull = (kvn_wire_pull){.request = request->id,
                                           .part = part->number,
                                           .first = section->from.index,
                                           .num_pieces = section->num_pieces,
                                           .num_ranges = section->num_ranges};
    return true;
}

static unsigned *parts_of(kvn_ucx_peer *peer, const kvn_request *request)
{
    return &peer->num_parts[kvn_request_is_small(request)];
}

/* The first of the line that may ask for a part; NULL for none. */
static kvn_request *find_next(kvn_ucx_peer *peer)
{
    kvn_request *request = peer->pulls.head;

    while (request && *parts_of(peer, request) >= MOST_PARTS[kvn_request_is_small(request)])
        request = request->next;
    return request;
}

unsigned kvn_ucx_pull_step(kvn_ucx_peer *peer)
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
    if (!write_pull(request, message, &request->parts[request->next_part % KVN_GATHERED_WINDOW])) {
        kvn_ucx_message_drop(message);
        kvn_ucx_request_refused(request, KVN_WIRE_OUTSIDE, request->at.index);
        return 1;
    }
    request->num_parts++;
    ++*parts_of(peer, request);
    kvn_ucx_line_turn(&peer->pulls, request);
    if (!may_ask(request))
        kvn_ucx_request_step_out(request);
    kvn_ucx_message_post(message, peer, KVN_WIRE_PULL, sizeof message->header.pull);
    return 1;
}

/* ---- what comes ---- */

/* The open part that a message speaks of, or NULL: of a request that was given up, or a lie. */
static kvn_ucx_awaited *find(kvn_ucx_peer *peer, uint64_t id, uint64_t number, kvn_request **request)
{
    kvn_ucx_awaited *part;

    *request = kvn_ucx_peer_request(peer, id);
    if (!*request || !kvn_request_is_pull(*request))
        return NULL;
    part = &(*request)->parts[number % KVN_GATHERED_WINDOW];
    if (part->is_open && part->number == number)
        return part;
    kvn_ucx_peer_refuse(peer, "answer", "nobody asked for that part");
    return NULL;
}

static void close_part(kvn_ucx_peer *peer, kvn_request *request, kvn_ucx_awaited *part)
{
    if (part->received != part->section.nbytes) {
        kvn_ucx_peer_refuse(peer, "DONE", "not all of the part's bytes came before it");
        return;
    }
    part->is_open = false;
    request->num_parts--;
    --*parts_of(peer, request);
    kvn_ucx_peer_wake(peer);
    if (request->at.index < request->batch.count)
        kvn_ucx_request_line_up(request);
    else if (request->num_parts == 0)
        kvn_ucx_request_end(request, KVN_OK, 0, KVN_NO_DESCRIPTOR, "");
}

void kvn_ucx_pull_on_data(kvn_ucx_peer *peer, const kvn_wire_data *header, const uint8_t *payload,
                          size_t nbytes)
{
    kvn_request *request;
    kvn_ucx_awaited *part = find(peer, header->request, header->part, &request);
    uint64_t unmapped;
    bool is_fit;

    if (!part)
        return;
    unmapped = kvn_ucx_first_unmapped(&request->batch, &part->section, header->piece, header->skip,
                                      nbytes);
    if (unmapped != KVN_NO_DESCRIPTOR) {
        kvn_ucx_request_unmapped(request, unmapped);
        return;
    }
    is_fit = nbytes <= part->section.nbytes - part->received &&
             kvn_ucx_scatter(&request->batch, &part->section, header->piece, header->skip, payload,
                             nbytes, kvn_ucx_copy_for(peer->serve, nbytes));
    kvn_copy_fence();
    if (!is_fit) {
        kvn_ucx_peer_refuse(peer, "DATA", "it is longer than what was asked for");
        return;
    }
    part->received += nbytes;
    atomic_fetch_add_explicit(&request->moved, nbytes, memory_order_relaxed);
    if (header->flags & KVN_WIRE_FINAL)
        close_part(peer, request, part);
}

void kvn_ucx_pull_on_done(kvn_ucx_peer *peer, const kvn_wire_done *header)
{
    kvn_request *request;
    kvn_ucx_awaited *part = find(peer, header->request, header->number, &request);

    if (!part)
        return;
    if (header->reason == KVN_WIRE_NONE)
        close_part(peer, request, part);
    else
        kvn_ucx_request_refused(request, header->reason, header->failed);
}

void kvn_ucx_pull_forget(kvn_request *request)
{
    kvn_ucx_peer *peer = request->peer;

    if (request->num_parts == 0)
        return;
    *parts_of(peer, request) -= request->num_parts;
    request->num_parts = 0;
    kvn_ucx_request_cancel(peer, request->id, KVN_WIRE_OF_PULL);
    kvn_ucx_peer_wake(peer);
}

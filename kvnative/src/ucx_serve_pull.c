/* Serving what peers pull: parts wait in the queues of their link, and go out as one DATA after another,
 * each looked at anew, so that a range that is withdrawn meanwhile ends them. A part is confirmed once all
 * of it was sent and its ranges were looked at again. */
#include <stdlib.h>
#include <string.h>

#include "ucx_check.h"
#include "ucx_serve_state.h"

/* DATA in flight on one link: enough that the socket never runs dry. */
#define MOST_DATA 4
/* Parts up to that size do not wait behind larger ones. */
#define SMALL_NBYTES (64u << 10)
/* Parts up to that size are copied whole, and confirmed by the message that brings them. */
#define COPIED_NBYTES (16u << 10)

struct kvn_ucx_asked {
    kvn_ucx_asked *next;
    kvn_ucx_peer *peer;
    uint64_t request;
    uint64_t number;
    uint64_t first; /* index of its first piece in the request */
    kvn_ucx_tables tables;
    uint32_t piece; /* how far it is */
    uint32_t skip;
    unsigned in_flight;
    kvn_wire_reason reason; /* why it failed */
    uint64_t failed;
    bool is_small;
    bool is_over;   /* no further DATA; out of the queue */
    bool is_dropped; /* nobody wants an answer */
    uint8_t bytes[];
};

/* ---- queues ---- */

static void enqueue(kvn_ucx_asked *part)
{
    kvn_ucx_asked_queue *queue = &part->peer->asked[part->is_small];

    if (queue->tail)
        queue->tail->next = part;
    else
        queue->head = part;
    queue->tail = part;
}

/* The parts of one request, or all, leave the queue; to each of them `then` is done. */
static void sift(kvn_ucx_asked_queue *queue, const uint64_t *request,
                 void (*then)(kvn_ucx_asked *))
{
    kvn_ucx_asked *part = queue->head;

    *queue = (kvn_ucx_asked_queue){NULL, NULL};
    while (part) {
        kvn_ucx_asked *next = part->next;

        part->next = NULL;
        if (!request || part->request == *request)
            then(part);
        else
            enqueue(part);
        part = next;
    }
}

static void dequeue(kvn_ucx_asked *part)
{
    kvn_ucx_asked_queue *queue = &part->peer->asked[part->is_small];

    queue->head = part->next; /* only the first is served */
    if (!queue->head)
        queue->tail = NULL;
    part->next = NULL;
}

/* The queues take turns where both have something. */
static kvn_ucx_asked *first_asked(kvn_ucx_peer *peer)
{
    kvn_ucx_asked *part = peer->asked[peer->next_queue].head;

    if (!part)
        part = peer->asked[!peer->next_queue].head;
    return part;
}

/* ---- the end of a part ---- */

static void forget(kvn_ucx_asked *part)
{
    part->peer->num_asked--;
    free(part);
}

static void drop(kvn_ucx_asked *part)
{
    part->is_over = part->is_dropped = true;
    if (part->in_flight == 0)
        forget(part);
}

/* Whether every piece lies in a range that is registered still. Who withdraws one waits for what is being
 * sent of it, but may have mapped other pages there before: what was read of those is not confirmed. */
static void look_again(kvn_ucx_asked *part)
{
    const kvn_ucx_ranges *ranges = &part->peer->serve->ranges;

    for (uint32_t i = 0; i < part->tables.num_ranges; i++) {
        const kvn_wire_range range = kvn_ucx_range_at(&part->tables, i);
        kvn_wire_piece piece = {0};

        if (kvn_ucx_ranges_holds(ranges, &range))
            continue;
        for (uint32_t k = 0; k < part->tables.num_pieces; k++) {
            piece = kvn_ucx_piece_at(&part->tables, k);
            if (piece.nbytes == 0 || piece.range != i)
                continue;
            part->reason = KVN_WIRE_STALE;
            part->failed = part->first + k;
            return;
        }
    }
}

/* All that was sent of it has left. */
static void conclude(kvn_ucx_asked *part)
{
    if (!part->is_dropped) {
        if (part->reason == KVN_WIRE_NONE)
            look_again(part);
        kvn_ucx_add(&part->peer->serve->parts, 1);
        kvn_ucx_peer_answer(part->peer, part->request, part->number, part->reason, part->failed,
                            KVN_WIRE_OF_PULL);
    }
    forget(part);
}

static void on_data_through(kvn_ucx_message *message, int status)
{
    kvn_ucx_asked *part = message->owner;
    kvn_ucx_peer *peer = message->peer;

    peer->num_data--;
    if (status == KVN_OK) {
        kvn_ucx_add(&peer->serve->pulled_nbytes, message->nbytes);
    } else {
        if (!part->is_over)
            dequeue(part);
        part->is_over = part->is_dropped = true;
    }
    if (--part->in_flight == 0 && part->is_over) {
        if (message->header.data.flags & KVN_WIRE_FINAL) {
            kvn_ucx_add(&peer->serve->parts, 1);
            forget(part);
        } else {
            conclude(part);
        }
    }
    kvn_ucx_peer_wake(peer);
}

/* ---- DATA ---- */

/* Puts as much of the part into the message as it holds. False: a piece may not be read. */
static bool fill(kvn_ucx_asked *part, kvn_ucx_message *message)
{
    kvn_ucx_ranges *ranges = &part->peer->serve->ranges;
    const bool copied = part->tables.nbytes <= COPIED_NBYTES;

    kvn_ucx_ranges_look(ranges);
    while (part->piece < part->tables.num_pieces && message->nbytes < KVN_WIRE_DATA_NBYTES) {
        const kvn_wire_piece piece = kvn_ucx_piece_at(&part->tables, part->piece);
        const size_t room = KVN_WIRE_DATA_NBYTES - message->nbytes, left = piece.nbytes - part->skip;
        const size_t taken = left < room ? left : room;

        if (left > 0) {
            const kvn_wire_range range = kvn_ucx_range_at(&part->tables, piece.range);
            const void *from = (const void *)(uintptr_t)(piece.address + part->skip);

            part->reason = kvn_ucx_ranges_check(ranges, &range, &piece, false);
            if (part->reason != KVN_WIRE_NONE) {
                part->failed = part->first + part->piece;
                return false;
            }
            if (copied) {
                kvn_ucx_message_copy(message, from, taken);
            } else if (kvn_ucx_message_add(message, from, taken)) {
                kvn_ucx_ranges_hold(ranges, range.slot);
                message->held[message->num_held++] = range.slot;
            }
        }
        part->skip += (uint32_t)taken;
        if (part->skip < piece.nbytes)
            return true;
        part->piece++;
        part->skip = 0;
    }
    return true;
}

static void end_early(kvn_ucx_asked *part, kvn_ucx_message *message)
{
    kvn_ucx_peer_let_go_ranges(part->peer, message);
    kvn_ucx_message_drop(message);
    dequeue(part);
    part->is_over = true;
    if (part->in_flight == 0)
        conclude(part);
}

unsigned kvn_ucx_serve_pull_step(kvn_ucx_peer *peer)
{
    kvn_ucx_asked *part = first_asked(peer);
    kvn_ucx_message *message;

    if (!part || peer->num_data == MOST_DATA)
        return 0;
    message = kvn_ucx_message_take(&peer->serve->messages);
    if (!message) {
        kvn_ucx_peer_fail(peer);
        return 0;
    }
    message->header.data = (kvn_wire_data){.request = part->request,
                                           .part = part->number,
                                           .piece = part->piece,
                                           .skip = part->skip};
    message->peer = peer;
    peer->next_queue = !part->is_small;
    if (!fill(part, message)) {
        end_early(part, message);
        return 1;
    }
    if (part->piece == part->tables.num_pieces) {
        dequeue(part);
        part->is_over = true;
        if (part->in_flight == 0 && message->num_held == 0)
            message->header.data.flags = KVN_WIRE_FINAL;
    }
    message->owner = part;
    message->on_through = on_data_through;
    part->in_flight++;
    peer->num_data++;
    kvn_ucx_message_post(message, peer, KVN_WIRE_DATA, sizeof message->header.data);
    return 1;
}

/* ---- what peers ask ---- */

void kvn_ucx_serve_on_pull(kvn_ucx_peer *peer, const kvn_wire_pull *header, const void *payload,
                           size_t nbytes, uint64_t data_nbytes)
{
    kvn_ucx_asked *part;

    if (peer->num_asked == KVN_WIRE_PARTS) {
        kvn_ucx_peer_refuse(peer, "PULL", "there are too many that are not answered yet");
        return;
    }
    part = malloc(sizeof *part + nbytes);
    if (!part) {
        kvn_ucx_peer_answer(peer, header->request, header->part, KVN_WIRE_NO_MEMORY, header->first,
                            KVN_WIRE_OF_PULL);
        return;
    }
    memset(part, 0, sizeof *part);
    memcpy(part->bytes, payload, nbytes);
    part->peer = peer;
    part->request = header->request;
    part->number = header->part;
    part->first = header->first;
    part->tables = (kvn_ucx_tables){.pieces = part->bytes,
                                    .ranges = part->bytes + 16 * (size_t)header->num_pieces,
                                    .num_pieces = header->num_pieces,
                                    .num_ranges = header->num_ranges,
                                    .nbytes = data_nbytes};
    part->is_small = data_nbytes <= SMALL_NBYTES;
    peer->num_asked++;
    enqueue(part);
    kvn_ucx_peer_wake(peer);
}

void kvn_ucx_serve_on_cancel(kvn_ucx_peer *peer, const kvn_wire_cancel *header)
{
    if (header->of == KVN_WIRE_OF_PULL) {
        sift(&peer->asked[0], &header->request, drop);
        sift(&peer->asked[1], &header->request, drop);
        return;
    }
    for (unsigned i = 0; peer->arriving && i < KVN_WIRE_PUSHES; i++)
        if (peer->arriving[i].is_used && peer->arriving[i].request == header->request)
            peer->arriving[i].is_used = false;
}

void kvn_ucx_serve_drop_asked(kvn_ucx_peer *peer)
{
    sift(&peer->asked[0], NULL, drop);
    sift(&peer->asked[1], NULL, drop);
}

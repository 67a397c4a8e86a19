/* Serving what peers push: each message is complete in itself, is looked at and written where it belongs
 * while the end has the turn, so that a range which is removed is not written to afterwards. Of a request
 * of several messages only their number and its first failure is kept. */
#include <stdlib.h>
#include <string.h>

#include "ucx_check.h"
#include "ucx_serve_state.h"

/* Writes the pieces until one may not be written: why, and its index. */
static kvn_wire_reason scatter(kvn_ucx_peer *peer, const kvn_ucx_tables *tables, uint32_t *index)
{
    kvn_ucx_ranges *ranges = &peer->serve->ranges;
    const kvn_copy copy = kvn_ucx_copy_for(peer->serve, tables->nbytes);
    const uint8_t *from = tables->data;
    kvn_wire_reason reason = KVN_WIRE_NONE;

    kvn_ucx_ranges_look(ranges);
    for (uint32_t i = 0; i < tables->num_pieces; i++) {
        const kvn_wire_piece piece = kvn_ucx_piece_at(tables, i);
        kvn_wire_range range;

        if (piece.nbytes == 0)
            continue;
        range = kvn_ucx_range_at(tables, piece.range);
        reason = kvn_ucx_ranges_check(ranges, &range, &piece, true);
        if (reason != KVN_WIRE_NONE) {
            *index = i;
            break;
        }
        copy((void *)(uintptr_t)piece.address, from, piece.nbytes);
        from += piece.nbytes;
    }
    kvn_copy_fence();
    if (reason == KVN_WIRE_NONE)
        kvn_ucx_add(&peer->serve->pushed_nbytes, tables->nbytes);
    return reason;
}

/* ---- requests of several messages ---- */

static kvn_ucx_arriving *find(kvn_ucx_peer *peer, uint64_t request)
{
    for (unsigned i = 0; peer->arriving && i < KVN_WIRE_PUSHES; i++)
        if (peer->arriving[i].is_used && peer->arriving[i].request == request)
            return &peer->arriving[i];
    return NULL;
}

/* Its place, or NULL with the link failed. */
static kvn_ucx_arriving *begin(kvn_ucx_peer *peer, uint64_t request)
{
    if (!peer->arriving)
        peer->arriving = calloc(KVN_WIRE_PUSHES, sizeof *peer->arriving);
    if (!peer->arriving) {
        kvn_ucx_peer_fail(peer);
        return NULL;
    }
    for (unsigned i = 0; i < KVN_WIRE_PUSHES; i++) {
        if (peer->arriving[i].is_used)
            continue;
        peer->arriving[i] = (kvn_ucx_arriving){.request = request, .is_used = true};
        return &peer->arriving[i];
    }
    kvn_ucx_peer_refuse(peer, "PUSH", "there are too many requests that are not through");
    return NULL;
}

void kvn_ucx_serve_on_push(kvn_ucx_peer *peer, const kvn_wire_push *header,
                           const kvn_ucx_tables *tables)
{
    const bool is_last = header->flags & KVN_WIRE_LAST, asks = header->flags & KVN_WIRE_ASK;
    kvn_ucx_arriving alone = {.request = header->request};
    kvn_ucx_arriving *it = find(peer, header->request);
    bool fails = false;

    if (!it) {
        it = is_last && header->sequence == 0 ? &alone : NULL;
        if (header->sequence != 0) {
            kvn_ucx_peer_refuse(peer, "PUSH", "those before it did not arrive");
            return;
        }
        if (!it)
            it = begin(peer, header->request);
        if (!it)
            return;
    }
    if (header->sequence != it->count) {
        kvn_ucx_peer_refuse(peer, "PUSH", "those before it did not arrive");
        return;
    }
    it->count++;
    if (it->reason == KVN_WIRE_NONE) {
        uint32_t index;

        it->reason = scatter(peer, tables, &index);
        fails = it->reason != KVN_WIRE_NONE;
        if (fails)
            it->failed = header->first + index;
    }
    if (asks || fails) /* a failure is told at once: what follows need not be sent */
        kvn_ucx_peer_answer(peer, header->request, it->count, it->reason, it->failed,
                            KVN_WIRE_OF_PUSH);
    if (is_last)
        it->is_used = false;
}

#include <inttypes.h>
#include <string.h>

#include "hccl/passage.h"

/* The staged mover. Chunks of the part go through the slots of a lane: two streams, the lane's for
 * copies and the communicator's for operations, ordered chunk by chunk with events. A slot is filled
 * again only when its event `emptied` has happened, for which this thread waits: so neither stream
 * ever waits for the other in a circle, and no more is queued than an abort can wait for. */

/* Fragments begin on such boundaries of a slot: what the device's copies like best. */
#define ALIGNMENT 64
#define SLICE_MS 10

typedef struct conveyor {
    kvn_passage *p;
    kvn_lane *lane;
    uint32_t slots;
    uint64_t slot_nbytes;
    kvn_fragment fragments[KVN_HCCL_MAX_BATCH]; /* of the chunk at hand */
    uint32_t count;
} conveyor;

static uint64_t slot_address(const conveyor *c, uint64_t chunk)
{
    return c->lane->address + chunk % c->slots * c->slot_nbytes;
}

/* Fills in the next chunk. False when there is none. */
static bool next_chunk(conveyor *c, kvn_cursor *at)
{
    c->count = kvn_passage_gather(c->p, at, c->slot_nbytes, ALIGNMENT, c->fragments);
    return c->count > 0;
}

static uint64_t next_place(uint64_t place, uint64_t nbytes)
{
    return place + (nbytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

/* ---- the calls ---- */

static int record(conveyor *c, aclrtEvent event, aclrtStream stream)
{
    const aclError code = c->p->acl->aclrtRecordEvent(event, stream);
    return code == KVN_ACL_OK ? KVN_OK : kvn_passage_fail(c->p, "aclrtRecordEvent", code);
}

static int order(conveyor *c, aclrtStream stream, aclrtEvent event)
{
    const aclError code = c->p->acl->aclrtStreamWaitEvent(stream, event);
    return code == KVN_ACL_OK ? KVN_OK : kvn_passage_fail(c->p, "aclrtStreamWaitEvent", code);
}

/* On the host: work behind it is issued when the event has happened. */
static int wait(conveyor *c, aclrtEvent event)
{
    return kvn_passage_wait(c->p, event, c->lane->stream);
}

static int copy_kind(const kvn_transfer *transfer)
{
    return transfer->local_on_device ? KVN_ACL_DEVICE_TO_DEVICE
           : transfer->is_put        ? KVN_ACL_HOST_TO_DEVICE
                                     : KVN_ACL_DEVICE_TO_HOST;
}

static int copy_failed(conveyor *c, const kvn_fragment *it, aclError code)
{
    kvn_passage *p = c->p;
    char *message = p->fault->why.message;
    const int prefix = snprintf(message, sizeof p->fault->why.message, "descriptor %" PRIu64 ": ",
                                p->part->first + it->index);
    p->fault->failed = it->index;
    p->fault->why.code = code;
    return kvn_acl_explain(p->acl, "aclrtMemcpyAsync", code, message + prefix,
                           sizeof p->fault->why.message - (size_t)prefix);
}

/* Between the slot and local memory. Of pageable host memory each of these is done when the call
 * returns, after what is on the lane's stream: that is why nothing there may wait for long. */
static int copy_chunk(conveyor *c, uint64_t place)
{
    const kvn_transfer *transfer = c->p->transfer;
    const int kind = copy_kind(transfer);
    for (uint32_t i = 0; i < c->count; i++) {
        const kvn_fragment *it = &c->fragments[i];
        void *local = (void *)(uintptr_t)it->local, *slot = (void *)(uintptr_t)place;
        aclError code;
        if (kvn_is_halted(&c->p->halt))
            return KVN_CANCELLED;
        code = c->p->acl->aclrtMemcpyAsync(transfer->is_put ? slot : local, it->nbytes,
                                           transfer->is_put ? local : slot, it->nbytes, kind,
                                           c->lane->stream);
        if (code != KVN_ACL_OK)
            return copy_failed(c, it, code);
        place = next_place(place, it->nbytes);
    }
    return KVN_OK;
}

/* Between the slot and the peer. */
static int issue_chunk(conveyor *c, uint64_t place)
{
    kvn_one_sided rows[KVN_HCCL_MAX_BATCH];
    for (uint32_t i = 0; i < c->count; i++) {
        rows[i] = kvn_row(place, c->fragments[i].remote, c->fragments[i].nbytes);
        place = next_place(place, c->fragments[i].nbytes);
    }
    return kvn_passage_issue(c->p, rows, c->fragments, c->count);
}

/* ---- put: local memory -> slot -> peer ---- */

static int put_chunk(conveyor *c, uint64_t chunk)
{
    const uint64_t place = slot_address(c, chunk);
    const aclrtStream stream = kvn_channel_stream(c->p->channel);
    const aclrtEvent filled = c->lane->filled[chunk % c->slots];
    const aclrtEvent emptied = c->lane->emptied[chunk % c->slots];
    int status = chunk < c->slots ? KVN_OK : wait(c, emptied);
    if (status == KVN_OK)
        status = copy_chunk(c, place);
    if (status == KVN_OK)
        status = record(c, filled, c->lane->stream);
    if (status == KVN_OK)
        status = order(c, stream, filled);
    if (status == KVN_OK)
        status = issue_chunk(c, place);
    return status == KVN_OK ? record(c, emptied, stream) : status;
}

static int put_all(conveyor *c)
{
    kvn_cursor at = {0, 0};
    int status = KVN_OK;
    for (uint64_t chunk = 0; status == KVN_OK && next_chunk(c, &at); chunk++)
        status = put_chunk(c, chunk);
    return status;
}

/* ---- get: peer -> slot -> local memory ---- */

static int fetch_chunk(conveyor *c, uint64_t chunk)
{
    const uint32_t slot = (uint32_t)(chunk % c->slots);
    int status = chunk < c->slots ? KVN_OK : wait(c, c->lane->emptied[slot]);
    if (status == KVN_OK)
        status = issue_chunk(c, slot_address(c, chunk));
    return status == KVN_OK
               ? record(c, c->lane->filled[slot], kvn_channel_stream(c->p->channel))
               : status;
}

static int deliver_chunk(conveyor *c, uint64_t chunk)
{
    const uint32_t slot = (uint32_t)(chunk % c->slots);
    /* A copy to pageable memory would wait inside ACL for a peer that may be gone, where no abort
     * reaches it. Other chunks are on their way meanwhile. */
    int status = c->p->transfer->local_on_device
                     ? order(c, c->lane->stream, c->lane->filled[slot])
                     : wait(c, c->lane->filled[slot]);
    if (status == KVN_OK)
        status = copy_chunk(c, slot_address(c, chunk));
    return status == KVN_OK ? record(c, c->lane->emptied[slot], c->lane->stream) : status;
}

static int get_all(conveyor *c)
{
    kvn_cursor fetching = {0, 0}, delivering = {0, 0};
    uint64_t fetched = 0, delivered = 0;
    bool more = true;
    int status = KVN_OK;
    while (status == KVN_OK && (more || delivered < fetched)) {
        if (more && fetched - delivered < c->slots) {
            more = next_chunk(c, &fetching);
            if (more)
                status = fetch_chunk(c, fetched++);
        } else {
            next_chunk(c, &delivering); /* the same chunk as was fetched */
            status = deliver_chunk(c, delivered++);
        }
    }
    return status;
}

/* ---- both ---- */

static int wait_for_copies(conveyor *c)
{
    kvn_passage *p = c->p;
    for (;;) {
        const aclError code = p->acl->aclrtSynchronizeStreamWithTimeout(c->lane->stream, SLICE_MS);
        if (code == KVN_ACL_OK)
            return KVN_OK;
        if (code != KVN_ACL_STREAM_TIMEOUT)
            return kvn_passage_fail(p, "aclrtSynchronizeStreamWithTimeout", code);
        kvn_acl_forget(p->acl);
        if (kvn_is_halted(&p->halt))
            return KVN_CANCELLED;
    }
}

/* Errors of a stream show only where that one is waited for. Copies first when putting: the
 * operations wait for them, and would wait for ever for one that failed. */
static int finish(conveyor *c)
{
    kvn_passage *p = c->p;
    int status = p->transfer->is_put ? wait_for_copies(c) : kvn_passage_synchronize(p, p->fault);
    if (status != KVN_OK)
        return status;
    return p->transfer->is_put ? kvn_passage_synchronize(p, p->fault) : wait_for_copies(c);
}

int kvn_move_staged(kvn_passage *p)
{
    kvn_staging *staging = p->transfer->staging;
    conveyor c = {.p = p, .slots = staging->slots, .slot_nbytes = staging->slot_nbytes};
    kvn_channel_fault ignored;
    bool is_clean;
    int status = kvn_staging_claim(staging, &p->halt, &c.lane, p->fault);
    if (status != KVN_OK) {
        p->is_untouched = true;
        return status;
    }
    kvn_channel_also_uses(p->channel, c.lane->stream);
    status = p->transfer->is_put ? put_all(&c) : get_all(&c);
    if (status == KVN_OK)
        status = kvn_guards_read(p);
    if (status == KVN_OK)
        status = finish(&c);
    if (status != KVN_OK) {
        /* Operations use the lane's slots, and events of the lane's stream may never happen now:
         * they are stopped before the lane is given to others. */
        kvn_channel_fault_begin(&ignored);
        kvn_channel_synchronize(p->channel, &KVN_ALWAYS, &ignored);
    }
    is_clean = !kvn_channel_also_uses(p->channel, NULL) && status == KVN_OK;
    kvn_staging_release(staging, c.lane, is_clean);
    return status;
}

/* Moves a shard through staging memory. Chunks of the shard go through the slots of a buffer set: two streams,
 * the set's for copies and the communicator's for operations, ordered chunk by chunk with events. This thread waits for
 * the event `emptied` of a slot before it fills the slot again. So the streams cannot deadlock, and no more is queued
 * than an abort can wait for. */
#include <inttypes.h>
#include <string.h>

#include "hccl/transfer.h"

/* Alignment of fragments in a slot, which is the fastest for the device's copies. */
#define ALIGNMENT 64
#define SLICE_MS 10

typedef struct pipeline {
    kvn_transfer_context *t;
    kvn_buffer_set *set;
    uint32_t slots;
    uint64_t slot_nbytes;
    kvn_fragment fragments[KVN_HCCL_MAX_BATCH]; /* of the current chunk */
    uint32_t count;
} pipeline;

static uint64_t slot_address(const pipeline *p, uint64_t chunk)
{
    return p->set->address + chunk % p->slots * p->slot_nbytes;
}

/* Fills in the next chunk. Returns false if there is none. */
static bool next_chunk(pipeline *p, kvn_cursor *at)
{
    p->count = kvn_transfer_gather(p->t, at, p->slot_nbytes, ALIGNMENT, p->fragments);
    return p->count > 0;
}

static uint64_t next_place(uint64_t place, uint64_t nbytes)
{
    return place + (nbytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

/* ---- the calls ---- */

static int record(pipeline *p, aclrtEvent event, kvn_stream stream)
{
    const aclError code = p->t->acl->aclrtRecordEvent(event, stream);
    return code == KVN_ACL_OK ? KVN_OK : kvn_transfer_fail(p->t, "aclrtRecordEvent", code);
}

static int order(pipeline *p, kvn_stream stream, aclrtEvent event)
{
    const aclError code = p->t->acl->aclrtStreamWaitEvent(stream, event);
    return code == KVN_ACL_OK ? KVN_OK : kvn_transfer_fail(p->t, "aclrtStreamWaitEvent", code);
}

/* Waits on the host, so that later work is issued after the event. */
static int wait(pipeline *p, aclrtEvent event)
{
    return kvn_transfer_wait_event(p->t, event, p->set->stream);
}

static kvn_direction copy_direction(const kvn_transfer *transfer)
{
    return transfer->local_on_device ? KVN_DEVICE_TO_DEVICE
           : transfer->is_put        ? KVN_HOST_TO_DEVICE
                                     : KVN_DEVICE_TO_HOST;
}

static int copy_failed(pipeline *p, const kvn_fragment *it, const kvn_failure *why)
{
    kvn_channel_fault *fault = p->t->fault;
    fault->failed = it->index;
    return kvn_fail(&fault->why, why->status, why->code, "descriptor %" PRIu64 ": %.220s",
                    p->t->shard->first + it->index, why->message);
}

/* Copies between the slot and local memory. A copy of pageable host memory returns only when it is done, after all work
 * on the set's stream. So that stream must have no long waits. */
static int copy_chunk(pipeline *p, uint64_t place)
{
    const kvn_transfer *transfer = p->t->transfer;
    const kvn_device *device = p->t->device;
    const kvn_direction direction = copy_direction(transfer);
    for (uint32_t i = 0; i < p->count; i++) {
        const kvn_fragment *it = &p->fragments[i];
        kvn_failure failure;
        if (kvn_is_halted(&p->t->halt))
            return KVN_CANCELLED;
        if (device->ops->copy_async(device, direction, transfer->is_put ? place : it->local,
                                    transfer->is_put ? it->local : place, it->nbytes,
                                    p->set->stream, &failure) != KVN_OK)
            return copy_failed(p, it, &failure);
        place = next_place(place, it->nbytes);
    }
    return KVN_OK;
}

/* Issues the operations between the slot and the peer. */
static int issue_chunk(pipeline *p, uint64_t place)
{
    kvn_one_sided rows[KVN_HCCL_MAX_BATCH];
    for (uint32_t i = 0; i < p->count; i++) {
        rows[i] = kvn_row(place, p->fragments[i].remote, p->fragments[i].nbytes);
        place = next_place(place, p->fragments[i].nbytes);
    }
    return kvn_transfer_issue(p->t, rows, p->fragments, p->count);
}

/* ---- put: local memory -> slot -> peer ---- */

static int put_chunk(pipeline *p, uint64_t chunk)
{
    const uint64_t place = slot_address(p, chunk);
    const kvn_stream stream = kvn_channel_stream(p->t->channel);
    const aclrtEvent filled = p->set->filled[chunk % p->slots];
    const aclrtEvent emptied = p->set->emptied[chunk % p->slots];
    int status = chunk < p->slots ? KVN_OK : wait(p, emptied);
    if (status == KVN_OK)
        status = copy_chunk(p, place);
    if (status == KVN_OK)
        status = record(p, filled, p->set->stream);
    if (status == KVN_OK)
        status = order(p, stream, filled);
    if (status == KVN_OK)
        status = issue_chunk(p, place);
    return status == KVN_OK ? record(p, emptied, stream) : status;
}

static int put_all(pipeline *p)
{
    kvn_cursor at = {0, 0};
    int status = KVN_OK;
    for (uint64_t chunk = 0; status == KVN_OK && next_chunk(p, &at); chunk++)
        status = put_chunk(p, chunk);
    return status;
}

/* ---- get: peer -> slot -> local memory ---- */

static int fetch_chunk(pipeline *p, uint64_t chunk)
{
    const uint32_t slot = (uint32_t)(chunk % p->slots);
    int status = chunk < p->slots ? KVN_OK : wait(p, p->set->emptied[slot]);
    if (status == KVN_OK)
        status = issue_chunk(p, slot_address(p, chunk));
    return status == KVN_OK
               ? record(p, p->set->filled[slot], kvn_channel_stream(p->t->channel))
               : status;
}

static int deliver_chunk(pipeline *p, uint64_t chunk)
{
    const uint32_t slot = (uint32_t)(chunk % p->slots);
    /* A copy to pageable memory would wait inside ACL for a peer that may have gone, where no abort reaches it. Other
     * chunks move meanwhile. */
    int status = p->t->transfer->local_on_device
                     ? order(p, p->set->stream, p->set->filled[slot])
                     : wait(p, p->set->filled[slot]);
    if (status == KVN_OK)
        status = copy_chunk(p, slot_address(p, chunk));
    return status == KVN_OK ? record(p, p->set->emptied[slot], p->set->stream) : status;
}

static int get_all(pipeline *p)
{
    kvn_cursor fetching = {0, 0}, delivering = {0, 0};
    uint64_t fetched = 0, delivered = 0;
    bool more = true;
    int status = KVN_OK;
    while (status == KVN_OK && (more || delivered < fetched)) {
        if (more && fetched - delivered < p->slots) {
            more = next_chunk(p, &fetching);
            if (more)
                status = fetch_chunk(p, fetched++);
        } else {
            next_chunk(p, &delivering); /* the chunk that was fetched */
            status = deliver_chunk(p, delivered++);
        }
    }
    return status;
}

/* ---- both ---- */

static int wait_for_copies(pipeline *p)
{
    const kvn_device *device = p->t->device;
    for (;;) {
        const int status =
            device->ops->wait_stream(device, p->set->stream, SLICE_MS, &p->t->fault->why);
        if (status != KVN_PENDING)
            return status;
        if (kvn_is_halted(&p->t->halt))
            return KVN_CANCELLED;
    }
}

/* Only a wait for a stream reports its error. For puts, wait for the copies first: the operations wait
 * for them, and would never end after a failed copy. */
static int finish(pipeline *p)
{
    kvn_transfer_context *t = p->t;
    int status = t->transfer->is_put ? wait_for_copies(p) : kvn_transfer_synchronize(t, t->fault);
    if (status != KVN_OK)
        return status;
    return t->transfer->is_put ? kvn_transfer_synchronize(t, t->fault) : wait_for_copies(p);
}

int kvn_transfer_staged(kvn_transfer_context *t)
{
    kvn_staging *staging = t->transfer->staging;
    pipeline p = {.t = t, .slots = staging->slots, .slot_nbytes = staging->slot_nbytes};
    kvn_channel_fault ignored;
    bool is_clean;
    int status = kvn_staging_claim(staging, &t->halt, &p.set, &t->fault->why);
    if (status != KVN_OK) {
        t->is_untouched = true;
        return status;
    }
    kvn_channel_also_uses(t->channel, p.set->stream);
    status = t->transfer->is_put ? put_all(&p) : get_all(&p);
    if (status == KVN_OK)
        status = kvn_transfer_read_guards(t);
    if (status == KVN_OK)
        status = finish(&p);
    if (status != KVN_OK) {
        /* Stop the operations before others get the set: they use its slots, and events of its stream may never happen
         * now. */
        kvn_channel_fault_begin(&ignored);
        kvn_transfer_stop(t, &ignored);
    }
    is_clean = !kvn_channel_also_uses(t->channel, NULL) && status == KVN_OK;
    kvn_staging_release(staging, p.set, is_clean);
    return status;
}

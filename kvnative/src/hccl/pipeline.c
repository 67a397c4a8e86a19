/* Moves a shard through staging memory. Its chunks take turns in the two slots of a buffer set: while HCCL moves one,
 * the device copies the next into the other slot, or the one before out of it. The streams of both never wait for each
 * other, so a failure or an abort of one cannot block the other. */
#include <inttypes.h>

#include "core/thread.h"
#include "hccl/transfer.h"

/* Alignment of fragments in a slot, which is the fastest for the device's copies. */
#define ALIGNMENT 64
/* Interval at which a waiting thread checks if it must stop. */
#define NS_PER_SLICE INT64_C(10000000)

/* The bytes in a slot. */
typedef struct chunk {
    uint32_t count;
    kvn_fragment fragments[KVN_HCCL_MAX_BATCH];
    uint64_t places[KVN_HCCL_MAX_BATCH]; /* in the slot */
} chunk;

typedef struct pipeline {
    kvn_transfer_context *t;
    kvn_buffer_set *set;
    kvn_cursor at;
    chunk chunks[2]; /* by slot */
} pipeline;

/* Assigns the next bytes of the shard to a slot. Returns false if none is left. */
static bool next_chunk(pipeline *p, unsigned slot)
{
    chunk *chunk = &p->chunks[slot];
    uint64_t place = p->set->address[slot];

    chunk->count =
        kvn_transfer_gather(p->t, &p->at, p->t->transfer->staging->slot_nbytes, ALIGNMENT, chunk->fragments);
    for (uint32_t i = 0; i < chunk->count; i++) {
        chunk->places[i] = place;
        place += (chunk->fragments[i].nbytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    }
    return chunk->count > 0;
}

static kvn_direction copy_direction(const kvn_transfer *transfer)
{
    return transfer->local_on_device ? KVN_DEVICE_TO_DEVICE
           : transfer->is_put        ? KVN_HOST_TO_DEVICE
                                     : KVN_DEVICE_TO_HOST;
}

static int fail_copy(const pipeline *p, const chunk *chunk, const kvn_staged_copy *copy, const kvn_failure *why)
{
    kvn_channel_fault *fault = p->t->fault;

    if (copy->report.failed >= chunk->count) {
        fault->why = *why;
        return why->status;
    }
    fault->failed = chunk->fragments[copy->report.failed].index;
    return kvn_fail(&fault->why, why->status, why->code, "descriptor %" PRIu64 ": %.220s",
                    p->t->shard->first + fault->failed, why->message);
}

/* Copies between a slot and local memory; after the return no byte moves. */
static int copy_chunk(const pipeline *p, unsigned slot)
{
    const kvn_transfer *transfer = p->t->transfer;
    const chunk *chunk = &p->chunks[slot];
    uint64_t locals[KVN_HCCL_MAX_BATCH], sizes[KVN_HCCL_MAX_BATCH];
    const kvn_columns columns = {.dst = transfer->is_put ? chunk->places : locals,
                                 .src = transfer->is_put ? locals : chunk->places,
                                 .nbytes = sizes,
                                 .count = chunk->count};
    kvn_staged_copy copy;
    kvn_failure failure;
    int status = KVN_PENDING;

    for (uint32_t i = 0; i < chunk->count; i++) {
        locals[i] = chunk->fragments[i].local;
        sizes[i] = chunk->fragments[i].nbytes;
    }
    kvn_copier_start(&p->set->copier, copy_direction(transfer), &columns, &copy);
    while (status == KVN_PENDING && !kvn_is_halted(&p->t->halt))
        status = kvn_staged_copy_wait(&copy, kvn_now_ns() + NS_PER_SLICE, &failure);
    if (status == KVN_PENDING) {
        kvn_staged_copy_abort(&copy);
        return KVN_CANCELLED;
    }
    return status == KVN_OK ? KVN_OK : fail_copy(p, chunk, &copy, &failure);
}

/* Issues the operations between a slot and the peer. */
static int issue_chunk(const pipeline *p, unsigned slot)
{
    const chunk *chunk = &p->chunks[slot];
    kvn_one_sided rows[KVN_HCCL_MAX_BATCH];

    for (uint32_t i = 0; i < chunk->count; i++)
        rows[i] = kvn_row(chunk->places[i], chunk->fragments[i].remote, chunk->fragments[i].nbytes);
    return kvn_transfer_issue(p->t, rows, chunk->fragments, chunk->count);
}

/* Local memory -> slot -> peer. */
static int put_all(pipeline *p)
{
    unsigned slot = 0;
    bool more = next_chunk(p, slot);
    int status = more ? copy_chunk(p, slot) : KVN_OK;

    while (status == KVN_OK && more) {
        status = issue_chunk(p, slot);
        slot = !slot;
        more = next_chunk(p, slot);
        if (status == KVN_OK && more)
            status = copy_chunk(p, slot);
        if (status == KVN_OK && more)
            status = kvn_transfer_catch_up(p->t);
    }
    return status;
}

/* Peer -> slot -> local memory. */
static int get_all(pipeline *p)
{
    unsigned slot = 0;
    bool more = next_chunk(p, slot);
    int status = more ? issue_chunk(p, slot) : KVN_OK;

    while (status == KVN_OK && more) {
        status = kvn_transfer_catch_up(p->t);
        more = next_chunk(p, !slot);
        if (status == KVN_OK && more)
            status = issue_chunk(p, !slot);
        if (status == KVN_OK)
            status = copy_chunk(p, slot);
        slot = !slot;
    }
    return status;
}

int kvn_transfer_staged(kvn_transfer_context *t)
{
    pipeline p = {.t = t};
    kvn_channel_fault ignored;
    int status = kvn_staging_claim(t->transfer->staging, &t->halt, &p.set, &t->fault->why);

    if (status != KVN_OK) {
        t->is_untouched = true;
        return status;
    }
    status = t->transfer->is_put ? put_all(&p) : get_all(&p);
    if (status == KVN_OK)
        status = kvn_transfer_read_guards(t);
    if (status == KVN_OK)
        status = kvn_transfer_synchronize(t, t->fault);
    if (status != KVN_OK) {
        /* Stop the operations, which use the set's slots, before another transfer gets the set. */
        kvn_channel_fault_begin(&ignored);
        kvn_transfer_stop(t, &ignored);
    }
    kvn_staging_release(t->transfer->staging, p.set);
    return status;
}

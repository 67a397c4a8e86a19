/* The backend that copies batches to, from and within a device. */
#include "device/copy.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "device/stream_backend.h"
#include "device/stream_request.h"

/* Maximum calls of a shard on the stream: a stream holds a few thousand, and a further call blocks until the device
 * makes progress, so that the thread cannot check for an abort. */
#define MAX_ISSUED 1024
/* The kind of host memory is queried once for each region of this size, and cached for a few. A wrong guess about the
 * rest of a region costs only time: either call copies both kinds. */
#define REGION_BITS 21
#define NUM_REGIONS 64

typedef struct copy_backend {
    kvn_stream_backend backend;
    kvn_device *device;
    kvn_direction direction;
} copy_backend;

/* Cached places of host memory. */
typedef struct host_memory {
    kvn_pinned pinned;                  /* the range of the latest answer */
    uint64_t regions[NUM_REGIONS];      /* numbers of the regions, + 1 */
    bool region_pageable[NUM_REGIONS];
} host_memory;

/* A shard in flight. */
typedef struct transfer {
    copy_backend *self;
    kvn_channel *channel;
    const kvn_columns *shard;
    const atomic_int *stop;
    kvn_channel_fault *fault;
    uint64_t at;     /* the first descriptor that was not issued */
    unsigned issued; /* calls since the last wait for the stream */
    uint64_t unstoppable; /* their bytes that abort_stream would not stop */
    bool is_held;    /* the event before the shard has not been waited for */
    host_memory host;
} transfer;

static const kvn_device_ops *ops_of(const transfer *t) { return t->self->device->ops; }

/* ---- failures ---- */

/* Reports the failure of a call for descriptor `index` of the shard, or for an unknown one. */
static int fail(transfer *t, uint64_t index, const kvn_failure *why)
{
    kvn_channel_fault *fault = t->fault;

    fault->failed = index;
    if (index == KVN_NO_DESCRIPTOR)
        fault->why = *why;
    else
        kvn_fail(&fault->why, why->status, why->code, "descriptor %" PRIu64 ": %.220s",
                 t->shard->first + index, why->message);
    return why->status;
}

/* Waits for all issued copies, and confirms them. */
static int drain(transfer *t, kvn_channel_fault *fault)
{
    int status = KVN_OK;

    if (t->issued > 0)
        status = kvn_stream_request_synchronize(t->channel, t->shard, t->stop, fault);
    t->issued = 0;
    t->unstoppable = 0;
    if (status == KVN_OK)
        t->fault->confirmed = t->at;
    return status;
}

/* Checks between two calls: KVN_OK, or why the transfer must stop. */
static int look(transfer *t)
{
    return atomic_load(t->stop) ? KVN_CANCELLED : kvn_stream_request_look(t->shard, &t->fault->why);
}

/* ---- issued copies ---- */

static uint64_t most_unstoppable(const transfer *t) { return kvn_most_unstoppable(t->self->direction); }

/* Makes room for a call on a stream with at most `most` calls; 0: any number. */
static int make_room(transfer *t, unsigned most)
{
    return (most && t->issued >= most) || t->unstoppable >= most_unstoppable(t) ? drain(t, t->fault) : KVN_OK;
}

static void note_issued(transfer *t, const uint64_t *nbytes, size_t count)
{
    const kvn_device_ops *ops = ops_of(t);

    t->issued++;
    if (ops->can_stop && !ops->can_stop(t->self->device, kvn_channel_stream(t->channel)))
        for (size_t i = 0; i < count; i++)
            t->unstoppable += nbytes[i];
}

/* ---- the kind of host memory ---- */

static bool ask_pageable(const transfer *t, uint64_t address)
{
    kvn_memory_place place = {.kind = KVN_MEMORY_PAGEABLE};
    kvn_failure ignored; /* the copy will report an invalid address */

    ops_of(t)->locate(t->self->device, address, &place, &ignored);
    return place.kind == KVN_MEMORY_PAGEABLE;
}

static bool is_pageable(transfer *t, uint64_t index)
{
    const uint64_t *side = t->self->direction == KVN_HOST_TO_DEVICE ? t->shard->src : t->shard->dst;
    const uint64_t address = side[index], region = address >> REGION_BITS;
    const size_t slot = region % NUM_REGIONS;
    host_memory *host = &t->host;

    if (address >= host->pinned.first && address < host->pinned.last)
        return false;
    if (host->regions[slot] == region + 1)
        return host->region_pageable[slot];
    if (kvn_device_pinned_at(t->self->device, address, &host->pinned))
        return false;
    host->regions[slot] = region + 1;
    host->region_pageable[slot] = ask_pageable(t, address);
    return host->region_pageable[slot];
}

/* Waits for the event before the shard. Call it before a copy that may end within its call, which the stream does not
 * order, and before a copy that cannot be stopped. */
static int await(transfer *t)
{
    int status;

    if (!t->is_held)
        return KVN_OK;
    status = kvn_stream_request_await(t->channel, t->shard, t->stop, t->fault);
    if (status != KVN_OK)
        return status;
    t->is_held = false;
    t->issued = 0; /* the stream has no work now */
    return drain(t, t->fault);
}

/* ---- batches ---- */

typedef struct chunk {
    size_t count;
    bool blocking; /* for pageable memory, or if no other way exists */
    bool sliced;   /* one descriptor exceeds the unstoppable limit */
} chunk;

/* The descriptors from `at` for one call: at least one, no more than the call takes, of one kind of memory. */
static chunk next_chunk(transfer *t, unsigned copies)
{
    const unsigned on_stream = t->self->direction == KVN_DEVICE_TO_DEVICE ? KVN_BATCH_WITHIN : KVN_BATCH_ASYNC;
    const uint64_t *nbytes = t->shard->nbytes + t->at;
    const uint64_t left = t->shard->count - t->at, max_batch = ops_of(t)->max_batch;
    const uint64_t most = left < max_batch ? left : max_batch;
    const bool look = (copies & KVN_BATCH_ASYNC) && (copies & (KVN_BATCH_BLOCKING | KVN_BATCH_PINNED));
    chunk chunk = {.count = 1, .blocking = !(copies & on_stream)};
    uint64_t taken = nbytes[0];

    if (look)
        chunk.blocking = is_pageable(t, t->at);
    chunk.sliced = (chunk.blocking || ops_of(t)->can_stop) && taken > most_unstoppable(t);
    while (chunk.count < most && nbytes[chunk.count] > 0 && !chunk.sliced) {
        if (look && is_pageable(t, t->at + chunk.count) != chunk.blocking)
            break;
        if (ops_of(t)->can_stop && nbytes[chunk.count] > most_unstoppable(t))
            break;
        if (chunk.blocking && nbytes[chunk.count] > most_unstoppable(t) - taken)
            break;
        taken += nbytes[chunk.count++];
    }
    return chunk;
}

/* Handles the failure of a slice or chunk of the `count` descriptors from `at`. KVN_PENDING: copy them again, one by
 * one. */
static int fail_batch(transfer *t, int status, size_t count, size_t failed, const kvn_failure *failure)
{
    if (status != KVN_UNSUPPORTED)
        return fail(t, failed < count ? t->at + failed : KVN_NO_DESCRIPTOR, failure);
    kvn_device_fall_back(t->self->device, failure->message);
    return KVN_PENDING;
}

static kvn_columns batch_of(const transfer *t, size_t count)
{
    const kvn_columns *shard = t->shard;

    return (kvn_columns){
        .dst = shard->dst + t->at, .src = shard->src + t->at, .nbytes = shard->nbytes + t->at, .count = count};
}

/* Copies on the stream or, if `blocking`, before the return. Sets batch->count to the number of copied descriptors. */
static int copy_some(transfer *t, bool blocking, kvn_columns *batch)
{
    const copy_backend *self = t->self;
    size_t failed = SIZE_MAX;
    kvn_failure failure;
    int status = blocking ? KVN_OK : make_room(t, ops_of(t)->max_batches);

    if (status != KVN_OK)
        return status;
    status = ops_of(t)->copy_batch(self->device, self->direction, batch,
                                   blocking ? NULL : kvn_channel_stream(t->channel), &failed, &failure);
    if (!blocking)
        note_issued(t, batch->nbytes, batch->count);
    return status == KVN_OK ? KVN_OK : fail_batch(t, status, batch->count, failed, &failure);
}

/* Copies a descriptor above the unstoppable limit, slice by slice. */
static int copy_sliced(transfer *t, bool blocking)
{
    uint64_t dst = t->shard->dst[t->at], src = t->shard->src[t->at], left = t->shard->nbytes[t->at];
    int status = KVN_OK;

    while (left && status == KVN_OK) {
        const uint64_t nbytes = left < most_unstoppable(t) ? left : most_unstoppable(t);

        status = look(t);
        if (status == KVN_OK)
            status = copy_some(t, blocking, &(kvn_columns){.dst = &dst, .src = &src, .nbytes = &nbytes, .count = 1});
        dst += nbytes;
        src += nbytes;
        left -= nbytes;
    }
    return status;
}

static int copy_batch(transfer *t, unsigned copies)
{
    const chunk chunk = next_chunk(t, copies);
    kvn_columns batch = batch_of(t, chunk.count);
    int status = chunk.blocking ? await(t) : KVN_OK;

    if (status != KVN_OK)
        return status;
    if (chunk.sliced)
        status = copy_sliced(t, chunk.blocking);
    else
        status = copy_some(t, chunk.blocking, &batch);
    if (status == KVN_PENDING)
        return KVN_OK;
    if (status != KVN_OK)
        return status;
    t->at += batch.count;
    if (chunk.blocking && t->issued == 0)
        t->fault->confirmed = t->at;
    return KVN_OK;
}

/* ---- behind an event that may never come ---- */

/* Copies as much as can be stopped on a stream that cannot be aborted. */
static int copy_held(transfer *t)
{
    const copy_backend *self = t->self;
    const uint64_t left = t->shard->count - t->at, max_batch = ops_of(t)->max_batch;
    kvn_columns batch = batch_of(t, 1);
    size_t failed = SIZE_MAX;
    kvn_failure failure;
    int status;

    if (ops_of(t)->max_batches && t->issued >= ops_of(t)->max_batches)
        return await(t);
    while (batch.count < left && batch.count < max_batch && batch.nbytes[batch.count] > 0)
        batch.count++;
    status = ops_of(t)->copy_held(self->device, self->direction, &batch, kvn_channel_stream(t->channel), &failed,
                                  &failure);
    if (status == KVN_PENDING)
        return await(t);
    t->issued++;
    if (status != KVN_OK)
        return fail(t, failed < batch.count ? t->at + failed : KVN_NO_DESCRIPTOR, &failure);
    t->at += batch.count;
    return KVN_OK;
}

/* ---- one by one ---- */

static int copy_single(transfer *t)
{
    const copy_backend *self = t->self;
    const kvn_columns *shard = t->shard;
    const bool is_whole = self->direction == KVN_DEVICE_TO_DEVICE && !ops_of(t)->can_stop;
    const uint64_t most = is_whole ? UINT64_MAX : most_unstoppable(t);
    uint64_t dst = shard->dst[t->at], src = shard->src[t->at], left = shard->nbytes[t->at];

    while (left) {
        const uint64_t nbytes = left < most ? left : most;
        kvn_failure failure;
        int status = KVN_OK;

        if (t->is_held && t->self->direction != KVN_DEVICE_TO_DEVICE && is_pageable(t, t->at))
            status = await(t);
        if (status == KVN_OK)
            status = make_room(t, MAX_ISSUED);
        if (status == KVN_OK)
            status = look(t);
        if (status != KVN_OK)
            return status;
        status = ops_of(t)->copy_async(self->device, self->direction, dst, src, nbytes,
                                       kvn_channel_stream(t->channel), &failure);
        if (status != KVN_OK)
            return fail(t, t->at, &failure);
        note_issued(t, &nbytes, 1);
        dst += nbytes;
        src += nbytes;
        left -= nbytes;
    }
    t->at++;
    return KVN_OK;
}

/* ---- the shard ---- */

/* The kinds of batches that the next descriptor may go in. */
static unsigned batches_for(transfer *t)
{
    const unsigned copies = atomic_load(&t->self->device->batch_copies);

    if (t->self->direction == KVN_DEVICE_TO_DEVICE)
        return copies & KVN_BATCH_WITHIN;
    if ((copies & KVN_BATCH_PINNED) && is_pageable(t, t->at))
        return copies & KVN_BATCH_BLOCKING;
    return copies & ~(unsigned)KVN_BATCH_WITHIN;
}

static int issue(transfer *t)
{
    const int status = look(t);
    unsigned copies;

    if (status != KVN_OK)
        return status;
    if (t->shard->nbytes[t->at] == 0) {
        t->at++; /* batch calls refuse empty descriptors */
        return KVN_OK;
    }
    if (t->is_held && ops_of(t)->copy_held)
        return copy_held(t);
    copies = batches_for(t);
    return copies ? copy_batch(t, copies) : copy_single(t);
}

static int move(kvn_stream_backend *self, kvn_channel *channel, const kvn_columns *shard,
                const atomic_int *stop, kvn_channel_fault *fault)
{
    transfer t = {.self = (copy_backend *)self, .channel = channel, .shard = shard, .stop = stop,
                  .fault = fault, .is_held = shard->after != NULL};
    kvn_channel_fault ignored;
    int status = KVN_OK;

    while (t.at < shard->count && status == KVN_OK)
        status = issue(&t);
    if (status == KVN_OK) {
        kvn_channel_note_issued(channel);
        return t.is_held && ops_of(&t)->copy_held ? await(&t) : drain(&t, fault);
    }
    /* Copies that were issued before the failure may still arrive, except held ones, which are abandoned. If the stream
     * has none, the last wait has confirmed all it could. */
    if (t.issued > 0 && !t.is_held)
        drain(&t, &ignored);
    return status;
}

/* ---- the backend ---- */

static void destroy(kvn_backend *base)
{
    kvn_stream_backend_end((kvn_stream_backend *)base);
    free(base);
}

kvn_backend *kvn_device_copy_create(kvn_device *device, kvn_channel **channels,
                                    unsigned num_channels, kvn_direction direction)
{
    const bool is_within = direction == KVN_DEVICE_TO_DEVICE;
    const kvn_copy_costs costs = is_within ? device->ops->within_costs : device->ops->host_costs;
    copy_backend *self = calloc(1, sizeof *self);
    int error = EINVAL;

    if (!self)
        return NULL;
    if (is_within || direction == KVN_HOST_TO_DEVICE || direction == KVN_DEVICE_TO_HOST)
        error = kvn_stream_backend_init(&self->backend, device->ops->name, destroy, channels,
                                        num_channels, move);
    if (error) {
        free(self);
        errno = error;
        return NULL;
    }
    self->device = device;
    self->direction = direction;
    self->backend.vtable.orders = device->ops->can_abort || device->ops->copy_held;
    self->backend.shard_cost = costs.shard;
    self->backend.descriptor_cost = costs.descriptor;
    return &self->backend.base;
}

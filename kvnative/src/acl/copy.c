#include "acl/copy.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* Bytes of one call that an abort cannot stop: at 5 GB/s some 13 ms. */
#define BLOCKING_NBYTES (64u << 20)
/* Calls of a part that are on the stream at one time: a stream holds a few thousand, and who issues
 * more blocks until the device gets on, where no abort reaches him. */
#define MAX_ISSUED 1024
/* What a part and a descriptor cost, in bytes that move in the same time: to wake a channel takes
 * as long as issuing a dozen copies, so less is not worth another channel. Not measured on hardware. */
#define HOST_PART_COST (4u << 20)
#define HOST_COPY_COST (64u << 10)
#define DEVICE_PART_COST (32u << 20)
#define DEVICE_COPY_COST (2u << 20)
/* Where host memory lies is asked once for each of these, and the answers of a few are kept. A wrong
 * guess about a neighbour costs time, never bytes: either call copies both kinds. */
#define REGION_BITS 21
#define NUM_REGIONS 64

typedef struct copy_backend {
    kvn_streamed streamed;
    kvn_device *device;
    kvn_acl_batch_attribute attribute; /* of every descriptor */
    int kind;                          /* aclrtMemcpyKind */
} copy_backend;

/* What is known of where host memory lies. */
typedef struct host_memory {
    kvn_pinned pinned;                  /* the range of the latest answer */
    uint64_t regions[NUM_REGIONS];      /* their numbers + 1 */
    bool region_pageable[NUM_REGIONS];
} host_memory;

/* One part on its way. */
typedef struct passage {
    copy_backend *self;
    kvn_channel *channel;
    const kvn_columns *part;
    const atomic_int *stop;
    kvn_channel_fault *fault;
    uint64_t at;       /* the first descriptor that is not issued */
    unsigned issued;   /* calls since the stream was last waited for */
    host_memory host;
} passage;

static const kvn_acl *acl_of(const passage *p) { return p->self->device->acl; }

/* ---- failures ---- */

/* The call failed for the descriptor `index` of the part, or for an unknown one. */
static int blame(passage *p, uint64_t index, const char *call, int code)
{
    char *message = p->fault->message;
    size_t room = sizeof p->fault->message;

    p->fault->code = code;
    p->fault->failed = index;
    if (index != KVN_NO_DESCRIPTOR) {
        int prefix = snprintf(message, room, "descriptor %" PRIu64 ": ", p->part->first + index);
        message += prefix;
        room -= (size_t)prefix;
    }
    return kvn_acl_explain(acl_of(p), call, code, message, room);
}

/* Waits for all that was issued; what was is confirmed then. */
static int drain(passage *p, kvn_channel_fault *fault)
{
    int status = KVN_OK;

    if (p->issued > 0)
        status = kvn_channel_synchronize(p->channel, p->stop, fault);
    p->issued = 0;
    if (status == KVN_OK)
        p->fault->confirmed = p->at;
    return status;
}

static bool is_unsupported(int code)
{
    return code == KVN_ACL_FEATURE_UNSUPPORTED || code == KVN_ACL_API_UNSUPPORTED;
}

/* ---- where host memory lies ---- */

static bool ask_pageable(const passage *p, uint64_t address)
{
    kvn_acl_pointer pointer;

    memset(&pointer, 0, sizeof pointer);
    if (acl_of(p)->aclrtPointerGetAttributes((const void *)(uintptr_t)address, &pointer)) {
        kvn_acl_forget(acl_of(p)); /* an address that cannot be: the copy will say so */
        return true;
    }
    return pointer.location.type == KVN_ACL_LOCATION_UNREGISTERED;
}

static bool is_pageable(passage *p, uint64_t index)
{
    const uint64_t *side = p->self->kind == KVN_ACL_HOST_TO_DEVICE ? p->part->src : p->part->dst;
    const uint64_t address = side[index], region = address >> REGION_BITS;
    const size_t slot = region % NUM_REGIONS;
    host_memory *host = &p->host;

    if (address >= host->pinned.first && address < host->pinned.last)
        return false;
    if (host->regions[slot] == region + 1)
        return host->region_pageable[slot];
    if (kvn_device_pinned_at(p->self->device, address, &host->pinned))
        return false;
    host->regions[slot] = region + 1;
    host->region_pageable[slot] = ask_pageable(p, address);
    return host->region_pageable[slot];
}

/* ---- batches between host and device ---- */

typedef struct chunk {
    uint64_t count;
    bool blocking; /* aclrtMemcpyBatch: pageable memory, or there is no other */
} chunk;

/* The descriptors from `at` that go in one call: not empty, at most 4096, of one kind of memory. */
static chunk next_chunk(passage *p, kvn_copying copying)
{
    const uint64_t *nbytes = p->part->nbytes + p->at;
    const uint64_t left = p->part->count - p->at;
    const uint64_t most = left < KVN_ACL_MAX_BATCH ? left : KVN_ACL_MAX_BATCH;
    const bool look = copying == KVN_COPY_BATCH_ASYNC && acl_of(p)->aclrtMemcpyBatch;
    chunk chunk = {.count = 1, .blocking = copying == KVN_COPY_BATCH};
    uint64_t taken = nbytes[0];

    if (look)
        chunk.blocking = is_pageable(p, p->at);
    while (chunk.count < most && nbytes[chunk.count] > 0) {
        if (look && is_pageable(p, p->at + chunk.count) != chunk.blocking)
            break;
        if (chunk.blocking && (taken >= BLOCKING_NBYTES ||
                               nbytes[chunk.count] > BLOCKING_NBYTES - taken))
            break;
        taken += nbytes[chunk.count++];
    }
    return chunk;
}

/* One call; arrays of `count`. */
static int call_batch(passage *p, bool blocking, uint64_t *dst, uint64_t *src, uint64_t *nbytes,
                      uint64_t count, size_t *failed)
{
    kvn_acl_batch_attribute attribute = p->self->attribute;
    size_t first = 0;

    *failed = SIZE_MAX;
    /* An array of uint64_t is one of pointers, and of sizes: acl.h asserts it. */
    if (blocking)
        return acl_of(p)->aclrtMemcpyBatch((void **)dst, nbytes, (void **)src, nbytes, count,
                                           &attribute, &first, 1, failed);
    p->issued++;
    return acl_of(p)->aclrtMemcpyBatchAsync((void **)dst, nbytes, (void **)src, nbytes, count,
                                            &attribute, &first, 1, failed,
                                            kvn_channel_stream(p->channel));
}

/* A descriptor that would block for too long: slice by slice. An aclError, which is positive, or
 * KVN_CANCELLED. */
static int copy_sliced(passage *p, size_t *failed)
{
    uint64_t dst = p->part->dst[p->at], src = p->part->src[p->at], left = p->part->nbytes[p->at];

    while (left) {
        uint64_t nbytes = left < BLOCKING_NBYTES ? left : BLOCKING_NBYTES;
        int code;
        if (atomic_load(p->stop))
            return KVN_CANCELLED;
        code = call_batch(p, true, &dst, &src, &nbytes, 1, failed);
        if (code != KVN_ACL_OK)
            return code;
        dst += nbytes;
        src += nbytes;
        left -= nbytes;
    }
    return KVN_ACL_OK;
}

static int copy_batch(passage *p, kvn_copying copying)
{
    const chunk chunk = next_chunk(p, copying);
    const kvn_columns *part = p->part;
    const char *call = chunk.blocking ? "aclrtMemcpyBatch" : "aclrtMemcpyBatchAsync";
    size_t failed;
    int code;

    if (chunk.blocking && part->nbytes[p->at] > BLOCKING_NBYTES)
        code = copy_sliced(p, &failed);
    else
        code = call_batch(p, chunk.blocking, (uint64_t *)part->dst + p->at,
                          (uint64_t *)part->src + p->at, (uint64_t *)part->nbytes + p->at,
                          chunk.count, &failed);
    if (code == KVN_CANCELLED)
        return KVN_CANCELLED;
    if (is_unsupported(code)) {
        char why[256];
        kvn_acl_explain(acl_of(p), call, code, why, sizeof why);
        kvn_device_fall_back(p->self->device, KVN_COPY_SINGLE, why);
        return KVN_OK; /* the same descriptors again, one by one */
    }
    if (code != KVN_ACL_OK)
        return blame(p, failed < chunk.count ? p->at + failed : KVN_NO_DESCRIPTOR, call, code);
    p->at += chunk.count;
    if (chunk.blocking && p->issued == 0)
        p->fault->confirmed = p->at;
    return KVN_OK;
}

/* ---- one by one ---- */

static int copy_single(passage *p)
{
    const kvn_columns *part = p->part;
    const uint64_t most = p->self->kind == KVN_ACL_DEVICE_TO_DEVICE ? UINT64_MAX : BLOCKING_NBYTES;
    uint64_t dst = part->dst[p->at], src = part->src[p->at], left = part->nbytes[p->at];

    while (left) {
        const uint64_t nbytes = left < most ? left : most;
        int code, status;

        if (p->issued >= MAX_ISSUED) {
            status = drain(p, p->fault);
            if (status != KVN_OK)
                return status;
        }
        if (atomic_load(p->stop))
            return KVN_CANCELLED;
        code = acl_of(p)->aclrtMemcpyAsync((void *)(uintptr_t)dst, nbytes,
                                           (const void *)(uintptr_t)src, nbytes, p->self->kind,
                                           kvn_channel_stream(p->channel));
        if (code != KVN_ACL_OK)
            return blame(p, p->at, "aclrtMemcpyAsync", code);
        p->issued++;
        dst += nbytes;
        src += nbytes;
        left -= nbytes;
    }
    p->at++;
    return KVN_OK;
}

/* ---- the part ---- */

static int issue(passage *p)
{
    const bool on_device = p->self->kind == KVN_ACL_DEVICE_TO_DEVICE;
    kvn_copying copying;

    if (atomic_load(p->stop))
        return KVN_CANCELLED;
    if (p->part->nbytes[p->at] == 0) {
        p->at++; /* batch calls refuse them */
        return KVN_OK;
    }
    copying = on_device ? KVN_COPY_SINGLE : (kvn_copying)atomic_load(&p->self->device->copying);
    return copying == KVN_COPY_SINGLE ? copy_single(p) : copy_batch(p, copying);
}

static int move(kvn_streamed *self, kvn_channel *channel, const kvn_columns *part,
                const atomic_int *stop, kvn_channel_fault *fault)
{
    passage p = {.self = (copy_backend *)self, .channel = channel, .part = part, .stop = stop,
                 .fault = fault};
    kvn_channel_fault ignored;
    int status = KVN_OK;

    while (p.at < part->count && status == KVN_OK)
        status = issue(&p);
    if (status == KVN_OK)
        return drain(&p, fault);
    /* What was issued before it may still arrive. If nothing is on the stream, it was waited for, maybe
     * in vain: then what that wait has confirmed stands. */
    if (p.issued > 0)
        drain(&p, &ignored);
    return status;
}

static void destroy(kvn_backend *base) { free(base); }

static const kvn_backend_vtable vtable = KVN_STREAMED_VTABLE("acl", destroy);

/* Where the two sides of a direction lie, as the batch calls want to be told. */
static int set_direction(copy_backend *self, kvn_direction direction)
{
    const kvn_acl_location host = {.id = 0, .type = KVN_ACL_LOCATION_HOST};
    const kvn_acl_location device = {.id = (uint32_t)self->device->id,
                                     .type = KVN_ACL_LOCATION_DEVICE};

    self->attribute.dst = direction == KVN_DEVICE_TO_HOST ? host : device;
    self->attribute.src = direction == KVN_HOST_TO_DEVICE ? host : device;
    switch ((int)direction) {
    case KVN_HOST_TO_DEVICE: self->kind = KVN_ACL_HOST_TO_DEVICE; return 0;
    case KVN_DEVICE_TO_HOST: self->kind = KVN_ACL_DEVICE_TO_HOST; return 0;
    case KVN_DEVICE_TO_DEVICE: self->kind = KVN_ACL_DEVICE_TO_DEVICE; return 0;
    default: return EINVAL;
    }
}

kvn_backend *kvn_acl_copy_create(kvn_device *device, kvn_channel **channels, unsigned num_channels,
                                 kvn_direction direction)
{
    copy_backend *self = calloc(1, sizeof *self);
    int error;

    if (!self)
        return NULL;
    self->device = device;
    error = set_direction(self, direction);
    if (!error)
        error = kvn_streamed_init(&self->streamed, &vtable, channels, num_channels, move);
    if (error) {
        free(self);
        errno = error;
        return NULL;
    }
    self->streamed.part_cost = direction == KVN_DEVICE_TO_DEVICE ? DEVICE_PART_COST : HOST_PART_COST;
    self->streamed.descriptor_cost =
        direction == KVN_DEVICE_TO_DEVICE ? DEVICE_COPY_COST : HOST_COPY_COST;
    return &self->streamed.base;
}

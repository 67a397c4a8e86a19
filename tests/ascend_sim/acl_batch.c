/*
 * Batch copies. Both calls check item by item. If an item is refused, the synchronous call copies
 * nothing, but the asynchronous call issues the items before the refused one. The order inside a
 * batch is unspecified, so the simulator shuffles the copies.
 */
#include <stdlib.h>
#include <string.h>

#include "acl.h"

#if KVSIM_BATCH

#define MAX_COUNT 4096

typedef struct {
    void **targets;
    size_t *capacities;
    void **sources;
    size_t *sizes;
    size_t count;
    acl_batch_attribute *attributes;
    size_t *first_items; /* the first item that each attribute applies to */
    size_t num_attributes;
    size_t *failed;
    size_t refused; /* the value of failIndex */
    int is_async;
} batch;

#define ARGUMENTS                                                                                    \
    void **targets, size_t *capacities, void **sources, size_t *sizes, size_t count,                 \
        acl_batch_attribute *attributes, size_t *first_items, size_t num_attributes
#define GIVEN targets, capacities, sources, sizes, count, attributes, first_items, num_attributes

static int check_pointers(const batch *all) {
    int code = acl_check_pointer(all->targets, "dsts");
    code = code ? code : acl_check_pointer(all->capacities, "destMaxs");
    code = code ? code : acl_check_pointer(all->sources, "srcs");
    code = code ? code : acl_check_pointer(all->sizes, "sizes");
    code = code ? code : acl_check_pointer(all->attributes, "attrs");
    code = code ? code : acl_check_pointer(all->first_items, "attrsIndexes");
    return code ? code : acl_check_pointer(all->failed, "failIndex");
}

static int check_counts(const batch *all) {
    if (!all->num_attributes || all->num_attributes > all->count) {
        return sim_error(SIM_PARAM, "numBatches=%zu, numAttrs=%zu", all->count, all->num_attributes);
    }
    if (!all->is_async && all->count > MAX_COUNT) {
        return sim_error(SIM_PARAM, "numBatches=%zu: at most %d", all->count, MAX_COUNT);
    }
    for (size_t i = 0; i < all->num_attributes; i++) {
        size_t item = all->first_items[i];
        if (i ? item <= all->first_items[i - 1] || item >= all->count : item != 0) {
            return sim_error(SIM_PARAM, "attrsIndexes[%zu]=%zu", i, item);
        }
    }
    return 0;
}

static int check_values(const batch *all) {
    static const uint8_t ZEROS[16];
    if (!all->count) {
        return sim_error(SIM_INVALID, "numBatches=0: at least 1");
    }
    for (size_t i = 0; i < all->count; i++) {
        if (all->capacities[i] < all->sizes[i]) {
            return sim_error(SIM_INVALID, "destMaxs[%zu]=%zu, sizes[%zu]=%zu", i, all->capacities[i],
                             i, all->sizes[i]);
        }
    }
    for (size_t i = 0; i < all->num_attributes; i++) {
        if (memcmp(all->attributes[i].reserved, ZEROS, sizeof ZEROS)) {
            return sim_error(SIM_INVALID, "attrs[%zu].rsv is not zero", i);
        }
    }
    return 0;
}

static int check_location(const acl_location *stated, const acl_place *real, const char *name) {
    int type = real->side == ACL_DEVICE_SIDE ? ACL_AT_DEVICE : ACL_AT_HOST;
    if (stated->type != type) {
        return sim_error(SIM_PARAM, "%s is said to be of type %d, but is %d", name, stated->type, type);
    }
    if (type == ACL_AT_DEVICE && stated->id != (uint32_t)real->device) {
        return sim_error(SIM_PARAM, "%s is said to be of device %u, but is of %d", name, stated->id,
                         real->device);
    }
    return 0;
}

static int find_item(const batch *all, size_t item, const acl_batch_attribute *attribute,
                     acl_copy *copy) {
    if (!all->targets[item] || !all->sources[item] || !all->sizes[item]) {
        return sim_error(SIM_PARAM, "item %zu: dst=%p, src=%p, size=%zu", item, all->targets[item],
                         all->sources[item], all->sizes[item]);
    }
    int code = acl_copy_find(copy, all->targets[item], all->sources[item], all->sizes[item]);
    if (code) {
        return code;
    }
    code = check_location(&attribute->target, &copy->target, "dst");
    code = code ? code : check_location(&attribute->source, &copy->source, "src");
    int kind = acl_copy_kind(copy);
    if (!code && kind != ACL_HOST_TO_DEVICE && kind != ACL_DEVICE_TO_HOST) {
        code = sim_error(SIM_PARAM, "item %zu is neither from host to device nor back", item);
    }
    if (code) {
        acl_copy_release(copy);
    }
    return code;
}

/* Finds the items up to the first refused one, and stores the index of that item. */
static int find_items(batch *all, acl_copy *copies, size_t *num_found) {
    size_t attribute = 0;
    int code = 0;
    for (*num_found = 0; *num_found < all->count; ++*num_found) {
        if (attribute + 1 < all->num_attributes && *num_found >= all->first_items[attribute + 1]) {
            attribute++;
        }
        code = find_item(all, *num_found, &all->attributes[attribute], &copies[*num_found]);
        if (code) {
            *all->failed = all->refused = *num_found;
            break;
        }
    }
    return code;
}

static void shuffle(acl_copy *copies, size_t count) {
    static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    static uint64_t state;
    pthread_mutex_lock(&mutex);
    state = state ? state : sim_settings_now().seed * 0x9E3779B97F4A7C15U + 1;
    for (size_t left = count; left > 1; left--) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        acl_copy swapped = copies[left - 1];
        size_t other = state % left;
        copies[left - 1] = copies[other];
        copies[other] = swapped;
    }
    pthread_mutex_unlock(&mutex);
}

static void release(acl_copy *copies, size_t count) {
    for (size_t i = 0; i < count; i++) {
        acl_copy_release(&copies[i]);
    }
}

/* Copies all items or none; a fault "partial" copies half of them. */
static int copy_now(const sim_call *call, acl_copy *copies, size_t count, int code) {
    size_t num_copied = code || call->fault.kind == SIM_FAULT_SYNC ? 0 : count;
    if (!code && call->fault.kind == SIM_FAULT_PARTIAL) {
        num_copied = count / 2;
    }
    shuffle(copies, count);
    acl_copies_now(copies, num_copied);
    release(copies + num_copied, count - num_copied);
    if (!code && call->fault.kind == SIM_FAULT_HANG) {
        return sim_error(500000, "%s: no stream that could hang", call->name);
    }
    return code || !call->fault.code ? code : sim_error(call->fault.code, "a fault of the test");
}

/* Queues copies of pinned memory. Copies pageable memory on this thread, after a wait for the stream. */
static int copy_on_stream(const sim_fault *fault, acl_copy *copies, size_t count, sim_stream *stream) {
    size_t begin = 0;
    while (begin < count) {
        int pageable = acl_copy_is_pageable(&copies[begin]);
        size_t end = begin + 1;
        while (end < count && acl_copy_is_pageable(&copies[end]) == pageable) {
            end++;
        }
        shuffle(copies + begin, end - begin);
        int code = pageable ? sim_stream_wait(stream, -1)
                            : acl_copies_enqueue(stream, fault, copies + begin, end - begin);
        if (pageable && !code) {
            acl_copies_now(copies + begin, end - begin);
        }
        if (code) {
            release(copies + (pageable ? begin : end), count - (pageable ? begin : end));
            return code;
        }
        begin = end;
    }
    return 0;
}

/* A fault "partial" fails between two copies: half of them are issued, and failIndex is not set. */
static int issue(const sim_call *call, acl_copy *copies, size_t count, sim_stream *stream, int code) {
    sim_fault fault = call->fault;
    size_t num_issued = count;
    if (!code && fault.kind == SIM_FAULT_PARTIAL) {
        code = sim_error(fault.code, "a fault of the test");
        num_issued = count / 2;
        fault.kind = SIM_FAULT_NONE;
    }
    release(copies + num_issued, count - num_issued);
    int issued = copy_on_stream(&fault, copies, num_issued, stream);
    return code ? code : issued;
}

/* Leaves *failed unchanged if a check returns 100000; otherwise sets it, to SIZE_MAX if no item is refused. */
static int perform(const sim_call *call, batch *all, sim_stream *stream) {
    if (KVSIM_BATCH == 2) {
        return sim_error(SIM_UNSUPPORTED, "%s: not on this product", call->name);
    }
    int code = check_pointers(all);
    code = code ? code : check_values(all);
    if (code) {
        return code;
    }
    *all->failed = SIZE_MAX;
    code = check_counts(all);
    if (code) {
        return code;
    }
    size_t count;
    acl_copy *copies = malloc(all->count * sizeof *copies);
    code = find_items(all, copies, &count);
    code = stream ? issue(call, copies, count, stream, code) : copy_now(call, copies, count, code);
    free(copies);
    return code;
}

static int leave(const sim_call *call, const batch *all, int code, void *stream) {
    uint64_t nbytes = 0;
    for (size_t i = 0; i < all->count && !code; i++) {
        nbytes += all->sizes[i];
    }
    return sim_leave(call, code,
                     "\"count\":%zu,\"attributes\":%zu,\"bytes\":%llu,\"failed\":%lld,"
                     "\"stream\":%llu",
                     all->count, all->num_attributes, (unsigned long long)nbytes,
                     (long long)all->refused, (unsigned long long)(uintptr_t)stream);
}

static int copy_batch(const char *name, batch *all) {
    sim_call call;
    int device;
    int code = acl_enter_device(&call, name, &device);
    code = code ? code : perform(&call, all, NULL);
    return leave(&call, all, code, NULL);
}

static int copy_batch_on_stream(const char *name, batch *all, void *handle) {
    sim_call call;
    sim_stream *stream;
    int code = acl_enter(&call, name);
    all->is_async = 1;
    code = code ? code : sim_stream_find(handle, &stream);
    if (!code) {
        code = perform(&call, all, stream);
        sim_stream_release(stream);
    }
    return leave(&call, all, code, handle);
}

#if KVSIM_BATCH == 3 /* only the V2 calls of 9.1, which do not report the refused item */

ACL aclrtMemcpyBatchV2(ARGUMENTS);
ACL aclrtMemcpyBatchAsyncV2(ARGUMENTS, void *stream);

ACL aclrtMemcpyBatchV2(ARGUMENTS) {
    size_t failed;
    batch all = {GIVEN, &failed, SIZE_MAX, 0};
    return copy_batch(__func__, &all);
}

ACL aclrtMemcpyBatchAsyncV2(ARGUMENTS, void *stream) {
    size_t failed;
    batch all = {GIVEN, &failed, SIZE_MAX, 0};
    return copy_batch_on_stream(__func__, &all, stream);
}

#else

ACL aclrtMemcpyBatch(ARGUMENTS, size_t *failed);
ACL aclrtMemcpyBatchAsync(ARGUMENTS, size_t *failed, void *stream);

ACL aclrtMemcpyBatch(ARGUMENTS, size_t *failed) {
    batch all = {GIVEN, failed, SIZE_MAX, 0};
    return copy_batch(__func__, &all);
}

ACL aclrtMemcpyBatchAsync(ARGUMENTS, size_t *failed, void *stream) {
    batch all = {GIVEN, failed, SIZE_MAX, 0};
    return copy_batch_on_stream(__func__, &all, stream);
}

#endif
#endif

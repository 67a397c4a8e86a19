/*
 * Batch copies: a batch is one operation of the stream. The order inside is unspecified, so the simulator shuffles the
 * copies. If a copy is refused, nothing is issued. Copies of one batch that depend on each other are a violation, and
 * so is a batch above limits that drivers have survived: 580.159 crashes or hangs at 51,828 copies.
 */
#include <stdlib.h>
#include <string.h>

#include "cuda_sim.h"

#if KVSIM_CUDA >= 12080

#define MOST_COPIES 1024
#define MOST_NBYTES (64u << 20)

typedef struct {
    int type;
    int id;
} location;

typedef struct {
    int order; /* 1 in the order of the stream, 2 during the call, 3 at any time */
    location source, target; /* hints for managed memory */
    unsigned flags;
} attributes; /* CUmemcpyAttributes */

typedef struct {
    const cuda_address *targets;
    const cuda_address *sources;
    const size_t *sizes;
    size_t count;
    const attributes *attributes;
    const size_t *firsts; /* the first copy that each attribute applies to */
    size_t num_attributes;
    size_t refused;
} batch;

CUDA cuMemcpyBatchAsync(cuda_address *targets, cuda_address *sources, size_t *sizes, size_t count,
                        attributes *attrs, size_t *firsts, size_t num_attributes, size_t *failed,
                        void *stream);
CUDA cuMemcpyBatchAsync_v2(const cuda_address *targets, const cuda_address *sources,
                           const size_t *sizes, size_t count, attributes *attrs, size_t *firsts,
                           size_t num_attributes, void *stream);

static int check_attributes(const batch *all) {
    if (!all->count || !all->num_attributes || all->num_attributes > all->count) {
        return sim_error(INVALID_VALUE, "count=%zu, numAttrs=%zu", all->count, all->num_attributes);
    }
    for (size_t i = 0; i < all->num_attributes; i++) {
        size_t first = all->firsts[i];
        const attributes *it = &all->attributes[i];
        if (i ? first <= all->firsts[i - 1] || first >= all->count : first != 0) {
            return sim_error(INVALID_VALUE, "attrsIdxs[%zu]=%zu", i, first);
        }
        if (it->order < 1 || it->order > 3 || it->flags > 1) {
            return sim_error(INVALID_VALUE, "attrs[%zu]: srcAccessOrder=%d, flags=%u", i, it->order,
                             it->flags);
        }
    }
    return 0;
}

static int check(const batch *all, void *handle) {
    int code = CUDA_CHECK(0, all->targets);
    code = CUDA_CHECK(code, all->sources);
    code = CUDA_CHECK(code, all->sizes);
    code = CUDA_CHECK(code, all->attributes);
    code = CUDA_CHECK(code, all->firsts);
    if (!code && (uintptr_t)handle <= 1) {
        code = sim_error(INVALID_VALUE, "hStream: not the default stream");
    }
    return code ? code : check_attributes(all);
}

static int by_target(const void *left, const void *right) {
    uint64_t a = ((const cuda_copy *)left)->target.address;
    uint64_t b = ((const cuda_copy *)right)->target.address;
    return (a > b) - (a < b);
}

/* Returns 1 if any target overlaps another target, or any source. The copies are sorted by target. */
static int has_dependent(const cuda_copy *copies, size_t count) {
    for (size_t i = 0; i + 1 < count; i++) {
        if (copies[i].target.address + copies[i].nbytes > copies[i + 1].target.address) {
            return 1;
        }
    }
    for (size_t i = 0; i < count; i++) {
        uint64_t start = copies[i].source.address;
        size_t low = 0, high = count; /* search for the first target that ends after the source's start */
        while (low < high) {
            size_t middle = (low + high) / 2;
            if (copies[middle].target.address + copies[middle].nbytes <= start) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        if (low < count && copies[low].target.address < start + copies[i].nbytes) {
            return 1;
        }
    }
    return 0;
}

static void shuffle(cuda_copy *copies, size_t count) {
    static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    static uint64_t state;
    pthread_mutex_lock(&mutex);
    state = state ? state : sim_settings_now().seed * 0x9E3779B97F4A7C15U + 1;
    for (size_t left = count; left > 1; left--) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        cuda_copy swapped = copies[left - 1];
        size_t other = state % left;
        copies[left - 1] = copies[other];
        copies[other] = swapped;
    }
    pthread_mutex_unlock(&mutex);
}

/* Finds the copies up to the first refused one, and stores the index of that copy. */
static int find_all(const cuda_context *context, batch *all, cuda_copy *copies, size_t *num_found) {
    int code = 0;
    for (*num_found = 0; *num_found < all->count; ++*num_found) {
        size_t i = *num_found;
        if (!all->sizes[i] || !all->targets[i] || !all->sources[i]) {
            code = sim_error(INVALID_VALUE, "copy %zu: dst=0x%llx, src=0x%llx, size=%zu", i,
                             all->targets[i], all->sources[i], all->sizes[i]);
        }
        code = code ? code : cuda_copy_find(context, &copies[i], all->targets[i], all->sources[i],
                                            all->sizes[i]);
        if (code) {
            all->refused = i;
            break;
        }
    }
    return code;
}

static int perform(const sim_call *call, const cuda_context *context, batch *all, sim_stream *stream) {
    cuda_copy *copies = malloc(all->count * sizeof *copies);
    size_t count;
    if (!copies) {
        abort();
    }
    int code = find_all(context, all, copies, &count);
    if (!code) {
        qsort(copies, count, sizeof *copies, by_target);
        if (has_dependent(copies, count)) {
            sim_violation("copies of one batch depend on each other");
        }
    }
    shuffle(copies, count);
    size_t num_issued = code ? 0 : call->fault.kind == SIM_FAULT_PARTIAL ? count / 2 : count;
    for (size_t i = num_issued; i < count; i++) {
        cuda_copy_release(&copies[i]);
    }
    if (!code) {
        code = cuda_copies_enqueue(context, stream, &call->fault, copies, num_issued);
    }
    free(copies);
    return code;
}

static int copy(const char *name, batch *all, size_t *failed, void *handle) {
    sim_call call;
    cuda_context *context;
    sim_stream *stream = NULL;
    uint64_t nbytes = 0;
    int code = cuda_enter_context(&call, name, &context);
    code = code ? code : check(all, handle);
    code = code ? code : cuda_stream_find(context, handle, &stream);
    code = code ? code : perform(&call, context, all, stream);
    if (stream) {
        sim_stream_release(stream);
    }
    if (failed) {
        *failed = all->refused;
    }
    for (size_t i = 0; i < all->count && !code; i++) {
        nbytes += all->sizes[i];
    }
    if (all->count > MOST_COPIES || (all->count > 1 && nbytes > MOST_NBYTES)) {
        sim_violation("a batch of %zu copies and %llu bytes", all->count, (unsigned long long)nbytes);
    }
    return cuda_leave(&call, code, "\"count\":%zu,\"bytes\":%llu,\"failed\":%lld,\"stream\":%llu",
                      all->count, (unsigned long long)nbytes, (long long)all->refused, ID(handle));
}

CUDA cuMemcpyBatchAsync(cuda_address *targets, cuda_address *sources, size_t *sizes, size_t count,
                        attributes *attrs, size_t *firsts, size_t num_attributes, size_t *failed,
                        void *handle) {
    batch all = {targets, sources, sizes, count, attrs, firsts, num_attributes, SIZE_MAX};
    return copy(__func__, &all, failed, handle);
}

#endif

#if KVSIM_CUDA >= 13000

/* Unlike the older call, does not report the refused copy. */
CUDA cuMemcpyBatchAsync_v2(const cuda_address *targets, const cuda_address *sources,
                           const size_t *sizes, size_t count, attributes *attrs, size_t *firsts,
                           size_t num_attributes, void *handle) {
    batch all = {targets, sources, sizes, count, attrs, firsts, num_attributes, SIZE_MAX};
    return copy(__func__, &all, NULL, handle);
}

#endif

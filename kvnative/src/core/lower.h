/* Lowering: makes a descriptor array from the segments of a plan and the base addresses of its tensor pairs, pair by
 * pair and segment by segment. A descriptor moves nbytes[segment] bytes from src_bases[pair] + src_offsets[segment] to
 * dst_bases[pair] + dst_offsets[segment]. A repeated segment has a descriptor for each repetition, a stride apart, the
 * outer level first. */
#ifndef KVN_LOWER_H
#define KVN_LOWER_H

#include <stddef.h>
#include <stdint.h>

#include "kvnative/descriptor.h"

#define KVN_MAX_REPEATS 2

typedef struct kvn_repeat {
    const uint64_t *counts; /* num_segments, each at least 1 */
    uint64_t src_stride;    /* bytes */
    uint64_t dst_stride;
} kvn_repeat;

typedef struct kvn_recipe {
    const uint64_t *src_offsets; /* num_segments each, bytes */
    const uint64_t *dst_offsets;
    const uint64_t *nbytes;
    size_t num_segments;
    kvn_repeat repeats[KVN_MAX_REPEATS]; /* outermost first */
    size_t num_repeats;
    size_t num_runs; /* descriptors of a pair: set by kvn_lower_count */
    const uint64_t *src_bases; /* num_pairs each, addresses */
    const uint64_t *dst_bases;
    size_t num_pairs;
} kvn_recipe;

/* Bytes from one column to the next: columns start on cache lines. */
size_t kvn_column_stride(size_t count);

typedef enum kvn_argument {
    KVN_ARG_NBYTES,
    KVN_ARG_SRC_OFFSETS,
    KVN_ARG_DST_OFFSETS,
    KVN_ARG_SRC_BASES,
    KVN_ARG_DST_BASES,
    KVN_NUM_ARGUMENTS,
    KVN_ARG_COUNTS = KVN_NUM_ARGUMENTS, /* + the level */
} kvn_argument;

/* The fault of a recipe: argument[index] is `value`, and may be at most `most`, which has no meaning for a count. An
 * nbytes or a count is also at least 1. */
typedef struct kvn_refusal {
    kvn_argument argument;
    size_t index;
    uint64_t value;
    uint64_t most;
} kvn_refusal;

/* Sets recipe->num_runs, and the size of the three columns. Returns -1 and the first refusal if a count is 0,
 * the counts overflow, or the columns pass PTRDIFF_MAX (then with index num_segments). */
int kvn_lower_count(kvn_recipe *recipe, size_t *nbytes, kvn_refusal *refusal);

/* Returns 0 and the bytes that the counted recipe moves, or -1 and the first refusal: an nbytes of 0, or an end of a
 * range or a total above UINT64_MAX. Does not compute each sum: every base is used with every segment, so the largest
 * base and the largest end of a segment decide. */
int kvn_lower_check(const kvn_recipe *recipe, uint64_t *total_nbytes, kvn_refusal *refusal);

/* Writes the columns of a checked recipe: dst, src and nbytes, kvn_column_stride apart. */
void kvn_lower(const kvn_recipe *recipe, uint64_t *out);

/* Allocates memory for an array, aligned to a cache line, or returns NULL. */
void *kvn_descriptors_alloc(size_t nbytes);
void kvn_descriptors_free(void *buffer);

/* Access to an array: any number of readers (NumPy views, tasks in flight) or one writer (lowering into it again). A
 * request that cannot be granted fails at once. */

#define KVN_BEING_WRITTEN (-1)

/* Returns 0, or -1 while the array is being written. */
static inline int kvn_lease_read(int64_t *leases)
{
    int64_t readers = __atomic_load_n(leases, __ATOMIC_RELAXED); /* the exchange below has acquire order */
    do {
        if (readers == KVN_BEING_WRITTEN)
            return -1;
    } while (!__atomic_compare_exchange_n(leases, &readers, readers + 1, 1, __ATOMIC_ACQUIRE,
                                          __ATOMIC_RELAXED));
    return 0;
}

static inline void kvn_lease_done(int64_t *leases)
{
    __atomic_fetch_sub(leases, 1, __ATOMIC_RELEASE);
}

/* Returns 0, or -1 while the array is read or written. */
static inline int kvn_lease_write(int64_t *leases)
{
    int64_t none = 0;
    return __atomic_compare_exchange_n(leases, &none, KVN_BEING_WRITTEN, 0, __ATOMIC_ACQUIRE,
                                       __ATOMIC_RELAXED)
               ? 0
               : -1;
}

static inline void kvn_lease_written(int64_t *leases)
{
    __atomic_store_n(leases, 0, __ATOMIC_RELEASE);
}

static inline int64_t kvn_lease_count(const int64_t *leases)
{
    return __atomic_load_n(leases, __ATOMIC_RELAXED);
}

#endif

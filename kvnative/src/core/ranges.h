/* Copies that a caller lists by addresses: sorted, and merged if both sides are adjacent. */
#ifndef KVN_RANGES_H
#define KVN_RANGES_H

#include <stddef.h>
#include <stdint.h>

#define KVN_NO_OVERLAP SIZE_MAX

typedef struct kvn_ranges {
    uint64_t *groups; /* NULL: one group */
    uint64_t *src;
    uint64_t *dst;
    uint64_t *nbytes;
} kvn_ranges;

/* Words of scratch memory that the functions below need for `count` ranges. */
size_t kvn_ranges_scratch(size_t count);

/* Sorts `from` into `to` by group and source address, and merges copies of a group that are adjacent on both sides.
 * Returns the number of copies that are left. */
size_t kvn_ranges_arrange(const kvn_ranges *from, size_t count, kvn_ranges *to, uint64_t *scratch);

/* Index of a range that shares a byte with range *other, or KVN_NO_OVERLAP. No range may be empty or pass 2**64. */
size_t kvn_ranges_overlap(const uint64_t *starts, const uint64_t *nbytes, size_t count,
                          uint64_t *scratch, size_t *other);

/* Finds the piece that holds the first byte of each range. Pieces are ascending and disjoint, from byte `firsts` to
 * byte `lasts`. Returns the number of ranges before the first one that begins in no piece, or `count`. *passes: a range
 * that was found extends beyond its piece. */
size_t kvn_ranges_locate(const uint64_t *firsts, const uint64_t *lasts, size_t num_pieces,
                         const uint64_t *starts, const uint64_t *nbytes, size_t count,
                         uint64_t *found, int *passes);

#endif

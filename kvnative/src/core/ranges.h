/* Copies that a caller lists by addresses: put in order, and merged where both sides go on. */
#ifndef KVN_RANGES_H
#define KVN_RANGES_H

#include <stddef.h>
#include <stdint.h>

#define KVN_NO_OVERLAP SIZE_MAX

typedef struct kvn_ranges {
    uint64_t *groups; /* NULL: all are of one */
    uint64_t *src;
    uint64_t *dst;
    uint64_t *nbytes;
} kvn_ranges;

/* Words of scratch memory that the functions below need for `count` ranges. */
size_t kvn_ranges_scratch(size_t count);

/* Write `from` to `to` by group, then by source address; those that go on where the one before ends, on
 * both sides and in one group, are merged with it. Returns how many are left. */
size_t kvn_ranges_arrange(const kvn_ranges *from, size_t count, kvn_ranges *to, uint64_t *scratch);

/* Index of a range that shares a byte with another, *other; KVN_NO_OVERLAP: none does. No range is empty
 * or passes 2**64. */
size_t kvn_ranges_overlap(const uint64_t *starts, const uint64_t *nbytes, size_t count,
                          uint64_t *scratch, size_t *other);

/* Position, for each range, of the piece that holds its first byte; pieces are ascending and apart, from
 * `firsts` to `lasts`, both bytes. Returns how many ranges were found before one that begins in no piece:
 * `count` if all were. *passes: whether one of those found goes on behind its piece. */
size_t kvn_ranges_locate(const uint64_t *firsts, const uint64_t *lasts, size_t num_pieces,
                         const uint64_t *starts, const uint64_t *nbytes, size_t count,
                         uint64_t *found, int *passes);

#endif

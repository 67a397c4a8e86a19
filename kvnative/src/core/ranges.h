/* Copies that a caller lists by addresses: sorted, and merged if both sides are adjacent. */
#ifndef KVN_RANGES_H
#define KVN_RANGES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define KVN_NO_OVERLAP SIZE_MAX

typedef struct kvn_ranges {
    uint64_t *groups; /* NULL: one group */
    uint64_t *src;
    uint64_t *dst;
    uint64_t *nbytes;
} kvn_ranges;

/* Words of `scratch` that the functions below with that argument need for `count` ranges. */
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

/* Memory of one side: `count` pieces, ascending and disjoint, and the extent that each belongs to (NULL: its number). */
typedef struct kvn_pieces {
    const uint64_t *firsts;
    const uint64_t *lasts;
    const uint64_t *owners;
    size_t count;
} kvn_pieces;

/* Writes own extent * num_peer_extents + peer extent of each range to `pairs`. False if a range lies in no piece, or
 * passes from one piece into the next. *alike: all pairs are equal. */
bool kvn_ranges_pair(const kvn_pieces *own, const kvn_pieces *peer, uint64_t num_peer_extents,
                     const uint64_t *local, const uint64_t *remote, const uint64_t *nbytes, size_t count,
                     uint64_t *pairs, bool *alike);

/* Index of the first range that is empty, begins at 0 or passes 2**64, at either side; or `count`. */
size_t kvn_ranges_first_bad(const uint64_t *local, const uint64_t *remote, const uint64_t *nbytes, size_t count);

/* Chosen rows of two lists of (address, size, device): `*_at` are indices, NULL for all rows in order. Returns the
 * number of rows before the first that does not exist or whose sizes differ, or `count`. */
size_t kvn_rows_choose(const uint64_t *local, size_t num_local, const uint64_t *local_at,
                       const uint64_t *remote, size_t num_remote, const uint64_t *remote_at, size_t count,
                       uint64_t *here, uint64_t *there, uint64_t *nbytes, uint64_t *total);

#endif

/* Finds the range of addresses that holds a given piece of memory. Ranges may overlap. */
#ifndef KVN_INTERVALS_H
#define KVN_INTERVALS_H

#include <stddef.h>
#include <stdint.h>

#define KVN_NO_INTERVAL SIZE_MAX

typedef struct kvn_interval {
    uint64_t first; /* `first` and `last` are inclusive, so that a range may end at 2**64 */
    uint64_t last;
    uint64_t reach; /* set by kvn_intervals_sort: the largest `last` of this interval and all before it */
    uint64_t index; /* the caller's */
} kvn_interval;

void kvn_intervals_sort(kvn_interval *items, size_t count);
/* Returns the position of an interval that holds [address, address + nbytes), nbytes >= 1; KVN_NO_INTERVAL: none does.
 * `hint` is the position to try first, any number. */
size_t kvn_intervals_find(const kvn_interval *items, size_t count, uint64_t address, uint64_t nbytes,
                          size_t hint);

/* ---- extents: ranges of equal length, given by their starts ---- */

/* Index of the first value below `least`, or `count`. */
size_t kvn_first_below(const uint64_t *values, size_t count, uint64_t least);

/* Overwrites both lists of starts, and `scratch` of as many words as both. Returns 1 if a written extent [start,
 * start + written_nbytes) shares a byte with another written extent, or with a read one. */
int kvn_extents_clash(uint64_t *written, size_t num_written, uint64_t written_nbytes,
                      uint64_t *read, size_t num_read, uint64_t read_nbytes, uint64_t *scratch);

#endif

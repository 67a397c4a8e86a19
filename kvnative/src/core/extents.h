/* Extents: equally long ranges of memory, by their starts. */
#ifndef KVN_EXTENTS_H
#define KVN_EXTENTS_H

#include <stddef.h>
#include <stdint.h>

/* Index of the first value below `least`; `count` where there is none. */
size_t kvn_first_below(const uint64_t *values, size_t count, uint64_t least);

/* Sorts both lists of starts. 1 if an extent [written, written + written_nbytes) shares a byte with
 * another of these, or with an extent that is read; two that are only read may share. */
int kvn_extents_clash(uint64_t *written, size_t num_written, uint64_t written_nbytes,
                      uint64_t *read, size_t num_read, uint64_t read_nbytes);

#endif

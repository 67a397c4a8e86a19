/* Whole rows (blocks or slots) of caches that are alike, as segments: what the planner makes of two
 * block tables, without its objects. It takes only what it is sure of; the planner refuses the rest,
 * in words. */
#ifndef KVN_ROWS_H
#define KVN_ROWS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Of both caches: how many rows each tensor has, and how many bytes a row has. */
typedef struct kvn_rows {
    uint64_t src_count;
    uint64_t dst_count;
    uint64_t stride;
    bool is_one; /* cache on both sides: no row may be read and written */
} kvn_rows;

/* Bytes of the scratch memory that kvn_rows_merge needs for `count` rows. */
size_t kvn_rows_scratch(const kvn_rows *rows, size_t count);

/* Rows src[i] to rows dst[i], in ascending order of source, then destination; those that are adjacent
 * on both sides become one segment. Writes at most `count` segments to three columns of `count`, and
 * returns how many; 0: a row is out of range, or named twice in dst, or in both
 * where that is one cache. count > 0; all columns, and
 * `scratch`, are aligned to 8 bytes. */
size_t kvn_rows_merge(const kvn_rows *rows, const int64_t *src, const int64_t *dst, size_t count,
                      void *scratch, uint64_t *src_offsets, uint64_t *dst_offsets, uint64_t *nbytes);

#endif

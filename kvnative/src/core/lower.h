/* Lowering: a plan's segments and the base addresses of its tensor pairs become the descriptor
 * array that a consumer takes. Descriptor `pair * num_segments + segment` moves nbytes[segment]
 * bytes from src_bases[pair] + src_offsets[segment] to dst_bases[pair] + dst_offsets[segment]. */
#ifndef KVN_LOWER_H
#define KVN_LOWER_H

#include <stddef.h>
#include <stdint.h>

#include "kvnative/descriptor.h"

typedef struct kvn_recipe {
    const uint64_t *src_offsets; /* num_segments each, bytes */
    const uint64_t *dst_offsets;
    const uint64_t *nbytes;
    size_t num_segments;
    const uint64_t *src_bases; /* num_pairs each, addresses */
    const uint64_t *dst_bases;
    size_t num_pairs;
} kvn_recipe;

/* A layout is a row of 64-bit words. What a word holds: */
typedef enum kvn_word {
    KVN_DST,
    KVN_SRC,
    KVN_LOCAL, /* dst or src, whichever the caller calls local */
    KVN_REMOTE,
    KVN_NBYTES,
    KVN_CONSTANT /* the layout's own */
} kvn_word;

typedef enum kvn_form {
    KVN_COLUMNS, /* word w of every row, then word w + 1 of every row: kvn_column_stride apart */
    KVN_ROWS     /* row after row */
} kvn_form;

#define KVN_MAX_WORDS 4

typedef struct kvn_layout {
    const char *name;
    const char *row_format; /* PEP 3118: names and types of a row's fields, as NumPy shows them */
    kvn_form form;
    uint32_t num_words;
    kvn_word words[KVN_MAX_WORDS];
    uint64_t constant;
} kvn_layout;

typedef enum kvn_side { KVN_LOCAL_DST, KVN_LOCAL_SRC } kvn_side;

/* NULL past the last one, or where there is none of that name. */
const kvn_layout *kvn_layout_at(size_t index);
const kvn_layout *kvn_layout_named(const char *name);

/* Bytes from one column to the next: columns start on cache lines. */
size_t kvn_column_stride(size_t count);

/* Size of the array; -1 where it passes PTRDIFF_MAX. */
int kvn_lower_nbytes(const kvn_layout *layout, size_t num_pairs, size_t num_segments,
                     size_t *nbytes);

typedef enum kvn_argument {
    KVN_ARG_NBYTES,
    KVN_ARG_SRC_OFFSETS,
    KVN_ARG_DST_OFFSETS,
    KVN_ARG_SRC_BASES,
    KVN_ARG_DST_BASES,
    KVN_NUM_ARGUMENTS
} kvn_argument;

/* What is wrong with a recipe: argument[index] is `value` and may be at most `most` (an nbytes is
 * also at least 1). */
typedef struct kvn_refusal {
    kvn_argument argument;
    size_t index;
    uint64_t value;
    uint64_t most;
} kvn_refusal;

/* 0 and the bytes that the recipe moves, or -1 and the first refusal: no nbytes is 0, and neither
 * the end of a range nor the total passes UINT64_MAX. Each value is looked at once, because with
 * every base meeting every segment the largest of both decide. */
int kvn_lower_check(const kvn_recipe *recipe, uint64_t *total_nbytes, kvn_refusal *refusal);

/* Writes the array of a checked recipe. Row words are in the machine's byte order. */
void kvn_lower(const kvn_recipe *recipe, const kvn_layout *layout, kvn_side local, void *out);

/* Memory for an array, aligned to a cache line; NULL when there is none. */
void *kvn_descriptors_alloc(size_t nbytes);
void kvn_descriptors_free(void *buffer);

#endif

/* Columns of descriptors: sums, slices, and walks over their bytes. */
#ifndef KVNATIVE_CORE_COLUMNS_H
#define KVNATIVE_CORE_COLUMNS_H

#include <stdbool.h>

#include "kvnative/descriptor.h"

/* Total bytes; false if they do not fit in 64 bits. */
static inline bool kvn_columns_total(const kvn_columns *columns, uint64_t *total)
{
    uint64_t sum = 0;
    bool overflow = false;

    for (size_t i = 0; i < columns->count; i++)
        overflow |= __builtin_add_overflow(sum, columns->nbytes[i], &sum);
    *total = sum;
    return !overflow;
}

/* A slice with the descriptors [first, last), without the end callback of the batch. */
static inline kvn_columns kvn_columns_slice(const kvn_columns *columns, uint64_t first, uint64_t last)
{
    kvn_columns slice = *columns;

    slice.dst += first;
    slice.src += first;
    slice.nbytes += first;
    slice.first += first;
    slice.count = last - first;
    slice.end = NULL;
    return slice;
}

/* Position of a walk. */
typedef struct kvn_cursor {
    uint64_t index;
    uint64_t skip; /* bytes of that descriptor */
} kvn_cursor;

/* Advances by nbytes, and past descriptors that end there or are empty. */
static inline void kvn_cursor_advance(kvn_cursor *at, const kvn_columns *columns, uint64_t nbytes)
{
    while (nbytes > 0 || (at->index < columns->count && columns->nbytes[at->index] == at->skip)) {
        const uint64_t left = columns->nbytes[at->index] - at->skip;
        if (nbytes < left) {
            at->skip += nbytes;
            return;
        }
        nbytes -= left;
        *at = (kvn_cursor){at->index + 1, 0};
    }
}

#endif

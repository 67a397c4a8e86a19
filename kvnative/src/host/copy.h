/* The ways to copy host memory, and which one suits a transfer (docs/adr/0002-copy-strategies.md).
 *
 * Nothing here keeps state: what the processor can do is asked of it each time a backend is made. */
#ifndef KVNATIVE_HOST_COPY_H
#define KVNATIVE_HOST_COPY_H

#include <stddef.h>
#include <stdint.h>

typedef enum kvn_strategy {
    KVN_COPY_AUTO, /* by the sizes of a transfer: kvn_copy_choose */
    KVN_COPY_MEMCPY,
    KVN_COPY_NON_TEMPORAL, /* stores that bypass the caches */
    KVN_COPY_MOVSB,  /* the processor's own block move */
    KVN_NUM_STRATEGIES
} kvn_strategy;

/* "auto", "memcpy", "non-temporal", "movsb"; NULL for none of them. */
const char *kvn_strategy_name(kvn_strategy strategy);

/* Copies between ranges that do not overlap; any size, any alignment. */
typedef void (*kvn_copy)(void *dst, const void *src, size_t nbytes);

/* The function of a strategy (not AUTO), as good as this processor allows: memcpy where it has no
 * non-temporal stores or no `rep movsb`. */
kvn_copy kvn_copy_function(kvn_strategy strategy);
/* Non-temporal stores become visible to other threads in order only after this. */
void kvn_copy_fence(void);

#endif

/* The ways to copy host memory, as one table; which one suits a transfer is said by a kvn_tuning
 * (tuning.h, docs/internals/adr/0002-copy-strategies.md).
 *
 * Nothing here keeps state: what the processor can do is asked of it when it is needed. */
#ifndef KVNATIVE_HOST_COPY_H
#define KVNATIVE_HOST_COPY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum kvn_strategy {
    KVN_COPY_MEMCPY,
    KVN_COPY_MOVSB,     /* the processor's own block move */
    KVN_COPY_NT_SSE2,   /* non-temporal: stores that bypass the caches, 16 bytes each */
    KVN_COPY_NT_AVX2,   /* 32 bytes */
    KVN_COPY_NT_AVX512, /* 64 bytes */
    KVN_COPY_NT_LDNP,   /* of aarch64: LDNP and STNP, which hint the same */
    KVN_COPY_DC_ZVA,    /* of aarch64: DC ZVA allocates a line of the destination without reading it */
    KVN_NUM_STRATEGIES
} kvn_strategy;

/* Copies between ranges that do not overlap; any size, any alignment. */
typedef void (*kvn_copy)(void *dst, const void *src, size_t nbytes);

/* "memcpy", "movsb", "nt-sse2", ...; NULL for none of them. */
const char *kvn_strategy_name(unsigned strategy);
/* The function of a strategy; NULL where this processor, or this system, cannot execute it. */
kvn_copy kvn_copy_function(unsigned strategy);
/* What a processor needs to have for it: "AVX-512", for messages. */
const char *kvn_strategy_needs(unsigned strategy);
/* The widest non-temporal strategy here; memcpy where there is none. */
kvn_strategy kvn_widest_non_temporal(void);
/* Non-temporal stores become visible to other threads in order only after this. */
void kvn_copy_fence(void);

#endif

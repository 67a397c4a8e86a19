/* The sizes by which a pool chooses a way to copy, and the sizes of pieces. */
#ifndef KVNATIVE_HOST_TUNING_H
#define KVNATIVE_HOST_TUNING_H

#include <stdint.h>

/* Built in, measured on other machines: docs/internals/adr/0002-copy-strategies.md. */
#define KVN_BYPASS_NBYTES (UINT64_C(1) << 20)
#define KVN_PIECE_NBYTES (UINT64_C(512) << 10)

typedef struct kvn_tuning {
    uint64_t bypass_nbytes; /* batches of at least this size are written past the caches */
    uint64_t piece_nbytes;  /* maximum size of a piece; at least KVN_PIECE_MIN */
} kvn_tuning;

#endif

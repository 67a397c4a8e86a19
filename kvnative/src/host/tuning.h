/* What suits a machine: which way of copying for which size, and in what pieces. */
#ifndef KVNATIVE_HOST_TUNING_H
#define KVNATIVE_HOST_TUNING_H

#include "host/copy.h"

typedef struct kvn_tuning {
    unsigned cached;    /* kvn_strategy of batches that the caches hold */
    unsigned bypassing; /* of those from `bypass_nbytes` on */
    uint64_t bypass_nbytes;
    uint64_t piece_nbytes; /* the most that a thread claims at once; at least KVN_PIECE_MIN */
} kvn_tuning;

/* What is built in, measured on other machines: docs/internals/adr/0002-copy-strategies.md. */
void kvn_tuning_builtin(kvn_tuning *tuning);

#endif

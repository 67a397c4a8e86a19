/* What suits a machine: which way of copying for which size, and in what pieces; and how to measure
 * it. Who compares and decides is kvplan/execution/calibration.py. */
#ifndef KVNATIVE_HOST_TUNING_H
#define KVNATIVE_HOST_TUNING_H

#include "host/copy.h"
#include "kvnative/descriptor.h"

typedef struct kvn_tuning {
    unsigned cached;    /* kvn_strategy of batches that the caches hold */
    unsigned bypassing; /* of those from `bypass_nbytes` on */
    uint64_t bypass_nbytes;
    uint64_t piece_nbytes; /* the most that a thread claims at once; at least KVN_PIECE_MIN */
} kvn_tuning;

/* What is built in, measured on other machines: docs/adr/0002-copy-strategies.md. */
void kvn_tuning_builtin(kvn_tuning *tuning);

/* One of what is compared. */
typedef struct kvn_candidate {
    kvn_tuning tuning;
    unsigned threads;
} kvn_candidate;

/* Copies the batch in `rounds` with each of `count` candidates in turn; ns[round * count + i] is what
 * candidate i took in a round: the fastest of three copies in a row, so that it has found the caches
 * as it leaves them itself, and not as another candidate did. Works on threads of its own, if `background` at the lowest
 * priority. Ends early once CLOCK_MONOTONIC is past `deadline_ns`. Returns how many rounds are
 * whole; -1 with errno set: no threads, or no memory. `share` is how much of the cores that it
 * wanted it was given: far below 1, others have them. */
int kvn_tuning_measure(const kvn_candidate *candidates, unsigned count, const kvn_columns *batch,
                       unsigned rounds, bool background, int64_t deadline_ns, int64_t *ns,
                       double *share);

#endif

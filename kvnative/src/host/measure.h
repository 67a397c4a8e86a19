/* How long transfers take with one tuning and with another. Who compares and decides is
 * kvplan/execution/calibration.py. */
#ifndef KVNATIVE_HOST_MEASURE_H
#define KVNATIVE_HOST_MEASURE_H

#include <stdbool.h>

#include "host/tuning.h"
#include "kvnative/descriptor.h"

/* A tuning to compare. */
typedef struct kvn_candidate {
    kvn_tuning tuning;
    unsigned threads;
} kvn_candidate;

/* Copies the batch with each of `count` candidates in turn, for `rounds` rounds, on threads of its own. ns[round *
 * count + i] is the time of candidate i: the fastest of three copies in a row, so that it finds the caches as it leaves
 * them itself. Ends early once CLOCK_MONOTONIC is past `deadline_ns`. Returns the number of complete rounds; -1 with
 * errno: no threads, or no memory. `share` is the part of the wanted core time that it got: far below 1, others use the
 * cores. */
int kvn_measure(const kvn_candidate *candidates, unsigned count, const kvn_columns *batch,
                unsigned rounds, int64_t deadline_ns, int64_t *ns, double *share);

#endif

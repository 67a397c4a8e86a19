/* Measures transfers with different tunings. kvplan/execution/calibration.py compares the times and decides. */
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

/* Copies with each of `count` candidates in turn, for `rounds` rounds, on separate threads. Each copy moves the next
 * `at_once` descriptors of the batch, which has as many at least. ns[round * count + i] is the time of candidate i: the
 * fastest of three copies in a row. Ends early once CLOCK_MONOTONIC is past `deadline_ns`. Returns the number of
 * complete rounds; -1 with errno: no threads, or no memory. `share` is the received part of the wanted processor time:
 * far below 1 if others use the cores. */
int kvn_measure(const kvn_candidate *candidates, unsigned count, const kvn_columns *batch,
                size_t at_once, unsigned rounds, int64_t deadline_ns, int64_t *ns, double *share);

#endif

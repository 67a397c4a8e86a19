/* How long transfers take with one tuning and with another. Who compares and decides is
 * kvplan/execution/calibration.py. */
#ifndef KVNATIVE_HOST_MEASURE_H
#define KVNATIVE_HOST_MEASURE_H

#include <stdbool.h>

#include "host/tuning.h"
#include "kvnative/descriptor.h"

/* One of what is compared. */
typedef struct kvn_candidate {
    kvn_tuning tuning;
    unsigned threads;
} kvn_candidate;

/* Copies the batch in `rounds` with each of `count` candidates in turn; ns[round * count + i] is what
 * candidate i took in a round: the fastest of three copies in a row, so that it has found the caches
 * as it leaves them itself, and not as another candidate did. Works on threads of its own. Ends early
 * once CLOCK_MONOTONIC is past `deadline_ns`. Returns how many rounds are whole; -1 with errno set: no threads, or no memory. `share` is how
 * much of the cores that it wanted it was given: far below 1, others have them. */
int kvn_measure(const kvn_candidate *candidates, unsigned count, const kvn_columns *batch,
                unsigned rounds, int64_t deadline_ns, int64_t *ns, double *share);

#endif

/* The insides of kvn_ucx_serve: for the files of the gathered protocol alone. */
#ifndef KVN_UCX_SERVE_STATE_H
#define KVN_UCX_SERVE_STATE_H

#include <stdatomic.h>

#include "ucx_peer.h"

/* A range that is being removed. */
typedef struct kvn_ucx_removal kvn_ucx_removal;

struct kvn_ucx_removal {
    kvn_ucx_errand errand; /* first */
    kvn_ucx_serve *serve;
    kvn_ucx_removal *next;
    uint64_t slot;
    bool is_held;        /* the slot holds a range */
    atomic_bool drained; /* no send reads from it */
};

struct kvn_ucx_serve {
    kvn_ucx_part part; /* first */
    kvn_ucx_end *end;
    kvn_ucx_ranges ranges;
    kvn_ucx_messages messages;
    kvn_ucx_peer *ready; /* the ring */
    kvn_ucx_removal *removals;
    atomic_uint_fast64_t pulled_nbytes, pushed_nbytes, parts, refused, broken, stalled;
};

static inline void kvn_ucx_add(atomic_uint_fast64_t *counter, uint64_t number)
{
    atomic_fetch_add_explicit(counter, number, memory_order_relaxed);
}

#endif

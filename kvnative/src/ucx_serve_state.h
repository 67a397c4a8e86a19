/* The insides of kvn_ucx_serve: for the files of the gathered protocol alone. */
#ifndef KVN_UCX_SERVE_STATE_H
#define KVN_UCX_SERVE_STATE_H

#include <stdatomic.h>

#include "copy.h"
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
    kvn_copy stream; /* past the caches */
    atomic_uint_fast64_t pulled_nbytes, pushed_nbytes, parts, refused, broken, stalled;
};

/* How bytes that came are written where they belong. What fills messages outgrows the caches, where it lies
 * once already, in the transport's segment: written past them it costs half. */
static inline kvn_copy kvn_ucx_copy_for(const kvn_ucx_serve *self, uint64_t nbytes)
{
    return nbytes < KVN_WIRE_DATA_NBYTES / 2 ? kvn_copy_function(KVN_COPY_MEMCPY) : self->stream;
}

static inline void kvn_ucx_add(atomic_uint_fast64_t *counter, uint64_t number)
{
    atomic_fetch_add_explicit(counter, number, memory_order_relaxed);
}

#endif

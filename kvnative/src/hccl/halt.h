/* Why a transfer over a communicator has to stop: its request was aborted, or the peer given up. */
#ifndef KVN_HCCL_HALT_H
#define KVN_HCCL_HALT_H

#include <stdatomic.h>
#include <stdbool.h>

typedef struct kvn_halt {
    const atomic_int *stop;       /* the request's */
    const atomic_bool *cancelled; /* the communicator's */
} kvn_halt;

static inline bool kvn_is_halted(const kvn_halt *halt)
{
    return atomic_load(halt->stop) || atomic_load(halt->cancelled);
}

#endif

/* The gathered protocol of an end: serves what peers ask for out of the ranges that are registered here,
 * and sends what this end's own requests (ucx_gathered.h) have to send; to each link in turn. It is a part
 * of the end and goes with it.
 *
 * Nobody in this process takes part in a transfer: all runs where the end's worker is driven. */
#ifndef KVN_UCX_SERVE_H
#define KVN_UCX_SERVE_H

#include "striped.h"
#include "ucx_end.h"

#define KVN_UCX_MAX_LANES KVN_MAX_STRIPES /* a batch is striped over the lanes of a link */

typedef struct kvn_ucx_serve kvn_ucx_serve;

/* For ranges in slots [0, max_ranges), 1 to 2**24. Before the end has any link. NULL with the reason; else
 * the end owns it. */
kvn_ucx_serve *kvn_ucx_serve_create(kvn_ucx_end *end, uint32_t max_ranges, kvn_failure *failure);

/* From here on peers may read [address, address + nbytes), and write if `writable`, by naming the slot
 * and the generation. The memory should be mapped, and stay so until the range is removed: what is not when
 * a peer asks for it is refused (ucx_mapped.h). */
int kvn_ucx_serve_add_range(kvn_ucx_serve *self, uint64_t slot, uint64_t address, uint64_t nbytes,
                            bool writable, uint64_t generation, kvn_failure *failure);

/* Peers reach it no more, by none of these ends, 1 to KVN_UCX_MAX_LANES: none writes to it, and no send reads
 * from it. Waits for those in flight, at most about half a second; then the links that do not take them are
 * failed, and waited for as long again. Should UCX not have given the sends up by then, it may read the memory
 * until the connection ends, for a peer that learns of no success. KVN_INVALID: the slot of the first holds no
 * range. Under no end's turn. */
int kvn_ucx_serve_remove_range(kvn_ucx_serve *const *all, size_t count, uint64_t slot,
                               kvn_failure *failure);

/* What has been counted; read at any time. */
typedef struct kvn_ucx_served {
    uint64_t pulled_nbytes; /* that peers have read */
    uint64_t pushed_nbytes; /* that peers have written */
    uint64_t parts;         /* of pulls, answered */
    uint64_t refused;       /* pieces that lay in no range, or in one not registered any more */
    uint64_t broken;        /* links failed for a message that is not allowed */
    uint64_t stalled;       /* links failed for not taking what had to be sent */
} kvn_ucx_served;

void kvn_ucx_serve_count(const kvn_ucx_serve *self, kvn_ucx_served *out);

#endif

/* A transfer on its way: made and ended by the backend; from begin to finish a task of the worker.
 *
 * Before a transfer and after it the generations of the ranges that it uses are read from the peer's table: if
 * one is not what the peer has published, it has ended the registration, and the transfer is KVN_UNMAPPED.
 * The check before keeps requests for memory that is gone off the wire, where they would end the endpoint.
 * The generations of leases that a transfer is made with are read beside them. */
#ifndef KVN_UCX_TRANSFER_H
#define KVN_UCX_TRANSFER_H

#include "kvnative/backend.h"
#include "ucx/endpoint.h"
#include "ucx/region.h"

#define KVN_UCX_WINDOW 128 /* operations of one transfer in flight */

/* A range of the peer's: its generation, in which slot of the peer's table, and which of the keys opens it. */
typedef struct kvn_ucx_peer_range {
    uint64_t address;
    uint64_t nbytes;
    uint64_t slot;
    uint64_t generation;
    uint64_t key;
} kvn_ucx_peer_range;

/* A lease of the peer: its slot in the peer's table, its generation, and its name in messages. */
typedef struct kvn_ucx_lease {
    uint64_t slot;
    uint64_t generation;
    char name[128];
} kvn_ucx_lease;

/* Between which memory the transfers of one backend move bytes, and over which endpoint. */
typedef struct kvn_ucx_route {
    kvn_ucx_endpoint *endpoint; /* held */
    kvn_direction direction;
    int local_type;
    kvn_ucx_peer_range *ranges;
    kvn_interval *places; /* of the ranges, sorted */
    uint64_t num_ranges;
    kvn_ucx_keys keys;
    kvn_ucx_lease *leases; /* that each transfer is made with */
    uint64_t num_leases;
} kvn_ucx_route;

/* The phases of a transfer, in order. Large writes go in rounds, each with a check before it. */
typedef enum kvn_ucx_phase {
    KVN_UCX_CHECKING_BEFORE,
    KVN_UCX_MOVING,
    KVN_UCX_FLUSHING, /* puts, also of a transfer that stops */
    KVN_UCX_CHECKING_AFTER,
    KVN_UCX_DONE
} kvn_ucx_phase;

/* A range that a transfer uses, or a lease. */
typedef struct kvn_ucx_use {
    const kvn_ucx_peer_range *range; /* NULL: a lease */
    const kvn_ucx_lease *lease;
    uint64_t first; /* descriptor that lies in it; of a lease KVN_NO_DESCRIPTOR */
    uint64_t slot;
    uint64_t expected; /* generation */
    uint64_t found;    /* that its slot of the peer's table held */
} kvn_ucx_use;

/* One in flight. */
typedef struct kvn_ucx_operation {
    kvn_request *request;
    uint64_t descriptor; /* KVN_NO_DESCRIPTOR: a generation, or a flush */
    uint64_t nbytes;
    struct kvn_ucx_operation *next; /* the next free one */
} kvn_ucx_operation;

struct kvn_request {
    const kvn_ucx_route *route;
    kvn_columns batch;
    uint64_t total; /* bytes */
    kvn_ucx_snapshot *snapshot;
    kvn_ucx_use *uses;
    uint64_t num_uses;
    kvn_ucx_work beginning;
    /* with the progress lock */
    kvn_ucx_task task;
    kvn_ucx_phase phase;
    unsigned ticket;     /* of a put: 1 + its place among the worker's; 0: not announced yet */
    uint64_t cursor;     /* of the uses or flushes: the next to post in this phase */
    uint64_t descriptor; /* that is posted next */
    uint64_t skip;       /* bytes of it that are posted */
    uint64_t round_left; /* bytes of puts until the next check */
    size_t local_hint;
    size_t remote_hint;
    unsigned in_flight;
    uint64_t bytes_in_flight;
    int why;             /* KVN_OK, or the status for which it was given up */
    kvn_failure failure; /* status KVN_OK: none */
    uint64_t failed;
    kvn_ucx_operation *free;
    kvn_ucx_operation operations[KVN_UCX_WINDOW];
    /* for all */
    atomic_uint_fast64_t moved;
    atomic_bool finished; /* set last: from then on its waiter may free it */
    kvn_report report;
};

/* With the progress lock: begins the request that `context` is. */
void kvn_ucx_begin_transfer(void *context);

/* Which of the ranges holds a remote piece; KVN_NO_INTERVAL: none. `hint` is the caller's, for the next call. */
static inline size_t kvn_ucx_range_of(const kvn_ucx_route *route, uint64_t address,
                                      uint64_t nbytes, size_t *hint)
{
    const size_t found =
        kvn_intervals_find(route->places, route->num_ranges, address, nbytes, *hint);
    if (found == KVN_NO_INTERVAL)
        return found;
    *hint = found;
    return route->places[found].index;
}

#endif

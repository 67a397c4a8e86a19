/* A transfer in flight: made and ended by the backend; from begin to finish a task of the worker.
 *
 * Before and after a transfer, the generations of its ranges, and of its leases, are read from the peer's table. If one
 * differs from the published generation, the peer has ended the registration, and the transfer ends with KVN_UNMAPPED.
 * The first check keeps requests for freed memory off the wire, where they would end the endpoint. */
#ifndef KVN_UCX_TRANSFER_H
#define KVN_UCX_TRANSFER_H

#include "kvnative/backend.h"
#include "ucx/endpoint.h"
#include "ucx/region.h"

#define KVN_UCX_WINDOW 128 /* simultaneous operations of one transfer */

/* A range of the peer: its slot in the peer's table, its generation, and the index of its key. */
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

/* The endpoint and the memory of the transfers of one backend. */
typedef struct kvn_ucx_route {
    kvn_ucx_endpoint *endpoint; /* held */
    kvn_direction direction;
    int local_type;
    kvn_ucx_peer_range *ranges;
    kvn_interval *places; /* of the ranges, sorted */
    uint64_t num_ranges;
    kvn_ucx_keys keys;
    kvn_ucx_lease *leases; /* of each transfer */
    uint64_t num_leases;
} kvn_ucx_route;

/* The phases of a transfer, in order. Large writes go in rounds, each with a check before it. */
typedef enum kvn_ucx_phase {
    KVN_UCX_CHECKING_BEFORE,
    KVN_UCX_MOVING,
    KVN_UCX_FLUSHING, /* puts, also of an aborted transfer */
    KVN_UCX_CHECKING_AFTER,
    KVN_UCX_DONE
} kvn_ucx_phase;

/* A range that a transfer uses, or a lease. */
typedef struct kvn_ucx_use {
    const kvn_ucx_peer_range *range; /* NULL: a lease */
    const kvn_ucx_lease *lease;
    uint64_t first; /* a descriptor in the range; for a lease KVN_NO_DESCRIPTOR */
    uint64_t slot;
    uint64_t expected; /* generation */
    uint64_t found;    /* generation in the peer's table */
} kvn_ucx_use;

/* An operation in flight. */
typedef struct kvn_ucx_operation {
    kvn_request *request;
    uint64_t descriptor; /* KVN_NO_DESCRIPTOR: a generation, or a flush */
    uint64_t nbytes;
    struct kvn_ucx_operation *next; /* in the list of free operations */
} kvn_ucx_operation;

struct kvn_request {
    const kvn_ucx_route *route;
    kvn_columns batch;
    uint64_t total; /* bytes */
    kvn_ucx_snapshot *snapshot;
    kvn_ucx_use *uses;
    uint64_t num_uses;
    kvn_ucx_work beginning;
    /* guarded by the progress lock */
    kvn_ucx_task task;
    kvn_ucx_phase phase;
    unsigned ticket;     /* of a put: 1 + its index in the worker's tickets; 0: not announced yet */
    uint64_t cursor;     /* the next use or flush to post in this phase */
    uint64_t descriptor; /* the next one to post */
    uint64_t skip;       /* its bytes that were posted */
    uint64_t round_left; /* bytes of puts until the next check */
    size_t local_hint;
    size_t remote_hint;
    unsigned in_flight;
    uint64_t bytes_in_flight;
    int why;             /* KVN_OK, or the status of an abort */
    kvn_failure failure; /* status KVN_OK: none */
    uint64_t failed;
    kvn_ucx_operation *free;
    kvn_ucx_operation operations[KVN_UCX_WINDOW];
    /* for all threads */
    atomic_uint_fast64_t moved;
    atomic_bool finished; /* set last: from then on the waiter may free the request */
    kvn_report *report;   /* written before that */
};

/* Begins the request `context`. Call it with the progress lock. */
void kvn_ucx_begin_transfer(void *context);

/* Returns the index of the range that holds a remote piece; KVN_NO_INTERVAL: none. The caller keeps `hint`. */
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

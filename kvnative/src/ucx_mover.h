/* A one-sided transfer on its way: shared by the backend (ucx_one_sided.c), which makes and ends requests, and
 * the mover (ucx_mover.c), which posts their operations under the turn. */
#ifndef KVN_UCX_MOVER_H
#define KVN_UCX_MOVER_H

#include "ucx_one_sided.h"

#define KVN_UCX_WINDOW 128 /* operations of one request in flight */

typedef struct kvn_ucx_one_sided {
    kvn_backend base;
    kvn_ucx_mover *mover;
    kvn_ucx_regions *regions;
    kvn_ucx_link *link; /* held */
    kvn_direction direction;
    int local_type;
    uint64_t board;
    kvn_ucp_rkey_h board_key;
    kvn_ucx_range *ranges;
    kvn_interval *places; /* of the ranges, sorted */
    uint64_t num_ranges;
    kvn_ucp_rkey_h *keys;
    uint64_t num_keys;
    pthread_mutex_t error_mutex;
    char error[256];       /* message of the latest failed request */
    char error_shown[256]; /* the copy of it that last_error returns */
} kvn_ucx_one_sided;

/* What a request does, one after the other. */
typedef enum kvn_ucx_phase {
    KVN_UCX_LOOKING_BEFORE,
    KVN_UCX_MOVING,
    KVN_UCX_FLUSHING, /* puts */
    KVN_UCX_LOOKING_AFTER,
    KVN_UCX_THROUGH
} kvn_ucx_phase;

/* A range that a request uses. */
typedef struct kvn_ucx_use {
    uint64_t range;
    uint64_t first; /* descriptor that lies in it */
    uint64_t word;  /* what its place on the board held */
} kvn_ucx_use;

/* One in flight. */
typedef struct kvn_ucx_operation {
    kvn_request *request;
    uint64_t descriptor; /* KVN_NO_DESCRIPTOR: a word of the board, or a flush */
    uint64_t nbytes;
    struct kvn_ucx_operation *next; /* among those that are free */
} kvn_ucx_operation;

struct kvn_request {
    kvn_ucx_one_sided *self;
    kvn_columns batch;
    uint64_t total; /* bytes */
    kvn_ucx_atlas *atlas;
    kvn_ucx_use *uses;
    uint64_t num_uses;
    kvn_ucx_errand beginning;
    /* under the turn */
    kvn_ucx_open open;
    kvn_request *next; /* the mover's */
    kvn_request *previous;
    kvn_ucx_phase phase;
    uint64_t cursor; /* descriptor, or use, that is posted next */
    uint64_t skip;   /* bytes of it that are posted */
    size_t local_hint;
    size_t remote_hint;
    unsigned in_flight;
    uint64_t bytes_in_flight;
    int why; /* KVN_OK, or for what it was given up */
    kvn_failure failure; /* status KVN_OK: none */
    uint64_t failed;
    kvn_ucx_operation *free;
    kvn_ucx_operation operations[KVN_UCX_WINDOW];
    /* for all */
    atomic_uint_fast64_t moved;
    atomic_bool finished; /* set last: from then on the request is who waits for it */
    kvn_report report;
};

/* ---- ucx_move_request.c: rows of the vtable ---- */

int kvn_ucx_move_submit(kvn_backend *base, const kvn_columns *batch, kvn_request **out,
                        kvn_report *report);
int kvn_ucx_move_poll(kvn_backend *base, kvn_request *request, kvn_report *report);
int kvn_ucx_move_wait(kvn_backend *base, kvn_request *request, int64_t deadline_ns,
                      kvn_report *report);
int kvn_ucx_move_abort(kvn_backend *base, kvn_request *request, int why, kvn_report *report);
void kvn_ucx_move_release(kvn_backend *base, kvn_request *request);

/* ---- ucx_mover.c ---- */

/* Under the turn: puts it among those that move, and takes the first step. */
void kvn_ucx_mover_begin(kvn_ucx_mover *self, kvn_request *request);
/* Under the turn: nothing more is posted for it. */
void kvn_ucx_mover_give_up(kvn_request *request, int why);

/* ---- ucx_operation.c ---- */

/* Posts what the cursor stands at, and moves that on. */
void kvn_ucx_post_piece(kvn_request *request, kvn_ucp_ep_h ep);
void kvn_ucx_post_look(kvn_request *request, kvn_ucp_ep_h ep);
void kvn_ucx_post_flush(kvn_request *request, kvn_ucp_ep_h ep);

/* The first failure counts. */
void kvn_ucx_move_fail(kvn_request *request, uint64_t descriptor, const kvn_failure *failure);
/* Which of the backend's ranges holds a remote piece; KVN_NO_INTERVAL: none. */
static inline size_t kvn_ucx_range_of(const kvn_ucx_one_sided *self, uint64_t address,
                                      uint64_t nbytes, size_t *hint)
{
    const size_t found = kvn_intervals_find(self->places, self->num_ranges, address, nbytes, *hint);
    if (found == KVN_NO_INTERVAL)
        return found;
    *hint = found;
    return self->places[found].index;
}

#endif

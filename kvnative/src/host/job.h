/* A job: one batch, moved piece by piece. This file has the code without threads; pool.h runs jobs on several. */
#ifndef KVNATIVE_HOST_JOB_H
#define KVNATIVE_HOST_JOB_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "core/columns.h"
#include "core/list.h"
#include "host/numa.h"
#include "kvnative/backend.h"

/* The least size that a piece aims at. An abort waits for the piece that each thread is moving. */
#define KVN_PIECE_MIN (64u << 10)
#define KVN_PIECE_TUNED 0 /* the piece size of the pool's tuning */

typedef struct kvn_pool kvn_pool;

/* A part of a batch: descriptors [first, last), beginning `skip` bytes into the first and
 * `nbytes` long in total; the next piece has the remaining bytes of the last descriptor. */
typedef struct kvn_piece {
    uint64_t first;
    uint64_t last;
    uint64_t skip;
    uint64_t nbytes;
    uint64_t batch_nbytes; /* bytes of the whole batch, to choose the way to copy */
} kvn_piece;

/* The fault that stopped a piece. Its descriptors [first, failed) are moved, [failed, last) are not confirmed. */
typedef struct kvn_fault {
    int32_t code;        /* errno or similar; 0: none */
    uint64_t failed;     /* index in the batch; preset to the piece's first */
    uint64_t bytes_done; /* moved bytes of the piece before the fault; preset to 0 */
    char message[256];
} kvn_fault;

/* Moves one piece, on any thread. Returns KVN_OK, or a failure status with `fault` filled in. */
typedef int (*kvn_move)(void *context, const kvn_columns *batch, const kvn_piece *piece,
                        kvn_fault *fault);

/* Maximum size of a piece, and whether the node of its destination matters. */
typedef struct kvn_piece_limits {
    uint64_t descriptors; /* at least 1; for example IOV_MAX */
    uint64_t nbytes;      /* at least KVN_PIECE_MIN, or KVN_PIECE_TUNED */
    bool by_node;         /* the destination is memory of this process */
} kvn_piece_limits;

/* The descriptors of a job that are on one node; all of them if the pool has no nodes. */
typedef struct kvn_share {
    uint64_t cursor;      /* the first that is not completely claimed; the job's count: none */
    uint64_t cursor_skip; /* its claimed bytes */
    uint64_t unclaimed;   /* bytes */
} kvn_share;

/* A job in a pool. Embed it in a request; it must stay in place until released. The fields belong to pool.c, and the
 * pool's mutex guards them unless a comment says otherwise. */
typedef struct kvn_job {
    kvn_columns batch;
    kvn_move move;
    void *context;
    kvn_piece_limits limits;
    kvn_pool *pool;           /* NULL: moved by kvn_job_run */
    kvn_node queued;          /* in the pool's queue of jobs with unclaimed descriptors */
    pthread_cond_t changed;    /* the job has finished, or a waiter has a place */
    kvn_share whole;
    kvn_share *shares;         /* one for each node, and one for descriptors without one; or `whole` alone */
    uint8_t *nodes;            /* of each descriptor: the share that it is in; NULL: `whole` */
    unsigned num_shares;
    unsigned num_open;         /* shares with unclaimed descriptors */
    uint64_t unclaimed;        /* bytes */
    uint64_t total;            /* bytes */
    uint32_t in_motion;        /* claimed pieces that have not ended */
    uint32_t waiters;          /* threads that wait for `changed` */
    uint32_t called;           /* of these, threads that were woken for a free place but do not run yet */
    int64_t caller_ns;         /* end of the caller's submit or latest wait; 0: it serves other batches */
    atomic_bool finished;        /* poll reads it without the mutex: release and acquire, for `report` */
    atomic_uint_fast64_t moved;  /* bytes; poll reads it without the mutex: relaxed, only a count */
    kvn_report *report;          /* the outcome; stable once finished */
} kvn_job;

/* `context` is passed to `move`. The columns must outlive the outcome, and the report the job. */
void kvn_job_init(kvn_job *job, const kvn_columns *batch, kvn_move move, void *context,
                  kvn_piece_limits limits, kvn_report *report);

/* Moves the whole job on the calling thread, without the pool; finished on return. */
void kvn_job_run(kvn_job *job, uint64_t total);

/* ---- for pool.c, under the pool's mutex ---- */

void kvn_job_start(kvn_job *job, uint64_t total);
/* Gives each descriptor to the share of its node; without the mutex, after kvn_job_start. A share's descriptors come in
 * runs of KVN_PIECE_MIN bytes or more, so that memory that alternates between nodes is not moved in tiny pieces. If
 * memory is short, the job stays whole. kvn_job_unshare frees the shares. */
void kvn_job_share(kvn_job *job, kvn_numa *numa);
void kvn_job_unshare(kvn_job *job);
static inline bool kvn_job_has_unclaimed(const kvn_job *job) { return job->num_open > 0; }
/* Unclaimed bytes on a node. */
static inline uint64_t kvn_job_unclaimed_on(const kvn_job *job, unsigned node)
{
    return job->nodes ? job->shares[node].unclaimed : job->unclaimed;
}
static inline bool kvn_job_is_finished(const kvn_job *job)
{
    return atomic_load_explicit(&job->finished, memory_order_acquire);
}
/* Takes the next piece, of a size for `threads` threads, for a thread on `node`: a piece of that node, else one without
 * a node, else of the node with the most bytes. A descriptor must be unclaimed. */
void kvn_job_claim(kvn_job *job, unsigned threads, unsigned node, kvn_piece *piece);
/* Calls `move`; without the mutex. */
int kvn_job_move(kvn_job *job, const kvn_piece *piece, kvn_fault *fault);
/* Notes that the piece failed, and abandons the unclaimed rest. */
void kvn_job_fail(kvn_job *job, const kvn_piece *piece, int status, kvn_fault *fault);
/* Ends the claiming of pieces; the unclaimed rest stays unconfirmed. */
void kvn_job_abandon(kvn_job *job);
/* Settles the report. No piece may be unclaimed or in motion. */
void kvn_job_finish(kvn_job *job);

#endif

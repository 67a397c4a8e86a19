/* A job: one batch, moved piece by piece. This file has the parts without threads; pool.h runs jobs on several. */
#ifndef KVNATIVE_HOST_JOB_H
#define KVNATIVE_HOST_JOB_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "core/columns.h"
#include "core/list.h"
#include "kvnative/backend.h"

/* Bytes of a piece. An abort waits for the piece that each thread is moving. */
#define KVN_PIECE_MIN (64u << 10)
#define KVN_PIECE_TUNED 0 /* as the pool is tuned */

typedef struct kvn_pool kvn_pool;

/* A part of a batch: descriptors [first, last), beginning `skip` bytes into the first and
 * `nbytes` long in all; the last descriptor goes on in the next piece if bytes of it are left. */
typedef struct kvn_piece {
    uint64_t first;
    uint64_t last;
    uint64_t skip;
    uint64_t nbytes;
    uint64_t batch_nbytes; /* bytes of the whole batch, which pass through the caches */
} kvn_piece;

/* Why a piece stopped: descriptors [first, failed) of it are moved, [failed, last) are not. */
typedef struct kvn_fault {
    int32_t code;        /* errno and the like; 0 when there is none */
    uint64_t failed;     /* index in the batch; preset to the piece's first */
    uint64_t bytes_done; /* bytes of the piece that were moved before the fault; preset to 0 */
    char message[256];
} kvn_fault;

/* Moves one piece, on any thread. Returns KVN_OK, or a failure status having filled `fault`. */
typedef int (*kvn_move)(void *context, const kvn_columns *batch, const kvn_piece *piece,
                        kvn_fault *fault);

/* The most that one piece holds; both >= 1. */
typedef struct kvn_piece_limits {
    uint64_t descriptors; /* IOV_MAX, say */
    uint64_t nbytes;      /* at least KVN_PIECE_MIN, or KVN_PIECE_TUNED */
} kvn_piece_limits;

/* A job in a pool. Embed it in a request; it must stay in place until released. The fields belong to pool.c, and the
 * pool's mutex guards them unless a comment says otherwise. */
typedef struct kvn_job {
    kvn_columns batch;
    kvn_move move;
    void *context;
    kvn_piece_limits limits;
    kvn_pool *pool;           /* NULL: moved by kvn_job_run */
    kvn_node queued;          /* in the pool's queue of jobs with unclaimed descriptors */
    pthread_cond_t changed;    /* finished, or there is a place for a waiter */
    uint64_t cursor;           /* first descriptor not wholly claimed */
    uint64_t cursor_skip;      /* bytes of it that are claimed */
    uint64_t unclaimed;        /* bytes */
    uint64_t total;            /* bytes */
    uint32_t in_motion;        /* pieces claimed and not yet back */
    uint32_t waiters;          /* threads that sleep until it changes */
    uint32_t called;           /* of these, threads that were woken for a free place and have not come yet */
    int64_t caller_ns;         /* when its caller was last here, and awake; 0: it does not come back */
    atomic_bool finished;        /* read without the mutex by poll: release and acquire, for `report` */
    atomic_uint_fast64_t moved;  /* bytes; read without the mutex by poll: relaxed, a count only */
    kvn_report report;           /* the outcome; stable once finished */
} kvn_job;

/* `context` is passed to `move`. The columns must outlive the outcome. */
void kvn_job_init(kvn_job *job, const kvn_columns *batch, kvn_move move, void *context,
                  kvn_piece_limits limits);

/* Moves all of it on the calling thread, without the pool; finished on return. */
void kvn_job_run(kvn_job *job, uint64_t total);

/* ---- for pool.c, under the pool's mutex ---- */

void kvn_job_start(kvn_job *job, uint64_t total);
static inline bool kvn_job_has_unclaimed(const kvn_job *job)
{
    return job->cursor < job->batch.count;
}
static inline bool kvn_job_is_finished(const kvn_job *job)
{
    return atomic_load_explicit(&job->finished, memory_order_acquire);
}
/* Takes the next piece, of a size that suits `threads` threads. Only if something is unclaimed. */
void kvn_job_claim(kvn_job *job, unsigned threads, kvn_piece *piece);
/* Calls the mover; without the mutex. */
int kvn_job_move(kvn_job *job, const kvn_piece *piece, kvn_fault *fault);
/* Notes that the piece failed, and abandons the unclaimed rest. */
void kvn_job_fail(kvn_job *job, const kvn_piece *piece, int status, kvn_fault *fault);
/* Stops handing out pieces; the unclaimed rest stays unconfirmed. */
void kvn_job_abandon(kvn_job *job);
/* Nothing is unclaimed or in motion: settles the report. */
void kvn_job_finish(kvn_job *job);

#endif

/* A fixed pool of threads that move batches of descriptors, piece by piece.
 *
 * A job is a batch (columns) and a `move` callback. Pieces are claimed from the job's cursor by
 * bytes, not by count: large descriptors are cut, small ones grouped, and pieces shrink towards the
 * end so that all threads finish together. Nothing is allocated per descriptor or per piece.
 *
 * - At most `threads` pieces of a pool are in motion at any moment. A thread in kvn_job_wait helps
 *   with its own job when a place is free, instead of a worker.
 * - Jobs start in the order of submission; one that somebody waits for comes first.
 * - A piece is short (KVN_PIECE_MAX bytes): aborting means claiming no more, and waiting for the
 *   pieces in motion. So the unconfirmed spans are at most one per thread, and the unclaimed tail.
 * - A pool belongs to the process that made it: in a forked child every call is refused
 *   (KVN_INVALID) and destroying it only forgets it. */
#ifndef KVNATIVE_POOL_H
#define KVNATIVE_POOL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "kvnative/backend.h"

#define KVN_MAX_THREADS 64 /* one span per thread, one tail here and one in the executor */
#define KVN_PIECE_MIN (64u << 10)
#define KVN_PIECE_MAX (1u << 20)

typedef struct kvn_pool kvn_pool;

/* A part of a batch: descriptors [first, last), beginning `skip` bytes into the first and
 * `nbytes` long in all; the last descriptor goes on in the next piece if bytes of it are left. */
typedef struct kvn_piece {
    uint64_t first;
    uint64_t last;
    uint64_t skip;
    uint64_t nbytes;
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

/* What is being moved. Embed it in a request; it must stay in place until released. The fields are
 * pool.c's, under the pool's mutex unless said otherwise. */
typedef struct kvn_job {
    kvn_columns batch;
    kvn_move move;
    void *context;
    uint64_t max_descriptors; /* of one piece */
    kvn_pool *pool;           /* NULL: moved by kvn_job_run */
    struct kvn_job *next;     /* in the pool's queue of jobs with unclaimed descriptors */
    struct kvn_job *previous;
    pthread_cond_t changed;    /* finished */
    uint64_t cursor;           /* first descriptor not wholly claimed */
    uint64_t cursor_skip;      /* bytes of it that are claimed */
    uint64_t unclaimed;        /* bytes */
    uint32_t in_motion;        /* pieces claimed and not yet back */
    uint32_t waiters;
    bool queued;
    atomic_bool finished;        /* read without the mutex by poll */
    atomic_uint_fast64_t moved;  /* bytes; read without the mutex by poll */
    kvn_report report;           /* the outcome; stable once finished */
} kvn_job;

/* `threads` in [1, KVN_MAX_THREADS]. NULL with errno set (EINVAL, ENOMEM, EAGAIN) on failure. */
kvn_pool *kvn_pool_create(unsigned threads);
unsigned kvn_pool_threads(const kvn_pool *pool);
/* No job may be left. Joins the workers (in the process that made the pool). */
void kvn_pool_destroy(kvn_pool *pool);
/* False in a forked child of the process that made the pool. */
bool kvn_pool_is_ours(const kvn_pool *pool);

/* `context` is passed to `move`; `max_descriptors` >= 1 limits one piece (IOV_MAX, say). The
 * columns must outlive the outcome. */
void kvn_job_init(kvn_job *job, const kvn_columns *batch, kvn_move move, void *context,
                  uint64_t max_descriptors);
/* Total bytes of a batch; false if they do not fit in 64 bits. */
bool kvn_columns_total(const kvn_columns *batch, uint64_t *total);

/* Moves all of it on the calling thread, without the pool; finished on return. */
void kvn_job_run(kvn_job *job, uint64_t total);
/* Queues the job and wakes a worker. KVN_OK, or KVN_INVALID in a forked child. */
int kvn_job_submit(kvn_job *job, kvn_pool *pool, uint64_t total, kvn_report *report);
/* As in the backend vtable. wait and abort may be called by several threads at once. */
int kvn_job_poll(kvn_job *job, kvn_report *report);
int kvn_job_wait(kvn_job *job, int64_t deadline_ns, kvn_report *report);
int kvn_job_abort(kvn_job *job, int why, kvn_report *report);
/* After an outcome, once, when no other thread is in a call on the job. */
void kvn_job_release(kvn_job *job);

#endif

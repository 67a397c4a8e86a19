/* A fixed pool of threads that move batches of descriptors, piece by piece.
 *
 * A job is a batch (columns) and a `move` callback. Pieces are claimed from the job's cursor by
 * bytes, not by count: large descriptors are cut, small ones grouped, and pieces shrink towards the
 * end so that all threads finish together. Nothing is allocated per descriptor or per piece.
 *
 * - At most `threads` pieces of a pool are in motion at any moment. A thread in kvn_job_wait helps
 *   with its own job when a place is free, instead of a worker.
 * - Of a job whose caller waits at once, or computes meanwhile (KVN_CALLER_WAITS, _COMPUTES), the
 *   workers take a place less, if there are two or more: the last one is the caller's. So they do
 *   for a moment after a caller has returned (KVN_CALLER_RETURNS) or has polled by a short wait, as it is awake and
 *   probably comes to wait.
 * - Jobs start in the order of submission; one that a thread waits for comes first.
 * - A piece is short (its backend says how long at most): aborting means claiming no more, and
 *   waiting for the pieces in motion. So the unconfirmed spans are at most one per thread, and the unclaimed tail.
 * - A pool belongs to the process that made it: a forked child, which has none of its threads, may only
 *   destroy it, which forgets it. ThreadPool and Backend (kvnative/_backend.pyx) see to that. */
#ifndef KVNATIVE_HOST_POOL_H
#define KVNATIVE_HOST_POOL_H

#include "host/copy.h"
#include "host/job.h"
#include "host/tuning.h"

#define KVN_MAX_THREADS 64 /* a report holds one span per thread, and the tail */

/* `threads` in [1, KVN_MAX_THREADS]; with the built-in tuning. NULL with errno set (EINVAL, ENOMEM,
 * EAGAIN) on failure. */
kvn_pool *kvn_pool_create(unsigned threads);
unsigned kvn_pool_threads(const kvn_pool *pool);
/* How often a worker has looked for the next job before it slept. */
uint64_t kvn_pool_looks(kvn_pool *pool);
/* Nanoseconds that its workers have run. */
int64_t kvn_pool_cpu_ns(const kvn_pool *pool);
/* Applies to pieces that are claimed from now on. */
void kvn_pool_tune(kvn_pool *pool, const kvn_tuning *tuning);
/* How a batch of so many bytes is copied. */
kvn_copy kvn_pool_copy(const kvn_pool *pool, uint64_t batch_nbytes);
/* No job may be left. Joins the workers (in the process that made the pool). */
void kvn_pool_destroy(kvn_pool *pool);

/* Queues the job and wakes a worker. */
void kvn_job_submit(kvn_job *job, kvn_pool *pool, uint64_t total);
/* As in the backend vtable. wait and abort may be called by several threads at once. */
int kvn_job_poll(kvn_job *job, kvn_report *report);
int kvn_job_wait(kvn_job *job, int64_t deadline_ns, kvn_report *report);
int kvn_job_abort(kvn_job *job, int why, kvn_report *report);
/* After an outcome, once, when no other thread is in a call on the job. */
void kvn_job_release(kvn_job *job);

#endif

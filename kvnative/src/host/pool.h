/* A fixed pool of threads that move batches of descriptors, piece by piece.
 *
 * A job is a batch (columns) and a `move` callback. Pieces are claimed from the job's cursor by
 * bytes, not by count: large descriptors are cut, small ones grouped, and pieces shrink towards the
 * end so that all threads finish together. Nothing is allocated per descriptor or per piece, except
 * a byte per descriptor if the pool has nodes.
 *
 * - At most `threads` pieces of a pool are in motion at any moment. A thread in kvn_job_wait helps
 *   with its own job when a place is free, instead of a worker.
 * - If the caller of a job waits at once, or computes meanwhile (KVN_CALLER_WAITS, _COMPUTES), workers leave it the
 * last place, if there are two or more. They do the same for a moment after a caller has returned (KVN_CALLER_RETURNS)
 * or has polled by a short wait, because it is awake and will probably wait.
 * - Jobs start in the order of submission; a job that a thread waits for goes first.
 * - If the pool has nodes, a piece is on one node: that of the page where its first descriptor's destination begins. A
 * thread takes pieces of its own node first, then those without a node, then any: so no piece waits while a place is
 * free. Jobs do not overtake each other for that.
 * - A piece is short (its backend sets the maximum): an abort claims no more pieces, and waits for those in motion. So
 * the unconfirmed spans are at most one per thread, and the unclaimed tail; with nodes, all runs that are left.
 * - A pool belongs to the process that made it: a forked child, which has none of its threads, may only destroy it,
 * which leaks it. ThreadPool and Backend (kvnative/_backend.pyx) ensure that. */
#ifndef KVNATIVE_HOST_POOL_H
#define KVNATIVE_HOST_POOL_H

#include "host/copy.h"
#include "host/job.h"
#include "host/tuning.h"

#define KVN_MAX_THREADS 64 /* a report has a span for each thread, and the tail */

/* `threads` in [1, KVN_MAX_THREADS], spread over the processors of the nodes; without nodes they run where the system
 * lets them. With the built-in tuning. NULL with errno set (EINVAL, ENOMEM, EAGAIN) on failure. */
kvn_pool *kvn_pool_create(unsigned threads, const kvn_numa_node *nodes, unsigned num_nodes);
unsigned kvn_pool_threads(const kvn_pool *pool);
/* Number of times that workers have polled for the next job. */
uint64_t kvn_pool_looks(kvn_pool *pool);
/* Processor time of its workers. */
int64_t kvn_pool_cpu_ns(const kvn_pool *pool);
/* Affects the piece size of jobs that are submitted later, and the way to copy of pieces that begin later. */
void kvn_pool_tune(kvn_pool *pool, const kvn_tuning *tuning);
/* Returns the way to copy a batch of this size. */
kvn_copy kvn_pool_copy(const kvn_pool *pool, uint64_t batch_nbytes);
/* Joins the workers, in the process that made the pool. No job may be left. */
void kvn_pool_destroy(kvn_pool *pool);

/* Queues the job and wakes a worker. */
void kvn_job_submit(kvn_job *job, kvn_pool *pool, uint64_t total);
/* Like the calls of the backend vtable. Several threads may call wait and abort at once. */
int kvn_job_poll(const kvn_job *job, uint64_t *bytes_done);
int kvn_job_wait(kvn_job *job, int64_t deadline_ns);
int kvn_job_abort(kvn_job *job, int why);
/* Call it once, after the outcome, when no other thread is in a call on the job. */
void kvn_job_release(kvn_job *job);

#endif

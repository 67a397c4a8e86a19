/* The threads of a pool: workers that move pieces of jobs, and callers that help with their own. */
#include "host/pool.h"

#include <errno.h>
#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "core/report.h"
#include "core/thread.h"
#include "host/places.h"

/* A sleep and a wake-up cost some 30 us (docs/internals/adr/0002-copy-strategies.md). So before it sleeps, a waiter
 * polls for the last pieces of its job, for the time of a small piece; and a worker that has just moved a piece polls
 * for the next job. A thread that has slept does not poll again. Workers do not poll if the pool has more threads than
 * cores, because other threads need the core, or after several polls in vain, until a job again follows another at
 * once. */
#define SPIN_NS 20000
#define LOOK_NS 100000
#define VAIN_LOOKS 4

/* Lets a spinning thread leave the core to its sibling, and poll less often. YIELD does nothing on most Arm processors;
 * ISB takes about as long as PAUSE does on Intel's. */
static void pause_cpu(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");
#endif
}

/* ---- pieces ---- */

static void finish(kvn_job *job)
{
    kvn_job_finish(job);
    if (job->waiters > 0)
        pthread_cond_broadcast(&job->changed);
}

/* Claims and moves one piece on this thread, which is on `node`. The caller holds the mutex, which is released
 * meanwhile. */
static void work_on(kvn_pool *pool, kvn_job *job, unsigned node)
{
    kvn_piece piece;
    kvn_fault fault;
    int status;

    kvn_job_claim(job, pool->threads, node, &piece);
    if (!kvn_job_has_unclaimed(job))
        kvn_list_remove(&job->queued);
    job->in_motion++;
    pool->moving++;
    kvn_wake_next(pool);
    pthread_mutex_unlock(&pool->mutex);

    status = kvn_job_move(job, &piece, &fault);

    pthread_mutex_lock(&pool->mutex);
    pool->moving--;
    pool->ended_ns = kvn_now_ns();
    job->in_motion--;
    if (status != KVN_OK) {
        kvn_job_fail(job, &piece, status, &fault);
        kvn_list_remove(&job->queued);
    }
    if (job->in_motion == 0 && !kvn_job_has_unclaimed(job))
        finish(job);
}

/* Polls for the next job for a moment. The caller holds the mutex. */
static void look_for_work(kvn_pool *pool)
{
    unsigned seen = atomic_load_explicit(&pool->calls, memory_order_relaxed);
    int64_t until = kvn_now_ns() + LOOK_NS;

    if (!pool->may_look || pool->vain >= VAIN_LOOKS)
        return;
    pool->looks++;
    pool->looking++;
    pthread_mutex_unlock(&pool->mutex);
    while (atomic_load_explicit(&pool->calls, memory_order_relaxed) == seen &&
           kvn_now_ns() < until)
        pause_cpu();
    pthread_mutex_lock(&pool->mutex);
    pool->looking--;
    if (atomic_load_explicit(&pool->calls, memory_order_relaxed) == seen)
        pool->vain++;
    else
        pool->vain = 0;
}

static void *worker_main(void *argument)
{
    const kvn_worker *self = argument;
    kvn_pool *pool = self->pool;
    kvn_crew *crew = &pool->crews[self->node];
    bool looked = true; /* since its last piece */

    pthread_mutex_lock(&pool->mutex);
    while (!pool->stopping) {
        if (kvn_free_places(pool) > 0) {
            work_on(pool, kvn_next_job(pool), self->node);
            looked = false;
            continue;
        }
        kvn_wake_waiter(pool);
        if (!looked) {
            looked = true;
            look_for_work(pool);
            continue;
        }
        crew->idle++;
        pthread_cond_wait(&crew->work, &pool->mutex);
        if (crew->waking > 0)
            crew->waking--;
        else
            crew->idle--; /* a spurious wake-up */
    }
    pthread_mutex_unlock(&pool->mutex);
    return NULL;
}

/* ---- the pool ---- */

static int start_workers(kvn_pool *pool)
{
    int error = 0;

    while (pool->started < pool->threads && error == 0) {
        const unsigned node = pool->numa ? kvn_numa_of_thread(pool->numa, pool->started) : 0;
        kvn_worker *worker = &pool->workers[pool->started];
        char name[16];
        *worker = (kvn_worker){.pool = pool, .node = node};
        snprintf(name, sizeof name, "kvn-pool-%u", pool->started % 1000);
        error = kvn_thread_start(&worker->thread, NULL, name, worker_main, worker);
        if (error)
            break;
        pool->started++;
        if (pool->numa)
            error = pthread_setaffinity_np(worker->thread, sizeof(cpu_set_t),
                                           &pool->numa->nodes[node].processors);
    }
    return error;
}

/* The mutex is held for a fraction of a microsecond between pieces, longer only by an abort of a large batch in a pool
 * with nodes: spinning is faster than sleeping. */
static void init_mutex(pthread_mutex_t *mutex)
{
    pthread_mutexattr_t attributes;

    pthread_mutexattr_init(&attributes);
#if defined(__GLIBC__)
    pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_ADAPTIVE_NP);
#endif
    pthread_mutex_init(mutex, &attributes);
    pthread_mutexattr_destroy(&attributes);
}

/* By affinity only, because the number of threads respects limits of CPU time. */
static unsigned usable_cores(void)
{
    cpu_set_t set;

    return sched_getaffinity(0, sizeof set, &set) == 0 ? (unsigned)CPU_COUNT(&set) : UINT_MAX;
}

kvn_pool *kvn_pool_create(unsigned threads, const kvn_numa_node *nodes, unsigned num_nodes)
{
    const kvn_tuning builtin = {KVN_BYPASS_NBYTES, KVN_PIECE_NBYTES};
    kvn_pool *pool;
    int error;

    if (threads < 1 || threads > KVN_MAX_THREADS || num_nodes > KVN_MAX_NODES) {
        errno = EINVAL;
        return NULL;
    }
    pool = calloc(1, sizeof *pool + threads * sizeof(kvn_worker));
    if (!pool)
        return NULL;
    init_mutex(&pool->mutex);
    pool->num_crews = num_nodes > 0 ? num_nodes : 1;
    for (unsigned i = 0; i < pool->num_crews; i++)
        pthread_cond_init(&pool->crews[i].work, NULL);
    kvn_list_init(&pool->queue);
    pool->threads = threads;
    pool->may_look = threads <= usable_cores();
    pool->pid = getpid();
    pool->past_caches = kvn_copy_past_caches();
    if (!pool->past_caches)
        pool->past_caches = kvn_copy_plain;
    kvn_pool_tune(pool, &builtin);
    if (num_nodes > 0)
        pool->numa = kvn_numa_create(nodes, num_nodes);
    error = num_nodes > 0 && !pool->numa ? errno : start_workers(pool);
    if (error) {
        kvn_pool_destroy(pool);
        errno = error;
        return NULL;
    }
    return pool;
}

unsigned kvn_pool_threads(const kvn_pool *pool) { return pool->threads; }

uint64_t kvn_pool_looks(kvn_pool *pool)
{
    uint64_t looks;

    pthread_mutex_lock(&pool->mutex);
    looks = pool->looks;
    pthread_mutex_unlock(&pool->mutex);
    return looks;
}

int64_t kvn_pool_cpu_ns(const kvn_pool *pool)
{
    int64_t sum = 0;

    for (unsigned i = 0; i < pool->started; i++) {
        clockid_t clock;
        struct timespec ran;
        if (pthread_getcpuclockid(pool->workers[i].thread, &clock) == 0 && clock_gettime(clock, &ran) == 0)
            sum += ran.tv_sec * INT64_C(1000000000) + ran.tv_nsec;
    }
    return sum;
}

void kvn_pool_tune(kvn_pool *pool, const kvn_tuning *tuning)
{
    atomic_store_explicit(&pool->bypass_nbytes, tuning->bypass_nbytes, memory_order_relaxed);
    atomic_store_explicit(&pool->piece_nbytes, tuning->piece_nbytes, memory_order_relaxed);
}

/* Blocks of a cache are mostly in no cache of the processor. A large batch is written past them, so that no destination
 * is read first; a small one stays in them for its reader. */
kvn_copy kvn_pool_copy(const kvn_pool *pool, uint64_t batch_nbytes)
{
    return batch_nbytes < atomic_load_explicit(&pool->bypass_nbytes, memory_order_relaxed)
               ? kvn_copy_plain
               : pool->past_caches;
}

void kvn_pool_destroy(kvn_pool *pool)
{
    if (!pool || pool->pid != getpid())
        return; /* a forked child has no workers, and may have inherited a locked mutex */
    pthread_mutex_lock(&pool->mutex);
    pool->stopping = true;
    for (unsigned i = 0; i < pool->num_crews; i++)
        pthread_cond_broadcast(&pool->crews[i].work);
    pthread_mutex_unlock(&pool->mutex);
    for (unsigned i = 0; i < pool->started; i++)
        pthread_join(pool->workers[i].thread, NULL);
    for (unsigned i = 0; i < pool->num_crews; i++)
        pthread_cond_destroy(&pool->crews[i].work);
    pthread_mutex_destroy(&pool->mutex);
    free(pool->numa);
    free(pool);
}

/* ---- jobs ---- */

void kvn_job_submit(kvn_job *job, kvn_pool *pool, uint64_t total)
{
    if (job->batch.count == 0) {
        kvn_job_run(job, 0);
        return;
    }
    kvn_cond_init(&job->changed);
    job->pool = pool;
    if (job->limits.nbytes == KVN_PIECE_TUNED)
        job->limits.nbytes = atomic_load_explicit(&pool->piece_nbytes, memory_order_relaxed);
    kvn_job_start(job, total);
    if (pool->numa && job->limits.by_node)
        kvn_job_share(job, pool->numa);
    pthread_mutex_lock(&pool->mutex);
    const int64_t now = kvn_now_ns();
    if (job->batch.caller != KVN_CALLER_HURRIES)
        job->caller_ns = now;
    if (now - pool->ended_ns < LOOK_NS)
        pool->vain = 0;
    kvn_list_push_back(&pool->queue, &job->queued);
    kvn_wake_next(pool);
    pthread_mutex_unlock(&pool->mutex);
}

static int outcome(const kvn_job *job) { return kvn_job_is_finished(job) ? job->report->status : KVN_PENDING; }

int kvn_job_poll(const kvn_job *job, uint64_t *bytes_done)
{
    *bytes_done = atomic_load_explicit(&job->moved, memory_order_relaxed);
    return outcome(job);
}

/* All of the job is claimed, and its last pieces are small, so they end soon. */
static void spin_until_finished(const kvn_job *job)
{
    int64_t until = kvn_now_ns() + SPIN_NS;

    while (!kvn_job_is_finished(job) && kvn_now_ns() < until)
        pause_cpu();
}

/* Returns false if the deadline has passed. */
static bool sleep_until(kvn_pool *pool, kvn_job *job, int64_t deadline_ns)
{
    bool in_time;

    job->waiters++;
    in_time = kvn_cond_wait(&job->changed, &pool->mutex, deadline_ns);
    job->waiters--;
    if (job->called > 0)
        job->called--;
    return in_time;
}

/* Works on the job while a place is free, then sleeps. The caller holds the mutex. */
static void help(kvn_pool *pool, kvn_job *job, int64_t deadline_ns)
{
    bool spun = false;

    while (!kvn_job_is_finished(job)) {
        if (deadline_ns != KVN_FOREVER && kvn_now_ns() >= deadline_ns)
            break;
        if (kvn_job_has_unclaimed(job) && pool->moving < pool->threads) {
            pool->helping++;
            work_on(pool, job, pool->numa ? kvn_numa_here(pool->numa) : 0);
            pool->helping--;
        } else if (!kvn_job_has_unclaimed(job) && !spun) {
            spun = true;
            kvn_wake_next(pool); /* this thread's place is free for other jobs */
            pthread_mutex_unlock(&pool->mutex);
            spin_until_finished(job);
            pthread_mutex_lock(&pool->mutex);
        } else {
            if (kvn_list_is_in(&job->queued)) /* a thread waits for it, so it goes first */
                kvn_list_push_front(&pool->queue, &job->queued);
            kvn_wake_next(pool);
            if (!sleep_until(pool, job, deadline_ns))
                break;
        }
    }
    job->caller_ns = kvn_now_ns();
    kvn_wake_next(pool);
}

int kvn_job_wait(kvn_job *job, int64_t deadline_ns)
{
    kvn_pool *pool = job->pool;

    if (kvn_job_is_finished(job))
        return outcome(job);
    pthread_mutex_lock(&pool->mutex);
    help(pool, job, deadline_ns);
    pthread_mutex_unlock(&pool->mutex);
    return outcome(job);
}

int kvn_job_abort(kvn_job *job, int why)
{
    kvn_pool *pool = job->pool;

    if (kvn_job_is_finished(job))
        return outcome(job);
    pthread_mutex_lock(&pool->mutex);
    if (kvn_job_has_unclaimed(job)) {
        job->report->status = why;
        kvn_job_abandon(job);
        kvn_list_remove(&job->queued);
        if (job->in_motion == 0)
            finish(job);
    }
    while (!kvn_job_is_finished(job))
        sleep_until(pool, job, KVN_FOREVER);
    pthread_mutex_unlock(&pool->mutex);
    return outcome(job);
}

void kvn_job_release(kvn_job *job)
{
    kvn_pool *pool = job->pool;

    if (!pool)
        return;
    /* The thread that finished the job may still hold the mutex. After this, no thread uses the job. */
    pthread_mutex_lock(&pool->mutex);
    pthread_mutex_unlock(&pool->mutex);
    pthread_cond_destroy(&job->changed);
    kvn_job_unshare(job);
}

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

/* A sleep and a wake-up cost some 30 us (docs/internals/adr/0002-copy-strategies.md). So before it sleeps, a waiter
 * polls for the last pieces of its job, for the time of a small piece; and a worker that has just moved a piece polls
 * for the next job. A thread that has slept does not poll again. Workers do not poll if the pool has more threads than
 * cores, because other threads need the core, or after several polls in vain, until a job again follows another at
 * once. */
#define SPIN_NS 20000
#define LOOK_NS 50000
#define VAIN_LOOKS 4
/* A caller in Python takes less between its submit and its first look at the outcome. */
#define CALLER_NS 200000

struct kvn_pool {
    pthread_mutex_t mutex; /* guards everything below, and the jobs in the pool */
    pthread_cond_t work;
    kvn_list queue; /* jobs with unclaimed descriptors, in serving order */
    unsigned threads;
    unsigned started;
    unsigned moving; /* pieces in motion; never more than `threads` */
    unsigned helping; /* of these, pieces moved by waiters */
    unsigned idle;   /* sleeping workers that were not woken */
    unsigned waking; /* woken workers that do not run yet */
    unsigned looking; /* awake workers that poll for the next job */
    unsigned vain;   /* polls in a row that found no job */
    uint64_t looks;  /* total number of polls */
    int64_t ended_ns; /* time of the last end of a piece */
    bool may_look;   /* each thread has a core */
    atomic_uint calls; /* read without the mutex, as a hint: relaxed */
    bool stopping;
    pid_t pid;
    kvn_copy past_caches; /* memcpy if the processor has no such copy */
    /* The tuning, read without the mutex. The values are independent, so old and new ones may be mixed. */
    atomic_uint_fast64_t bypass_nbytes;
    atomic_uint_fast64_t piece_nbytes;
    pthread_t workers[];
};

static kvn_job *next_job(const kvn_pool *pool)
{
    return KVN_LISTED(kvn_list_first(&pool->queue), kvn_job, queued);
}

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

/* True if the caller of a job is awake: its core is busy, so a worker would only displace it. */
static bool caller_is_awake(const kvn_job *job)
{
    const kvn_caller caller = job->batch.caller;

    if (caller == KVN_CALLER_WAITS || caller == KVN_CALLER_COMPUTES)
        return true;
    return job->caller_ns != 0 && kvn_now_ns() - job->caller_ns < CALLER_NS;
}

/* Returns the number of pieces of the next job that workers may still take. The caller holds the mutex. If there are
 * several places, workers leave one to an awake caller, for its wait. */
static unsigned free_places(const kvn_pool *pool)
{
    const kvn_job *next = next_job(pool);
    unsigned workers = pool->moving - pool->helping, most = pool->threads;

    if (!next || pool->moving >= pool->threads)
        return 0;
    if (most > 1 && caller_is_awake(next))
        most--;
    if (workers >= most)
        return 0;
    most -= workers;
    return most < pool->threads - pool->moving ? most : pool->threads - pool->moving;
}

/* Wakes the caller of a job that sleeps because no place was free. The place that workers leave is for it. The caller
 * of this function holds the mutex. */
static void wake_waiter(kvn_pool *pool)
{
    kvn_job *next = next_job(pool);

    if (next && next->waiters > next->called && pool->moving < pool->threads) {
        next->called++;
        pthread_cond_signal(&next->changed);
    }
}

/* Wakes one worker, which wakes the next, so that a submit costs one wake-up. */
static void wake_next(kvn_pool *pool)
{
    unsigned places = free_places(pool);

    if (places == 0) {
        wake_waiter(pool);
        return;
    }
    if (pool->looking > 0)
        atomic_fetch_add_explicit(&pool->calls, 1, memory_order_relaxed);
    if (pool->idle > 0 && pool->waking + pool->looking < places) {
        pool->idle--;
        pool->waking++;
        pthread_cond_signal(&pool->work);
    }
}

/* ---- pieces ---- */

static void finish(kvn_job *job)
{
    kvn_job_finish(job);
    if (job->waiters > 0)
        pthread_cond_broadcast(&job->changed);
}

/* Claims and moves one piece on this thread. The caller holds the mutex, which is released meanwhile. */
static void work_on(kvn_pool *pool, kvn_job *job)
{
    kvn_piece piece;
    kvn_fault fault;
    int status;

    kvn_job_claim(job, pool->threads, &piece);
    if (!kvn_job_has_unclaimed(job))
        kvn_list_remove(&job->queued);
    job->in_motion++;
    pool->moving++;
    wake_next(pool);
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
    kvn_pool *pool = argument;
    bool looked = true; /* since its last piece */

    pthread_mutex_lock(&pool->mutex);
    while (!pool->stopping) {
        if (free_places(pool) > 0) {
            work_on(pool, next_job(pool));
            looked = false;
            continue;
        }
        wake_waiter(pool);
        if (!looked) {
            looked = true;
            look_for_work(pool);
            continue;
        }
        pool->idle++;
        pthread_cond_wait(&pool->work, &pool->mutex);
        if (pool->waking > 0)
            pool->waking--;
        else
            pool->idle--; /* a spurious wake-up */
    }
    pthread_mutex_unlock(&pool->mutex);
    return NULL;
}

/* ---- the pool ---- */

static int start_workers(kvn_pool *pool)
{
    int error = 0;

    while (pool->started < pool->threads && error == 0) {
        char name[16];
        snprintf(name, sizeof name, "kvn-pool-%u", pool->started % 1000);
        error = kvn_thread_start(&pool->workers[pool->started], NULL, name, worker_main, pool);
        if (error == 0)
            pool->started++;
    }
    return error;
}

/* The mutex is held for a fraction of a microsecond between pieces: spinning is faster than sleeping. */
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

kvn_pool *kvn_pool_create(unsigned threads)
{
    const kvn_tuning builtin = {KVN_BYPASS_NBYTES, KVN_PIECE_NBYTES};
    kvn_pool *pool;
    int error;

    if (threads < 1 || threads > KVN_MAX_THREADS) {
        errno = EINVAL;
        return NULL;
    }
    pool = calloc(1, sizeof *pool + threads * sizeof(pthread_t));
    if (!pool)
        return NULL;
    init_mutex(&pool->mutex);
    pthread_cond_init(&pool->work, NULL);
    kvn_list_init(&pool->queue);
    pool->threads = threads;
    pool->may_look = threads <= usable_cores();
    pool->pid = getpid();
    pool->past_caches = kvn_copy_past_caches();
    if (!pool->past_caches)
        pool->past_caches = kvn_copy_plain;
    kvn_pool_tune(pool, &builtin);
    error = start_workers(pool);
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
        if (pthread_getcpuclockid(pool->workers[i], &clock) == 0 && clock_gettime(clock, &ran) == 0)
            sum += ran.tv_sec * INT64_C(1000000000) + ran.tv_nsec;
    }
    return sum;
}

void kvn_pool_tune(kvn_pool *pool, const kvn_tuning *tuning)
{
    atomic_store_explicit(&pool->bypass_nbytes, tuning->bypass_nbytes, memory_order_relaxed);
    atomic_store_explicit(&pool->piece_nbytes, tuning->piece_nbytes, memory_order_relaxed);
}

/* A batch that is larger than the caches is written past them; a smaller one is probably in them, and will be read from
 * them next. */
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
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->mutex);
    for (unsigned i = 0; i < pool->started; i++)
        pthread_join(pool->workers[i], NULL);
    pthread_cond_destroy(&pool->work);
    pthread_mutex_destroy(&pool->mutex);
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
    pthread_mutex_lock(&pool->mutex);
    const int64_t now = kvn_now_ns();
    if (job->batch.caller != KVN_CALLER_HURRIES)
        job->caller_ns = now;
    if (now - pool->ended_ns < LOOK_NS)
        pool->vain = 0;
    kvn_list_push_back(&pool->queue, &job->queued);
    wake_next(pool);
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
            work_on(pool, job);
            pool->helping--;
        } else if (!kvn_job_has_unclaimed(job) && !spun) {
            spun = true;
            wake_next(pool); /* this thread's place is free for other jobs */
            pthread_mutex_unlock(&pool->mutex);
            spin_until_finished(job);
            pthread_mutex_lock(&pool->mutex);
        } else {
            if (kvn_list_is_in(&job->queued)) /* a thread waits for it, so it goes first */
                kvn_list_push_front(&pool->queue, &job->queued);
            wake_next(pool);
            if (!sleep_until(pool, job, deadline_ns))
                break;
        }
    }
    job->caller_ns = kvn_now_ns();
    wake_next(pool);
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
}

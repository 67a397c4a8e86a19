/* Places, and wake-ups for them. */
#include "host/places.h"

#include "core/thread.h"

/* A caller in Python takes less between its submit and its first look at the outcome. */
#define CALLER_NS 200000

/* True if the caller of a job is awake: its core is busy, so a worker would only displace it. */
static bool caller_is_awake(const kvn_job *job)
{
    const kvn_caller caller = job->batch.caller;

    if (caller == KVN_CALLER_WAITS || caller == KVN_CALLER_COMPUTES)
        return true;
    return job->caller_ns != 0 && kvn_now_ns() - job->caller_ns < CALLER_NS;
}

unsigned kvn_free_places(const kvn_pool *pool)
{
    const kvn_job *next = kvn_next_job(pool);
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

void kvn_wake_waiter(kvn_pool *pool)
{
    kvn_job *next = kvn_next_job(pool);

    if (next && next->waiters > next->called && pool->moving < pool->threads) {
        next->called++;
        pthread_cond_signal(&next->changed);
    }
}

static unsigned num_waking(const kvn_pool *pool)
{
    unsigned sum = 0;

    for (unsigned i = 0; i < pool->num_crews; i++)
        sum += pool->crews[i].waking;
    return sum;
}

/* Returns the crew with a sleeping worker whose node has most to do; NULL: none sleeps. */
static kvn_crew *crew_to_wake(kvn_pool *pool)
{
    const kvn_job *next = kvn_next_job(pool);
    kvn_crew *best = NULL;
    uint64_t most = 0;

    for (unsigned i = 0; i < pool->num_crews; i++) {
        const uint64_t nbytes = kvn_job_unclaimed_on(next, i);
        if (pool->crews[i].idle > 0 && (!best || nbytes > most)) {
            best = &pool->crews[i];
            most = nbytes;
        }
    }
    return best;
}

void kvn_wake_next(kvn_pool *pool)
{
    const unsigned places = kvn_free_places(pool);
    kvn_crew *crew;

    if (places == 0) {
        kvn_wake_waiter(pool);
        return;
    }
    if (pool->looking > 0)
        atomic_fetch_add_explicit(&pool->calls, 1, memory_order_relaxed);
    if (num_waking(pool) + pool->looking >= places)
        return;
    crew = crew_to_wake(pool);
    if (crew) {
        crew->idle--;
        crew->waking++;
        pthread_cond_signal(&crew->work);
    }
}

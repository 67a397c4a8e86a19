/* The thread that moves the next piece of a pool: places for pieces in motion, and the threads that they wake. */
#ifndef KVNATIVE_HOST_PLACES_H
#define KVNATIVE_HOST_PLACES_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/types.h>

#include "core/list.h"
#include "host/copy.h"
#include "host/job.h"
#include "host/numa.h"

/* Workers of one node, or of a pool without nodes. */
typedef struct kvn_crew {
    pthread_cond_t work;
    unsigned idle;   /* sleeping workers that were not woken */
    unsigned waking; /* woken workers that do not run yet */
} kvn_crew;

typedef struct kvn_worker {
    pthread_t thread;
    struct kvn_pool *pool;
    unsigned node; /* and crew */
} kvn_worker;

struct kvn_pool {
    pthread_mutex_t mutex; /* guards everything below, and the jobs in the pool */
    kvn_numa *numa;        /* NULL: the system chooses where threads run */
    unsigned num_crews;
    kvn_crew crews[KVN_MAX_NODES];
    kvn_list queue; /* jobs with unclaimed descriptors, in serving order */
    unsigned threads;
    unsigned started;
    unsigned moving; /* pieces in motion; never more than `threads` */
    unsigned helping; /* of these, pieces moved by waiters */
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
    kvn_worker workers[];
};

/* The caller of these functions holds the mutex. */

static inline kvn_job *kvn_next_job(const kvn_pool *pool)
{
    return KVN_LISTED(kvn_list_first(&pool->queue), kvn_job, queued);
}
/* Returns the number of pieces of the next job that workers may still take. If there are several places, workers leave
 * one to an awake caller, for its wait. */
unsigned kvn_free_places(const kvn_pool *pool);
/* Wakes the caller of a job that sleeps because no place was free. The place that workers leave is for it. */
void kvn_wake_waiter(kvn_pool *pool);
/* Wakes one worker, which wakes the next, so that a submit costs one wake-up. */
void kvn_wake_next(kvn_pool *pool);

#endif

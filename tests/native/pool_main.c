/* A caller that found no place in the pool sleeps. Once a place is free, the caller takes it.
 * usage: pool THREADS. Prints how many threads moved the caller's job at the same time. */
#include "host/pool.c" /* its mutex says when the caller sleeps */

enum { DEADLINE_S = 20 };

/* Everything here is under `mutex`. */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static unsigned threads, blocked, together, most;
static bool is_open, has_met;
static struct timespec deadline;

static int wait_until(const bool *reached)
{
    int error = 0;
    while (!*reached && error == 0)
        error = pthread_cond_timedwait(&changed, &mutex, &deadline);
    return error ? KVN_FAILED : KVN_OK;
}

/* Holds its thread until the gate opens. */
static int block(void *context, const kvn_columns *batch, const kvn_piece *piece, kvn_fault *fault)
{
    (void)context, (void)batch, (void)piece, (void)fault;
    pthread_mutex_lock(&mutex);
    blocked++;
    pthread_cond_broadcast(&changed);
    const int status = wait_until(&is_open);
    pthread_mutex_unlock(&mutex);
    return status;
}

/* Holds its thread until as many threads as the pool has are here. */
static int meet(void *context, const kvn_columns *batch, const kvn_piece *piece, kvn_fault *fault)
{
    (void)context, (void)batch, (void)piece, (void)fault;
    pthread_mutex_lock(&mutex);
    together++;
    most = together > most ? together : most;
    has_met |= together == threads;
    pthread_cond_broadcast(&changed);
    const int status = wait_until(&has_met);
    together--;
    pthread_mutex_unlock(&mutex);
    return status;
}

/* A job of one piece for each thread. */
static void submit(kvn_job *job, kvn_pool *pool, kvn_move move, kvn_caller caller)
{
    static uint64_t numbers[KVN_MAX_THREADS];
    const kvn_columns batch = {.dst = numbers, .src = numbers, .nbytes = numbers, .count = threads,
                               .caller = caller};
    kvn_job_init(job, &batch, move, NULL, (kvn_piece_limits){1, KVN_PIECE_MIN});
    kvn_job_submit(job, pool, 0);
}

/* Opens the gate once the job's caller sleeps. */
static void *open_gate(void *argument)
{
    kvn_job *job = argument;
    bool sleeps = false;
    while (!sleeps) {
        sched_yield();
        pthread_mutex_lock(&job->pool->mutex);
        sleeps = job->waiters > 0;
        pthread_mutex_unlock(&job->pool->mutex);
    }
    pthread_mutex_lock(&mutex);
    is_open = true;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&mutex);
    return NULL;
}

int main(int argc, char **argv)
{
    kvn_job before, waited;
    kvn_report report;
    pthread_t opener;
    threads = argc > 1 ? (unsigned)atoi(argv[1]) : 2;
    clock_gettime(CLOCK_REALTIME, &deadline);
    deadline.tv_sec += DEADLINE_S;
    kvn_pool *pool = kvn_pool_create(threads);

    submit(&before, pool, block, KVN_CALLER_RETURNS);
    pthread_mutex_lock(&mutex);
    while (blocked < threads)
        pthread_cond_wait(&changed, &mutex);
    pthread_mutex_unlock(&mutex);
    submit(&waited, pool, meet, KVN_CALLER_WAITS);
    pthread_create(&opener, NULL, open_gate, &waited);
    int status = kvn_job_wait(&waited, KVN_FOREVER, &report);
    pthread_join(opener, NULL);
    status |= kvn_job_wait(&before, KVN_FOREVER, &report);
    kvn_job_release(&waited);
    kvn_job_release(&before);
    kvn_pool_destroy(pool);
    printf("%u\n", most);
    return status != KVN_OK;
}

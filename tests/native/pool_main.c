/* Places of a pool. A caller without a place sleeps, and takes the first free place.
 * usage: pool THREADS. Prints how many threads moved the caller's job at the same time.
 *        pool first. Prints the order of two jobs that wait for the only thread: a was submitted first, the caller of b
 *        waits.
 *        pool places. Prints the number of workers with a place for a job whose caller hurries, is computing, has just
 *        returned, or has returned long ago; then whether each call notes that its caller is awake: a submit by a
 *        caller that hurries, a submit by a caller that returns, and a wait that ends at its deadline.
 *        pool looks. Prints how often a worker has looked for work: after six jobs with long pauses before them, and
 *        after a job without a pause. */
#include "host/pool.c" /* for its mutex, which shows that the caller sleeps */

enum { DEADLINE_S = 20 };

/* `mutex` guards the variables below. */
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

/* Holds its thread until all threads of the pool are in this call. */
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

/* Records the job of the piece. */
static int note(void *context, const kvn_columns *batch, const kvn_piece *piece, kvn_fault *fault)
{
    (void)batch, (void)piece, (void)fault;
    printf("%s", (const char *)context);
    return KVN_OK;
}

/* Submits a job with one piece for each thread. */
static void submit_as(kvn_job *job, kvn_pool *pool, kvn_move move, void *context, kvn_caller caller)
{
    static uint64_t numbers[KVN_MAX_THREADS];
    static kvn_report reports[16];
    static size_t num_reports;
    const kvn_columns batch = {.dst = numbers, .src = numbers, .nbytes = numbers, .count = threads,
                               .caller = caller};
    kvn_job_init(job, &batch, move, context, (kvn_piece_limits){1, KVN_PIECE_MIN, false},
                 &reports[num_reports++]);
    kvn_job_submit(job, pool, 0);
}

static void submit(kvn_job *job, kvn_pool *pool, kvn_move move, kvn_caller caller)
{
    submit_as(job, pool, move, NULL, caller);
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

static int wait_and_release(kvn_job *job)
{
    const int status = kvn_job_wait(job, KVN_FOREVER);
    kvn_job_release(job);
    return status;
}

/* Moves jobs whose caller waits before others. */
static int order(kvn_pool *pool)
{
    kvn_job before, a, b;
    pthread_t opener;
    submit(&before, pool, block, KVN_CALLER_HURRIES); /* wakes all workers at once */
    pthread_mutex_lock(&mutex);
    while (blocked < threads)
        pthread_cond_wait(&changed, &mutex);
    pthread_mutex_unlock(&mutex);
    submit_as(&a, pool, note, "a", KVN_CALLER_RETURNS);
    submit_as(&b, pool, note, "b", KVN_CALLER_RETURNS);
    pthread_create(&opener, NULL, open_gate, &b);
    int status = wait_and_release(&b);
    pthread_join(opener, NULL);
    status |= wait_and_release(&a) | wait_and_release(&before);
    printf("\n");
    return status;
}

/* Moves a job as if the previous one had ended at `ended_ns`, and waits until the worker sleeps. */
static void move_one(kvn_pool *pool, int64_t ended_ns)
{
    kvn_job job;
    uint64_t bytes_done;
    bool sleeps = false;
    pthread_mutex_lock(&pool->mutex);
    pool->ended_ns = ended_ns;
    pthread_mutex_unlock(&pool->mutex);
    submit_as(&job, pool, note, "", KVN_CALLER_RETURNS);
    while (kvn_job_poll(&job, &bytes_done) == KVN_PENDING)
        sched_yield();
    while (!sleeps) {
        sched_yield();
        pthread_mutex_lock(&pool->mutex);
        sleeps = pool->crews[0].idle == pool->threads;
        pthread_mutex_unlock(&pool->mutex);
    }
    kvn_job_release(&job);
}

static int64_t processor_ns(void)
{
    struct timespec ran;

    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &ran);
    return ran.tv_sec * INT64_C(1000000000) + ran.tv_nsec;
}

/* Returns true if a thread polls in vain for about as long as it should, for work and for the end of its job. */
static bool polls_are_short(kvn_pool *pool)
{
    kvn_job unfinished = {.pool = pool};
    const int64_t start = processor_ns();

    pool->vain = 0;
    pthread_mutex_lock(&pool->mutex);
    look_for_work(pool);
    pthread_mutex_unlock(&pool->mutex);
    spin_until_finished(&unfinished);
    return processor_ns() - start < 10 * (LOOK_NS + SPIN_NS);
}

static int looks(kvn_pool *pool)
{
    const int64_t hour_ns = INT64_C(3600000000000);
    pool->may_look = true;
    for (int i = 0; i < 6; i++)
        move_one(pool, kvn_now_ns() - hour_ns);
    printf("%u ", (unsigned)kvn_pool_looks(pool));
    move_one(pool, kvn_now_ns() + hour_ns); /* an hour ahead, in case the submit takes long */
    printf("%u\n", (unsigned)kvn_pool_looks(pool));
    return !polls_are_short(pool);
}

static unsigned places_for(kvn_pool *pool, kvn_caller caller, int64_t caller_ns)
{
    static uint64_t number;
    kvn_job job = {.batch = {.nbytes = &number, .count = 1, .caller = caller}, .caller_ns = caller_ns};
    kvn_list_push_back(&pool->queue, &job.queued);
    const unsigned places = kvn_free_places(pool);
    kvn_list_remove(&job.queued);
    return places;
}

static int places(kvn_pool *pool)
{
    const int64_t hour_ns = INT64_C(3600000000000);
    kvn_job before, job;
    pthread_mutex_lock(&pool->mutex); /* hides these jobs from the workers */
    printf("%u ", places_for(pool, KVN_CALLER_HURRIES, 0));
    printf("%u ", places_for(pool, KVN_CALLER_COMPUTES, 0));
    printf("%u ", places_for(pool, KVN_CALLER_RETURNS, kvn_now_ns() + hour_ns));
    printf("%u, ", places_for(pool, KVN_CALLER_RETURNS, kvn_now_ns() - hour_ns));
    pthread_mutex_unlock(&pool->mutex);

    submit(&before, pool, block, KVN_CALLER_HURRIES);
    printf("%d ", before.caller_ns != 0);
    pthread_mutex_lock(&mutex);
    while (blocked < threads)
        pthread_cond_wait(&changed, &mutex);
    pthread_mutex_unlock(&mutex);
    const int64_t start = kvn_now_ns();
    submit_as(&job, pool, note, "", KVN_CALLER_RETURNS);
    printf("%d ", job.caller_ns >= start);
    job.caller_ns = 0;
    int status = kvn_job_wait(&job, start) != KVN_PENDING;
    printf("%d\n", job.caller_ns >= start);
    pthread_mutex_lock(&mutex);
    is_open = true;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&mutex);
    return status | wait_and_release(&job) | wait_and_release(&before);
}

int main(int argc, char **argv)
{
    kvn_job before, waited;
    pthread_t opener;
    const char *what = argc > 1 ? argv[1] : "2";
    const bool is_first = strcmp(what, "first") == 0, are_looks = strcmp(what, "looks") == 0;
    const bool are_places = strcmp(what, "places") == 0;
    threads = is_first || are_looks ? 1 : are_places ? 2 : (unsigned)atoi(what);
    clock_gettime(CLOCK_REALTIME, &deadline);
    deadline.tv_sec += DEADLINE_S;
    kvn_pool *pool = kvn_pool_create(threads, NULL, 0);
    if (is_first || are_looks || are_places) {
        const int failed = is_first ? order(pool) : are_looks ? looks(pool) : places(pool);
        kvn_pool_destroy(pool);
        return failed;
    }

    submit(&before, pool, block, KVN_CALLER_HURRIES); /* wakes all workers at once */
    pthread_mutex_lock(&mutex);
    while (blocked < threads)
        pthread_cond_wait(&changed, &mutex);
    pthread_mutex_unlock(&mutex);
    submit(&waited, pool, meet, KVN_CALLER_WAITS);
    pthread_create(&opener, NULL, open_gate, &waited);
    int status = kvn_job_wait(&waited, KVN_FOREVER);
    pthread_join(opener, NULL);
    status |= kvn_job_wait(&before, KVN_FOREVER);
    kvn_job_release(&waited);
    kvn_job_release(&before);
    kvn_pool_destroy(pool);
    printf("%u\n", most);
    return status != KVN_OK;
}

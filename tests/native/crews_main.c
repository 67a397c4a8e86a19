/* The threads of a pool on several NUMA nodes. */
#include "nodes.h"

#include "process/process.h"

/* Finds two processors that this process may use; the same one twice if there is only one. */
static void two_processors(int found[2])
{
    cpu_set_t allowed;
    int count = 0;

    CHECK(sched_getaffinity(0, sizeof allowed, &allowed) == 0);
    for (int i = 0; i < CPU_SETSIZE && count < 2; i++)
        if (CPU_ISSET((size_t)i, &allowed))
            found[count++] = i;
    if (count == 1)
        found[1] = found[0];
}

static kvn_pool *pool_of(unsigned threads, int processors[2])
{
    two_processors(processors);
    const kvn_numa_node nodes[] = {node_of_one(FIRST, processors[0]),
                                   node_of_one(SECOND, processors[1])};
    kvn_pool *pool = kvn_pool_create(threads, nodes, 2);

    CHECK(pool);
    pool->numa->ask = tell;
    return pool;
}

/* ---- threads ---- */

static void threads_are_spread(void)
{
    kvn_numa_node nodes[] = {node_of_one(0, 0), node_of_one(1, 1)};
    static const unsigned expected[] = {0, 1, 1, 1, 0, 0, 0, 1};
    kvn_numa *numa;

    CPU_SET(2, &nodes[1].processors);
    CPU_SET(3, &nodes[1].processors);
    numa = kvn_numa_create(nodes, 2);
    for (unsigned i = 0; i < 8; i++)
        CHECK(kvn_numa_of_thread(numa, i) == expected[i]);
    free(numa);
    CHECK(!kvn_numa_create(nodes, 0) && !kvn_pool_create(1, nodes, KVN_MAX_NODES + 1));
}

static void threads_are_bound_to_their_nodes(void)
{
    int processors[2];
    kvn_pool *pool = pool_of(3, processors);

    for (unsigned i = 0; i < 3; i++) {
        cpu_set_t bound;
        CHECK(pool->workers[i].node == i % 2);
        CHECK(pthread_getaffinity_np(pool->workers[i].thread, sizeof bound, &bound) == 0);
        CHECK(CPU_COUNT(&bound) == 1 && CPU_ISSET((size_t)processors[i % 2], &bound));
    }
    kvn_pool_destroy(pool);
}

static void a_thread_knows_its_node(void)
{
    int processors[2];
    kvn_pool *pool = pool_of(1, processors);
    cpu_set_t bound;

    if (processors[0] != processors[1]) {
        for (unsigned node = 0; node < 2; node++) {
            CPU_ZERO(&bound);
            CPU_SET((size_t)processors[node], &bound);
            CHECK(sched_setaffinity(0, sizeof bound, &bound) == 0);
            CHECK(kvn_numa_here(pool->numa) == node);
        }
        CPU_ZERO(&pool->numa->nodes[1].processors);
        CHECK(kvn_numa_here(pool->numa) == 2);
    }
    kvn_pool_destroy(pool);
}

/* `mutex` guards the variables below. */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static unsigned arrived, round_number, blocked;
static bool is_open;
static unsigned moved_by[3][3]; /* pieces by node of the thread and node of the destination; 2: another node */
static int order[64], num_moved;

static unsigned index_of_number(int number) { return number == FIRST ? 0 : number == SECOND ? 1 : 2; }

static void note(const kvn_pool *pool, const kvn_piece *piece)
{
    unsigned mine = 2;

    for (unsigned i = 0; i < pool->threads; i++)
        if (pthread_equal(pool->workers[i].thread, pthread_self()))
            mine = pool->workers[i].node;
    moved_by[mine][index_of_number(node_at(piece->first))]++;
    order[num_moved++] = node_at(piece->first);
}

static bool wait_for(const bool *reached, const unsigned *number, unsigned old)
{
    struct timespec deadline;
    int error = 0;

    clock_gettime(CLOCK_REALTIME, &deadline);
    deadline.tv_sec += DEADLINE_S;
    while (error == 0 && (reached ? !*reached : *number == old))
        error = pthread_cond_timedwait(&changed, &mutex, &deadline);
    return error == 0;
}

/* Two threads move one piece each, and then the next two pieces. */
static int move_in_pairs(void *context, const kvn_columns *columns, const kvn_piece *piece, kvn_fault *fault)
{
    bool in_time = true;

    (void)columns, (void)fault;
    pthread_mutex_lock(&mutex);
    note(context, piece);
    if (++arrived == 2) {
        arrived = 0;
        round_number++;
        pthread_cond_broadcast(&changed);
    } else {
        in_time = wait_for(NULL, &round_number, round_number);
    }
    pthread_mutex_unlock(&mutex);
    return in_time ? KVN_OK : KVN_FAILED;
}

static int move_at_once(void *context, const kvn_columns *columns, const kvn_piece *piece, kvn_fault *fault)
{
    (void)columns, (void)fault;
    pthread_mutex_lock(&mutex);
    note(context, piece);
    pthread_mutex_unlock(&mutex);
    return KVN_OK;
}

static int block(void *context, const kvn_columns *columns, const kvn_piece *piece, kvn_fault *fault)
{
    bool in_time;

    (void)context, (void)columns, (void)piece, (void)fault;
    pthread_mutex_lock(&mutex);
    blocked++;
    pthread_cond_broadcast(&changed);
    in_time = wait_for(&is_open, NULL, 0);
    pthread_mutex_unlock(&mutex);
    return in_time ? KVN_OK : KVN_FAILED;
}

static void wait_until_blocked(unsigned threads)
{
    pthread_mutex_lock(&mutex);
    while (blocked < threads)
        CHECK(wait_for(NULL, &blocked, blocked));
    pthread_mutex_unlock(&mutex);
}

static void open_gate(void)
{
    pthread_mutex_lock(&mutex);
    is_open = true;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&mutex);
}

/* Pieces are single descriptors. */
static void submit(kvn_job *job, kvn_pool *pool, kvn_move move)
{
    static kvn_report report;

    kvn_job_init(job, &batch, move, pool, (kvn_piece_limits){1, KVN_PIECE_MIN, true}, &report);
    kvn_job_submit(job, pool, total);
}

static void await(kvn_job *job)
{
    uint64_t bytes_done;

    while (kvn_job_poll(job, &bytes_done) == KVN_PENDING)
        usleep(100); /* kvn_job_wait would move pieces */
    CHECK(job->report->status == KVN_OK);
    kvn_job_release(job);
}

static void each_moves_its_own(void)
{
    int processors[2];
    kvn_pool *pool = pool_of(2, processors);
    kvn_job job;

    begin_batch(KVN_CALLER_HURRIES);
    for (int i = 0; i < 20; i++)
        add(i / 2 % 2 ? FIRST : SECOND, MIN);
    submit(&job, pool, move_in_pairs);
    await(&job);
    CHECK(moved_by[0][0] == 10 && moved_by[1][1] == 10);
    kvn_pool_destroy(pool);
}

/* A thread whose node has no pieces moves half of those of the other node. */
static void the_idle_one_steals(void)
{
    int processors[2];
    kvn_pool *pool = pool_of(2, processors);
    kvn_job job;

    begin_batch(KVN_CALLER_HURRIES);
    for (int i = 0; i < 20; i++)
        add(i < 4 ? SECOND : FIRST, MIN);
    submit(&job, pool, move_in_pairs);
    await(&job);
    CHECK(moved_by[1][1] == 4 && moved_by[1][0] == 6 && moved_by[0][0] == 10);
    kvn_pool_destroy(pool);
}

static void one_thread_moves_both(void)
{
    int processors[2];
    kvn_pool *pool = pool_of(1, processors);
    kvn_job job;

    begin_batch(KVN_CALLER_HURRIES);
    for (int i = 0; i < 6; i++)
        add(i % 2 ? FIRST : i == 2 ? ABSENT : SECOND, MIN);
    submit(&job, pool, move_at_once);
    await(&job);
    CHECK(moved_by[0][0] == 3 && moved_by[0][1] == 2 && moved_by[0][2] == 1);
    kvn_pool_destroy(pool);
}

/* The kernel is not asked for the nodes of another process's memory. */
static void memory_of_others_has_no_node(void)
{
    int processors[2];
    kvn_pool *pool = pool_of(2, processors);
    kvn_job job;
    kvn_report report;

    begin_batch(KVN_CALLER_HURRIES);
    add(SECOND, MIN);
    kvn_job_init(&job, &batch, move_at_once, pool, (kvn_piece_limits){1, KVN_PIECE_MIN, false},
                 &report);
    kvn_job_submit(&job, pool, total);
    CHECK(num_calls == 0 && !job.nodes);
    await(&job);
    kvn_pool_destroy(pool);
}

/* Waits until all workers sleep. */
static void wait_until_idle(kvn_pool *pool)
{
    unsigned idle = 0;

    while (idle < pool->threads) {
        sched_yield();
        pthread_mutex_lock(&pool->mutex);
        idle = pool->crews[0].idle + pool->crews[1].idle;
        pthread_mutex_unlock(&pool->mutex);
    }
}

/* A submitted job wakes the worker of its destination's node. */
static void the_right_one_wakes(void)
{
    static const int numbers[] = {FIRST, SECOND};

    for (unsigned node = 0; node < 2; node++) {
        int processors[2];
        kvn_pool *pool = pool_of(2, processors);
        kvn_job job;

        memset(moved_by, 0, sizeof moved_by);
        for (int i = 0; i < 50; i++) {
            wait_until_idle(pool);
            num_moved = 0;
            begin_batch(KVN_CALLER_HURRIES);
            add(numbers[node], MIN);
            submit(&job, pool, move_at_once);
            await(&job);
        }
        CHECK(moved_by[node][node] >= 48); /* a thread may wake by itself */
        kvn_pool_destroy(pool);
    }
}

/* A caller that moves its own job begins with the pieces on its node. */
static void a_caller_moves_its_own_first(void)
{
    static const int expected[] = {SECOND, SECOND, FIRST, FIRST};
    static uint64_t one_dst[] = {ON(FIRST, 0)}, one_size[] = {MIN};
    const kvn_columns one = {.dst = one_dst, .src = one_dst, .nbytes = one_size, .count = 1,
                             .caller = KVN_CALLER_HURRIES};
    int processors[2];
    kvn_pool *pool = pool_of(2, processors);
    kvn_job before, job;
    kvn_report report;
    cpu_set_t bound;

    CPU_ZERO(&bound);
    CPU_SET((size_t)processors[1], &bound);
    CHECK(sched_setaffinity(0, sizeof bound, &bound) == 0);
    kvn_job_init(&before, &one, block, pool, (kvn_piece_limits){1, KVN_PIECE_MIN, true}, &report);
    kvn_job_submit(&before, pool, MIN);
    wait_until_blocked(1); /* the only worker, because the next caller waits */
    begin_batch(KVN_CALLER_WAITS);
    for (int i = 0; i < 4; i++)
        add(i % 2 ? SECOND : FIRST, MIN);
    submit(&job, pool, move_at_once);
    CHECK(kvn_job_wait(&job, KVN_FOREVER) == KVN_OK);
    CHECK(num_moved == 4 && moved_by[2][0] == 2);
    for (int i = 0; i < 4; i++)
        CHECK(processors[0] == processors[1] || order[i] == expected[i]);
    kvn_job_release(&job);
    open_gate();
    await(&before);
    kvn_pool_destroy(pool);
}

static void *abort_job(void *argument)
{
    kvn_job *job = argument;

    CHECK(kvn_job_abort(job, KVN_CANCELLED) == KVN_CANCELLED);
    CHECK(job->report->num_unconfirmed == 2);
    CHECK(job->report->unconfirmed[0].first == 1 && job->report->unconfirmed[0].last == 2);
    CHECK(job->report->unconfirmed[1].first == 3 && job->report->unconfirmed[1].last == 6);
    return NULL;
}

/* An abort waits for the pieces under way on both nodes, and leaves the other pieces unconfirmed. */
static void an_abort_leaves_the_rest_of_both(void)
{
    int processors[2];
    kvn_pool *pool = pool_of(2, processors);
    pthread_t thread;
    kvn_job job;

    begin_batch(KVN_CALLER_HURRIES);
    for (int i = 0; i < 6; i++)
        add(i < 2 || i > 4 ? FIRST : SECOND, MIN);
    submit(&job, pool, block);
    wait_until_blocked(2);
    CHECK(pthread_create(&thread, NULL, abort_job, &job) == 0);
    for (bool is_given_up = false; !is_given_up;) {
        sched_yield();
        pthread_mutex_lock(&pool->mutex);
        is_given_up = !kvn_job_has_unclaimed(&job);
        pthread_mutex_unlock(&pool->mutex);
    }
    CHECK(!kvn_job_is_finished(&job));
    open_gate();
    CHECK(pthread_join(thread, NULL) == 0);
    kvn_job_release(&job);
    kvn_pool_destroy(pool);
}

/* The kernel is asked for pages of this process only: to another process its addresses are other memory. */
static void only_own_destinations_have_a_node(void)
{
    static const uint64_t size = 3 * MIN;
    int processors[2];
    kvn_pool *pool = pool_of(2, processors);
    char *memory = calloc(2, size);
    const uint64_t from = (uintptr_t)memory, to = from + size;

    for (int is_get = 0; is_get < 2; is_get++) { /* the get last, whose answers are kept */
        kvn_backend *backend = kvn_process_create(pool, getpid(), is_get ? KVN_PEER_GET : KVN_PEER_PUT);
        const kvn_columns one = {.dst = &to, .src = &from, .nbytes = &size, .count = 1};
        kvn_request *request;
        kvn_report report;

        num_calls = 0;
        CHECK(backend->vtable->submit(backend, &one, &request, &report) == KVN_OK);
        CHECK(backend->vtable->wait(backend, request, KVN_FOREVER) == KVN_OK);
        CHECK(num_calls == (unsigned)is_get);
        backend->vtable->release(backend, request);
        backend->vtable->destroy(backend);
    }
    kvn_pool_destroy(pool);
    free(memory);
}

int main(int count, char **arguments)
{
    static const check_row rows[] = {
        {"threads_are_spread", threads_are_spread},
        {"threads_are_bound_to_their_nodes", threads_are_bound_to_their_nodes},
        {"a_thread_knows_its_node", a_thread_knows_its_node},
        {"each_moves_its_own", each_moves_its_own},
        {"the_idle_one_steals", the_idle_one_steals},
        {"one_thread_moves_both", one_thread_moves_both},
        {"memory_of_others_has_no_node", memory_of_others_has_no_node},
        {"the_right_one_wakes", the_right_one_wakes},
        {"a_caller_moves_its_own_first", a_caller_moves_its_own_first},
        {"an_abort_leaves_the_rest_of_both", an_abort_leaves_the_rest_of_both},
        {"only_own_destinations_have_a_node", only_own_destinations_have_a_node},
    };

    return run_check(count, arguments, rows, sizeof rows / sizeof *rows);
}

/* The pool, and transfers with several waiting threads, at moments that only C can choose. */
#include <pthread.h>
#include <semaphore.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "core/layered.h"
#include "core/thread.h"
#include "host/pooled.h"

#include "asleep.h"
#include "said.h"

#define SECOND INT64_C(1000000000)
/* ---- pool ---- */

static int move_slowly(void *context, const kvn_columns *batch, const kvn_piece *piece, kvn_fault *fault)
{
    (void)context, (void)batch, (void)piece, (void)fault;
    nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
    return KVN_OK;
}

/* A thread that helps and leaves at its deadline leaves the rest to a worker. */
static void helper_leaves(void)
{
    enum { PIECES = 20 };
    static uint64_t nbytes[PIECES], nowhere[PIECES];
    kvn_pool *pool = kvn_pool_create(1, NULL, 0);
    const kvn_columns columns = {.dst = nowhere, .src = nowhere, .nbytes = nbytes, .count = PIECES,
                                 .caller = KVN_CALLER_WAITS};

    for (int i = 0; i < PIECES; i++)
        nbytes[i] = KVN_PIECE_MIN;
    for (int round = 0; round < 40; round++) {
        const int64_t deadline_ns = kvn_now_ns() + 5 * SECOND;
        kvn_report report;
        uint64_t bytes_done;
        kvn_job job;

        kvn_job_init(&job, &columns, move_slowly, NULL, (kvn_piece_limits){1, KVN_PIECE_MIN, false}, &report);
        kvn_job_submit(&job, pool, (uint64_t)PIECES * KVN_PIECE_MIN);
        kvn_job_wait(&job, kvn_now_ns() + 1000000);
        while (kvn_job_poll(&job, &bytes_done) == KVN_PENDING) {
            CHECK(kvn_now_ns() < deadline_ns);
            sched_yield();
        }
        kvn_job_release(&job);
    }
    kvn_pool_destroy(pool);
}

/* Aborts a job after each number of pieces. Descriptors with unclaimed bytes are unconfirmed, the earlier ones are
 * confirmed. */
static void give_up_between_pieces(void)
{
    enum { COUNT = 6, MIN = KVN_PIECE_MIN };
    static const uint64_t nbytes[COUNT] = {MIN / 2, 5 * MIN + 7, 1, 2 * MIN, 3 * MIN + 1, MIN};
    static const uint64_t nowhere[COUNT];
    const kvn_columns columns = {.dst = nowhere, .src = nowhere, .nbytes = nbytes, .count = COUNT};
    uint64_t total = 0;
    bool has_cut = false, has_ended = false;

    for (int i = 0; i < COUNT; i++)
        total += nbytes[i];
    for (int pieces = 1; !has_ended; pieces++) {
        uint64_t claimed = 0, whole = 0, end = 0;
        kvn_piece piece;
        kvn_report report;
        kvn_job job;

        kvn_job_init(&job, &columns, NULL, NULL, (kvn_piece_limits){COUNT, MIN, false}, &report);
        kvn_job_start(&job, total);
        for (int i = 0; i < pieces && kvn_job_has_unclaimed(&job); i++) {
            kvn_job_claim(&job, 1, 0, &piece);
            claimed += piece.nbytes;
        }
        while (whole < COUNT && end + nbytes[whole] <= claimed)
            end += nbytes[whole++];
        has_cut |= end < claimed;
        has_ended = whole == COUNT;
        report.status = KVN_CANCELLED;
        kvn_job_abandon(&job);
        kvn_job_finish(&job);
        CHECK(report.status == (has_ended ? KVN_OK : KVN_CANCELLED));
        CHECK(report.num_unconfirmed == !has_ended);
        if (!has_ended)
            CHECK(report.unconfirmed[0].first == whole && report.unconfirmed[0].last == COUNT);
    }
    CHECK(has_cut);
}

/* ---- several waiting threads ---- */

static sem_t has_begun, may_end;
static kvn_ending ending;

/* Moves nothing, and returns when the check allows the end. */
static int move_when_told(void *context, const kvn_columns *batch, const kvn_piece *piece, kvn_fault *fault)
{
    (void)context, (void)batch, (void)piece, (void)fault;
    sem_post(&has_begun);
    sem_wait(&may_end);
    return KVN_OK;
}

static void destroy_nothing(kvn_backend *self) { (void)self; }

static const kvn_backend_vtable POOLED = KVN_POOLED_VTABLE("told", destroy_nothing);

/* A transfer that is awaited and aborted as a request, a task, and a layered task. */
typedef struct waited {
    kvn_backend *backend;
    kvn_request *request;
    kvn_task task;
    kvn_layered layered;
} waited;

static int wait_for_request(waited *it)
{
    return it->backend->vtable->wait(it->backend, it->request, KVN_FOREVER);
}

static int abort_request(waited *it)
{
    return it->backend->vtable->abort(it->backend, it->request, KVN_CANCELLED);
}

static int wait_for_the_task(waited *it) { return kvn_task_wait(&it->task, KVN_FOREVER); }
static int abort_the_task(waited *it) { return kvn_task_abort(&it->task, KVN_CANCELLED); }
static int wait_for_layers(waited *it) { return kvn_layered_wait(&it->layered, KVN_FOREVER); }
static int abort_layers(waited *it) { return kvn_layered_abort(&it->layered, KVN_CANCELLED); }

typedef struct caller {
    int (*call)(waited *it);
    waited *it;
    _Atomic pid_t thread;
} caller;

static void *call(void *argument)
{
    caller *self = argument;
    self->thread = (pid_t)syscall(SYS_gettid);
    return (void *)(intptr_t)self->call(self->it);
}

/* All threads sleep when the transfer ends, and all wake. */
static void check_all_wake(waited *it, int (*const *calls)(waited *it), size_t count)
{
    pthread_t threads[4];
    caller callers[4];
    struct timespec deadline;

    sem_wait(&has_begun);
    for (size_t i = 0; i < count; i++) {
        callers[i] = (caller){calls[i], it, 0};
        CHECK(pthread_create(&threads[i], NULL, call, &callers[i]) == 0);
        while (!callers[i].thread)
            sched_yield();
        other = callers[i].thread;
        wait_until_it_sleeps();
    }
    sem_post(&may_end);
    clock_gettime(CLOCK_REALTIME, &deadline);
    deadline.tv_sec += 20;
    for (size_t i = 0; i < count; i++) {
        void *status;
        CHECK(pthread_timedjoin_np(threads[i], &status, &deadline) == 0);
        CHECK((intptr_t)status == KVN_OK); /* all bytes were claimed before the abort */
    }
}

static void all_who_wait_wake(void)
{
    kvn_pool *pool = kvn_pool_create(1, NULL, 0);
    kvn_pooled backend;
    const kvn_columns columns = columns_of(1);
    waited it = {.backend = &backend.base};
    kvn_report report;
    int opened;

    sem_init(&has_begun, 0, 0);
    sem_init(&may_end, 0, 0);
    kvn_pooled_init(&backend, &POOLED, pool, move_when_told);
    for (int first = 0; first < 3; first++) { /* index of the call that sleeps first */
        int (*const of_request[])(waited *) = {wait_for_request, wait_for_request, abort_request};
        int (*const of_task[])(waited *) = {wait_for_the_task, wait_for_the_task, abort_the_task};
        int (*const of_layers[])(waited *) = {wait_for_layers, wait_for_layers, abort_layers};
        int (*const *const kinds[])(waited *) = {of_request, of_task, of_layers};

        for (int kind = 0; kind < 3; kind++) {
            int (*calls[3])(waited *);
            for (int i = 0; i < 3; i++)
                calls[i] = kinds[kind][(first + i) % 3];
            if (kind == 0) {
                CHECK(kvn_pooled_submit(it.backend, &columns, &it.request, &report) == KVN_OK);
            } else if (kind == 1) {
                kvn_task_init(&it.task, it.backend, &columns, NULL);
                CHECK(kvn_task_begin(&it.task) == KVN_PENDING);
            } else {
                kvn_ending_init(&ending, 1);
                kvn_layered_init(&it.layered, it.backend, &columns, 1, &ending);
                CHECK(kvn_layered_open(&it.layered, 0, NULL, &opened) == KVN_PENDING && opened);
            }
            check_all_wake(&it, calls, 3);
            if (kind == 0)
                kvn_pooled_release(it.backend, it.request);
            else if (kind == 1)
                kvn_task_release(&it.task);
            else
                kvn_layered_release(&it.layered);
        }
    }
    kvn_pool_destroy(pool);
}

/* A thread can read the number of moved bytes while another thread waits. */
static void bytes_beside_a_wait(void)
{
    static const uint64_t nbytes[2] = {KVN_PIECE_MIN, KVN_PIECE_MIN}, nowhere[2];
    const kvn_columns columns = {.dst = nowhere, .src = nowhere, .nbytes = nbytes, .count = 2};
    kvn_pool *pool = kvn_pool_create(1, NULL, 0);
    kvn_pooled backend;
    waited it = {.backend = &backend.base};
    caller waiting = {wait_for_the_task, &it, 0};
    pthread_t thread;
    void *status;

    sem_init(&has_begun, 0, 0);
    sem_init(&may_end, 0, 0);
    kvn_pooled_init(&backend, &POOLED, pool, move_when_told);
    backend.piece.descriptors = 1;
    kvn_task_init(&it.task, it.backend, &columns, NULL);
    CHECK(kvn_task_begin(&it.task) == KVN_PENDING);
    CHECK(pthread_create(&thread, NULL, call, &waiting) == 0);
    while (!waiting.thread)
        sched_yield();
    other = waiting.thread;
    for (int moved = 0; moved < 2; moved++) {
        sem_wait(&has_begun);
        wait_until_it_sleeps();
        CHECK(kvn_task_bytes_done(&it.task) == (uint64_t)moved * KVN_PIECE_MIN);
        sem_post(&may_end);
    }
    pthread_join(thread, &status);
    CHECK((intptr_t)status == KVN_OK && kvn_task_bytes_done(&it.task) == 2 * KVN_PIECE_MIN);
    kvn_task_release(&it.task);
    kvn_pool_destroy(pool);
}

int main(int count, char **arguments)
{
    static const check_row rows[] = {
        {"helper_leaves", helper_leaves},
        {"give_up_between_pieces", give_up_between_pieces},
        {"all_who_wait_wake", all_who_wait_wake},
        {"bytes_beside_a_wait", bytes_beside_a_wait},
    };

    return run_check(count, arguments, rows, sizeof rows / sizeof *rows);
}

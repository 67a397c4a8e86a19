/* Tasks, gates and layers over a backend that a check controls. */
#include <malloc.h>
#include <pthread.h>
#include <semaphore.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "core/layered.h"
#include "core/thread.h"
#include "host/pooled.h"

#include "asleep.h"
#include "said.h"

#define SECOND INT64_C(1000000000)
/* ---- a gate, and a backend that orders streams ---- */

static const kvn_backend_vtable ordering = {
    .name = "said", .orders = true, .submit = submit_said, .poll = poll_said, .wait = wait_done,
    .abort = abort_said, .release = release_nothing,
};

static int enter_gate(kvn_gate *gate, kvn_gate_waiter *waiter, kvn_failure *failure)
{
    (void)gate, (void)failure;
    said.waiter = waiter;
    if (said.on_enter)
        said.on_enter();
    return KVN_OK;
}

static void note_leaving(kvn_gate *gate, kvn_gate_waiter *waiter)
{
    (void)gate, (void)waiter;
    said.left++;
}

static kvn_gate gate = {.enter = enter_gate, .leave = note_leaving};

/* ---- executor ---- */

static void *wait_for_task(void *task)
{
    other = (pid_t)syscall(SYS_gettid);
    return (void *)(intptr_t)kvn_task_wait(task, kvn_now_ns() + 5 * SECOND);
}

/* A thread that waits at a gate continues when a backend that had no room accepts the batch. */
static void pass_wakes(void)
{
    kvn_backend backend = {&ordering};
    kvn_columns columns = columns_of(1);
    kvn_task task;
    pthread_t thread;
    void *status;

    columns.after = &gate;
    said.refuses = true;
    kvn_task_init(&task, &backend, &columns, NULL);
    CHECK(kvn_task_begin(&task) == KVN_PENDING && said.waiter->pass && said.waiter->room == &backend);
    CHECK(pthread_create(&thread, NULL, wait_for_task, &task) == 0);
    wait_until_it_sleeps();
    said.refuses = false;
    CHECK(said.waiter->pass(said.waiter));
    pthread_join(thread, &status);
    CHECK((intptr_t)status == KVN_OK);
    kvn_task_release(&task);
}

/* A task is held until a backend has its batch. If the task is aborted before, nothing is confirmed. */
static void held_at_its_gate(void)
{
    kvn_backend backends[] = {{&plain}, {&ordering}};
    kvn_columns columns = columns_of(2);

    columns.after = &gate;
    for (int orders = 0; orders < 2; orders++) {
        kvn_task task;

        said.polled = KVN_PENDING;
        kvn_task_init(&task, &backends[orders], &columns, NULL);
        CHECK(kvn_task_begin(&task) == KVN_PENDING && kvn_task_is_held(&task) == !orders);
        said.polled = KVN_CANCELLED;
        CHECK(kvn_task_abort(&task, KVN_CANCELLED) == KVN_CANCELLED && !kvn_task_is_held(&task));
        CHECK(orders || strstr(kvn_task_outcome(&task)->message, "2 of 2 descriptors are not confirmed; the event"));
        kvn_task_release(&task);
    }
}

/* A thread that waits at a gate continues when the gate opens or fails. */
static void open_wakes(void)
{
    const int given[] = {KVN_OK, KVN_FAILED};
    const kvn_failure why = {.status = KVN_FAILED, .message = "it was destroyed"};
    kvn_backend backend = {&plain};
    kvn_columns columns = columns_of(1);

    columns.after = &gate;
    for (size_t i = 0; i < 2; i++) {
        kvn_task task;
        pthread_t thread;
        void *status;

        other = 0;
        said.polled = KVN_PENDING;
        kvn_task_init(&task, &backend, &columns, NULL);
        CHECK(kvn_task_begin(&task) == KVN_PENDING);
        CHECK(pthread_create(&thread, NULL, wait_for_task, &task) == 0);
        wait_until_it_sleeps();
        CHECK(said.waiter->open(said.waiter, given[i], &why));
        pthread_join(thread, &status);
        CHECK((intptr_t)status == given[i]);
        kvn_task_release(&task);
    }
}

static sem_t is_ordering, may_end;

static int order_when_told(kvn_backend *self, kvn_request *request, void *stream, int64_t deadline_ns,
                           kvn_failure *why)
{
    (void)self, (void)request, (void)stream, (void)deadline_ns, (void)why;
    sem_post(&is_ordering);
    sem_wait(&may_end);
    return KVN_OK;
}

static void *order_stream(void *task)
{
    kvn_failure why;
    return (void *)(intptr_t)kvn_task_block_stream(task, NULL, KVN_FOREVER, &why);
}

/* A thread that waits during block_stream continues after that call, even if the bytes arrive earlier. */
static void order_wakes(void)
{
    kvn_backend_vtable with_streams = plain;
    kvn_backend backend = {&with_streams};
    const kvn_columns columns = columns_of(1);
    pthread_t ordering_thread, waiting_thread;
    kvn_task task;
    void *status;

    sem_init(&is_ordering, 0, 0);
    sem_init(&may_end, 0, 0);
    with_streams.block_stream = order_when_told;
    kvn_task_init(&task, &backend, &columns, NULL);
    CHECK(kvn_task_begin(&task) == KVN_PENDING);
    CHECK(pthread_create(&ordering_thread, NULL, order_stream, &task) == 0);
    sem_wait(&is_ordering);
    CHECK(pthread_create(&waiting_thread, NULL, wait_for_task, &task) == 0);
    wait_until_it_sleeps();
    sem_post(&may_end);
    pthread_join(waiting_thread, &status);
    CHECK((intptr_t)status == KVN_OK);
    pthread_join(ordering_thread, &status);
    CHECK((intptr_t)status == KVN_OK);
    kvn_task_release(&task);
}

static int refuse_entry(kvn_gate *gate, kvn_gate_waiter *waiter, kvn_failure *failure)
{
    (void)gate, (void)waiter;
    return kvn_fail(failure, KVN_NO_MEMORY, 12, "no room at the gate");
}

/* A task fails as its gate fails, and leaves the gate if and only if it has entered. */
static void gate_fails(void)
{
    static const int statuses[] = {KVN_NO_MEMORY, KVN_PEER_GONE, KVN_CANCELLED, KVN_UNSUPPORTED};
    kvn_gate refusing = {.enter = refuse_entry, .leave = note_leaving};
    kvn_backend backend = {&plain};
    kvn_columns columns = columns_of(2);
    kvn_failure why;
    kvn_task task;

    columns.after = &refusing;
    kvn_task_init(&task, &backend, &columns, NULL);
    CHECK(kvn_task_begin(&task) == KVN_NO_MEMORY);
    CHECK(kvn_task_outcome(&task)->code == 12 && strstr(kvn_task_outcome(&task)->message, "no room"));
    kvn_task_release(&task);
    CHECK(said.left == 0);
    columns.after = &gate;
    for (int i = 0; i < 4; i++) {
        kvn_task_init(&task, &backend, &columns, NULL);
        CHECK(kvn_task_begin(&task) == KVN_PENDING);
        kvn_fail(&why, statuses[i], 5 + i, "the stream has failed");
        said.waiter->open(said.waiter, statuses[i], &why);
        CHECK(kvn_task_poll(&task) == statuses[i]);
        CHECK(kvn_task_outcome(&task)->code == 5 + i);
        CHECK(strstr(kvn_task_outcome(&task)->message, "the stream has failed"));
        CHECK(kvn_task_outcome(&task)->num_unconfirmed == 1);
        kvn_task_release(&task);
        CHECK(said.left == i + 1);
    }
    CHECK(said.submitted == 0);
}

/* The thread of a gate never waits for a place: it submits a batch without a place again later, until the abort. */
static void opened_again(void)
{
    kvn_backend backend = {&plain};
    kvn_columns columns = columns_of(2);
    kvn_failure why = {0};

    columns.after = &gate;
    for (int is_given_up = 0; is_given_up < 2; is_given_up++) {
        kvn_task task;

        said.is_full = true;
        said.polled = KVN_PENDING;
        said.submitted = said.left = 0;
        kvn_task_init(&task, &backend, &columns, NULL);
        CHECK(kvn_task_begin(&task) == KVN_PENDING);
        CHECK(!said.waiter->open(said.waiter, KVN_OK, &why));
        CHECK(!said.waiter->open(said.waiter, KVN_OK, &why));
        CHECK(kvn_task_poll(&task) == KVN_PENDING && said.submitted == 0);
        if (is_given_up)
            CHECK(kvn_task_abort(&task, KVN_TIMEOUT) == KVN_TIMEOUT && said.left == 1);
        said.is_full = false;
        CHECK(said.waiter->open(said.waiter, KVN_OK, &why));
        CHECK(said.submitted == !is_given_up);
        if (!is_given_up)
            CHECK(kvn_task_wait(&task, KVN_FOREVER) == KVN_OK);
        kvn_task_release(&task);
    }
}

static pthread_t moved_by;

static int note_thread(void *context, const kvn_columns *batch, const kvn_piece *piece, kvn_fault *fault)
{
    (void)context, (void)batch, (void)piece, (void)fault;
    moved_by = pthread_self();
    return KVN_OK;
}

/* A caller moves a small batch itself, but not if it hurries. */
static void small_batches_in_a_hurry(void)
{
    static const kvn_backend_vtable vtable = KVN_POOLED_VTABLE("said", NULL);
    kvn_pool *pool = kvn_pool_create(1, NULL, 0);
    kvn_columns columns = columns_of(2);
    kvn_pooled pooled;

    kvn_pooled_init(&pooled, &vtable, pool, note_thread);
    pooled.inline_nbytes = 100;
    for (int hurries = 0; hurries < 2; hurries++) {
        kvn_request *request;
        kvn_report report;
        uint64_t bytes_done;

        columns.caller = hurries ? KVN_CALLER_HURRIES : KVN_CALLER_RETURNS;
        CHECK(vtable.submit(&pooled.base, &columns, &request, &report) == KVN_OK);
        while (vtable.poll(&pooled.base, request, &bytes_done) == KVN_PENDING)
            sched_yield();
        CHECK((pthread_equal(moved_by, pthread_self()) == 0) == (hurries == 1));
        vtable.release(&pooled.base, request);
    }
    kvn_pooled_fini(&pooled);
    kvn_pool_destroy(pool);
}

/* ---- layers ---- */

static kvn_layered layered;
static kvn_ending ending;

static void init_layered(kvn_backend *backend, const kvn_columns *columns)
{
    kvn_ending_init(&ending, 1);
    kvn_layered_init(&layered, backend, columns, 1, &ending);
}

static void fail_first_layer(void)
{
    said.polled = KVN_FAILED;
    CHECK(kvn_layered_poll(&layered) == KVN_PENDING && kvn_layered_is_sealed(&layered));
}

/* A layer that opens while another layer fails does not wait for its event any more. */
static void open_beside_failure(void)
{
    kvn_backend backend = {&plain};
    const kvn_columns columns = columns_of(3);
    int opened;

    init_layered(&backend, &columns);
    CHECK(kvn_layered_open(&layered, 0, NULL, &opened) == KVN_PENDING && opened);
    said.on_enter = fail_first_layer;
    kvn_layered_open(&layered, 1, &gate, &opened);
    CHECK(opened);
    CHECK(kvn_layered_poll(&layered) == KVN_FAILED && said.left == 1);
    kvn_layered_release(&layered);
}

static void *abort_again(void *unused)
{
    (void)unused;
    other = (pid_t)syscall(SYS_gettid);
    return (void *)(intptr_t)kvn_layered_abort(&layered, KVN_CANCELLED);
}

static pthread_t second;

static void abort_in_another_thread(void)
{
    said.on_abort = NULL;
    CHECK(pthread_create(&second, NULL, abort_again, NULL) == 0);
    wait_until_it_sleeps();
}

/* The first of two aborts gives the reason. */
static void abort_twice(void)
{
    kvn_backend backend = {&plain};
    const kvn_columns columns = columns_of(2);
    int opened;
    void *status;

    init_layered(&backend, &columns);
    CHECK(kvn_layered_open(&layered, 0, NULL, &opened) == KVN_PENDING && opened);
    said.on_abort = abort_in_another_thread;
    CHECK(kvn_layered_abort(&layered, KVN_TIMEOUT) == KVN_TIMEOUT);
    pthread_join(second, &status);
    CHECK((intptr_t)status == KVN_TIMEOUT);
    kvn_layered_release(&layered);
}

static int fail_instead(kvn_backend *self, kvn_request *request, int why)
{
    (void)self, (void)why;
    said.polled = KVN_FAILED;
    return outcome(request);
}

static int poll_place(kvn_backend *self, kvn_request *request, uint64_t *bytes_done)
{
    const int status = poll_said(self, request, bytes_done);

    if (status == KVN_FAILED)
        ((kvn_report *)request)->failed = 0;
    return status;
}

/* A layer that fails during its abort has failed. */
static void fail_beside_abort(void)
{
    kvn_backend_vtable failing = plain;
    kvn_backend backend = {&failing};
    const kvn_columns columns = columns_of(3);
    int opened;

    failing.abort = fail_instead;
    failing.poll = poll_place;
    for (uint64_t layer = 0; layer < 3; layer++) {
        said.polled = KVN_PENDING;
        init_layered(&backend, &columns);
        CHECK(kvn_layered_open(&layered, layer, NULL, &opened) == KVN_PENDING && opened);
        CHECK(kvn_layered_abort(&layered, KVN_CANCELLED) == KVN_FAILED);
        CHECK(kvn_layered_outcome(&layered)->status == KVN_FAILED && kvn_layered_outcome(&layered)->failed == layer);
        kvn_layered_release(&layered);
    }
}

static int submit_beside_abort(kvn_backend *self, const kvn_columns *batch, kvn_request **out, kvn_report *report)
{
    abort_in_another_thread();
    return submit_said(self, batch, out, report);
}

/* An abort during the submit of a layer stops the layer afterwards. */
static void open_beside_abort(void)
{
    kvn_backend_vtable aborted = plain;
    kvn_backend backend = {&aborted};
    const kvn_columns columns = columns_of(2);
    int opened;
    void *status;

    aborted.submit = submit_beside_abort;
    init_layered(&backend, &columns);
    kvn_layered_open(&layered, 0, NULL, &opened);
    CHECK(opened);
    pthread_join(second, &status);
    CHECK((intptr_t)status == KVN_CANCELLED);
    kvn_layered_release(&layered);
}

static void *wait_for_layers(void *unused)
{
    (void)unused;
    other = (pid_t)syscall(SYS_gettid);
    return (void *)(intptr_t)kvn_layered_wait(&layered, kvn_now_ns() + 5 * SECOND);
}

/* The first call ends at its deadline while the second thread waits for it; the second call finds the end. */
static int wait_in_turn(kvn_backend *self, kvn_request *request, int64_t deadline_ns)
{
    (void)self, (void)deadline_ns;
    if (!other) {
        CHECK(pthread_create(&second, NULL, wait_for_layers, NULL) == 0);
        wait_until_it_sleeps();
    } else {
        said.polled = KVN_OK;
    }
    return outcome(request);
}

/* A waiting thread takes over from a thread that leaves at its deadline. */
static void deadline_wakes(void)
{
    kvn_backend_vtable waited = plain;
    kvn_backend backend = {&waited};
    const kvn_columns columns = columns_of(1);
    int opened;
    void *status;

    waited.wait = wait_in_turn;
    init_layered(&backend, &columns);
    CHECK(kvn_layered_open(&layered, 0, NULL, &opened) == KVN_PENDING && opened);
    CHECK(kvn_layered_wait(&layered, kvn_now_ns()) == KVN_PENDING);
    pthread_join(second, &status);
    CHECK((intptr_t)status == KVN_OK);
    kvn_layered_release(&layered);
}

static size_t heap_nbytes(void)
{
#if defined(__GLIBC__)
    return mallinfo2().uordblks;
#else
    return 0;
#endif
}

/* Layers that are done, failed, aborted or never opened are freed. */
static void layers_are_freed(void)
{
    static const int ends[] = {KVN_OK, KVN_FAILED, KVN_CANCELLED};
    kvn_backend backend = {&plain};
    const kvn_columns columns = columns_of(4);
    size_t before = 0;
    int opened;

    for (int round = 0; round < 300; round++) {
        if (round == 30)
            before = heap_nbytes();
        init_layered(&backend, &columns);
        said.polled = KVN_PENDING;
        for (uint64_t layer = 0; layer < 3; layer++)
            CHECK(kvn_layered_open(&layered, layer, NULL, &opened) == KVN_PENDING && opened);
        said.polled = ends[round % 3];
        kvn_layered_poll(&layered);
        said.polled = KVN_PENDING;
        kvn_layered_abort(&layered, KVN_TIMEOUT);
        kvn_layered_release(&layered);
    }
    CHECK(heap_nbytes() - before < 270 * sizeof(uint64_t));
}

int main(int count, char **arguments)
{
    static const check_row rows[] = {
        {"pass_wakes", pass_wakes},
        {"held_at_its_gate", held_at_its_gate},
        {"open_wakes", open_wakes},
        {"order_wakes", order_wakes},
        {"open_beside_failure", open_beside_failure},
        {"abort_twice", abort_twice},
        {"gate_fails", gate_fails},
        {"opened_again", opened_again},
        {"small_batches_in_a_hurry", small_batches_in_a_hurry},
        {"fail_beside_abort", fail_beside_abort},
        {"open_beside_abort", open_beside_abort},
        {"layers_are_freed", layers_are_freed},
        {"deadline_wakes", deadline_wakes},
    };

    return run_check(count, arguments, rows, sizeof rows / sizeof *rows);
}

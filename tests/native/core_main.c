/* Checks of core and of the pool whose moments only C can choose. */
#include <dlfcn.h>
#include <malloc.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "core/intervals.h"
#include "core/layered.h"
#include "core/library.h"
#include "core/report.h"
#include "core/sort.h"
#include "core/thread.h"
#include "host/identity.h"
#include "host/pooled.h"
#include "host/writers.h"
#include "process/guarded.h"

#include "check.h"

#define SECOND INT64_C(1000000000)

/* ---- spans ---- */

static void merge_spans(void)
{
    kvn_report nested = {.num_unconfirmed = 2, .unconfirmed = {{9, 20}, {9, 10}}};

    kvn_report_merge_spans(&nested);
    CHECK(nested.num_unconfirmed == 1);
    CHECK(nested.unconfirmed[0].first == 9 && nested.unconfirmed[0].last == 20);
    srand(1);
    for (int round = 0; round < 500; round++) {
        kvn_report report = {.num_unconfirmed = 1 + rand() % 8};
        bool in[32] = {false}, merged[32] = {false};

        for (uint32_t i = 0; i < report.num_unconfirmed; i++) {
            const uint64_t first = rand() % 31, last = first + 1 + rand() % (31 - first);
            report.unconfirmed[i] = (kvn_span){first, last};
            for (uint64_t at = first; at < last; at++)
                in[at] = true;
        }
        kvn_report_merge_spans(&report);
        for (uint32_t i = 0; i < report.num_unconfirmed; i++) {
            CHECK(i == 0 || report.unconfirmed[i - 1].last < report.unconfirmed[i].first);
            for (uint64_t at = report.unconfirmed[i].first; at < report.unconfirmed[i].last; at++)
                merged[at] = true;
        }
        CHECK(memcmp(in, merged, sizeof in) == 0);
    }
}

/* ---- sort ---- */

static uint64_t itself(const void *item, const void *unused)
{
    (void)unused;
    return *(const uint64_t *)item;
}

/* In one array records would overwrite each other: builds that check refuse that. */
static void sort_in_one_array(void)
{
    uint64_t items[] = {300, 2, 1}, spare[3];
    int status = 0;

    const uint64_t *sorted = kvn_sort(items, spare, 3, sizeof *items, itself, NULL);
    CHECK(sorted[0] == 1 && sorted[1] == 2 && sorted[2] == 300);
    const int child = fork();
    if (child == 0) {
        close(STDERR_FILENO);
        kvn_sort(items, items, 3, sizeof *items, itself, NULL);
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
}

/* ---- intervals ---- */

static bool holds_all(const kvn_interval *it, uint64_t first, uint64_t last)
{
    return it->first <= first && last <= it->last;
}

/* Found if and only if one of them holds the piece; they may touch, overlap and lie inside one another. */
static void find_intervals(void)
{
    srand(2);
    for (int round = 0; round < 2000; round++) {
        kvn_interval items[6] = {0};
        const size_t count = 1 + rand() % 6;

        for (size_t i = 0; i < count; i++) {
            items[i].first = rand() % 24;
            items[i].last = items[i].first + rand() % 8;
        }
        kvn_intervals_sort(items, count);
        for (uint64_t first = 0; first < 32; first++)
            for (uint64_t nbytes = 1; nbytes < 9; nbytes++) {
                const size_t found = kvn_intervals_find(items, count, first, nbytes, rand() % 8);
                bool is_held = false;

                for (size_t i = 0; i < count; i++)
                    is_held |= holds_all(&items[i], first, first + nbytes - 1);
                CHECK((found != KVN_NO_INTERVAL) == is_held);
                CHECK(!is_held || holds_all(&items[found], first, first + nbytes - 1));
            }
    }
    CHECK(kvn_intervals_find(&(kvn_interval){.last = UINT64_MAX, .reach = UINT64_MAX}, 1, UINT64_MAX, 2, 0) ==
          KVN_NO_INTERVAL);
}

/* ---- libraries ---- */

/* Of several files with a call the first counts; of several missing calls the first is named. */
static void find_calls(void)
{
    void *const math = dlopen("libm.so.6", RTLD_NOW), *const c = dlopen("libc.so.6", RTLD_NOW);
    void *const of_math = dlsym(math, "frexp"), *const of_c = dlsym(c, "frexp");
    const kvn_symbol symbols[] = {{"frexp", 0, false}, {"no_1", 8, true}, {"no_2", 16, false}, {"no_3", 24, false}};
    const kvn_symbols all = {symbols, 4}, two = {symbols, 2};
    void *calls[4] = {c, c, c, c};

    CHECK(of_math && of_c && of_math != of_c);
    CHECK(kvn_library_find((void *[]){math, c}, 2, "frexp") == of_math);
    CHECK(kvn_library_find((void *[]){c, math}, 2, "frexp") == of_c);
    CHECK(kvn_library_find((void *[]){NULL, c}, 2, "frexp") == of_c);
    CHECK(strcmp(kvn_library_fill((void *[]){c, math}, 2, &all, calls), "no_2") == 0);
    CHECK(calls[0] == of_c && !calls[1] && !calls[2] && !calls[3]);
    CHECK(kvn_library_fill(&c, 1, &two, calls) == NULL);
    for (size_t i = 0; i < 3; i++)
        CHECK(strcmp(kvn_library_missing(calls, &all, i), symbols[i + 1].name) == 0);
    CHECK(kvn_library_missing(calls, &all, 3) == NULL);
}

/* ---- processes ---- */

static void rename_process(void)
{
    const kvn_identity own = kvn_identity_of(getpid());

    CHECK(kvn_identity_lives(own) && kvn_identity_pid(own) == getpid());
    CHECK(!kvn_identity_lives(own + (UINT64_C(1) << 40))); /* it started at another time */
    CHECK(prctl(PR_SET_NAME, "a) R 1 (b) 2 3") == 0);
    CHECK(kvn_identity_of(getpid()) == own && kvn_identity_lives(own));
}

static void *stay(void *unused)
{
    while (true)
        pause();
    return unused;
}

static bool has_mappings(int pid)
{
    char path[32];
    snprintf(path, sizeof path, "/proc/%d/maps", pid);
    FILE *file = fopen(path, "re");
    CHECK(file);
    const bool found = getc(file) != EOF;
    fclose(file);
    return found;
}

/* Its other threads may still use what is mapped, and no list says so. */
static void first_thread_ends(void)
{
    const int child = fork();

    if (child == 0) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, stay, NULL))
            _exit(1);
        pthread_exit(NULL);
    }
    CHECK(!kvn_process_has_mapped(getpid(), UINT64_MAX));
    while (has_mappings(child))
        sched_yield();
    const bool may_have = kvn_process_has_mapped(child, UINT64_MAX);
    CHECK(kill(child, SIGKILL) == 0 && waitpid(child, NULL, 0) == child);
    CHECK(may_have);
}

/* ---- threads ---- */

static void *blocked_signals(void *mask)
{
    pthread_sigmask(SIG_SETMASK, NULL, mask);
    return mask;
}

/* Handlers run in the program's own threads, and the thread that starts another keeps its mask. */
static void thread_blocks_signals(void)
{
    const int numbers[] = {SIGINT, SIGTERM, SIGCHLD, SIGUSR1, SIGALRM};
    sigset_t blocked, before, after;
    pthread_t thread;

    sigemptyset(&before);
    sigaddset(&before, SIGUSR2);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    CHECK(kvn_thread_start(&thread, NULL, "kvn-check", blocked_signals, &blocked) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    pthread_sigmask(SIG_SETMASK, NULL, &after);
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        CHECK(sigismember(&blocked, numbers[i]) == 1 && sigismember(&after, numbers[i]) == 0);
    CHECK(sigismember(&after, SIGUSR2) == 1);
}

/* ---- a backend and a gate that do what a check says ---- */

static struct {
    int submitted, left, polled;
    bool refuses; /* what comes after a gate: there is no room */
    bool is_full; /* a caller that hurries gets no place */
    kvn_gate_waiter *waiter;
    void (*on_enter)(void);
    void (*on_abort)(void);
} said = {.polled = KVN_PENDING};

static int submit(kvn_backend *self, const kvn_columns *batch, kvn_request **out, kvn_report *report)
{
    (void)self, (void)report;
    *out = NULL;
    if ((batch->after && said.refuses) || (batch->caller == KVN_CALLER_HURRIES && said.is_full))
        return KVN_PENDING;
    said.submitted++;
    *out = (kvn_request *)&said;
    return KVN_OK;
}

static int outcome(kvn_report *report, int status)
{
    if (status == KVN_OK)
        kvn_report_begin(report);
    else if (status != KVN_PENDING)
        kvn_report_refuse(report, 1, status, 0, "said");
    report->status = status;
    return status;
}

static int poll_said(kvn_backend *self, kvn_request *request, kvn_report *report)
{
    (void)self, (void)request;
    return outcome(report, said.polled);
}

static int wait_done(kvn_backend *self, kvn_request *request, int64_t deadline_ns, kvn_report *report)
{
    (void)self, (void)request, (void)deadline_ns;
    said.polled = KVN_OK;
    return outcome(report, KVN_OK);
}

static int abort_said(kvn_backend *self, kvn_request *request, int why, kvn_report *report)
{
    (void)self, (void)request;
    if (said.on_abort)
        said.on_abort();
    said.polled = why;
    return outcome(report, why);
}

static void release_nothing(kvn_backend *self, kvn_request *request) { (void)self, (void)request; }

static const kvn_backend_vtable plain = {
    .name = "said", .submit = submit, .poll = poll_said, .wait = wait_done, .abort = abort_said,
    .release = release_nothing,
}, ordering = {
    .name = "said", .orders = true, .submit = submit, .poll = poll_said, .wait = wait_done,
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
static uint64_t zeros[4], ones[4] = {1, 1, 1, 1};

static kvn_columns columns_of(size_t count)
{
    return (kvn_columns){.dst = zeros, .src = zeros, .nbytes = ones, .count = count};
}

/* ---- another thread, that sleeps ---- */

static _Atomic pid_t other;

static void wait_until_it_sleeps(void)
{
    char path[64], state = 'R';

    while (!other)
        sched_yield();
    snprintf(path, sizeof path, "/proc/self/task/%d/stat", (int)other);
    while (state != 'S') {
        FILE *file = fopen(path, "r");
        CHECK(file && fscanf(file, "%*d (%*[^)]) %c", &state) == 1);
        fclose(file);
        sched_yield();
    }
}

/* ---- executor ---- */

static void *wait_for_task(void *task)
{
    other = (pid_t)syscall(SYS_gettid);
    return (void *)(intptr_t)kvn_task_wait(task, kvn_now_ns() + 5 * SECOND);
}

/* Who waits at a gate goes on when a backend that had no room takes the batch. */
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

/* Who waits at a gate goes on when it opens, and when it never will. */
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
                           kvn_report *report)
{
    (void)self, (void)request, (void)stream, (void)deadline_ns, (void)report;
    sem_post(&is_ordering);
    sem_wait(&may_end);
    return KVN_OK;
}

static void *order_stream(void *task)
{
    kvn_report report;
    return (void *)(intptr_t)kvn_task_block_stream(task, NULL, KVN_FOREVER, &report);
}

/* Who waits while a stream is put behind the task, and sees the bytes arrive meanwhile, goes on after that. */
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

/* A task has the failure of its gate, and leaves the gate exactly if it has entered it. */
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

/* The thread of a gate never waits for a place: a batch that finds none is opened again later, or given up. */
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

/* A small batch is moved at once by its caller, but not by one that hurries. */
static void small_batches_in_a_hurry(void)
{
    static const kvn_backend_vtable vtable = KVN_POOLED_VTABLE("said", NULL);
    kvn_pool *pool = kvn_pool_create(1);
    kvn_columns columns = columns_of(2);
    kvn_pooled pooled;

    kvn_pooled_init(&pooled, &vtable, pool, note_thread);
    pooled.inline_nbytes = 100;
    for (int hurries = 0; hurries < 2; hurries++) {
        kvn_request *request;
        kvn_report report;

        columns.caller = hurries ? KVN_CALLER_HURRIES : KVN_CALLER_RETURNS;
        CHECK(vtable.submit(&pooled.base, &columns, &request, &report) == KVN_OK);
        while (vtable.poll(&pooled.base, request, &report) == KVN_PENDING)
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

/* A layer that is opened while another one fails does not stay behind its event. */
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

/* The reason is that of the first abort. */
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

static int fail_instead(kvn_backend *self, kvn_request *request, int why, kvn_report *report)
{
    (void)why;
    said.polled = KVN_FAILED;
    return poll_said(self, request, report);
}

static int poll_place(kvn_backend *self, kvn_request *request, kvn_report *report)
{
    const int status = poll_said(self, request, report);

    if (status == KVN_FAILED)
        report->failed = 0;
    return status;
}

/* What fails while it is given up has failed, of whichever layer it is. */
static void fail_beside_abort(void)
{
    kvn_backend_vtable failing = plain;
    kvn_backend backend = {&failing};
    const kvn_columns columns = columns_of(3);
    kvn_report report;
    int opened;

    failing.abort = fail_instead;
    failing.poll = poll_place;
    for (uint64_t layer = 0; layer < 3; layer++) {
        said.polled = KVN_PENDING;
        init_layered(&backend, &columns);
        CHECK(kvn_layered_open(&layered, layer, NULL, &opened) == KVN_PENDING && opened);
        CHECK(kvn_layered_abort(&layered, KVN_CANCELLED) == KVN_FAILED);
        CHECK(kvn_layered_report(&layered, &report) == KVN_FAILED && report.failed == layer);
        kvn_layered_release(&layered);
    }
}

static int submit_beside_abort(kvn_backend *self, const kvn_columns *batch, kvn_request **out, kvn_report *report)
{
    abort_in_another_thread();
    return submit(self, batch, out, report);
}

/* An abort that finds a layer not submitted yet stops it afterwards. */
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

static size_t heap_nbytes(void)
{
#if defined(__GLIBC__)
    return mallinfo2().uordblks;
#else
    return 0;
#endif
}

/* Whatever has become of its layers: done, failed, given up, or never opened. */
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

/* ---- pool ---- */

static int move_slowly(void *context, const kvn_columns *batch, const kvn_piece *piece, kvn_fault *fault)
{
    (void)context, (void)batch, (void)piece, (void)fault;
    nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
    return KVN_OK;
}

/* A thread that helped and goes, its deadline over, leaves the rest to a worker. */
static void helper_leaves(void)
{
    enum { PIECES = 20 };
    static uint64_t nbytes[PIECES], nowhere[PIECES];
    kvn_pool *pool = kvn_pool_create(1);
    const kvn_columns columns = {.dst = nowhere, .src = nowhere, .nbytes = nbytes, .count = PIECES,
                                 .caller = KVN_CALLER_WAITS};

    for (int i = 0; i < PIECES; i++)
        nbytes[i] = KVN_PIECE_MIN;
    for (int round = 0; round < 40; round++) {
        const int64_t deadline_ns = kvn_now_ns() + 5 * SECOND;
        kvn_report report;
        kvn_job job;

        kvn_job_init(&job, &columns, move_slowly, NULL, (kvn_piece_limits){1, KVN_PIECE_MIN});
        kvn_job_submit(&job, pool, (uint64_t)PIECES * KVN_PIECE_MIN);
        kvn_job_wait(&job, kvn_now_ns() + 1000000, &report);
        while (kvn_job_poll(&job, &report) == KVN_PENDING) {
            CHECK(kvn_now_ns() < deadline_ns);
            sched_yield();
        }
        kvn_job_release(&job);
    }
    kvn_pool_destroy(pool);
}

/* What is confirmed of a job that ends after each number of its pieces, by what was claimed: bytes that are
 * claimed come first, and a descriptor of which some are not stays unconfirmed. */
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
        kvn_job job;

        kvn_job_init(&job, &columns, NULL, NULL, (kvn_piece_limits){COUNT, MIN});
        kvn_job_start(&job, total);
        for (int i = 0; i < pieces && kvn_job_has_unclaimed(&job); i++) {
            kvn_job_claim(&job, 1, &piece);
            claimed += piece.nbytes;
        }
        while (whole < COUNT && end + nbytes[whole] <= claimed)
            end += nbytes[whole++];
        has_cut |= end < claimed;
        has_ended = whole == COUNT;
        job.report.status = KVN_CANCELLED;
        kvn_job_abandon(&job);
        kvn_job_finish(&job);
        CHECK(job.report.status == (has_ended ? KVN_OK : KVN_CANCELLED));
        CHECK(job.report.num_unconfirmed == !has_ended);
        if (!has_ended)
            CHECK(job.report.unconfirmed[0].first == whole && job.report.unconfirmed[0].last == COUNT);
    }
    CHECK(has_cut);
}

/* ---- several who wait ---- */

static sem_t has_begun;

/* Lasts until it may end. */
static int move_when_told(void *context, const kvn_columns *batch, const kvn_piece *piece, kvn_fault *fault)
{
    (void)context, (void)batch, (void)piece, (void)fault;
    sem_post(&has_begun);
    sem_wait(&may_end);
    return KVN_OK;
}

static void destroy_nothing(kvn_backend *self) { (void)self; }

static const kvn_backend_vtable POOLED = KVN_POOLED_VTABLE("told", destroy_nothing);

/* A transfer that is waited for and given up as a request, a task, and a task of layers. */
typedef struct waited {
    kvn_backend *backend;
    kvn_request *request;
    kvn_task task;
    kvn_layered layered;
} waited;

static int wait_for_request(waited *it)
{
    kvn_report report;
    return it->backend->vtable->wait(it->backend, it->request, KVN_FOREVER, &report);
}

static int abort_request(waited *it)
{
    kvn_report report;
    return it->backend->vtable->abort(it->backend, it->request, KVN_CANCELLED, &report);
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

/* All of them sleep when it ends, and all of them wake. */
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
        CHECK((intptr_t)status == KVN_OK); /* all of it was claimed when it was given up */
    }
}

static void all_who_wait_wake(void)
{
    kvn_pool *pool = kvn_pool_create(1);
    kvn_pooled backend;
    const kvn_columns columns = columns_of(1);
    waited it = {.backend = &backend.base};
    kvn_report report;
    int opened;

    sem_init(&has_begun, 0, 0);
    sem_init(&may_end, 0, 0);
    kvn_pooled_init(&backend, &POOLED, pool, move_when_told);
    for (int first = 0; first < 3; first++) { /* whose call comes first, and goes to sleep first */
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

/* ---- announcements ---- */

static uint64_t count_tickets(kvn_writers *writers)
{
    kvn_ticket left[KVN_WRITER_TICKETS];
    uint64_t next = 0;

    return kvn_writers_drain(writers, 0, &next, left);
}

/* What lasts has one ticket, renewed or not, and none once it has ended: an owner would wait for it. */
static void renewed_and_left(void)
{
    kvn_generations table;
    kvn_writers writers;
    kvn_writer writer;
    kvn_failure failure;
    kvn_fault fault;
    kvn_announcement announced;
    kvn_word word;

    CHECK(kvn_generations_create(1, 0, &table, &failure) == KVN_OK);
    CHECK(kvn_writers_create(1, &writers, &failure) == KVN_OK);
    CHECK(kvn_writer_open(getpid(), table.memory.fd, table.memory.inode, 1, writers.memory.fd, writers.memory.inode,
                          1, (uintptr_t)writers.gates, &writer, &failure) == KVN_OK);
    for (int is_ended = 0; is_ended < 2; is_ended++) {
        CHECK(kvn_generations_take(&table, false, 0, &word.slot, &word.generation, &failure) == KVN_OK);
        kvn_guard *guard = kvn_guard_create(&writer, &word, 1);

        CHECK(kvn_guard_enter(guard, false, 0, &announced, &fault) == KVN_OK);
        if (is_ended)
            CHECK(kvn_generations_release(&table, word.slot, word.generation, &failure) == KVN_OK);
        CHECK(kvn_guard_renew(guard, &announced, &failure) == (is_ended ? KVN_UNMAPPED : KVN_OK));
        CHECK(count_tickets(&writers) == 1);
        kvn_guard_leave(guard, &announced);
        CHECK(count_tickets(&writers) == 0);
        if (!is_ended)
            CHECK(kvn_generations_release(&table, word.slot, word.generation, &failure) == KVN_OK);
        kvn_guard_destroy(guard);
    }
    kvn_writer_close(&writer);
    kvn_writers_close(&writers);
    kvn_generations_close(&table);
}

/* When all places are taken, a batch of a caller that hurries is not taken, and later it is. */
static void no_place_in_a_hurry(void)
{
    kvn_backend backend = {&plain};
    kvn_columns columns = columns_of(2);
    kvn_announcement taken[KVN_WRITER_TICKETS];
    kvn_generations table;
    kvn_writers writers;
    kvn_writer writer;
    kvn_failure failure;
    kvn_fault fault;
    kvn_word word;
    kvn_request *request;
    kvn_report report;

    CHECK(kvn_generations_create(1, 0, &table, &failure) == KVN_OK);
    CHECK(kvn_generations_take(&table, false, 0, &word.slot, &word.generation, &failure) == KVN_OK);
    CHECK(kvn_writers_create(1, &writers, &failure) == KVN_OK);
    CHECK(kvn_writer_open(getpid(), table.memory.fd, table.memory.inode, 1, writers.memory.fd, writers.memory.inode,
                          1, (uintptr_t)writers.gates, &writer, &failure) == KVN_OK);
    kvn_guard *guard = kvn_guard_create(&writer, &word, 1);
    for (int i = 0; i < KVN_WRITER_TICKETS; i++)
        CHECK(kvn_guard_enter(guard, false, 0, &taken[i], &fault) == KVN_OK);
    kvn_backend *guarded = kvn_guarded_create(&backend, kvn_guard_create(&writer, &word, 1));
    columns.caller = KVN_CALLER_HURRIES;
    CHECK(guarded->vtable->submit(guarded, &columns, &request, &report) == KVN_PENDING);
    for (int i = 0; i < KVN_WRITER_TICKETS; i++)
        kvn_guard_leave(guard, &taken[i]);
    CHECK(guarded->vtable->submit(guarded, &columns, &request, &report) == KVN_OK);
    CHECK(guarded->vtable->wait(guarded, request, KVN_FOREVER, &report) == KVN_OK);
    guarded->vtable->release(guarded, request);
    CHECK(kvn_generations_release(&table, word.slot, word.generation, &failure) == KVN_OK);
    CHECK(guarded->vtable->submit(guarded, &columns, &request, &report) == KVN_UNMAPPED);
    guarded->vtable->destroy(guarded);
    kvn_guard_destroy(guard);
    kvn_writer_close(&writer);
    kvn_writers_close(&writers);
    kvn_generations_close(&table);
}

/* A writer that was late once is waited for again, and tickets of many entries are all seen. */
static void late_is_forgiven(void)
{
    enum { ENTRIES = 40 };
    static kvn_writer opened[ENTRIES];
    kvn_generations table;
    kvn_writers writers;
    kvn_failure failure;
    kvn_fault fault;
    kvn_announcement announced;
    kvn_word word;

    CHECK(kvn_generations_create(1, 0, &table, &failure) == KVN_OK);
    CHECK(kvn_generations_take(&table, false, 0, &word.slot, &word.generation, &failure) == KVN_OK);
    CHECK(kvn_writers_create(ENTRIES, &writers, &failure) == KVN_OK);
    for (int entry = 0; entry < ENTRIES; entry++) {
        CHECK(kvn_writer_open(getpid(), table.memory.fd, table.memory.inode, 1, writers.memory.fd,
                              writers.memory.inode, ENTRIES, (uintptr_t)writers.gates, &opened[entry],
                              &failure) == KVN_OK);
        kvn_guard *guard = kvn_guard_create(&opened[entry], &word, 1);

        for (int by_glance = 0; by_glance < 2; by_glance++) {
            CHECK(kvn_guard_enter(guard, false, 0, &announced, &fault) == KVN_OK);
            CHECK(!kvn_writers_are_idle(&writers));
            CHECK(count_tickets(&writers) == 1);
            CHECK(atomic_load(&writers.stopped[opened[entry].entry]));
            kvn_guard_leave(guard, &announced);
            CHECK(by_glance ? kvn_writers_are_idle(&writers) || entry >= 32 : count_tickets(&writers) == 0);
            CHECK(!atomic_load(&writers.stopped[opened[entry].entry]) || (by_glance && entry >= 32));
        }
        kvn_guard_destroy(guard);
    }
    for (int entry = 0; entry < ENTRIES; entry++)
        kvn_writer_close(&opened[entry]);
    kvn_writers_close(&writers);
    kvn_generations_close(&table);
}

int main(int count, char **arguments)
{
    static const check_row rows[] = {
        {"merge_spans", merge_spans},
        {"sort_in_one_array", sort_in_one_array},
        {"find_intervals", find_intervals},
        {"find_calls", find_calls},
        {"rename_process", rename_process},
        {"thread_blocks_signals", thread_blocks_signals},
        {"first_thread_ends", first_thread_ends},
        {"pass_wakes", pass_wakes},
        {"open_wakes", open_wakes},
        {"order_wakes", order_wakes},
        {"open_beside_failure", open_beside_failure},
        {"abort_twice", abort_twice},
        {"helper_leaves", helper_leaves},
        {"give_up_between_pieces", give_up_between_pieces},
        {"all_who_wait_wake", all_who_wait_wake},
        {"renewed_and_left", renewed_and_left},
        {"gate_fails", gate_fails},
        {"opened_again", opened_again},
        {"small_batches_in_a_hurry", small_batches_in_a_hurry},
        {"no_place_in_a_hurry", no_place_in_a_hurry},
        {"fail_beside_abort", fail_beside_abort},
        {"open_beside_abort", open_beside_abort},
        {"layers_are_freed", layers_are_freed},
        {"late_is_forgiven", late_is_forgiven},
    };

    return run_check(count, arguments, rows, sizeof rows / sizeof *rows);
}

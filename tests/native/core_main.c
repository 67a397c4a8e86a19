/* Spans, intervals, libraries, processes and threads at moments that only C can choose. */
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/intervals.h"
#include "core/library.h"
#include "core/report.h"
#include "core/sort.h"
#include "core/thread.h"
#include "host/identity.h"

#include "check.h"
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

/* A report with more spans than it has room for names too many descriptors, but never too few, in any order. */
static void add_to_a_full_report(void)
{
    srand(2);
    for (int round = 0; round < 500; round++) {
        static kvn_report report;
        bool in[4 * KVN_MAX_SPANS] = {false};

        kvn_report_begin(&report);
        for (int i = 0; i < 2 * KVN_MAX_SPANS; i++) {
            const uint64_t first = rand() % KVN_COUNT_OF(in);
            kvn_report_add_span(&report, first, first + 1);
            in[first] = true;
        }
        kvn_report_merge_spans(&report);
        CHECK(report.num_unconfirmed <= KVN_MAX_SPANS);
        for (uint32_t i = 0; i < report.num_unconfirmed; i++)
            for (uint64_t at = report.unconfirmed[i].first; at < report.unconfirmed[i].last; at++)
                in[at] = false;
        for (size_t at = 0; at < KVN_COUNT_OF(in); at++)
            CHECK(!in[at]);
    }
}

/* ---- sort ---- */

static uint64_t itself(const void *item, const void *unused)
{
    (void)unused;
    return *(const uint64_t *)item;
}

/* A sort inside of one array would overwrite records, so an assertion fails. */
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

/* A range is found if and only if one interval contains it. Intervals may touch, overlap or contain each other. */
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

/* A call is taken from the first library that has it. An error names the first missing call. */
static void find_calls(void)
{
    void *const math = dlopen("libm.so.6", RTLD_NOW), *const c = dlopen("libc.so.6", RTLD_NOW);
    void *const of_math = dlsym(math, "frexp"), *const of_c = dlsym(c, "frexp");
    const kvn_symbol symbols[] = {
        {"frexp", 0, false, false}, {"no_1", 8, true, false}, {"no_2", 16, false, false}, {"no_3", 24, false, false},
        {"no_4", 32, true, true}};
    const kvn_symbols all = {symbols, 5}, two = {symbols, 2};
    const kvn_symbol *missing = NULL;
    void *calls[5] = {c, c, c, c, c};

    CHECK(of_math && of_c && of_math != of_c);
    CHECK(kvn_library_find((void *[]){math, c}, 2, "frexp") == of_math);
    CHECK(kvn_library_find((void *[]){c, math}, 2, "frexp") == of_c);
    CHECK(kvn_library_find((void *[]){NULL, c}, 2, "frexp") == of_c);
    CHECK(strcmp(kvn_library_fill((void *[]){c, math}, 2, &all, calls), "no_2") == 0);
    CHECK(calls[0] == of_c && !calls[1] && !calls[2] && !calls[3]);
    CHECK(kvn_library_fill(&c, 1, &two, calls) == NULL);
    for (size_t i = 1; i <= 3; i++) {
        missing = kvn_library_missing(calls, &all, missing);
        CHECK(missing == &symbols[i]);
    }
    CHECK(kvn_library_missing(calls, &all, missing) == NULL);
    calls[4] = c; /* replaces no_3 */
    CHECK(kvn_library_missing(calls, &all, &symbols[2]) == NULL);
}

/* ---- processes ---- */

static void rename_process(void)
{
    const kvn_identity own = kvn_identity_of(getpid());

    CHECK(kvn_identity_lives(own) && kvn_identity_pid(own) == getpid());
    CHECK(!kvn_identity_lives(own + (UINT64_C(1) << 40))); /* another start time */
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

/* A process lives as long as any of its threads, which may still use mapped memory. */
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

/* Handlers run in the program's own threads, and starting a thread does not change the caller's mask. */
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

/* A wait that nothing wakes lasts until its deadline, and ends then. */
static void wait_until_the_deadline(void)
{
    const int64_t from_now_ns[] = {3000000, 1, -3000000, -2 * kvn_now_ns()};
    pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t never;

    kvn_cond_init(&never);
    pthread_mutex_lock(&mutex);
    for (size_t i = 0; i < KVN_COUNT_OF(from_now_ns); i++) {
        const int64_t deadline_ns = kvn_now_ns() + from_now_ns[i];
        while (kvn_cond_wait(&never, &mutex, deadline_ns))
            ; /* a spurious wake-up */
        CHECK(kvn_now_ns() >= deadline_ns);
    }
    pthread_mutex_unlock(&mutex);
    pthread_cond_destroy(&never);
}

int main(int count, char **arguments)
{
    static const check_row rows[] = {
        {"merge_spans", merge_spans},
        {"add_to_a_full_report", add_to_a_full_report},
        {"sort_in_one_array", sort_in_one_array},
        {"find_intervals", find_intervals},
        {"find_calls", find_calls},
        {"rename_process", rename_process},
        {"thread_blocks_signals", thread_blocks_signals},
        {"wait_until_the_deadline", wait_until_the_deadline},
        {"first_thread_ends", first_thread_ends},
    };

    return run_check(count, arguments, rows, sizeof rows / sizeof *rows);
}

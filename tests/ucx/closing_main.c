/* Checks that the end of an endpoint wakes waiting threads, and that queued work is always begun. */
#include "ucx/endpoint.c"

#include <sys/syscall.h>

#include "asleep.h"

static kvn_ucx_worker worker = {.wake_fd = -1, .has_thread = true};

static void *wait_for_ends(void *unused)
{
    other = (pid_t)syscall(SYS_gettid);
    CHECK(kvn_ucx_wait(&worker, has_no_endpoints, &worker, KVN_FOREVER));
    return unused;
}

/* The end of the last endpoint wakes a thread that closes the worker. */
static void woken_by_the_last(void)
{
    kvn_ucx_endpoint endpoints[2];
    pthread_t thread;

    worker.pid = getpid();
    pthread_mutex_init(&worker.mutex, NULL);
    pthread_mutex_init(&worker.progress_lock, NULL);
    kvn_cond_init(&worker.changed);
    atomic_store(&worker.num_endpoints, 2);
    pthread_mutex_lock(&worker.progress_lock); /* the other thread cannot call progress itself */
    CHECK(pthread_create(&thread, NULL, wait_for_ends, NULL) == 0);
    for (int i = 0; i < 2; i++) {
        endpoints[i] = (kvn_ucx_endpoint){.worker = &worker, .num_holders = 2, .is_closed = true};
        kvn_ucx_add_task(&worker, &endpoints[i].ending, end, &endpoints[i]);
        wait_until_it_sleeps();
        CHECK(end(&endpoints[i]) == 1);
        CHECK(atomic_load(&endpoints[i].num_holders) == 1 && !worker.first_task);
    }
    pthread_join(thread, NULL);
    pthread_mutex_unlock(&worker.progress_lock);
}

static kvn_ucx_work late;
static bool is_queued, has_run;

static void run_late(void *unused)
{
    (void)unused;
    has_run = true;
}

static void run_nothing(void *unused) { (void)unused; }

static unsigned progress_nothing(kvn_ucp_worker_h unused)
{
    (void)unused;
    return 0;
}

/* Submits work as another thread would, which finds the progress lock taken. */
static kvn_ucs_status arm_late(kvn_ucp_worker_h unused)
{
    (void)unused;
    if (!is_queued) {
        is_queued = true;
        kvn_ucx_post(&worker, &late, run_late, NULL);
        CHECK(!has_run);
    }
    return KVN_UCS_OK;
}

/* The holder of the progress lock begins work that is queued after its last check, because no event would follow. */
static void begun_by_the_holder(void)
{
    static const kvn_ucx calls = {.ucp_worker_progress = progress_nothing, .ucp_worker_arm = arm_late};
    kvn_ucx_work early;

    worker.calls = &calls;
    pthread_mutex_init(&worker.mutex, NULL);
    pthread_mutex_init(&worker.progress_lock, NULL);
    kvn_ucx_post(&worker, &early, run_nothing, NULL);
    CHECK(is_queued && has_run);
}

int main(int count, char **arguments)
{
    static const check_row rows[] = {
        {"woken_by_the_last", woken_by_the_last},
        {"begun_by_the_holder", begun_by_the_holder},
    };

    return run_check(count, arguments, rows, sizeof rows / sizeof *rows);
}

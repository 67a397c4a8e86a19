/* Checks of who is woken when UCX has closed an endpoint. */
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

/* Whoever closes a worker sleeps until the last of its endpoints is closed: nothing else wakes it. */
static void woken_by_the_last(void)
{
    kvn_ucx_endpoint endpoints[2];
    pthread_t thread;

    worker.pid = getpid();
    pthread_mutex_init(&worker.mutex, NULL);
    pthread_mutex_init(&worker.progress_lock, NULL);
    kvn_cond_init(&worker.changed);
    atomic_store(&worker.num_endpoints, 2);
    pthread_mutex_lock(&worker.progress_lock); /* as in a call-back; so the other thread makes no progress itself */
    CHECK(pthread_create(&thread, NULL, wait_for_ends, NULL) == 0);
    for (int i = 0; i < 2; i++) {
        endpoints[i] = (kvn_ucx_endpoint){.worker = &worker, .num_holders = 2};
        wait_until_it_sleeps();
        on_closed(NULL, KVN_UCS_OK, &endpoints[i]);
        CHECK(endpoints[i].is_closed && atomic_load(&endpoints[i].num_holders) == 1);
    }
    pthread_join(thread, NULL);
    pthread_mutex_unlock(&worker.progress_lock);
}

int main(int count, char **arguments)
{
    static const check_row rows[] = {{"woken_by_the_last", woken_by_the_last}};

    return run_check(count, arguments, rows, sizeof rows / sizeof *rows);
}

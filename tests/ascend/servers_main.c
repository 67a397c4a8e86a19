/* Checks of HIXL's servers. */
#include "hccl/server.c"

#include <pthread.h>
#include <unistd.h>

#include "asleep.h"

static int num_destroyed;
static kvn_hixl_server server;

static kvn_hixl_status destroy(void *handle)
{
    CHECK(handle == &num_destroyed);
    num_destroyed++;
    return KVN_HCCL_SUCCESS;
}

static void *get_context(const kvn_device *device) { return device->context; }

static void *close_it(void *unused)
{
    kvn_failure failure;

    (void)unused;
    other = gettid();
    CHECK(kvn_hixl_server_close(&server, &failure) == KVN_OK);
    return NULL;
}

/* Two threads close a server, of which neither has found it closed: both wait for a thread that registers memory. */
static void closed_by_two(void)
{
    static const kvn_device_ops ops = {.get_context = get_context};
    static kvn_hccl hccl = {.hixl = {.server_destroy = destroy}, .registry = PTHREAD_MUTEX_INITIALIZER};
    const kvn_device device = {.ops = &ops, .pid = getpid()};
    pthread_t threads[2];

    server = (kvn_hixl_server){.hccl = &hccl, .device = &device, .handle = &num_destroyed};
    hccl.servers = &server;
    pthread_mutex_lock(&hccl.registry);
    for (int i = 0; i < 2; i++) {
        other = 0;
        CHECK(pthread_create(&threads[i], NULL, close_it, NULL) == 0);
        wait_until_it_sleeps();
    }
    pthread_mutex_unlock(&hccl.registry);
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    CHECK(num_destroyed == 1 && !hccl.servers);
}

int main(int count, char **arguments)
{
    static const check_row rows[] = {{"closed_by_two", closed_by_two}};

    return run_check(count, arguments, rows, sizeof rows / sizeof *rows);
}

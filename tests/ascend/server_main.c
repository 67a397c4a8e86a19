/* Checks of HIXL's servers that other threads open and close at the same time. */
#include "hccl/server.h"

#include <unistd.h>

#include "check.h"

static void (*faster)(void); /* another thread, which comes before a lock of this one */

static int lock(pthread_mutex_t *mutex)
{
    void (*const other)(void) = faster;

    faster = NULL;
    if (other)
        other();
    return pthread_mutex_lock(mutex);
}

#define pthread_mutex_lock lock
#include "hccl/server.c"
#undef pthread_mutex_lock

static int destroyed;

static kvn_hixl_status create(const kvn_hixl_server_desc *desc, const kvn_hixl_config *config, void **out)
{
    (void)desc, (void)config;
    *out = &destroyed;
    return KVN_HCCL_SUCCESS;
}

static kvn_hixl_status start_listening(void *server, uint32_t backlog)
{
    (void)server, (void)backlog;
    return KVN_HCCL_SUCCESS;
}

static kvn_hixl_status destroy(void *server)
{
    (void)server;
    destroyed++;
    return KVN_HCCL_SUCCESS;
}

static void *get_context(const kvn_device *device) { return device->context; }

static const kvn_device_ops OPS = {.get_context = get_context};
static kvn_device device = {.ops = &OPS};
static kvn_hccl hccl = {
    .hixl = {.server_create = create, .server_listen = start_listening, .server_destroy = destroy},
    .registry = PTHREAD_MUTEX_INITIALIZER,
};
static kvn_hixl_server server;

static void open_server(void)
{
    const kvn_hixl_endpoint endpoint = {.protocol = 0};
    kvn_failure failure;

    device.pid = getpid();
    CHECK(kvn_hixl_server_open(&hccl, &device, &endpoint, 1, "127.0.0.1", 1, &server, &failure) == KVN_OK);
}

static void close_server(void)
{
    kvn_failure failure;

    CHECK(kvn_hixl_server_close(&server, &failure) == KVN_OK);
}

static void two_close(void)
{
    open_server();
    faster = close_server;
    close_server();
    CHECK(destroyed == 1 && !hccl.servers);
}

int main(int count, char **arguments)
{
    static const check_row rows[] = {{"two_close", two_close}};

    return run_check(count, arguments, rows, sizeof rows / sizeof *rows);
}

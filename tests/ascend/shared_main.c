/* Checks of objects that links of a process share: HIXL's servers, and staging memory. */
#include "hccl/server.c"
#include "hccl/staging.c"

#include <string.h>
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

/* Two threads close a server at the same time: both wait for a thread that registers memory. */
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

static bool has_thread;

int kvn_copier_init(kvn_copier *self, kvn_device *device, kvn_failure *failure)
{
    *self = (kvn_copier){.device = device};
    if (!has_thread)
        return kvn_fail(failure, KVN_NO_MEMORY, EAGAIN, "no thread");
    self->channel = (kvn_channel *)self;
    return KVN_OK;
}

void kvn_copier_fini(kvn_copier *self) { memset(self, 0, sizeof *self); }

/* A transfer without a thread releases its buffer set to the next transfer. */
static void claimed_without_a_thread(void)
{
    static atomic_int stop;
    static atomic_bool cancelled;
    const kvn_halt halt = {.stop = &stop, .cancelled = &cancelled};
    kvn_device device = {.id = 0};
    kvn_staging staging;
    kvn_buffer_set *set;
    kvn_failure failure;

    for (int i = 0; i < 2; i++) {
        has_thread = false;
        CHECK(kvn_staging_open(&device, 4096, 4096, 1, &staging, &failure) == KVN_OK);
        CHECK(kvn_staging_claim(&staging, &halt, &set, &failure) == KVN_NO_MEMORY);
        has_thread = i > 0;
        if (has_thread) {
            CHECK(kvn_staging_claim(&staging, &halt, &set, &failure) == KVN_OK);
            CHECK(kvn_staging_close(&staging, &failure) == KVN_INVALID);
            kvn_staging_release(&staging, set);
        }
        CHECK(kvn_staging_close(&staging, &failure) == KVN_OK);
        kvn_staging_free(&staging);
    }
}

int main(int count, char **arguments)
{
    static const check_row rows[] = {
        {"closed_by_two", closed_by_two},
        {"claimed_without_a_thread", claimed_without_a_thread},
    };

    return run_check(count, arguments, rows, sizeof rows / sizeof *rows);
}

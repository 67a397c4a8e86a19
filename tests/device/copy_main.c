/* Checks of what a shard confirms when copies on the stream and blocking ones take turns. */
#include "device/copy.c"

#include "check.h"

enum { PINNED = 4096, PAGEABLE = 1 << 30 };

kvn_stream kvn_channel_stream(const kvn_channel *channel)
{
    (void)channel;
    return (kvn_stream)1;
}

static int locate(const kvn_device *device, uint64_t address, kvn_memory_place *place, kvn_failure *failure)
{
    (void)device, (void)failure;
    place->kind = address >= PAGEABLE ? KVN_MEMORY_PAGEABLE : KVN_MEMORY_PINNED;
    return KVN_OK;
}

static int copy_nothing(kvn_device *device, kvn_direction direction, kvn_columns *batch, kvn_stream stream,
                        size_t *failed, kvn_failure *failure)
{
    (void)device, (void)direction, (void)batch, (void)stream, (void)failed, (void)failure;
    return KVN_OK;
}

/* Sources of one descriptor each; returns how many are confirmed after each call. */
static void confirm(const uint64_t *sources, size_t count, const uint64_t *confirmed)
{
    static const kvn_device_ops ops = {.max_batch = 16, .locate = locate, .copy_batch = copy_nothing};
    kvn_device device = {.ops = &ops, .mutex = PTHREAD_MUTEX_INITIALIZER};
    copy_backend backend = {.device = &device, .direction = KVN_HOST_TO_DEVICE};
    const uint64_t nowhere[4] = {0}, nbytes[4] = {64, 64, 64, 64};
    const kvn_columns shard = {.dst = nowhere, .src = sources, .nbytes = nbytes, .count = count};
    atomic_int stop = 0;
    kvn_channel_fault fault = {.confirmed = 0};
    transfer t = {.self = &backend, .shard = &shard, .stop = &stop, .fault = &fault};

    for (size_t i = 0; i < count; i++) {
        CHECK(copy_batch(&t, KVN_BATCH_ASYNC | KVN_BATCH_BLOCKING) == KVN_OK);
        CHECK(t.at == i + 1);
        CHECK(fault.confirmed == confirmed[i]);
    }
}

/* A blocking copy is over when it returns; that says nothing of those that are on the stream. */
static void blocking_behind_asynchronous(void)
{
    const uint64_t turns[] = {PINNED, PAGEABLE, PINNED}, none[] = {0, 0, 0};
    const uint64_t after[] = {PAGEABLE, PINNED, PAGEABLE}, first[] = {1, 1, 1};

    confirm(turns, 3, none);
    confirm(after, 3, first);
}

static int refuse_second(kvn_device *device, kvn_direction direction, kvn_columns *batch, kvn_stream stream,
                         size_t *failed, kvn_failure *failure)
{
    (void)device, (void)direction, (void)batch, (void)stream;
    *failed = 1;
    return kvn_fail(failure, KVN_UNMAPPED, 0, "refused");
}

/* A call counts from its own first descriptor; a fault names that of the shard, also behind others. */
static void failed_behind_others(void)
{
    static const kvn_device_ops ops = {
        .max_batch = 2, .locate = locate, .copy_batch = refuse_second, .copy_held = refuse_second};
    kvn_device device = {.ops = &ops, .mutex = PTHREAD_MUTEX_INITIALIZER};
    copy_backend backend = {.device = &device, .direction = KVN_HOST_TO_DEVICE};
    const uint64_t nowhere[5] = {0}, pinned[5] = {PINNED, PINNED, PINNED, PINNED, PINNED};
    const uint64_t nbytes[5] = {64, 64, 64, 64, 64};
    const kvn_columns shard = {.dst = nowhere, .src = pinned, .nbytes = nbytes, .count = 5, .first = 100};

    for (int is_held = 0; is_held < 2; is_held++) {
        kvn_channel_fault fault = {.confirmed = 0};
        transfer t = {.self = &backend, .shard = &shard, .fault = &fault, .at = 3, .is_held = is_held};

        CHECK((is_held ? copy_held(&t) : copy_batch(&t, KVN_BATCH_ASYNC)) == KVN_UNMAPPED);
        CHECK(fault.failed == 4);
        CHECK(strcmp(fault.why.message, "descriptor 104: refused") == 0);
    }
}

int main(int count, char **arguments)
{
    static const check_row rows[] = {
        {"blocking_behind_asynchronous", blocking_behind_asynchronous},
        {"failed_behind_others", failed_behind_others},
    };

    return run_check(count, arguments, rows, sizeof rows / sizeof *rows);
}

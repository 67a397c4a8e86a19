/* Checks of a shard's confirmed descriptors if copies on the stream and blocking ones alternate. */
#include "device/copy.c"

#include "check.h"

enum { PINNED = 4096, PAGEABLE = 1 << 30 };

kvn_stream kvn_channel_stream(const kvn_channel *channel)
{
    (void)channel;
    return (kvn_stream)1;
}

static int num_waits;

int kvn_stream_request_look(const kvn_columns *shard, kvn_failure *failure)
{
    (void)shard, (void)failure;
    return KVN_OK;
}

int kvn_stream_request_synchronize(kvn_channel *channel, const kvn_columns *shard, const atomic_int *stop,
                                   kvn_channel_fault *fault)
{
    (void)channel, (void)shard, (void)stop, (void)fault;
    num_waits++;
    return KVN_OK;
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

/* Copies sources of one descriptor each; returns the number of confirmed ones after each call. */
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

/* A blocking copy has ended when it returns, which does not confirm copies on the stream. */
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

/* A call counts from its own first descriptor; a fault names the descriptor of the shard, also behind
 * others. */
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

/* The load of the stream after a wait: no calls and no bytes. */
static void nothing_left_after_wait(void)
{
    const kvn_columns shard = {.count = 5};
    kvn_channel_fault fault = {.confirmed = 0};
    transfer t = {.shard = &shard, .fault = &fault, .at = 3, .issued = 2, .unstoppable = 4096};

    CHECK(drain(&t, &fault) == KVN_OK && num_waits == 1);
    CHECK(t.issued == 0 && t.unstoppable == 0 && fault.confirmed == 3);
    CHECK(drain(&t, &fault) == KVN_OK && num_waits == 1);
}

static size_t num_copied;

static int copy_some_bytes(kvn_device *device, kvn_direction direction, kvn_columns *batch, kvn_stream stream,
                           size_t *failed, kvn_failure *failure)
{
    (void)device, (void)direction, (void)stream, (void)failed, (void)failure;
    for (size_t i = 0; i < batch->count; i++)
        CHECK(batch->nbytes[i] > 0);
    num_copied += batch->count;
    return KVN_OK;
}

/* Calls of a device refuse empty descriptors at any position. */
static void empty_descriptors(void)
{
    static const kvn_device_ops ops = {.max_batch = 16, .locate = locate, .copy_batch = copy_some_bytes};
    kvn_device device = {.ops = &ops, .mutex = PTHREAD_MUTEX_INITIALIZER};
    copy_backend backend = {.device = &device, .direction = KVN_HOST_TO_DEVICE};
    const uint64_t nowhere[4] = {0}, pinned[4] = {PINNED, PINNED, PINNED, PINNED};
    atomic_int stop = 0;

    atomic_store(&device.batch_copies, KVN_BATCH_ASYNC);
    for (unsigned full = 0; full < 16; full++) {
        uint64_t nbytes[4];
        const kvn_columns shard = {.dst = nowhere, .src = pinned, .nbytes = nbytes, .count = 4};
        kvn_channel_fault fault = {.confirmed = 0};
        transfer t = {.self = &backend, .shard = &shard, .stop = &stop, .fault = &fault};

        for (unsigned i = 0; i < 4; i++)
            nbytes[i] = full >> i & 1 ? 64 : 0;
        num_copied = 0;
        while (t.at < 4)
            CHECK(issue(&t) == KVN_OK);
        CHECK(num_copied == (size_t)__builtin_popcount(full));
    }
}

static int refuse_later(kvn_device *device, kvn_direction direction, kvn_columns *batch, kvn_stream stream,
                        size_t *failed, kvn_failure *failure)
{
    (void)device, (void)direction, (void)batch, (void)stream;
    *failed = 0;
    return num_copied++ ? kvn_fail(failure, KVN_UNMAPPED, 0, "refused") : KVN_OK;
}

/* If a later call fails, the bytes of earlier ones have arrived before the shard ends. */
static void waited_for_after_failure(void)
{
    static const kvn_device_ops ops = {.max_batch = 1, .locate = locate, .copy_batch = refuse_later};
    kvn_device device = {.ops = &ops, .mutex = PTHREAD_MUTEX_INITIALIZER};
    copy_backend backend = {.device = &device, .direction = KVN_HOST_TO_DEVICE};
    const uint64_t nowhere[3] = {0}, pinned[3] = {PINNED, PINNED, PINNED}, nbytes[3] = {64, 64, 64};
    const kvn_columns shard = {.dst = nowhere, .src = pinned, .nbytes = nbytes, .count = 3};
    kvn_channel_fault fault = {.confirmed = 0};
    atomic_int stop = 0;

    atomic_store(&device.batch_copies, KVN_BATCH_ASYNC);
    for (int before = 1; before >= 0; before--) {
        num_copied = !before; /* the first call of the second round fails, so nothing was issued */
        num_waits = 0;
        CHECK(move((kvn_stream_backend *)&backend, NULL, &shard, &stop, &fault) == KVN_UNMAPPED);
        CHECK(num_waits >= before && fault.failed == (uint64_t)before);
    }
}

/* A blocking call, which nothing stops, copies at most as much as may be waited for. */
static void limited_blocking_calls(void)
{
    static const kvn_device_ops ops = {.max_batch = 16, .locate = locate, .copy_batch = copy_nothing};
    static const uint64_t half = KVN_UNSTOPPABLE_HOST / 2;
    kvn_device device = {.ops = &ops, .mutex = PTHREAD_MUTEX_INITIALIZER};
    copy_backend backend = {.device = &device, .direction = KVN_HOST_TO_DEVICE};
    const uint64_t nowhere[4] = {0}, pageable[4] = {PAGEABLE, PAGEABLE, PAGEABLE, PAGEABLE};
    const uint64_t sizes[4][4] = {{half, half, 1, 1}, {half, half + 1, 1, 1}, {1, 2 * half, 1, 1}, {2 * half, 1, 1, 1}};
    static const uint64_t counts[4] = {2, 1, 1, 1};

    for (size_t i = 0; i < 4; i++) {
        const kvn_columns shard = {.dst = nowhere, .src = pageable, .nbytes = sizes[i], .count = 4};
        transfer t = {.self = &backend, .shard = &shard};
        const chunk first = next_chunk(&t, KVN_BATCH_ASYNC | KVN_BATCH_BLOCKING);

        CHECK(first.blocking && !first.sliced && first.count == counts[i]);
    }
}

int main(int count, char **arguments)
{
    static const check_row rows[] = {
        {"blocking_behind_asynchronous", blocking_behind_asynchronous},
        {"failed_behind_others", failed_behind_others},
        {"nothing_left_after_wait", nothing_left_after_wait},
        {"empty_descriptors", empty_descriptors},
        {"waited_for_after_failure", waited_for_after_failure},
        {"limited_blocking_calls", limited_blocking_calls},
    };

    return run_check(count, arguments, rows, sizeof rows / sizeof *rows);
}

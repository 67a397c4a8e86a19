/* Checks of puts with leases that need several rounds. */
#include "hccl/announced.c"

#include "check.h"

static unsigned rounds, failing;

int kvn_transfer_check_guards(kvn_transfer_context *t)
{
    (void)t;
    return KVN_OK;
}

int kvn_transfer_move(kvn_transfer_context *t)
{
    if (++rounds != failing)
        return KVN_OK;
    t->fault->failed = 1; /* descriptors of the round */
    return KVN_FAILED;
}

static int copy(const kvn_device *device, kvn_direction direction, uint64_t dst, uint64_t src, uint64_t nbytes,
                kvn_failure *failure)
{
    (void)device, (void)direction, (void)dst, (void)src, (void)nbytes, (void)failure;
    return KVN_OK;
}

/* The failed descriptor is named by its position in the shard, in any round. */
static void failed_descriptor(void)
{
    static const kvn_device_ops ops = {.copy = copy};
    static kvn_tickets tickets;
    const kvn_device device = {.ops = &ops};
    const kvn_transfer transfer = {.tickets = &tickets};
    const uint64_t half = KVN_ROUND_NBYTES / 2, nbytes[] = {half, half, half, half, half, half};
    const uint64_t nowhere[6] = {0};
    const kvn_columns shard = {.dst = nowhere, .src = nowhere, .nbytes = nbytes, .count = 6};

    for (failing = 1; failing <= 3; failing++) {
        kvn_channel_fault fault = {.failed = KVN_NO_DESCRIPTOR};
        kvn_transfer_context t = {.transfer = &transfer, .device = &device, .shard = &shard, .fault = &fault};

        rounds = 0;
        CHECK(kvn_transfer_announced(&t) == KVN_FAILED);
        CHECK(rounds == failing);
        CHECK(fault.failed == 2 * (failing - 1) + 1);
        CHECK(t.shard == &shard && !atomic_load(&tickets.is_taken[0]));
    }
}

int main(int count, char **arguments)
{
    static const check_row rows[] = {{"failed_descriptor", failed_descriptor}};

    return run_check(count, arguments, rows, sizeof rows / sizeof *rows);
}

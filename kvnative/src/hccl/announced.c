/* Puts with leases, announced by a ticket in the memory of the writer's device (core/announce.h). Large transfers go
 * in rounds, each with its own ticket and check. */
#include <inttypes.h>

#include "core/announce.h"
#include "hccl/transfer.h"

/* Writes the ticket and waits until the device has it. */
static int write_ticket(kvn_transfer_context *t, unsigned place, uint64_t ticket)
{
    return t->device->ops->copy(t->device, KVN_HOST_TO_DEVICE,
                                t->transfer->tickets->address + place * sizeof ticket,
                                (uintptr_t)&ticket, sizeof ticket, &t->fault->why);
}

static bool take_place(kvn_tickets *tickets, unsigned *out)
{
    for (unsigned i = 0; i < KVN_HCCL_TICKETS; i++)
        if (!atomic_exchange(&tickets->is_taken[i], true)) {
            *out = i;
            return true;
        }
    return false;
}

/* Removes the ticket. No operation may be in flight. If the removal fails, the place is not reused: owners see a
 * transfer that does not end. */
static void withdraw(kvn_transfer_context *t, unsigned place)
{
    kvn_channel_fault ignored, *fault = t->fault;

    kvn_channel_fault_begin(&ignored);
    t->fault = &ignored;
    if (write_ticket(t, place, 0) == KVN_OK)
        atomic_store(&t->transfer->tickets->is_taken[place], false);
    t->fault = fault;
}

/* A round has at least one descriptor. */
static uint64_t end_of_round(const kvn_columns *shard, uint64_t first)
{
    uint64_t nbytes = 0, last = first;

    while (last < shard->count && (last == first || nbytes + shard->nbytes[last] <= KVN_ROUND_NBYTES))
        nbytes += shard->nbytes[last++];
    return last;
}

static int move_round(kvn_transfer_context *t, unsigned place)
{
    const kvn_transfer *transfer = t->transfer;
    int status = write_ticket(t, place, kvn_next_ticket(transfer->tag, &transfer->tickets->num_announced));

    if (status != KVN_OK)
        return status;
    status = kvn_transfer_check_guards(t);
    return status == KVN_OK ? kvn_transfer_move(t) : status;
}

int kvn_transfer_announced(kvn_transfer_context *t)
{
    const kvn_columns *shard = t->shard;
    uint64_t first = 0, last;
    unsigned place;
    int status;

    if (!take_place(t->transfer->tickets, &place))
        return kvn_fail(&t->fault->why, KVN_FAILED, 0,
                        "%d transfers with leases are in flight, the maximum: wait for one of them first",
                        KVN_HCCL_TICKETS);
    do {
        last = end_of_round(shard, first);
        const kvn_columns round = kvn_columns_slice(shard, first, last);
        t->shard = &round;
        status = move_round(t, place);
        t->shard = shard;
        if (status != KVN_OK && t->fault->failed != KVN_NO_DESCRIPTOR)
            t->fault->failed += first;
        first = last;
    } while (status == KVN_OK && first < shard->count);
    withdraw(t, place);
    return status;
}

/* Announce, then check: an owner takes memory back from writing peers without a message.
 *
 * A writer publishes a ticket that the owner can read, then reads the owner's generations, and writes only if the
 * registrations are valid. It removes the ticket once its bytes have arrived. An owner that ends a registration
 * changes the generation, then reads the tickets of its peers, and waits until these are gone. Both sides have a full
 * fence between the two steps, so at least one of them sees the first step of the other: either the peer does not
 * write, or the owner waits for the write.
 *
 * Tickets are kept in a table that both sides map (host/writers.h), in words of the writer that the owner reads by
 * UCX (ucx/transfer.c), or in memory of the writer's device (hccl/announced.c). TCP needs none, because threads of the
 * owner write. */
#ifndef KVNATIVE_CORE_ANNOUNCE_H
#define KVNATIVE_CORE_ANNOUNCE_H

#include <stdatomic.h>
#include <stdint.h>

/* Bytes of a round of UCX or HCCL, which one ticket announces; more if the last piece exceeds them. */
#define KVN_ROUND_NBYTES (UINT64_C(64) << 20)

/* The next ticket for the owner with this tag: not 0 and not an earlier one. */
static inline uint64_t kvn_next_ticket(uint32_t tag, atomic_uint *count)
{
    uint32_t number;

    do
        number = atomic_fetch_add_explicit(count, 1, memory_order_relaxed) + 1;
    while (number == 0);
    return (uint64_t)tag << 32 | number;
}

#endif

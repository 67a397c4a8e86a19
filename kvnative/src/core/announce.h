/* Announce, then check: how an owner takes memory back from peers that write to it with no message between them.
 *
 * A writer first publishes a ticket where the owner can read it, then reads the owner's generations, and writes only
 * if the registrations stand; it takes the ticket out when what it has written is there. An owner that ends a
 * registration first changes its generation, then reads the tickets of its peers, and waits until those that it
 * found are gone. A full fence on both sides lies between the two steps. So at least one of the two sees the
 * other's first step: either nothing is written, or the owner waits for it.
 *
 * Three places keep tickets: a table in memory that both map (host/writers.h), words of the writer's that the owner
 * reads over UCX (ucx/transfer.c), and words in the memory of the writer's device (hccl/announced.c). TCP needs
 * none: the owner's own threads write. */
#ifndef KVNATIVE_CORE_ANNOUNCE_H
#define KVNATIVE_CORE_ANNOUNCE_H

#include <stdatomic.h>
#include <stdint.h>

/* Bytes that a writer moves by one ticket: what an owner may have to wait for. */
#define KVN_ROUND_NBYTES (UINT64_C(64) << 20)

/* The next ticket for the owner that has given this writer `tag`: neither 0 nor any earlier one. */
static inline uint64_t kvn_next_ticket(uint32_t tag, atomic_uint *count)
{
    uint32_t number;

    do
        number = atomic_fetch_add_explicit(count, 1, memory_order_relaxed) + 1;
    while (number == 0);
    return (uint64_t)tag << 32 | number;
}

#endif

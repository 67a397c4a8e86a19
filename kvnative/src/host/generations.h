/* The generation table: one page-aligned array of generations that a process shows to its peers.
 *
 * A range of memory that peers may reach holds a slot. The generation of the slot is odd while the range is registered.
 * Taking and releasing the slot each add one; the first value is random, of 48 bits, so that no word of one table is
 * valid in another one. A peer compares the generation that was published to it before and after each transfer. So it
 * detects without a message that the owner has released the range, even if the slot was taken again. A lease is a slot
 * without memory, which a transfer checks in addition to those of its ranges.
 *
 * The generations are followed by as many deadlines of CLOCK_MONOTONIC, which all processes of a host share; 0: none.
 * For peers that map the table, a slot whose deadline has passed is released. The last item says whether the process
 * that made the table lives. */
#ifndef KVN_GENERATIONS_H
#define KVN_GENERATIONS_H

#include <stdatomic.h>
#include <stdbool.h>

#include "host/arena.h"
#include "host/life.h"

/* The identity of a registration or a lease. */
typedef struct kvn_word {
    uint64_t slot;
    uint64_t generation;
} kvn_word;

typedef struct kvn_generations {
    kvn_arena memory;
    uint64_t num_slots;
    uint64_t start; /* of the owner's table: the even number before the first generation of each slot */
    /* The owner's fields: the first slot for leases, and the starts of searches for a free slot of each kind. */
    uint64_t first_lease;
    uint64_t next, next_lease;
    bool is_own;
} kvn_generations;

int kvn_generations_create(uint64_t num_slots, uint64_t num_leases, kvn_generations *out,
                           kvn_failure *failure);
int kvn_generations_import(int pid, int fd, uint64_t inode, uint64_t num_slots,
                           kvn_generations *out, kvn_failure *failure);
void kvn_generations_close(kvn_generations *table); /* the owner releases every slot first */

/* Calls of the owner. KVN_NO_MEMORY if all slots are taken; KVN_INVALID if the slot has another generation. A peer's
 * transfer that ends after the return of release does not succeed. */
int kvn_generations_take(kvn_generations *table, bool is_lease, uint64_t deadline_ns, uint64_t *slot,
                         uint64_t *generation, kvn_failure *failure);
/* Replaces the deadline. */
int kvn_generations_renew(kvn_generations *table, uint64_t slot, uint64_t generation,
                          uint64_t deadline_ns, kvn_failure *failure);
int kvn_generations_release(kvn_generations *table, uint64_t slot, uint64_t generation,
                            kvn_failure *failure);

/* A call of peers: index of the first word whose slot has another generation, is past its deadline or is out of range,
 * or `count`. All reads before the call happened under the generations that it sees. */
uint64_t kvn_generations_first_stale(const kvn_generations *table, const kvn_word *words,
                                     uint64_t count);

/* Checks if the owner lives and runs the same program: KVN_LIVES, KVN_LIFE_ENDED or KVN_LIFE_UNKNOWN. */
int kvn_generations_owner(const kvn_generations *table);

#endif

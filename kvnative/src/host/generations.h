/* The generation table: one page-aligned array of generations that a process shows to its peers.
 *
 * A range of memory that peers may reach holds a slot. The slot's generation is odd while the range
 * is registered; taking and releasing it each add one, from a random number of 48 bits on: a word of one
 * table is no word of another process's. A peer remembers the generation that was
 * published to it and looks again before and after each transfer, so a range that its owner has
 * released, or released and registered again for something else, is noticed with no message between
 * the two. A lease is a slot without memory, which a transfer checks beside those of its ranges.
 *
 * Behind the generations come as many deadlines, in CLOCK_MONOTONIC, which all processes of a host
 * share; 0: none. A slot whose deadline has passed counts as released, to whoever maps the table. The
 * last thing in it says whether the process that made it lives. */
#ifndef KVN_GENERATIONS_H
#define KVN_GENERATIONS_H

#include <stdatomic.h>
#include <stdbool.h>

#include "host/arena.h"
#include "host/life.h"

/* By which a peer knows a registration or a lease. */
typedef struct kvn_word {
    uint64_t slot;
    uint64_t generation;
} kvn_word;

typedef struct kvn_generations {
    kvn_arena memory;
    uint64_t num_slots;
    uint64_t start; /* the owner's: what comes before the first generation of each slot; even */
    /* The owner's: slots from here on are of leases, and where it looks first for a free one of each. */
    uint64_t first_lease;
    uint64_t next, next_lease;
    bool is_own;
} kvn_generations;

int kvn_generations_create(uint64_t num_slots, uint64_t num_leases, kvn_generations *out,
                           kvn_failure *failure);
int kvn_generations_import(int pid, int fd, uint64_t inode, uint64_t num_slots,
                           kvn_generations *out, kvn_failure *failure);
void kvn_generations_close(kvn_generations *table); /* the owner releases every slot first */

/* The owner's side. KVN_NO_MEMORY when every slot is taken; KVN_INVALID when the slot is not held
 * with that generation. After release returned, no peer reports a success for the range any more.
 */
int kvn_generations_take(kvn_generations *table, bool is_lease, uint64_t deadline_ns, uint64_t *slot,
                         uint64_t *generation, kvn_failure *failure);
/* Gives it another deadline. */
int kvn_generations_renew(kvn_generations *table, uint64_t slot, uint64_t generation,
                          uint64_t deadline_ns, kvn_failure *failure);
int kvn_generations_release(kvn_generations *table, uint64_t slot, uint64_t generation,
                            kvn_failure *failure);

/* The peer's side: index of the first word whose slot has another generation by now, or whose deadline
 * has passed, or `count`. A slot out of range counts as such. Everything read before the call was read
 * under the generations that it sees. */
uint64_t kvn_generations_first_stale(const kvn_generations *table, const kvn_word *words,
                                     uint64_t count);

/* Whether its owner lives and runs the program that made it: KVN_LIVES, KVN_LIFE_ENDED or UNKNOWN. */
int kvn_generations_owner(const kvn_generations *table);

#endif

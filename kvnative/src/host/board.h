/* The registration board: one page-aligned array of generations that a process shows to its peers.
 *
 * A range of memory that peers may reach holds a slot. The slot's generation is odd while the range
 * is registered; taking and releasing it each add one. A peer remembers the generation that it was
 * told and looks again before and after each transfer, so a range that its owner has released, or
 * released and registered anew for something else, is noticed with no message between the two. */
#ifndef KVN_BOARD_H
#define KVN_BOARD_H

#include <stdatomic.h>

#include "host/arena.h"

typedef struct kvn_board {
    kvn_arena memory;
    uint64_t num_slots;
    uint64_t next; /* where the owner looks for a free slot first */
} kvn_board;

int kvn_board_create(uint64_t num_slots, kvn_board *out, kvn_failure *failure);
int kvn_board_import(int pid, int fd, uint64_t inode, uint64_t num_slots, kvn_board *out,
                     kvn_failure *failure);
void kvn_board_close(kvn_board *board); /* the owner releases every slot first */

/* The owner's side. KVN_NO_MEMORY when every slot is taken; KVN_INVALID when the slot is not held
 * with that generation. After release returned, no peer reports a success for the range any more.
 */
int kvn_board_take(kvn_board *board, uint64_t *slot, uint64_t *generation, kvn_failure *failure);
int kvn_board_release(kvn_board *board, uint64_t slot, uint64_t generation, kvn_failure *failure);

/* The peer's side: index of the first slot whose generation is another one by now, or `count`.
 * A slot out of range counts as such. Everything read before the call was read under the
 * generations that it sees. */
uint64_t kvn_board_first_stale(const kvn_board *board, const uint64_t *slots,
                               const uint64_t *generations, uint64_t count);

#endif

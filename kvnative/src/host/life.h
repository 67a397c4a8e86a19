/* A word in shared memory by which others see that a process lives, with no system call.
 *
 * The kernel keeps for each thread a list of futexes that it holds (set_robust_list(2)), and marks
 * them when the thread ends, whatever ends it: exit, a signal, execve. One thread of this process,
 * the keeper, does nothing but live as long as the process, and holds all of its words. It is marked
 * before the process can be waited for, and before its pidfd polls readable: who sees a word that is
 * not marked sees a process that lived then, and that ran the program which has made the word.
 *
 * Where there can be no keeper (no thread to be had, an emulator without robust futexes), and of
 * more words than the kernel marks, the word stays KVN_LIFE_UNKNOWN, and the system has to be asked. */
#ifndef KVN_LIFE_H
#define KVN_LIFE_H

#include <linux/futex.h>
#include <stdatomic.h>
#include <stdint.h>

typedef struct kvn_life {
    struct robust_list node; /* of the keeper's list: the owner's address, of no meaning to others */
    _Atomic uint32_t word;   /* the keeper's thread id, and the kernel's mark */
    uint32_t unused;
} kvn_life;

enum { KVN_LIFE_UNKNOWN, KVN_LIVES, KVN_LIFE_ENDED };

/* The owner's side; `life` is zeroed, in memory that is mapped until kvn_life_end. */
void kvn_life_begin(kvn_life *life);
void kvn_life_end(kvn_life *life); /* nothing in a forked child: it is the parent's */

/* The peer's side. What was read before the call was read while the process lived, if it does. */
static inline int kvn_life_look(const kvn_life *life)
{
    atomic_thread_fence(memory_order_seq_cst); /* what was read comes before the look here */
    const uint32_t word = atomic_load_explicit(&life->word, memory_order_acquire);
    if (word & FUTEX_OWNER_DIED)
        return KVN_LIFE_ENDED;
    return word != 0 ? KVN_LIVES : KVN_LIFE_UNKNOWN;
}

#endif

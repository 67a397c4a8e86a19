/* A word in shared memory by which peers see without a system call that a process lives.
 *
 * The kernel has a list of the robust futexes of each thread (set_robust_list(2)), and marks them when the thread ends
 * by exit, a signal or execve. The keeper, a thread that lives as long as the process, holds all words. The kernel
 * marks them before the process can be waited for, and before its pidfd polls readable. So if a word is not marked
 * when it is read, its process lived then, and ran the program that made it.
 *
 * Without a keeper (no thread can be started, or an emulator lacks robust futexes), or with more words than the kernel
 * marks, the word stays KVN_LIFE_UNKNOWN, and peers must ask the system. */
#ifndef KVN_LIFE_H
#define KVN_LIFE_H

#include <linux/futex.h>
#include <stdatomic.h>
#include <stdint.h>

typedef struct kvn_life {
    struct robust_list node; /* of the keeper's list, with addresses of the owner */
    _Atomic uint32_t word;   /* the keeper's thread id, and the kernel's mark */
    uint32_t unused;
} kvn_life;

enum { KVN_LIFE_UNKNOWN, KVN_LIVES, KVN_LIFE_ENDED };

/* The owner's side; `life` is zeroed, in memory that is mapped until kvn_life_end. */
void kvn_life_begin(kvn_life *life);
void kvn_life_end(kvn_life *life); /* no effect in a forked child */

/* A call of peers. If the process lives, all reads before the call happened while it lived. */
static inline int kvn_life_look(const kvn_life *life)
{
    atomic_thread_fence(memory_order_seq_cst); /* earlier reads come before this check */
    const uint32_t word = atomic_load_explicit(&life->word, memory_order_acquire);
    if (word & FUTEX_OWNER_DIED)
        return KVN_LIFE_ENDED;
    return word != 0 ? KVN_LIVES : KVN_LIFE_UNKNOWN;
}

#endif

/* Simulated NUMA nodes, and batches for their memory. The upper half of an address is the number of its node. No bytes
 * are moved. */
#ifndef TESTS_NODES_H
#define TESTS_NODES_H

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include "core/thread.h"
#include "host/places.h"
#include "host/pool.h"

#include "check.h"

#define DEADLINE_S 20
#define MIN ((uint64_t)KVN_PIECE_MIN)
#define MIB (UINT64_C(1) << 20)
#define ON(node, offset) (((uint64_t)(node) + 1) << 40 | (offset))

enum { FIRST = 0, SECOND = 5, THIRD = 2, ABSENT = 100, ELSEWHERE = 101 }; /* numbers of nodes, as in ON */
enum { MOST = 4096 };

/* ---- answers of the kernel ---- */

static unsigned num_calls, num_asked;
static bool refuses;

static inline int tell(unsigned long count, void **pages, int *numbers)
{
    num_calls++;
    num_asked += (unsigned)count;
    for (unsigned long i = 0; i < count; i++) {
        const int number = (int)((uintptr_t)pages[i] >> 40) - 1;
        numbers[i] = number == ABSENT ? -2 : number;
    }
    return refuses ? -1 : 0;
}

static inline kvn_numa_node node_of_one(int number, int processor)
{
    kvn_numa_node node = {.number = number};

    CPU_ZERO(&node.processors);
    CPU_SET((size_t)processor, &node.processors);
    return node;
}

/* ---- batches ---- */

static uint64_t dst[MOST], sizes[MOST];
static kvn_columns batch;
static uint64_t total;

static inline void begin_batch(kvn_caller caller)
{
    batch = (kvn_columns){.dst = dst, .src = dst, .nbytes = sizes, .caller = caller};
    total = 0;
}

static inline void add(int node, uint64_t nbytes)
{
    static uint64_t at;

    dst[batch.count] = ON(node, at += nbytes);
    sizes[batch.count++] = nbytes;
    total += nbytes;
}

static inline int node_at(uint64_t index) { return (int)(dst[index] >> 40) - 1; }

#endif

/* The NUMA nodes that the threads of a pool run on, and which of them holds a page.
 *
 * The kernel tells the node of a page, for 0.1 to 0.3 us. An answer stands for the 2 MiB around the page, for some
 * seconds: a page may move, or its address may become another page. A wrong node costs time, nothing else. A page that
 * does not exist yet has no node: the thread that writes it first decides. */
#ifndef KVNATIVE_HOST_NUMA_H
#define KVNATIVE_HOST_NUMA_H

#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>

#include "core/columns.h"

#define KVN_MAX_NODES 64
#define KVN_KNOWN_BITS 15 /* 64 GiB */

typedef struct kvn_numa_node {
    int number; /* of the kernel */
    cpu_set_t processors;
} kvn_numa_node;

/* Writes the number of the node of each page, or a negative errno. Returns 0, or -1 if the kernel refuses. */
typedef int (*kvn_numa_ask)(unsigned long count, void **pages, int *numbers);

/* Below, a node is an index into `nodes`; `count` stands for any node. */
typedef struct kvn_numa {
    unsigned count;
    kvn_numa_ask ask;
    kvn_numa_node nodes[KVN_MAX_NODES];
    atomic_uint_fast64_t known[1u << KVN_KNOWN_BITS]; /* each value stands for itself: relaxed */
} kvn_numa;

/* NULL with errno set (EINVAL, ENOMEM) on failure. */
kvn_numa *kvn_numa_create(const kvn_numa_node *nodes, unsigned count);
/* Asks for the nodes of the destinations that are not known, but of no more than `most`. */
void kvn_numa_learn(kvn_numa *self, const kvn_columns *batch, uint64_t most, int64_t now_ns);
unsigned kvn_numa_of(kvn_numa *self, uint64_t address, int64_t now_ns);
/* The node of the processor that runs the calling thread. */
unsigned kvn_numa_here(const kvn_numa *self);
/* Spreads `threads` evenly over the nodes, but gives no node more than its processors while another has one left.
 * Returns the node of thread `thread`. */
unsigned kvn_numa_of_thread(const kvn_numa *self, unsigned thread);
/* The kernel's answer: what `ask` is unless a test replaces it. */
int kvn_numa_ask_kernel(unsigned long count, void **pages, int *numbers);

#endif

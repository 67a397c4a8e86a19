/* Nodes of threads and of pages. */
#include "host/numa.h"

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define CHUNK_BITS 21
#define AGE_BITS 33      /* of nanoseconds: 8.6 s */
#define ASKED_AT_ONCE 64 /* pages */

int kvn_numa_ask_kernel(unsigned long count, void **pages, int *numbers)
{
    return (int)syscall(SYS_move_pages, 0, count, pages, NULL, numbers, 0);
}

kvn_numa *kvn_numa_create(const kvn_numa_node *nodes, unsigned count)
{
    kvn_numa *self;

    if (count < 1 || count > KVN_MAX_NODES) {
        errno = EINVAL;
        return NULL;
    }
    self = calloc(1, sizeof *self);
    if (!self)
        return NULL;
    self->count = count;
    self->ask = kvn_numa_ask_kernel;
    memcpy(self->nodes, nodes, count * sizeof *nodes);
    return self;
}

/* An answer: the chunk, the time, and the node + 1 in the lowest byte. A time that is over makes it another chunk. */
static uint64_t answer_without_node(uint64_t address, int64_t now_ns)
{
    return address >> CHUNK_BITS << 24 | ((uint64_t)now_ns >> AGE_BITS & 0xffff) << 8;
}

/* Chunks that are next to each other, or far apart by a power of two, have different places: the multiplier is 2**64 by
 * the golden ratio. */
static atomic_uint_fast64_t *place_of(kvn_numa *self, uint64_t address)
{
    const uint64_t mixed = (address >> CHUNK_BITS) * UINT64_C(0x9e3779b97f4a7c15);

    return &self->known[mixed >> (64 - KVN_KNOWN_BITS)];
}

/* -1: not known. */
static int find(kvn_numa *self, uint64_t address, int64_t now_ns)
{
    const uint64_t found = atomic_load_explicit(place_of(self, address), memory_order_relaxed);

    return (found & ~UINT64_C(0xff)) == answer_without_node(address, now_ns) ? (int)(found & 0xff) - 1
                                                                             : -1;
}

unsigned kvn_numa_of(kvn_numa *self, uint64_t address, int64_t now_ns)
{
    const int found = find(self, address, now_ns);

    return found < 0 ? self->count : (unsigned)found;
}

static unsigned index_of(const kvn_numa *self, int number)
{
    unsigned node = 0;

    while (node < self->count && self->nodes[node].number != number)
        node++;
    return node;
}

static void keep(kvn_numa *self, uint64_t address, uint64_t node, int64_t now_ns)
{
    atomic_store_explicit(place_of(self, address), answer_without_node(address, now_ns) | (node + 1),
                          memory_order_relaxed);
}

/* A refusal leaves what was kept before: any node. */
static void ask(kvn_numa *self, unsigned long count, void **pages, int64_t now_ns)
{
    int numbers[ASKED_AT_ONCE];

    if (count == 0 || self->ask(count, pages, numbers) != 0)
        return;
    for (unsigned long i = 0; i < count; i++) {
        const uint64_t address = (uint64_t)(uintptr_t)pages[i];
        if (numbers[i] >= 0)
            keep(self, address, index_of(self, numbers[i]), now_ns);
        else
            atomic_store_explicit(place_of(self, address), 0, memory_order_relaxed);
    }
}

void kvn_numa_learn(kvn_numa *self, const kvn_columns *batch, uint64_t most, int64_t now_ns)
{
    void *pages[ASKED_AT_ONCE];
    unsigned long count = 0;

    for (size_t i = 0; i < batch->count && most > 0; i++) {
        const uint64_t address = batch->dst[i];
        if (find(self, address, now_ns) >= 0)
            continue;
        keep(self, address, self->count, now_ns); /* so that its neighbours are not asked for as well */
        pages[count++] = (void *)(uintptr_t)address;
        most--;
        if (count == ASKED_AT_ONCE) {
            ask(self, count, pages, now_ns);
            count = 0;
        }
    }
    ask(self, count, pages, now_ns);
}

unsigned kvn_numa_here(const kvn_numa *self)
{
    const int processor = sched_getcpu();
    unsigned node = 0;

    while (node < self->count &&
           (processor < 0 || !CPU_ISSET((size_t)processor, &self->nodes[node].processors)))
        node++;
    return node;
}

unsigned kvn_numa_of_thread(const kvn_numa *self, unsigned thread)
{
    unsigned has[KVN_MAX_NODES] = {0}, best = 0;

    for (unsigned i = 0; i <= thread; i++) {
        bool best_is_full = true;
        for (unsigned node = 0; node < self->count; node++) {
            const bool is_full = has[node] >= (unsigned)CPU_COUNT(&self->nodes[node].processors);
            if (node == 0 || is_full < best_is_full ||
                (is_full == best_is_full && has[node] < has[best])) {
                best = node;
                best_is_full = is_full;
            }
        }
        has[best]++;
    }
    return best;
}

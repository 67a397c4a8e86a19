/* The pages behind memory: which exist, are mapped here, or are huge; and how to prepare them before their use.
 *
 * A mapping of shared memory has no page-table entries at first, even if another process has filled its pages, and each
 * page costs a fault at its first use. A walk populates existing pages in short steps. It leaves holes, since
 * populating one would allocate memory that the owner has not used. Another kind of walk makes huge pages of complete 2
 * MiB of an owner's memory. */
#ifndef KVN_PAGES_H
#define KVN_PAGES_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/mman.h>

#include "core/failure.h"

#ifndef MADV_POPULATE_READ /* Linux 5.14 */
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE /* Linux 6.1 */
#define MADV_COLLAPSE 25
#endif

#define KVN_SMALL_NBYTES ((uint64_t)4 << 10) /* the minimum size of a page, and the only one on x86-64 */
/* Bytes of a huge page, for pages of 4 KiB. Kernels of aarch64 may have pages of 16 or 64 KiB, whose huge pages have 32
 * or 512 MiB; those are not used. */
#define KVN_HUGE_NBYTES ((uint64_t)2 << 20)

typedef enum kvn_walk_kind {
    KVN_WALK_MAP,      /* map existing pages */
    KVN_WALK_COLLAPSE, /* make huge pages of existing ones */
} kvn_walk_kind;

/* Progress of the pages [0, nbytes) of one mapping; one thread at a time advances it. */
typedef struct kvn_walk {
    uint64_t nbytes;
    uint64_t chunk_nbytes; /* bytes of a step */
    uint64_t num_chunks;   /* the last may be shorter */
    uint64_t next;       /* the next chunk; num_chunks: the end of a pass */
    uint64_t left;       /* chunks that are not done */
    uint16_t *seen;      /* by chunk: number of done pages */
    kvn_walk_kind kind;
    atomic_bool stopped; /* set by any thread: the current step is the last */
} kvn_walk;

/* KVN_OK or KVN_NO_MEMORY. If pages are larger than KVN_SMALL_NBYTES, a collapse is done at once: no chunk is left. */
int kvn_walk_begin(kvn_walk *walk, uint64_t nbytes, kvn_walk_kind kind, kvn_failure *failure);
void kvn_walk_end(kvn_walk *walk); /* idempotent */

/* Continues at the mapping `address` until the end of a pass, until `budget_ns` have passed, or until it is stopped.
 * Sleeps half of the time, to leave the processor to transfers. `*advanced`: newly done bytes. KVN_UNSUPPORTED: this
 * kernel cannot do it; the walk is then done. */
int kvn_walk_advance(kvn_walk *walk, char *address, int64_t budget_ns, uint64_t *advanced,
                     kvn_failure *failure);
/* Begins a pass, from the first chunk that is not done. */
void kvn_walk_again(kvn_walk *walk);

/* Pages of any memory of this process. */
typedef struct kvn_page_use {
    uint64_t present; /* bytes whose pages are in memory, mapped here or not */
    int has_mapped;   /* True if the kernel reports the fields below (Linux 6.7) */
    uint64_t mapped;  /* bytes that can be used here without a fault */
    uint64_t huge;    /* of these, in huge pages */
} kvn_page_use;

/* Counts the whole pages that [address, address + nbytes) touches, without reading them. KVN_UNMAPPED: not all of it is
 * mapped. Takes up to 30 ms for each GiB. */
int kvn_pages_look(uint64_t address, uint64_t nbytes, kvn_page_use *out, kvn_failure *failure);

/* Lets later pages of shared memory at `address` come from NUMA node `node`, whichever thread touches them first, or
 * from others if it has none left. KVN_INVALID: no such node. */
int kvn_pages_prefer_node(void *address, uint64_t nbytes, unsigned node, kvn_failure *failure);

/* Allocates the memory in huge pages where possible: clearing one costs less than the faults of its 512 small pages.
 * Where that fails, allocates at most the first page of each 2 MiB. No effect if pages exceed KVN_SMALL_NBYTES. */
void kvn_pages_make_huge(char *address, uint64_t nbytes);

#endif

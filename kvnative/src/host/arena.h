/* Arenas: memory in a sealed memfd, which peers on this host map too. The seals fix its size, so that no process can
 * cause a SIGBUS in another one. An absent page still causes one if the system has no page left (under
 * vm.overcommit_memory 2), so populate the arena. */
#ifndef KVN_ARENA_H
#define KVN_ARENA_H

#include <stdint.h>

#include "core/failure.h"

typedef enum kvn_arena_pages {
    KVN_PAGES_AUTO,   /* huge ones if the arena is populated, or the system prefers them */
    KVN_PAGES_SMALL,
    KVN_PAGES_HUGETLB /* pages that the administrator has reserved; all present from the start */
} kvn_arena_pages;

typedef struct kvn_arena {
    void *address;   /* NULL when closed; a multiple of 2 MiB for arenas of 2 MiB or more, for huge pages */
    uint64_t nbytes; /* of the file and of the mapping; with hugetlb whole huge pages */
    uint64_t inode;
    uint64_t device; /* of the inode's file system */
    int fd;          /* -1 in a peer, where only the mapping keeps the memory */
    int writable;
    kvn_arena_pages pages;
} kvn_arena;

/* Makes zeroed memory. `name` shows in /proc/<pid>/maps. `exclusive`: no other process can map it writable. `node`:
 * NUMA node of the pages; -1 leaves the choice to the system. KVN_INVALID, KVN_NO_MEMORY, KVN_DENIED or KVN_FAILED. */
int kvn_arena_create(const char *name, uint64_t nbytes, int exclusive, kvn_arena_pages pages,
                     int node, kvn_arena *out, kvn_failure *failure);

/* Maps the arena behind descriptor `fd` of process `pid`. KVN_INVALID unless it is a sealed memfd with this inode and
 * size. KVN_DENIED, KVN_PEER_GONE, KVN_NO_MEMORY or KVN_FAILED if the system refuses. */
int kvn_arena_import(int pid, int fd, uint64_t inode, uint64_t nbytes, int writable, kvn_arena *out,
                     kvn_failure *failure);

/* Populates all pages and page tables now, which saves a fault at the first use of each page. With
 * KVN_PAGES_AUTO the owner gets huge pages if there are any. KVN_NO_MEMORY if memory is short. */
int kvn_arena_populate(const kvn_arena *arena, kvn_failure *failure);

void kvn_arena_close(kvn_arena *arena); /* idempotent */

#endif

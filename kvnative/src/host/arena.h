/* Arenas: memory in a sealed memfd, which a peer on this host maps as well. The seals fix its size,
 * so neither side's mapping can ever end in SIGBUS by what the other does; but it does where the system
 * has no page left (under vm.overcommit_memory 2), unless all are there by `populate`. */
#ifndef KVN_ARENA_H
#define KVN_ARENA_H

#include <stdint.h>

#include "core/failure.h"

typedef enum kvn_arena_pages {
    KVN_PAGES_AUTO,   /* huge ones where it is populated, or the system says so */
    KVN_PAGES_SMALL,
    KVN_PAGES_HUGETLB /* of those that the administrator has reserved; all present from the start */
} kvn_arena_pages;

typedef struct kvn_arena {
    void *address;   /* NULL when closed; of 2 MiB or more at a multiple of that, for huge pages */
    uint64_t nbytes; /* of the file and of the mapping; with hugetlb in whole pages of that */
    uint64_t inode;
    uint64_t device; /* of the file system that the inode is in */
    int fd;          /* -1 in a peer: the mapping alone keeps the memory */
    int writable;
    kvn_arena_pages pages;
} kvn_arena;

/* New zeroed memory. `name` shows in /proc/<pid>/maps. `exclusive`: nobody but this process may
 * ever map it writable. `node`: of NUMA, where its pages come from; -1: as the system does.
 * KVN_INVALID, KVN_NO_MEMORY or KVN_FAILED otherwise. */
int kvn_arena_create(const char *name, uint64_t nbytes, int exclusive, kvn_arena_pages pages,
                     int node, kvn_arena *out, kvn_failure *failure);

/* Maps the arena that descriptor `fd` of process `pid` is. Refuses (KVN_INVALID) what is not a
 * sealed memfd of just this inode and size. KVN_DENIED, KVN_PEER_GONE: as the system says. */
int kvn_arena_import(int pid, int fd, uint64_t inode, uint64_t nbytes, int writable, kvn_arena *out,
                     kvn_failure *failure);

/* Makes every page present now (page tables too), instead of one fault a page at first use.
 * An owner's are huge where they can be. KVN_NO_MEMORY: there are not as many. */
int kvn_arena_populate(const kvn_arena *arena, kvn_failure *failure);

void kvn_arena_close(kvn_arena *arena); /* idempotent */

#endif

/* Memory that an end's UCX knows: mapped once for any number of users, with the key that peers need.
 *
 * What is mapped at one time is an atlas: a value that never changes. A transfer holds the one that it began
 * with, finds in it what it needs for its local memory, and so keeps that mapped until it is through. */
#ifndef KVN_UCX_REGION_H
#define KVN_UCX_REGION_H

#include <pthread.h>
#include <stdatomic.h>

#include "intervals.h"
#include "ucx_end.h"

typedef struct kvn_ucx_region kvn_ucx_region;

struct kvn_ucx_region {
    kvn_ucx_end *end; /* held */
    uint64_t address;
    uint64_t nbytes;
    int memory_type;
    kvn_ucp_mem_h memory;
    void *key; /* for peers; UCX's */
    size_t key_nbytes;
    unsigned num_users;   /* under the mutex of the regions */
    atomic_uint num_held; /* by its users together, and by atlases; unmapped with the last */
    kvn_ucx_region *next; /* of the regions */
};

typedef struct kvn_ucx_atlas {
    atomic_uint num_held;
    size_t count;
    kvn_interval *items; /* `index`: of regions */
    kvn_ucx_region **regions;
} kvn_ucx_atlas;

typedef struct kvn_ucx_regions {
    kvn_ucx_end *end; /* held */
    pthread_mutex_t mutex;
    kvn_ucx_region *first;
    kvn_ucx_atlas *atlas; /* of now; NULL: it could not be made, and none is used */
} kvn_ucx_regions;

/* Stays in place until fini. */
void kvn_ucx_regions_init(kvn_ucx_regions *self, kvn_ucx_end *end);
/* What users still have stays mapped. */
void kvn_ucx_regions_fini(kvn_ucx_regions *self);

/* One more user of exactly that range; maps it if it has none. `memory_type`: KVN_UCS_MEMORY_. Blocks for
 * long where a network card has to know gigabytes; not under the turn. */
int kvn_ucx_region_use(kvn_ucx_regions *self, uint64_t address, uint64_t nbytes, int memory_type,
                       kvn_ucx_region **out, kvn_failure *failure);
/* One user less: of the last, the range is unmapped as soon as no transfer uses it. Not under the turn. */
void kvn_ucx_region_drop(kvn_ucx_regions *self, kvn_ucx_region *region);

/* What is mapped now; NULL: nothing that is known. Held until let go, not under the turn. */
kvn_ucx_atlas *kvn_ucx_atlas_hold(kvn_ucx_regions *self);
void kvn_ucx_atlas_let_go(kvn_ucx_atlas *atlas);
/* The region that holds the range; NULL: none does. `hint` is the caller's, for the next call. */
kvn_ucx_region *kvn_ucx_atlas_find(const kvn_ucx_atlas *atlas, uint64_t address, uint64_t nbytes,
                                   size_t *hint);

#endif

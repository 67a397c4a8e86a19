/* Memory that is registered with UCX: mapped once for any number of users, with a key for peers.
 *
 * A snapshot is the immutable list of all regions at one time. A transfer holds the snapshot of its beginning to find
 * its local memory, and so keeps that memory mapped until it has finished. */
#ifndef KVN_UCX_REGION_H
#define KVN_UCX_REGION_H

#include <pthread.h>
#include <stdatomic.h>

#include "core/intervals.h"
#include "ucx/worker.h"

typedef struct kvn_ucx_region kvn_ucx_region;

struct kvn_ucx_region {
    kvn_ucx_worker *worker; /* held */
    uint64_t address;
    uint64_t nbytes;
    int memory_type;
    kvn_ucp_mem_h memory;
    void *key; /* for peers; owned by UCX */
    size_t key_nbytes;
    unsigned num_users;      /* guarded by the mutex of the regions */
    atomic_uint num_holders; /* one for all users, and one for each snapshot; unmapped with the last */
    kvn_ucx_region *next;    /* of the regions */
};

typedef struct kvn_ucx_snapshot {
    atomic_uint num_holders;
    size_t count;
    kvn_interval *items; /* with `index` into `regions` */
    kvn_ucx_region **regions;
} kvn_ucx_snapshot;

typedef struct kvn_ucx_regions {
    kvn_ucx_worker *worker; /* held */
    pthread_mutex_t mutex;
    kvn_ucx_region *first;
    kvn_ucx_snapshot *snapshot; /* the current one; NULL: none yet, or it could not be made */
} kvn_ucx_regions;

/* `self` must stay in place until fini. */
void kvn_ucx_regions_init(kvn_ucx_regions *self, kvn_ucx_worker *worker);
/* Regions that still have users stay mapped. */
void kvn_ucx_regions_fini(kvn_ucx_regions *self);

/* Adds a user of exactly this range, which the first user maps. `memory_type`: KVN_UCS_MEMORY_. May block long if a
 * network card registers gigabytes. Without the progress lock. */
int kvn_ucx_region_use(kvn_ucx_regions *self, uint64_t address, uint64_t nbytes, int memory_type,
                       kvn_ucx_region **out, kvn_failure *failure);
/* Removes a user. After the last one, the range is unmapped once no transfer uses it. Without the progress lock. */
void kvn_ucx_region_drop(kvn_ucx_regions *self, kvn_ucx_region *region);

/* Returns the present snapshot, held until it is released; NULL if none was made yet or memory is short. Without the
 * progress lock. */
kvn_ucx_snapshot *kvn_ucx_snapshot_take(kvn_ucx_regions *self);
void kvn_ucx_snapshot_release(kvn_ucx_snapshot *snapshot);
/* Returns the region that holds the range, or NULL. The caller keeps `hint` for the next call. */
kvn_ucx_region *kvn_ucx_snapshot_find(const kvn_ucx_snapshot *snapshot, uint64_t address,
                                      uint64_t nbytes, size_t *hint);

#endif

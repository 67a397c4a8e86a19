/* Staging: device memory in slots, through which a transfer copies local memory that HCCL cannot access. One transfer
 * uses one buffer set: two slots, and a copier that moves bytes between them and the local memory. */
#ifndef KVN_HCCL_STAGING_H
#define KVN_HCCL_STAGING_H

#include "device/copier.h"
#include "hccl/communicator.h"

#define KVN_STAGING_MAX_SETS 64

typedef struct kvn_buffer_set {
    bool busy;           /* guarded by the staging's mutex */
    uint64_t address[2]; /* of its slots */
    kvn_copier copier;   /* made by the first transfer that uses the set */
} kvn_buffer_set;

typedef struct kvn_staging {
    kvn_device *device;
    uint64_t slot_nbytes;
    uint32_t num_sets;
    kvn_buffer_set *sets;
    pthread_mutex_t mutex;
    pthread_cond_t freed;
    uint32_t num_busy;
    bool is_open;
} kvn_staging;

/* KVN_INVALID if a number is out of range; calls no library. */
int kvn_staging_check(uint64_t slot_nbytes, uint64_t sets, kvn_failure *failure);
/* Uses num_sets * 2 * slot_nbytes bytes of device memory at `address`. The caller has bound their region to every
 * communicator that uses them. */
int kvn_staging_open(kvn_device *device, uint64_t address, uint64_t slot_nbytes, uint32_t num_sets, kvn_staging *out,
                     kvn_failure *failure);
/* KVN_INVALID while a transfer uses it; idempotent. */
int kvn_staging_close(kvn_staging *staging, kvn_failure *failure);
/* Call it after close, or in a forked child. */
void kvn_staging_free(kvn_staging *staging);

/* ---- on a channel's thread ---- */

/* Waits for a free set. KVN_CANCELLED if the transfer is halted first. */
int kvn_staging_claim(kvn_staging *staging, const kvn_halt *halt, kvn_buffer_set **out,
                      kvn_failure *failure);
/* Call it when no copy or operation uses the set. */
void kvn_staging_release(kvn_staging *staging, kvn_buffer_set *set);

#endif

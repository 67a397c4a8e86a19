/* Staging: device memory in slots, through which a transfer goes whose local memory HCCL cannot use.
 * A buffer set is what one transfer uses: slots, a stream that copies between them and the local memory,
 * and events that order that stream and the communicator's. */
#ifndef KVN_HCCL_STAGING_H
#define KVN_HCCL_STAGING_H

#include "acl/ops.h"
#include "hccl/communicator.h"

#define KVN_STAGING_MAX_SLOTS 64
#define KVN_STAGING_MAX_SETS 64

typedef struct kvn_buffer_set {
    bool busy;        /* under the staging's mutex */
    uint64_t address; /* of its slots, one behind the other */
    kvn_stream stream;
    /* Of each slot: its bytes have come in; they have gone out, and the slot is free. */
    aclrtEvent filled[KVN_STAGING_MAX_SLOTS];
    aclrtEvent emptied[KVN_STAGING_MAX_SLOTS];
} kvn_buffer_set;

typedef struct kvn_staging {
    kvn_device *device;
    uint64_t slot_nbytes;
    uint32_t slots; /* of a set */
    uint32_t num_sets;
    kvn_buffer_set *sets;
    pthread_mutex_t mutex;
    pthread_cond_t freed;
    uint32_t num_busy;
    bool is_open;
} kvn_staging;

/* KVN_INVALID, with no call made, for numbers that cannot be. */
int kvn_staging_check(uint64_t slot_nbytes, uint64_t slots, uint64_t sets, kvn_failure *failure);
/* Over num_sets * slots * slot_nbytes bytes of device memory at `address`, whose owner has them in a
 * region that is bound to every communicator that uses them. */
int kvn_staging_open(kvn_device *device, uint64_t address, uint64_t slot_nbytes, uint32_t slots,
                     uint32_t num_sets, kvn_staging *out, kvn_failure *failure);
/* KVN_INVALID while a transfer uses it; idempotent. */
int kvn_staging_close(kvn_staging *staging, kvn_failure *failure);
/* After close, or in a forked child. */
void kvn_staging_free(kvn_staging *staging);

/* ---- on a channel's thread ---- */

/* Waits for a free set. KVN_CANCELLED when the transfer was halted before one was free. */
int kvn_staging_claim(kvn_staging *staging, const kvn_halt *halt, kvn_buffer_set **out,
                      kvn_failure *failure);
/* `is_clean`: all that was issued on its stream is through. Else that is stopped and made again;
 * on return nothing of it touches memory any more. */
void kvn_staging_release(kvn_staging *staging, kvn_buffer_set *set, bool is_clean);

#endif

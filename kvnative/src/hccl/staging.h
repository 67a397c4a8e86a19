/* Staging: device memory in slots, through which a transfer goes whose local memory HCCL cannot use.
 * A lane is what one transfer uses: slots, a stream that copies between them and the local memory,
 * and events that order that stream and the communicator's. */
#ifndef KVN_HCCL_STAGING_H
#define KVN_HCCL_STAGING_H

#include "acl/ops.h"
#include "device/channel.h"
#include "hccl/halt.h"

#define KVN_STAGING_MAX_SLOTS 64
#define KVN_STAGING_MAX_LANES 64

typedef struct kvn_lane {
    bool busy;        /* under the staging's mutex */
    uint64_t address; /* of its slots, one behind the other */
    aclrtStream stream;
    /* Of each slot: its bytes have come in; they have gone out, and the slot is free. */
    aclrtEvent filled[KVN_STAGING_MAX_SLOTS];
    aclrtEvent emptied[KVN_STAGING_MAX_SLOTS];
} kvn_lane;

typedef struct kvn_staging {
    kvn_device *device;
    uint64_t slot_nbytes;
    uint32_t slots; /* of a lane */
    uint32_t num_lanes;
    kvn_lane *lanes;
    pthread_mutex_t mutex;
    pthread_cond_t freed;
    uint32_t num_busy;
    bool is_open;
} kvn_staging;

/* KVN_INVALID, with no call made, for numbers that cannot be. */
int kvn_staging_check(uint64_t slot_nbytes, uint64_t slots, uint64_t lanes, kvn_failure *failure);
/* Over lanes * slots * slot_nbytes bytes of device memory at `address`, whose owner has them in a
 * region that is bound to every communicator that uses them. */
int kvn_staging_open(kvn_device *device, uint64_t address, uint64_t slot_nbytes, uint32_t slots,
                     uint32_t num_lanes, kvn_staging *out, kvn_failure *failure);
/* KVN_INVALID while a transfer uses it; idempotent. */
int kvn_staging_close(kvn_staging *staging, kvn_failure *failure);
/* After close, or in a forked child. */
void kvn_staging_free(kvn_staging *staging);

/* ---- on a channel's thread ---- */

/* Waits for a lane. KVN_CANCELLED when the transfer was halted before one was free. */
int kvn_staging_claim(kvn_staging *staging, const kvn_halt *halt, kvn_lane **out,
                      kvn_channel_fault *fault);
/* `is_clean`: all that was issued on the lane is through. Else its stream is stopped and made anew;
 * on return nothing of it touches memory any more. */
void kvn_staging_release(kvn_staging *staging, kvn_lane *lane, bool is_clean);

#endif

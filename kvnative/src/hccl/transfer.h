/* Backends over a communicator: one-sided puts and gets, directly or through staging memory, and the
 * guards that notice when the owner has deregistered what was transferred. */
#ifndef KVN_HCCL_TRANSFER_H
#define KVN_HCCL_TRANSFER_H

#include "hccl/communicator.h"
#include "hccl/staging.h"

typedef struct kvn_transfer_options {
    kvn_direction direction; /* KVN_PEER_GET or KVN_PEER_PUT */
    /* Remote words, and what they must hold after the data was moved; copied. At most KVN_MAX_GUARDS. */
    const uint64_t *guard_addresses;
    const uint64_t *guard_words;
    uint32_t num_guards;
    kvn_staging *staging; /* NULL: local memory is in bound regions */
    bool local_on_device;
} kvn_transfer_options;

/* The communicator and the staging outlive the backend. NULL with errno set (EINVAL, ENOMEM). */
kvn_backend *kvn_transfer_create(kvn_communicator *communicator,
                                 const kvn_transfer_options *options);

#endif

/* A region: a range of memory that HCCL knows, on a device or pinned in the host. Where the library
 * registers memory once this does it; else each communicator does when the region is bound. Overlaps
 * are refused here, with both ranges named: HCCL only says that a parameter is wrong. */
#ifndef KVN_HCCL_REGION_H
#define KVN_HCCL_REGION_H

#include "acl/ops.h"
#include "hccl/library.h"

struct kvn_region {
    kvn_hccl *hccl;
    const kvn_device *device;
    uint64_t address;
    uint64_t nbytes;
    bool on_device;
    void *handle;        /* HCCL's; NULL where communicators register */
    uint32_t num_bound;  /* communicators; under hccl->registry, as what follows */
    bool is_open;
    kvn_region *next;    /* in hccl->regions */
};

/* `out` must stay in place until closed. */
int kvn_region_open(kvn_hccl *hccl, const kvn_device *device, uint64_t address, uint64_t nbytes,
                    bool on_device, kvn_region *out, kvn_failure *failure);
/* KVN_INVALID while it is bound; idempotent. When HCCL refuses, the region counts as closed. */
int kvn_region_close(kvn_region *region, kvn_failure *failure);
/* Bytes of each kind that are registered with a device: [0] of the host's memory, [1] of its own. */
void kvn_hccl_registered(kvn_hccl *hccl, int32_t device_id, uint64_t nbytes[2]);
/* One more communicator uses it; KVN_INVALID when it is closed. */
int kvn_region_retain(kvn_region *region, kvn_failure *failure);
void kvn_region_release(kvn_region *region);

#endif

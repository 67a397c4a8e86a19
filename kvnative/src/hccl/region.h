/* A region: a range of device memory or pinned host memory for HCCL or HIXL. If the library registers memory once (with
 * HIXL: for the device's server), that is done here, else by each communicator when the region is bound. Overlaps are
 * refused here with both ranges, because HCCL only reports a wrong parameter. */
#ifndef KVN_HCCL_REGION_H
#define KVN_HCCL_REGION_H

#include "device/device.h"
#include "hccl/library.h"

struct kvn_region {
    kvn_hccl *hccl;
    const kvn_device *device;
    uint64_t address;
    uint64_t nbytes;
    bool on_device;
    void *handle;        /* HCCL's, or that of HIXL's server; NULL if communicators register the memory */
    uint64_t server;     /* number of HIXL's server */
    uint32_t num_bound;  /* communicators; guarded by hccl->registry, like the fields below */
    bool is_open;
    kvn_region *next;    /* in hccl->regions */
};

/* `out` must stay in place until closed. With HIXL, the device's server is open. */
int kvn_region_open(kvn_hccl *hccl, const kvn_device *device, uint64_t address, uint64_t nbytes,
                    bool on_device, kvn_region *out, kvn_failure *failure);
/* KVN_INVALID while the region is bound; idempotent. If HCCL refuses, the region still counts as closed. */
int kvn_region_close(kvn_region *region, kvn_failure *failure);
/* Counts the bytes that are registered with a device: [0] of host memory, [1] of its own. */
void kvn_hccl_registered(kvn_hccl *hccl, int32_t device_id, uint64_t nbytes[2]);
/* Adds a communicator as a user; KVN_INVALID if the region is closed. */
int kvn_region_retain(kvn_region *region, kvn_failure *failure);
void kvn_region_release(kvn_region *region);

static inline kvn_hccl_mem kvn_region_memory(const kvn_region *region)
{
    return (kvn_hccl_mem){.type = region->on_device ? KVN_HCCL_MEM_DEVICE : KVN_HCCL_MEM_HOST,
                          .address = region->address,
                          .nbytes = region->nbytes};
}

#endif

/* Ascend devices: the table of calls that device/ works with, filled with those of ACL. */
#ifndef KVN_ACL_OPS_H
#define KVN_ACL_OPS_H

#include "acl/library.h"
#include "device/device.h"

/* The `runtime` of such a device is a kvn_acl_library. */
extern const kvn_device_ops kvn_acl_ops;

/* ACL's calls, for code on top of ACL. The device is an Ascend device. */
static inline const kvn_acl *kvn_acl_of(const kvn_device *device)
{
    return &((const kvn_acl_library *)device->runtime)->calls;
}

/* Maps whole pages of host memory for the device and unmaps them, as HCCL will: the driver refuses memory that is
 * mapped already. */
int kvn_acl_try_map(const kvn_device *device, uint64_t address, uint64_t nbytes, kvn_failure *failure);

#endif

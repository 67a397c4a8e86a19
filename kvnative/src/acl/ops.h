/* Ascend devices: the operations of device/, implemented by calls of ACL. */
#ifndef KVN_ACL_OPS_H
#define KVN_ACL_OPS_H

#include "acl/library.h"
#include "device/device.h"

/* The `runtime` of such a device is a kvn_acl_library. */
extern const kvn_device_ops kvn_acl_ops;

/* Returns ACL's calls, for code on top of ACL. The device is an Ascend device. */
static inline const kvn_acl *kvn_acl_of(const kvn_device *device)
{
    return &((const kvn_acl_library *)device->runtime)->calls;
}

/* Tries what HCCL will do: maps whole pages of host memory for the device, and unmaps them. The driver refuses memory
 * that is already mapped. */
int kvn_acl_try_map(const kvn_device *device, uint64_t address, uint64_t nbytes, kvn_failure *failure);

#endif

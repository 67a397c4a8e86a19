/* CUDA devices: the table of calls that device/ works with, filled with those of the driver. */
#ifndef KVN_CUDA_OPS_H
#define KVN_CUDA_OPS_H

#include "device/ops.h"

/* The `runtime` of such a device is a kvn_cuda_library, which says whose context it works in. */
extern const kvn_device_ops kvn_cuda_ops;

#endif

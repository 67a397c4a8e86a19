/* The copy kernel, loaded into the context of one device. */
#ifndef KVN_CUDA_KERNEL_H
#define KVN_CUDA_KERNEL_H

#include "cuda/device.h"

/* Zeroed before the first call. The caller serializes the calls, with the device's context current. */
typedef struct kvn_cuda_kernel {
    CUmodule module;
    CUfunction few;  /* takes a kvn_copy_few */
    CUfunction many; /* takes a kvn_copy_many */
    kvn_failure outcome; /* of loading; .status is KVN_UNSUPPORTED if the driver refuses the kernel */
    bool is_final;       /* later calls return `outcome` again */
} kvn_cuda_kernel;

/* Has the driver compile the kernel. KVN_UNSUPPORTED is final; other failures, such as KVN_NO_MEMORY, are not. */
int kvn_cuda_kernel_load(kvn_cuda_kernel *self, const kvn_device *device, kvn_failure *failure);
void kvn_cuda_kernel_unload(kvn_cuda_kernel *self, const kvn_device *device);

#endif

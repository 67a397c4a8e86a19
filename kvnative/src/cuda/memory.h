/* Memory of a CUDA device that can be exported to other processes: handles of the virtual-memory API,
 * mapped at an address that this process reserves. */
#ifndef KVN_CUDA_MEMORY_H
#define KVN_CUDA_MEMORY_H

#include "cuda/device.h"

/* Asks the device which kinds of memory it supports. */
int kvn_cuda_memory_init(const kvn_device *device, kvn_failure *failure);

/* Rows of kvn_device_ops. */
int kvn_cuda_allocate(const kvn_device *device, uint64_t nbytes, void **out, kvn_failure *failure);
/* Memory of the primary context is forgotten now, and freed when all work of that context is over (cuda/reclaim.h). */
int kvn_cuda_free(const kvn_device *device, void *address, kvn_failure *failure);

/* Lets the device read and write mapped memory. */
int kvn_cuda_give_access(const kvn_device *device, CUdeviceptr address, uint64_t nbytes, kvn_failure *failure);

/* Finds the allocation of kvn_cuda_allocate that holds `address`; false: none does, or it cannot be exported. */
bool kvn_cuda_allocated_at(const kvn_device *device, uint64_t address, kvn_cuda_allocated *out);

#endif

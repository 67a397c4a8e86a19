/* Memory of a CUDA device that can be exported to other processes: handles of the virtual-memory API,
 * mapped at an address that this process reserves. */
#ifndef KVN_CUDA_MEMORY_H
#define KVN_CUDA_MEMORY_H

#include "cuda/device.h"

/* Asks the device what memory it has. */
int kvn_cuda_memory_init(const kvn_device *device, kvn_failure *failure);

/* Rows of kvn_device_ops. */
int kvn_cuda_allocate(const kvn_device *device, uint64_t nbytes, void **out, kvn_failure *failure);
/* Waits for all work of the primary context, as cuMemFree does: to unmap what a kernel of the program still reads
 * would break the context for all of the program, and only the program knows of its streams. So it also waits for
 * the events that our streams stand behind, though what stands there was given up. That cannot be
 * waited for while one of them is captured into a graph: a failure, and the memory goes with what is next
 * allocated or freed, or with the device. */
int kvn_cuda_free(const kvn_device *device, void *address, kvn_failure *failure);
/* What could not be waited for when it was freed. */
void kvn_cuda_free_rest(const kvn_device *device);

/* The allocation that holds `address`; false where it is not from here, or was not made to be exported. */
bool kvn_cuda_allocated_at(const kvn_device *device, uint64_t address, kvn_cuda_allocated *out);

#endif

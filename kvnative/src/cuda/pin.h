/* Host memory that is registered with CUDA's driver: in parts, since a driver may refuse a large registration. */
#ifndef KVN_CUDA_PIN_H
#define KVN_CUDA_PIN_H

#include "cuda/device.h"

/* A multiple of every page size. Drivers since 580 fail above 512 GiB, whose table of pages has more than 2 GiB. */
#define KVN_CUDA_MAX_REGISTERED ((uint64_t)64 << 30)

/* Rows of kvn_device_ops. If a part cannot be registered, none is. */
int kvn_cuda_pin(const kvn_device *device, void *address, uint64_t nbytes, kvn_failure *failure);
int kvn_cuda_unpin(const kvn_device *device, void *address, kvn_failure *failure);

/* Sets the maximum size of a part, in place of KVN_CUDA_MAX_REGISTERED. Call it before any memory is pinned. */
void kvn_cuda_limit_registered(const kvn_device *device, uint64_t nbytes);

/* Returns how many bytes from `address` one driver copy may take: its host side must lie in one registration. */
uint64_t kvn_cuda_part_left(const kvn_device *device, uint64_t address);

/* Copies on a stream, in several calls if a side lies in several parts. */
int kvn_cuda_copy_parts(const kvn_device *device, uint64_t dst, uint64_t src, uint64_t nbytes, CUstream stream,
                        kvn_failure *failure);

#endif

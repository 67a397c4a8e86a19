/* What moves the bytes of backends on a CUDA device: rows of kvn_device_ops. */
#ifndef KVN_CUDA_COPIES_H
#define KVN_CUDA_COPIES_H

#include "cuda/ops.h"

int kvn_cuda_copy_async(const kvn_device *device, kvn_direction direction, uint64_t dst, uint64_t src,
                        uint64_t nbytes, kvn_stream stream, kvn_failure *failure);
unsigned kvn_cuda_batch_copies(const kvn_device *device, char *why, size_t room);
/* With the context current, before it is closed; nothing of the device is in use. */
void kvn_cuda_copies_close(const kvn_device *device);

#endif

/* What moves the bytes of backends on a CUDA device: rows of kvn_device_ops, and which of three ways is taken.
 *
 *   kernel  one launch copies all descriptors (copy.cu)
 *   batch   cuMemcpyBatchAsync, of CUDA 12.8 and later
 *   single  cuMemcpyAsync for each descriptor
 *
 * A copy of its own costs the GPU some microseconds, in which it could move tens of kilobytes from and to the
 * host, and megabytes within; the kernel costs processors of the GPU that a model would use. So which way is
 * fastest depends on the direction and on the size of a descriptor: a table, built in or measured. */
#ifndef KVN_CUDA_COPIES_H
#define KVN_CUDA_COPIES_H

#include "cuda/device.h"

typedef enum kvn_cuda_way {
    KVN_CUDA_KERNEL,
    KVN_CUDA_BATCH,
    KVN_CUDA_SINGLE
} kvn_cuda_way;

/* Of one direction. By the mean size of a batch's descriptors. */
typedef struct kvn_cuda_tuning {
    uint64_t kernel_below; /* bytes: smaller ones go by the kernel */
    uint64_t batch_below;  /* then these in a batch; what is larger by single copies */
    uint32_t blocks;       /* of the kernel, at most; 0: as many as the device runs at one time */
} kvn_cuda_tuning;

int kvn_cuda_copies_open(const kvn_device *device, kvn_failure *failure);
/* With the context current, before it is closed; nothing of the device is in use. Whether something that was given up
 * may still begin, so that the context must stay. */
bool kvn_cuda_copies_close(const kvn_device *device);

/* ---- rows of the table ---- */

int kvn_cuda_copy_async(const kvn_device *device, kvn_direction direction, uint64_t dst, uint64_t src,
                        uint64_t nbytes, kvn_stream stream, kvn_failure *failure);
unsigned kvn_cuda_batch_copies(const kvn_device *device, char *why, size_t room);
int kvn_cuda_copy_batch(kvn_device *device, kvn_direction direction, kvn_columns *batch, kvn_stream stream,
                        size_t *failed, kvn_failure *failure);
int kvn_cuda_copy_held(kvn_device *device, kvn_direction direction, kvn_columns *batch, kvn_stream stream,
                       size_t *failed, kvn_failure *failure);

/* ---- the table of ways ---- */

/* What is built in; the same on all devices. */
kvn_cuda_tuning kvn_cuda_tuning_builtin(kvn_direction direction);
kvn_cuda_tuning kvn_cuda_copies_tuning(const kvn_device *device, kvn_direction direction);
void kvn_cuda_copies_tune(const kvn_device *device, kvn_direction direction, kvn_cuda_tuning tuning);
/* Of all directions: whether the driver's batch call is never made, and how many blocks the kernel has; 0: as many as the
 * table says. */
void kvn_cuda_copies_limit(const kvn_device *device, bool without_batch, uint32_t max_blocks);
/* What copies between two GPUs go by: built in, as no tool measures it. */
kvn_cuda_tuning kvn_cuda_tuning_far(void);
/* How a batch with descriptors of that mean size goes; what this driver lacks or has refused is left out.
 * `is_far`: of device memory, whether one side is another GPU's. */
kvn_cuda_way kvn_cuda_copies_way(const kvn_device *device, kvn_direction direction, bool is_far,
                                 uint64_t mean_nbytes, size_t count);

#endif

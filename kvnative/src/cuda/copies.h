/* Copies on a CUDA device for backends: rows of kvn_device_ops, and the choice among three ways.
 *
 *   kernel  one launch copies all descriptors (copy.cu)
 *   batch   cuMemcpyBatchAsync, of CUDA 12.8 and later
 *   single  cuMemcpyAsync for each descriptor
 *
 * A single copy costs the GPU some microseconds, in which it could move tens of kilobytes from or to the host, and
 * megabytes within the device. The kernel takes processors of the GPU from a model. So the fastest way depends on the
 * direction and on the size of a descriptor, and is taken from a table that is built in or measured. */
#ifndef KVN_CUDA_COPIES_H
#define KVN_CUDA_COPIES_H

#include "cuda/device.h"

typedef enum kvn_cuda_way {
    KVN_CUDA_KERNEL,
    KVN_CUDA_BATCH,
    KVN_CUDA_SINGLE
} kvn_cuda_way;

/* The ways of one direction, by the mean size of a batch's descriptors. */
typedef struct kvn_cuda_tuning {
    uint64_t kernel_below; /* bytes: smaller descriptors use the kernel */
    uint64_t batch_below;  /* larger ones below this use the batch call, the rest single copies */
    uint32_t blocks;       /* maximum of the kernel; 0: as many as the device runs at one time */
} kvn_cuda_tuning;

int kvn_cuda_copies_open(const kvn_device *device, kvn_failure *failure);
/* Call this with the context current, when nothing of the device is in use. Returns true if work that was given up may
 * still begin: then the context must stay. */
bool kvn_cuda_copies_close(const kvn_device *device);

/* ---- rows of kvn_device_ops ---- */

int kvn_cuda_copy_async(const kvn_device *device, kvn_direction direction, uint64_t dst, uint64_t src,
                        uint64_t nbytes, kvn_stream stream, kvn_failure *failure);
unsigned kvn_cuda_batch_copies(const kvn_device *device, char *why, size_t room);
int kvn_cuda_copy_batch(kvn_device *device, kvn_direction direction, kvn_columns *batch, kvn_stream stream,
                        size_t *failed, kvn_failure *failure);
int kvn_cuda_copy_held(kvn_device *device, kvn_direction direction, kvn_columns *batch, kvn_stream stream,
                       size_t *failed, kvn_failure *failure);

/* ---- the table of ways ---- */

/* Returns the built-in tuning, which is the same on all devices. */
kvn_cuda_tuning kvn_cuda_tuning_builtin(kvn_direction direction);
kvn_cuda_tuning kvn_cuda_copies_tuning(const kvn_device *device, kvn_direction direction);
void kvn_cuda_copies_tune(const kvn_device *device, kvn_direction direction, kvn_cuda_tuning tuning);
/* Limits copies in all directions: no batch calls of the driver if `without_batch`, and at most `max_blocks` blocks of
 * the kernel; 0: as many as the tuning says. */
void kvn_cuda_copies_limit(const kvn_device *device, bool without_batch, uint32_t max_blocks);
/* Returns false if the driver lacks or has refused batch calls, or a limit forbids them. */
bool kvn_cuda_copies_has_batch(const kvn_device *device);
/* Returns the tuning of copies between two GPUs, which is built in, since no tool measures it. */
kvn_cuda_tuning kvn_cuda_tuning_far(void);
/* Returns the way of a batch with descriptors of this mean size, one that the driver neither lacks nor has refused.
 * `is_far`: one side is memory of another GPU. */
kvn_cuda_way kvn_cuda_copies_way(const kvn_device *device, kvn_direction direction, bool is_far,
                                 uint64_t mean_nbytes, size_t count);

#endif

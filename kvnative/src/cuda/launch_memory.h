/* Memory that launches of the copy kernel read: control words, and columns of descriptors. A launch that was given up
 * may still begin and read its own. So memory is only reused, after its launch has ended, and freed with the launcher.
 * The launcher serializes all calls, with the device's context current.
 *
 * Columns are made once, with the kernel, before a stream of ours can wait for an event of the program. Allocating device
 * memory may wait for all work of the context, and so for that event. */
#ifndef KVN_CUDA_LAUNCH_MEMORY_H
#define KVN_CUDA_LAUNCH_MEMORY_H

#include "cuda/copy_kernel.h"
#include "cuda/device.h"

#define KVN_CUDA_LAUNCH_COUNT 8192u /* maximum number of descriptors of a launch */

/* Columns that do not fit into the parameters of a launch. They are filled on the host, and copied to the device
 * before the launch: up to 229 KB in less than 10 us by DMA. If the kernel read them from the host, each piece would
 * wait for PCIe, and in a binary search each of its steps would. */
typedef struct kvn_cuda_columns {
    char *host;
    CUdeviceptr device;
} kvn_cuda_columns;

/* The memory of one launch, which outlives the launch. */
typedef struct kvn_cuda_launch_memory {
    struct kvn_cuda_launch_memory *next;
    kvn_copy_control *control;
    kvn_cuda_columns columns; /* .host is NULL before they are made */
} kvn_cuda_launch_memory;

/* Zeroed before the first call. */
typedef struct kvn_cuda_launches {
    kvn_cuda_launch_memory *idle;
    kvn_cuda_launch_memory **pages; /* one array of launches for each page of control words */
    size_t num_pages;
} kvn_cuda_launches;

/* Makes the columns, and control words for as many launches as are on streams at one time. Makes fewer if the memory of
 * the device is full. */
void kvn_cuda_launches_reserve(kvn_cuda_launches *self, const kvn_device *device);
/* Takes an idle launch with zeroed control words, and columns if `with_columns`. NULL: `failure` says why;
 * KVN_CUDA_OUT_OF_MEMORY: all columns are in use. */
kvn_cuda_launch_memory *kvn_cuda_launches_take(kvn_cuda_launches *self, const kvn_device *device, bool with_columns,
                                               kvn_failure *failure);
/* Takes back a list of launches that have ended. */
void kvn_cuda_launches_give(kvn_cuda_launches *self, kvn_cuda_launch_memory *launches);
/* Frees the memory of all launches, which must be idle; `pages` itself stays. */
void kvn_cuda_launches_free(kvn_cuda_launches *self, const kvn_device *device);

#endif

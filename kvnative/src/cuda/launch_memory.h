/* What launches of the copy kernel read: control words, and columns of descriptors. A launch that was given up may
 * still begin, and then reads them; so they are used again, but not freed before the launcher is. The launcher
 * serializes all calls, with the device's context current.
 *
 * Columns are made once, with the kernel, before a stream of ours can wait for an event of the program's: to allocate
 * memory of the device may wait for all of its work, and so for the event. */
#ifndef KVN_CUDA_LAUNCH_MEMORY_H
#define KVN_CUDA_LAUNCH_MEMORY_H

#include "cuda/copy_kernel.h"
#include "cuda/device.h"

#define KVN_CUDA_LAUNCH_COUNT 8192u /* descriptors of a launch, at most */

/* Columns of a launch that do not fit in its parameters: filled on the host, and copied to the device in front
 * of the launch. One copy of up to 229 KB takes less than 10 us by DMA; read by the kernel from the host, each
 * piece would wait for PCIe, and a binary search for each of its steps. */
typedef struct kvn_cuda_columns {
    char *host;
    CUdeviceptr device;
} kvn_cuda_columns;

/* What one launch reads: it outlives the launch. */
typedef struct kvn_cuda_launch_memory {
    struct kvn_cuda_launch_memory *next;
    kvn_copy_control *control;
    kvn_cuda_columns columns; /* .host NULL: it has none yet */
} kvn_cuda_launch_memory;

/* Zeroed before the first call. */
typedef struct kvn_cuda_launches {
    kvn_cuda_launch_memory *idle;
    kvn_cuda_launch_memory **pages; /* of control words: each the array of its launches */
    size_t num_pages;
} kvn_cuda_launches;

/* Makes the columns, and control words for as many launches as are on streams at one time; on a device whose memory is
 * full, fewer. */
void kvn_cuda_launches_reserve(kvn_cuda_launches *self, const kvn_device *device);
/* Takes an idle launch out, with zeroed control words, and with columns if `with_columns`. NULL: `failure` says why;
 * KVN_CUDA_OUT_OF_MEMORY: all columns are in use. */
kvn_cuda_launch_memory *kvn_cuda_launches_take(kvn_cuda_launches *self, const kvn_device *device, bool with_columns,
                                               kvn_failure *failure);
/* The launches of a list, which have ended, are idle again. */
void kvn_cuda_launches_give(kvn_cuda_launches *self, kvn_cuda_launch_memory *launches);
/* Frees the memory of all launches, which are idle; `pages` itself stays. */
void kvn_cuda_launches_free(kvn_cuda_launches *self, const kvn_device *device);

#endif

/* Memory of CUDA devices that processes of one host share: exported by its owner, mapped by its peers.
 *
 * Memory of kvn_cuda_allocate is exported as a file descriptor. A peer that has imported it keeps the memory, even if
 * the owner frees it. Memory of cuMemAlloc, as users have it, has a handle of 64 bytes instead (the older calls,
 * cuIpc...), and must not be freed while a peer uses it. */
#ifndef KVN_CUDA_SHARE_H
#define KVN_CUDA_SHARE_H

#include <stdbool.h>

#include "device/device.h"
#include "kvnative/cuda.h"

typedef struct kvn_cuda_exported {
    uint64_t address; /* start of the allocation, which is exported whole */
    uint64_t nbytes;
    int fd; /* -1: use `handle` */
    kvn_cuda_ipc_memory handle;
} kvn_cuda_exported;

typedef struct kvn_cuda_imported {
    uint64_t address; /* in this process */
    uint64_t nbytes;
    bool is_legacy;    /* True: imported by a handle of cuIpcGetMemHandle */
    CUcontext context; /* the owner's context, if the owner is this process and nothing was mapped; else NULL */
} kvn_cuda_imported;

/* The GPU of some memory, from the view of a device. */
typedef enum kvn_cuda_gpu {
    KVN_CUDA_SAME_GPU,
    KVN_CUDA_OTHER_GPU, /* the two have peer access */
    KVN_CUDA_HIDDEN_GPU /* CUDA_VISIBLE_DEVICES hides it: only mapping shows if it is reached */
} kvn_cuda_gpu;

/* Any thread may call these. The device is a CUDA device. */

/* KVN_UNSUPPORTED, with a remedy: the memory lies in several allocations, or in one that cannot be shared. The caller
 * closes the descriptor. An importer keeps the memory alive. */
int kvn_cuda_export(const kvn_device *device, uint64_t address, uint64_t nbytes, kvn_cuda_exported *out,
                    kvn_failure *failure);

/* Finds the GPU with this UUID. KVN_UNSUPPORTED: `device` does not reach its memory, or, with `both_ways`, it does not
 * reach the device's. */
int kvn_cuda_check_reach(const kvn_device *device, const kvn_cuda_uuid *uuid, bool both_ways, kvn_cuda_gpu *out,
                         kvn_failure *failure);

/* Maps `nbytes` bytes of an exported allocation by descriptor `fd`, which the caller may close afterwards. `is_far`: it
 * is memory of another GPU. */
int kvn_cuda_import_descriptor(const kvn_device *device, int fd, uint64_t nbytes, bool is_far,
                               kvn_cuda_imported *out, kvn_failure *failure);
/* Maps the allocation of `handle`. KVN_INVALID: it has fewer bytes. A process cannot open its own handles. */
int kvn_cuda_import_handle(const kvn_device *device, const kvn_cuda_ipc_memory *handle, uint64_t nbytes,
                           bool is_far, kvn_cuda_imported *out, kvn_failure *failure);
/* Lets `device` use memory of cuMemAlloc of `owner`, another device of this process, which outlives `out`. */
int kvn_cuda_import_here(const kvn_device *device, const kvn_device *owner, uint64_t address, uint64_t nbytes,
                         kvn_cuda_imported *out, kvn_failure *failure);
/* Call it when no copy that uses the memory is in flight. */
int kvn_cuda_unmap(const kvn_device *device, const kvn_cuda_imported *imported, kvn_failure *failure);

#endif

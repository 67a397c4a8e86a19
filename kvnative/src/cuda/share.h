/* Memory of CUDA devices that processes of one host share: exported by its owner, mapped by its peers.
 *
 * Memory of kvn_cuda_allocate is exported as a file descriptor. A peer that has imported it keeps the memory, even if
 * the owner frees it. The same holds for memory that users have mapped themselves, such as torch's expandable segments:
 * each piece has a descriptor, which is made when a peer asks for it. Memory of cuMemAlloc has a handle of 64 bytes
 * instead (the older calls, cuIpc...), and must not be freed while a peer uses it. */
#ifndef KVN_CUDA_SHARE_H
#define KVN_CUDA_SHARE_H

#include <stdbool.h>

#include "device/device.h"
#include "kvnative/cuda.h"

/* One mapping of physical memory. */
typedef struct kvn_cuda_piece {
    uint64_t address;
    uint64_t nbytes;
    unsigned long long id; /* of the allocation */
} kvn_cuda_piece;

typedef struct kvn_cuda_exported {
    uint64_t address; /* start of the allocation, or of the first piece; both are exported whole */
    uint64_t nbytes;
    int fd; /* -1: use `pieces`, or `handle` if there are none */
    kvn_cuda_ipc_memory handle;
    kvn_cuda_piece *pieces; /* by address, without gaps; the caller frees them */
    size_t num_pieces;
} kvn_cuda_exported;

typedef struct kvn_cuda_imported {
    uint64_t address; /* in this process */
    uint64_t nbytes;
    uint64_t num_mapped; /* bytes of the pieces imported so far */
    bool is_legacy;    /* True: imported by a handle of cuIpcGetMemHandle */
    CUcontext context; /* the owner's context, if the owner is this process and nothing was mapped; else NULL */
} kvn_cuda_imported;

/* The GPU of some memory, as seen from a device. */
typedef enum kvn_cuda_gpu {
    KVN_CUDA_SAME_GPU,
    KVN_CUDA_OTHER_GPU, /* the two have peer access */
    KVN_CUDA_HIDDEN_GPU /* CUDA_VISIBLE_DEVICES hides it: only mapping its memory shows if the device reaches it */
} kvn_cuda_gpu;

/* Any thread may call these. The device is a CUDA device. */

/* Exports memory. KVN_UNSUPPORTED, with a remedy: it lies in several allocations that are not pieces, or in one that
 * cannot be shared. The caller closes the descriptor. An importer keeps the memory alive. */
int kvn_cuda_export(const kvn_device *device, uint64_t address, uint64_t nbytes, kvn_cuda_exported *out,
                    kvn_failure *failure);
/* Makes a descriptor of a piece, which the caller closes. KVN_INVALID: other memory is mapped there now, or none. */
int kvn_cuda_export_piece(const kvn_device *device, const kvn_cuda_piece *piece, int *fd, kvn_failure *failure);

/* Finds the GPU with this UUID. KVN_UNSUPPORTED: `device` does not reach the memory of that GPU, or, with `both_ways`,
 * that GPU does not reach the memory of `device`. */
int kvn_cuda_check_reach(const kvn_device *device, const kvn_cuda_uuid *uuid, bool both_ways, kvn_cuda_gpu *out,
                         kvn_failure *failure);

/* `begin` reserves addresses for pieces of `nbytes` bytes in all. `piece` maps one after the previous one, by a
 * descriptor that the caller may close afterwards. `end` lets the device use them; KVN_INVALID: the pieces have more or
 * fewer bytes. `is_far`: they are memory of another GPU. After a failure the caller calls kvn_cuda_unmap. */
int kvn_cuda_import_begin(const kvn_device *device, uint64_t nbytes, kvn_cuda_imported *out, kvn_failure *failure);
int kvn_cuda_import_piece(const kvn_device *device, kvn_cuda_imported *imported, int fd, uint64_t nbytes,
                          kvn_failure *failure);
int kvn_cuda_import_end(const kvn_device *device, kvn_cuda_imported *imported, bool is_far, kvn_failure *failure);
/* Maps the allocation of `handle`. KVN_INVALID: it has fewer than `nbytes`. A process cannot open its own handles. */
int kvn_cuda_import_handle(const kvn_device *device, const kvn_cuda_ipc_memory *handle, uint64_t nbytes,
                           bool is_far, kvn_cuda_imported *out, kvn_failure *failure);
/* Lets `device` use memory that cuMemAlloc made on `owner`, another device of this process; `owner` outlives `out`. */
int kvn_cuda_import_here(const kvn_device *device, const kvn_device *owner, uint64_t address, uint64_t nbytes,
                         kvn_cuda_imported *out, kvn_failure *failure);
/* Call this when no copy that uses the memory is in flight. */
int kvn_cuda_unmap(const kvn_device *device, const kvn_cuda_imported *imported, kvn_failure *failure);

#endif

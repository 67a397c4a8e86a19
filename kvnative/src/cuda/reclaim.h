/* Unmaps freed memory of a CUDA device when the work that may still use it is over.
 *
 * Unmapping memory that a kernel of the program still reads would break the context of the whole program, and only the
 * program knows its streams. So a thread waits for all work of the context (cuCtxSynchronize; cuMemFree waits by
 * itself), including our streams that wait for an event which may never come. A call that frees memory waits for the
 * thread, but at most KVN_CUDA_FREE_MS, and not at all while the thread is late with earlier memory. */
#ifndef KVN_CUDA_RECLAIM_H
#define KVN_CUDA_RECLAIM_H

#include "cuda/device.h"

#define KVN_CUDA_FREE_MS 500

typedef struct kvn_cuda_reclaimer kvn_cuda_reclaimer;

/* Frees a block of kvn_cuda_allocate, or memory of cuMemAlloc if its handle is 0. KVN_OK also if it is freed later. While
 * a stream is captured into a graph, nothing can be waited for: the call fails, and the memory is freed with the next
 * call. If the device is closed during the same capture, the memory stays allocated until its context is destroyed. */
int kvn_cuda_reclaim(const kvn_device *device, const kvn_cuda_allocated *block, kvn_failure *failure);
/* Tries again to free the remaining memory, and waits as kvn_cuda_reclaim does. */
void kvn_cuda_reclaim_rest(const kvn_device *device);
/* Ends the thread. False: it still waits, and frees the memory when it can; the context must stay until then. */
bool kvn_cuda_reclaim_end(const kvn_device *device);

/* Unmaps at once. Makes all calls, even if one fails, and reports the first failure. */
int kvn_cuda_unmap_block(const kvn_cuda *cuda, const kvn_cuda_allocated *block, kvn_failure *failure);

#endif

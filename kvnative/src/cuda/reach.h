/* Which memory the copy kernel may be given. A wrong address in a kernel ends the context and all that is in it
 * (700), so each range is looked up in what the driver knows, whatever was checked before. */
#ifndef KVN_CUDA_REACH_H
#define KVN_CUDA_REACH_H

#include "cuda/device.h"

typedef enum kvn_cuda_reach {
    KVN_CUDA_REPLACED = -1, /* registered memory was freed, and its addresses are other memory's */
    KVN_CUDA_UNMAPPED, /* not all of it is within reach: pageable memory, another GPU's, none at all */
    KVN_CUDA_COPIED,  /* known, but only the driver's own copies can be sure to reach it */
    KVN_CUDA_REACHED  /* memory of this device and context, or mapped there, or pinned on the host */
} kvn_cuda_reach;

#define KVN_CUDA_KNOWN 64

typedef struct kvn_cuda_range {
    uint64_t first, last; /* [first, last); empty: of nothing */
    kvn_cuda_reach reach;
    bool is_far; /* memory of another GPU */
    uint64_t id; /* of the program's allocation; 0: unknown, or not the program's */
} kvn_cuda_range;

/* What was asked of one side's memory, which is in few allocations: to ask takes as long as copying a block.
 * For one batch only: memory may be freed, and be other memory, between two. */
typedef struct kvn_cuda_ranges {
    const kvn_device *device;
    kvn_cuda_range latest;
    size_t num_asked; /* so many are known, and of more than there is room for the latest */
    kvn_cuda_range known[KVN_CUDA_KNOWN];
} kvn_cuda_ranges;

/* Memory of a peer was mapped for this device, or will be unmapped. Of that on another GPU the driver does not
 * say who reaches it. KVN_NO_MEMORY. */
int kvn_cuda_reach_add(const kvn_device *device, uint64_t address, uint64_t nbytes, bool is_far,
                       kvn_failure *failure);
void kvn_cuda_reach_remove(const kvn_device *device, uint64_t address);
/* The device's context has peer access to that one, of another GPU, or uses it no more: as often as it was added.
 * All that is allocated there is within reach. */
int kvn_cuda_reach_add_context(const kvn_device *device, CUcontext context, kvn_failure *failure);
void kvn_cuda_reach_remove_context(const kvn_device *device, CUcontext context);

/* ---- memory that the program has registered ---- */

/* It can be freed under its registration, and its addresses be other memory's then: the driver's numbers tell
 * that apart. */
typedef struct kvn_cuda_watch kvn_cuda_watch;

/* Takes down which allocations the ranges are in. What was taken down at those
 * addresses before, and is not there any more, is replaced: `*replaced` of them were not known to be. */
int kvn_cuda_watch_create(const kvn_device *device, const uint64_t *addresses, const uint64_t *nbytes, size_t count,
                          kvn_cuda_watch **out, size_t *replaced, kvn_failure *failure);
void kvn_cuda_watch_destroy(const kvn_device *device, kvn_cuda_watch *watch);
/* Whether some of it was found to be other memory. No call of the driver. */
bool kvn_cuda_watch_is_replaced(const kvn_cuda_watch *watch);

/* ---- what is within reach ---- */

/* Of all bytes of [address, address + nbytes), the least. */
kvn_cuda_reach kvn_cuda_reach_of(kvn_cuda_ranges *ranges, uint64_t address, uint64_t nbytes);
/* Whether there is memory of another GPU. */
bool kvn_cuda_is_far(kvn_cuda_ranges *ranges, uint64_t address);

/* Whether the range lies where the one before it did, which nearly all do: then it is reached. */
static inline bool kvn_cuda_is_beside(const kvn_cuda_ranges *ranges, uint64_t address, uint64_t nbytes)
{
    const kvn_cuda_range *latest = &ranges->latest;
    const uint64_t size = latest->last - latest->first, offset = address - latest->first;

    return latest->reach == KVN_CUDA_REACHED && offset < size && nbytes <= size - offset;
}

#endif

/* Finds out which memory the copy kernel may use. A wrong address in a kernel ends the context with everything in it
 * (error 700). So each range is looked up again: with the driver, unless this library has made it. */
#ifndef KVN_CUDA_REACH_H
#define KVN_CUDA_REACH_H

#include "cuda/device.h"

typedef enum kvn_cuda_reach {
    KVN_CUDA_REPLACED = -1, /* registered memory was freed, and other memory has its addresses */
    KVN_CUDA_UNMAPPED, /* a part is out of reach: pageable, of another GPU, or not memory */
    KVN_CUDA_COPIED,  /* known, but only the driver's copies are sure to reach it */
    KVN_CUDA_REACHED  /* memory of this device and context, or mapped there, or pinned on the host */
} kvn_cuda_reach;

#define KVN_CUDA_KNOWN 64

typedef struct kvn_cuda_range {
    uint64_t first, last; /* [first, last); empty: unknown */
    kvn_cuda_reach reach;
    bool is_far; /* memory of another GPU */
    uint64_t id; /* CUDA's id of an allocation of the program; 0: unknown, or made by this library */
} kvn_cuda_range;

/* Ranges of one side that were looked up. A side is in few allocations, and asking takes as long as copying a block.
 * Use it for one batch only: memory may be freed and replaced between two batches. */
typedef struct kvn_cuda_ranges {
    const kvn_device *device;
    kvn_cuda_range latest;
    size_t num_asked; /* number of look-ups; `known` has the latest of them */
    kvn_cuda_range known[KVN_CUDA_KNOWN];
} kvn_cuda_ranges;

/* Notes that memory of a peer was mapped for this device, or will be unmapped. The driver does not say which devices
 * reach memory of another GPU. `add` may fail with KVN_NO_MEMORY. */
int kvn_cuda_reach_add(const kvn_device *device, uint64_t address, uint64_t nbytes, bool is_far,
                       kvn_failure *failure);
void kvn_cuda_reach_remove(const kvn_device *device, uint64_t address);
/* Notes that the device's context has peer access to the context of another GPU, and so reaches all of its memory.
 * Remove it as often as it was added. */
int kvn_cuda_reach_add_context(const kvn_device *device, CUcontext context, kvn_failure *failure);
void kvn_cuda_reach_remove_context(const kvn_device *device, CUcontext context);

/* ---- memory that the program has registered ---- */

/* The program can free registered memory, and other memory may get its addresses. The driver's ids tell them apart. */
typedef struct kvn_cuda_watch kvn_cuda_watch;

/* Watches the allocations that hold the ranges. Earlier watches with other memory at these addresses become replaced;
 * `*replaced` counts those that were not yet known to be. */
int kvn_cuda_watch_create(const kvn_device *device, const uint64_t *addresses, const uint64_t *nbytes, size_t count,
                          kvn_cuda_watch **out, size_t *replaced, kvn_failure *failure);
void kvn_cuda_watch_destroy(const kvn_device *device, kvn_cuda_watch *watch);
/* Returns true if some of its memory was found to be replaced. Makes no call of the driver. */
bool kvn_cuda_watch_is_replaced(const kvn_cuda_watch *watch);

/* ---- reach ---- */

/* Returns the least reach of the bytes [address, address + nbytes). */
kvn_cuda_reach kvn_cuda_reach_of(kvn_cuda_ranges *ranges, uint64_t address, uint64_t nbytes);
/* Returns true if the address is memory of another GPU. */
bool kvn_cuda_is_far(kvn_cuda_ranges *ranges, uint64_t address);

/* Returns true if the range lies in the one that was looked up last, as most do, and is reached. */
static inline bool kvn_cuda_is_beside(const kvn_cuda_ranges *ranges, uint64_t address, uint64_t nbytes)
{
    const kvn_cuda_range *latest = &ranges->latest;
    const uint64_t size = latest->last - latest->first, offset = address - latest->first;

    return latest->reach == KVN_CUDA_REACHED && offset < size && nbytes <= size - offset;
}

#endif

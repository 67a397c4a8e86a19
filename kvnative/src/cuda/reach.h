/* Which memory the copy kernel may be given. A wrong address in a kernel ends the context and all that is in it
 * (700), so each range is looked up in what the driver knows, whatever was checked before. */
#ifndef KVN_CUDA_REACH_H
#define KVN_CUDA_REACH_H

#include "cuda/device.h"

typedef enum kvn_cuda_reach {
    KVN_CUDA_UNMAPPED, /* the driver does not know all of it: pageable memory, or none at all */
    KVN_CUDA_COPIED,  /* known, but only the driver's own copies can be sure to reach it */
    KVN_CUDA_REACHED  /* memory of this device and context, or mapped there, or pinned on the host */
} kvn_cuda_reach;

#define KVN_CUDA_KNOWN 64

typedef struct kvn_cuda_range {
    uint64_t first, last; /* [first, last); empty: of nothing */
    kvn_cuda_reach reach;
} kvn_cuda_range;

/* What was asked of late. For one batch only: memory may be freed, and be other memory, between two. */
typedef struct kvn_cuda_ranges {
    const kvn_device *device;
    kvn_cuda_range latest;
    kvn_cuda_range known[KVN_CUDA_KNOWN];
} kvn_cuda_ranges;

/* Of all bytes of [address, address + nbytes), the least. */
kvn_cuda_reach kvn_cuda_reach_of(kvn_cuda_ranges *ranges, uint64_t address, uint64_t nbytes);

#endif

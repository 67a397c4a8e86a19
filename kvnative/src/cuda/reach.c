#include "cuda/reach.h"

#define REGION_BITS 21 /* of an address: a slot of what is known */

static kvn_cuda_reach judge(const kvn_device *device, unsigned type, unsigned is_managed, int number,
                            CUcontext context)
{
    if (type == 0)
        return KVN_CUDA_UNMAPPED;
    if (is_managed)
        return KVN_CUDA_COPIED; /* a kernel would move its pages to the device */
    if (type == KVN_CUDA_MEMORY_HOST)
        return KVN_CUDA_REACHED;
    /* Of another device only where peer access was enabled, which cannot be asked for an address. */
    return number == device->id && (!context || context == device->context) ? KVN_CUDA_REACHED
                                                                             : KVN_CUDA_COPIED;
}

/* What the driver knows of the range that holds the address. */
static kvn_cuda_range ask(const kvn_device *device, uint64_t address)
{
    int asked[] = {KVN_CUDA_POINTER_MEMORY_TYPE, KVN_CUDA_POINTER_IS_MANAGED, KVN_CUDA_POINTER_DEVICE,
                   KVN_CUDA_POINTER_CONTEXT,     KVN_CUDA_POINTER_RANGE_START, KVN_CUDA_POINTER_RANGE_SIZE};
    kvn_cuda_range found = {0};
    unsigned type = 0, is_managed = 0;
    int number = -1;
    CUcontext context = NULL;
    CUdeviceptr start = 0;
    size_t nbytes = 0;
    void *answers[] = {&type, &is_managed, &number, &context, &start, &nbytes};

    if (kvn_cuda_of(device)->cuPointerGetAttributes(sizeof asked / sizeof *asked, asked, answers, address) !=
        KVN_CUDA_OK)
        return found;
    found.reach = judge(device, type, is_managed, number, context);
    found.first = start;
    found.last = start + nbytes;
    /* A driver that does not say how far it goes says something of this byte. */
    if (address < found.first || address >= found.last)
        found = (kvn_cuda_range){address, address + 1, found.reach < KVN_CUDA_COPIED ? found.reach : KVN_CUDA_COPIED};
    return found;
}

static bool holds(const kvn_cuda_range *range, uint64_t address)
{
    return address >= range->first && address < range->last;
}

static const kvn_cuda_range *look_up(kvn_cuda_ranges *ranges, uint64_t address)
{
    kvn_cuda_range *slot = &ranges->known[(address >> REGION_BITS) % KVN_CUDA_KNOWN];

    if (holds(&ranges->latest, address))
        return &ranges->latest;
    if (!holds(slot, address))
        *slot = ask(ranges->device, address);
    ranges->latest = *slot;
    return &ranges->latest;
}

kvn_cuda_reach kvn_cuda_reach_of(kvn_cuda_ranges *ranges, uint64_t address, uint64_t nbytes)
{
    kvn_cuda_reach least = KVN_CUDA_REACHED;

    /* Mapped memory may lie in several ranges, one behind the other. */
    while (nbytes > 0 && least == KVN_CUDA_REACHED) {
        const kvn_cuda_range *range = look_up(ranges, address);
        const uint64_t left = range->last - address;

        if (range->reach < least)
            least = range->reach;
        address += left;
        nbytes -= nbytes < left ? nbytes : left;
    }
    return least;
}

#include "cuda/reach.h"

#include <errno.h>
#include <stdlib.h>

/* ---- memory of peers ---- */

typedef struct kvn_cuda_mapped {
    struct kvn_cuda_mapped *next;
    uint64_t address;
    uint64_t nbytes;
} kvn_cuda_mapped;

int kvn_cuda_reach_add(const kvn_device *device, uint64_t address, uint64_t nbytes, kvn_failure *failure)
{
    kvn_cuda_device *state = kvn_cuda_state(device);
    kvn_cuda_mapped *made = malloc(sizeof *made);

    if (!made)
        return kvn_fail(failure, KVN_NO_MEMORY, ENOMEM, "no memory to note what a peer has shared");
    pthread_mutex_lock(&state->mutex);
    *made = (kvn_cuda_mapped){state->mapped, address, nbytes};
    state->mapped = made;
    pthread_mutex_unlock(&state->mutex);
    return KVN_OK;
}

void kvn_cuda_reach_remove(const kvn_device *device, uint64_t address)
{
    kvn_cuda_device *state = kvn_cuda_state(device);
    kvn_cuda_mapped **link = &state->mapped, *found;

    pthread_mutex_lock(&state->mutex);
    while (*link && (*link)->address != address)
        link = &(*link)->next;
    found = *link;
    if (found)
        *link = found->next;
    pthread_mutex_unlock(&state->mutex);
    free(found);
}

static bool is_mapped(const kvn_device *device, uint64_t address)
{
    kvn_cuda_device *state = kvn_cuda_state(device);
    const kvn_cuda_mapped *it;

    pthread_mutex_lock(&state->mutex);
    for (it = state->mapped; it && address - it->address >= it->nbytes; it = it->next)
        ;
    pthread_mutex_unlock(&state->mutex);
    return it != NULL;
}

/* ---- what the driver knows ---- */

static kvn_cuda_reach judge(const kvn_device *device, unsigned type, unsigned is_managed, int number,
                            CUcontext context)
{
    if (type == 0)
        return KVN_CUDA_UNMAPPED;
    if (is_managed)
        return KVN_CUDA_COPIED; /* a kernel would move its pages to the device */
    if (type == KVN_CUDA_MEMORY_HOST)
        return KVN_CUDA_REACHED;
    /* Of another device only where this one was given access, which the driver does not say of an address. */
    return number == device->id && (!context || context == device->context) ? KVN_CUDA_REACHED
                                                                             : KVN_CUDA_UNMAPPED;
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
    if (type == KVN_CUDA_MEMORY_DEVICE && found.reach == KVN_CUDA_UNMAPPED && is_mapped(device, address))
        found.reach = KVN_CUDA_REACHED;
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
    const size_t count = ranges->num_asked < KVN_CUDA_KNOWN ? ranges->num_asked : KVN_CUDA_KNOWN;
    size_t at = 0;

    if (holds(&ranges->latest, address))
        return &ranges->latest;
    while (at < count && !holds(&ranges->known[at], address))
        at++;
    if (at == count) {
        at = ranges->num_asked++ % KVN_CUDA_KNOWN;
        ranges->known[at] = ask(ranges->device, address);
    }
    ranges->latest = ranges->known[at];
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

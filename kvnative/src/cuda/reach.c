#include "cuda/reach.h"

#include <errno.h>
#include <stdlib.h>

#include "cuda/memory.h"

/* ---- memory of peers ---- */

typedef struct kvn_cuda_mapped {
    struct kvn_cuda_mapped *next;
    uint64_t address;
    uint64_t nbytes;
    bool is_far;
} kvn_cuda_mapped;

/* A context of another GPU in this process, that the device's has peer access to. */
typedef struct kvn_cuda_peer {
    struct kvn_cuda_peer *next;
    CUcontext context;
    size_t num_users;
} kvn_cuda_peer;

int kvn_cuda_reach_add(const kvn_device *device, uint64_t address, uint64_t nbytes, bool is_far,
                       kvn_failure *failure)
{
    kvn_cuda_device *state = kvn_cuda_state(device);
    kvn_cuda_mapped *made = malloc(sizeof *made);

    if (!made)
        return kvn_fail(failure, KVN_NO_MEMORY, ENOMEM, "no memory to note what a peer has shared");
    pthread_mutex_lock(&state->mutex);
    *made = (kvn_cuda_mapped){state->mapped, address, nbytes, is_far};
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

/* With the mutex. */
static kvn_cuda_peer **find_peer(kvn_cuda_device *state, CUcontext context)
{
    kvn_cuda_peer **link = &state->peers;

    while (*link && (*link)->context != context)
        link = &(*link)->next;
    return link;
}

int kvn_cuda_reach_add_context(const kvn_device *device, CUcontext context, kvn_failure *failure)
{
    kvn_cuda_device *state = kvn_cuda_state(device);
    kvn_cuda_peer *made = malloc(sizeof *made), **link;

    if (!made)
        return kvn_fail(failure, KVN_NO_MEMORY, ENOMEM, "no memory to note a context");
    pthread_mutex_lock(&state->mutex);
    link = find_peer(state, context);
    if (!*link) {
        *made = (kvn_cuda_peer){.context = context};
        *link = made;
        made = NULL;
    }
    (*link)->num_users++;
    pthread_mutex_unlock(&state->mutex);
    free(made);
    return KVN_OK;
}

void kvn_cuda_reach_remove_context(const kvn_device *device, CUcontext context)
{
    kvn_cuda_device *state = kvn_cuda_state(device);
    kvn_cuda_peer **link, *gone = NULL;

    pthread_mutex_lock(&state->mutex);
    link = find_peer(state, context);
    if (*link && --(*link)->num_users == 0) {
        gone = *link;
        *link = gone->next;
    }
    pthread_mutex_unlock(&state->mutex);
    free(gone);
}

static bool is_of_peer(const kvn_device *device, CUcontext context)
{
    kvn_cuda_device *state = kvn_cuda_state(device);
    bool found;

    pthread_mutex_lock(&state->mutex);
    found = *find_peer(state, context) != NULL;
    pthread_mutex_unlock(&state->mutex);
    return found;
}

/* The mapping that holds the address; false where it is not of a peer. */
static bool find_mapped(const kvn_device *device, uint64_t address, kvn_cuda_range *out)
{
    kvn_cuda_device *state = kvn_cuda_state(device);
    const kvn_cuda_mapped *it;

    pthread_mutex_lock(&state->mutex);
    for (it = state->mapped; it && address - it->address >= it->nbytes; it = it->next)
        ;
    if (it) {
        *out = (kvn_cuda_range){it->address, it->address + it->nbytes, KVN_CUDA_REACHED, it->is_far};
    }
    pthread_mutex_unlock(&state->mutex);
    return it != NULL;
}

/* ---- what the driver knows ---- */

/* What the driver says of one address. */
typedef struct answers {
    unsigned type, is_managed;
    int number;
    CUcontext context;
    CUdeviceptr on_device, start;
    size_t nbytes;
} answers;

/* Whether it is of a pool of this device (cudaMallocAsync), which always reaches those. */
static bool is_of_own_pool(const kvn_device *device, uint64_t address, int number)
{
    int asked[] = {KVN_CUDA_POINTER_POOL};
    void *pool = NULL, *values[] = {&pool};

    return kvn_cuda_of(device)->cuPointerGetAttributes(1, asked, values, address) == KVN_CUDA_OK && pool &&
           number == device->id;
}

/* Of memory that is of no context, and not from here. Where it was mapped there are holes in what was reserved,
 * in torch's expandable segments, say; and mappings that this device may not use. */
static kvn_cuda_range ask_mapping(const kvn_device *device, uint64_t address, int number)
{
    const kvn_cuda *cuda = kvn_cuda_of(device);
    const kvn_cuda_location location = {KVN_CUDA_LOCATION_DEVICE, kvn_cuda_state(device)->number};
    kvn_cuda_range range = {.reach = KVN_CUDA_UNMAPPED};
    unsigned long long flags = 0;
    CUdeviceptr start = 0;
    size_t nbytes = 0;

    if (cuda->cuMemGetAddressRange_v2(&start, &nbytes, address) != KVN_CUDA_OK)
        return range;
    range.first = start;
    range.last = start + nbytes;
    if (is_of_own_pool(device, address, number))
        range.reach = KVN_CUDA_REACHED;
    else if (cuda->cuMemGetAccess(&flags, &location, address) != KVN_CUDA_OK)
        range.reach = KVN_CUDA_COPIED;
    else if (flags)
        range.reach = flags == KVN_CUDA_ACCESS_READ_WRITE ? KVN_CUDA_REACHED : KVN_CUDA_COPIED;
    return range;
}

static kvn_cuda_range judge(const kvn_device *device, uint64_t address, const answers *found)
{
    kvn_cuda_range range = {.first = found->start, .last = found->start + found->nbytes};
    kvn_cuda_allocated ours;

    if (found->type == 0)
        return range;
    if (found->is_managed) {
        range.reach = KVN_CUDA_COPIED; /* a kernel would move its pages to the device */
    } else if (found->type == KVN_CUDA_MEMORY_HOST) {
        /* Kernels reach registered memory at another address, or at none, on systems where
         * CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM is 0. */
        range.reach = found->on_device == address ? KVN_CUDA_REACHED : KVN_CUDA_COPIED;
    } else if (find_mapped(device, address, &range)) {
        return range;
    } else if (kvn_cuda_allocated_at(device, address, &ours)) {
        range.first = ours.address;
        range.last = ours.address + ours.nbytes;
        range.reach = KVN_CUDA_REACHED;
    } else if (!found->context) {
        range = ask_mapping(device, address, found->number);
    } else if (found->number == device->id && found->context == device->context) {
        range.reach = KVN_CUDA_REACHED;
    } else if (found->number != device->id && is_of_peer(device, found->context)) {
        range.reach = KVN_CUDA_REACHED;
        range.is_far = true;
    }
    return range;
}

/* What the driver knows of the range that holds the address. */
static kvn_cuda_range ask(const kvn_device *device, uint64_t address)
{
    int asked[] = {KVN_CUDA_POINTER_MEMORY_TYPE, KVN_CUDA_POINTER_IS_MANAGED, KVN_CUDA_POINTER_DEVICE,
                   KVN_CUDA_POINTER_CONTEXT,     KVN_CUDA_POINTER_ON_DEVICE,  KVN_CUDA_POINTER_RANGE_START,
                   KVN_CUDA_POINTER_RANGE_SIZE};
    answers found = {.number = -1};
    void *values[] = {&found.type,      &found.is_managed, &found.number, &found.context,
                      &found.on_device, &found.start,      &found.nbytes};
    kvn_cuda_range range = {0};

    if (kvn_cuda_of(device)->cuPointerGetAttributes(sizeof asked / sizeof *asked, asked, values, address) !=
        KVN_CUDA_OK)
        return range;
    range = judge(device, address, &found);
    /* A driver that does not say how far it goes says something of this byte. */
    if (address < range.first || address >= range.last)
        range = (kvn_cuda_range){address, address + 1, range.reach < KVN_CUDA_COPIED ? range.reach : KVN_CUDA_COPIED,
                                 range.is_far};
    return range;
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

bool kvn_cuda_is_far(kvn_cuda_ranges *ranges, uint64_t address) { return look_up(ranges, address)->is_far; }

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

/* Asks the driver about ranges before the copy kernel may use them. */
#include "cuda/reach.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "cuda/memory.h"

/* ---- memory of peers ---- */

typedef struct kvn_cuda_mapped {
    struct kvn_cuda_mapped *next;
    uint64_t address;
    uint64_t nbytes;
    bool is_far;
} kvn_cuda_mapped;

/* A context of another GPU in this process to which the device's context has peer access. */
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

/* The caller holds the mutex. */
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

/* Finds the mapping of a peer's memory that holds the address; returns false if none does. */
static bool find_mapped(const kvn_device *device, uint64_t address, kvn_cuda_range *out)
{
    kvn_cuda_device *state = kvn_cuda_state(device);
    const kvn_cuda_mapped *mapped;

    pthread_mutex_lock(&state->mutex);
    for (mapped = state->mapped; mapped && address - mapped->address >= mapped->nbytes; mapped = mapped->next)
        ;
    if (mapped) {
        *out = (kvn_cuda_range){mapped->address, mapped->address + mapped->nbytes, KVN_CUDA_REACHED, mapped->is_far, 0};
    }
    pthread_mutex_unlock(&state->mutex);
    return mapped != NULL;
}

/* ---- asking the driver ---- */

/* The attributes of one address. */
typedef struct answers {
    unsigned type, is_managed;
    int number;
    CUcontext context;
    CUdeviceptr on_device, start;
    size_t nbytes;
    unsigned long long id;
} answers;

/* Returns true for memory of a pool of this device (cudaMallocAsync), which the device always reaches. */
static bool is_of_own_pool(const kvn_device *device, uint64_t address, int number)
{
    int asked[] = {KVN_CUDA_POINTER_POOL};
    void *pool = NULL, *values[] = {&pool};

    return kvn_cuda_of(device)->cuPointerGetAttributes(1, asked, values, address) == KVN_CUDA_OK && pool &&
           number == device->id;
}

/* Judges memory that has no context and that this library has not mapped, such as torch's expandable segments.
 * Reserved ranges have holes, and mappings that this device may not use. */
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
    kvn_cuda_range range = {found->start, found->start + found->nbytes, KVN_CUDA_UNMAPPED, false, 0};

    if (found->type == 0)
        return range;
    if (found->is_managed) {
        range.reach = KVN_CUDA_COPIED; /* a kernel would move its pages to the device */
    } else if (found->type == KVN_CUDA_MEMORY_HOST) {
        /* Kernels reach registered memory at another address, or at none, on systems where
         * CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM is 0. */
        range.reach = found->on_device == address ? KVN_CUDA_REACHED : KVN_CUDA_COPIED;
    } else if (!found->context) {
        range = ask_mapping(device, address, found->number);
        range.id = found->id;
    } else if (found->number == device->id && found->context == device->context) {
        range.reach = KVN_CUDA_REACHED;
        range.id = found->id;
    } else if (found->number != device->id && is_of_peer(device, found->context)) {
        range.reach = KVN_CUDA_REACHED;
        range.is_far = true;
    }
    return range;
}

/* Finds memory that this library has mapped, allocated or pinned. No other code unmaps it, and asking the driver takes
 * as long as copying a block. */
static bool find_ours(const kvn_device *device, uint64_t address, kvn_cuda_range *out)
{
    kvn_cuda_allocated allocated;
    kvn_pinned pinned;

    if (find_mapped(device, address, out))
        return true;
    if (kvn_cuda_allocated_at(device, address, &allocated)) {
        *out = (kvn_cuda_range){allocated.address, allocated.address + allocated.nbytes, KVN_CUDA_REACHED, false, 0};
        return true;
    }
    if (!kvn_device_pinned_at((kvn_device *)device, address, &pinned) ||
        !(pinned.is_allocated || kvn_cuda_state(device)->maps_registered))
        return false;
    *out = (kvn_cuda_range){pinned.first, pinned.last, KVN_CUDA_REACHED, false, 0};
    return true;
}

/* Returns the range that holds the address, as this library or the driver knows it. */
static kvn_cuda_range ask(const kvn_device *device, uint64_t address)
{
    int asked[] = {KVN_CUDA_POINTER_MEMORY_TYPE, KVN_CUDA_POINTER_IS_MANAGED, KVN_CUDA_POINTER_DEVICE,
                   KVN_CUDA_POINTER_CONTEXT,     KVN_CUDA_POINTER_ON_DEVICE,  KVN_CUDA_POINTER_RANGE_START,
                   KVN_CUDA_POINTER_RANGE_SIZE,  KVN_CUDA_POINTER_BUFFER_ID};
    answers found = {.number = -1};
    void *values[] = {&found.type,      &found.is_managed, &found.number, &found.context,
                      &found.on_device, &found.start,      &found.nbytes,  &found.id};
    kvn_cuda_range range = {0};

    if (find_ours(device, address, &range))
        return range;
    if (kvn_cuda_of(device)->cuPointerGetAttributes(sizeof asked / sizeof *asked, asked, values, address) !=
        KVN_CUDA_OK)
        return range;
    range = judge(device, address, &found);
    /* A driver that does not report the range has answered for this byte only. */
    if (address < range.first || address >= range.last)
        range = (kvn_cuda_range){address, address + 1, range.reach < KVN_CUDA_COPIED ? range.reach : KVN_CUDA_COPIED,
                                 range.is_far, range.id};
    return range;
}

static bool holds(const kvn_cuda_range *range, uint64_t address)
{
    return address >= range->first && address < range->last;
}

/* ---- memory that the program has registered ---- */

struct kvn_cuda_watch {
    kvn_cuda_watch *next;
    atomic_bool is_replaced;
    bool is_over; /* a later watch has its addresses; guarded by the mutex */
    size_t num_parts;
    kvn_cuda_range parts[]; /* whole allocations, by address, ascending */
};

/* Returns the index of the first part that ends beyond the address; num_parts if none does. */
static size_t first_behind(const kvn_cuda_watch *watch, uint64_t address)
{
    size_t low = 0, high = watch->num_parts;

    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        if (watch->parts[middle].last > address)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

/* Returns the part that holds the address; NULL: none does. */
static const kvn_cuda_range *part_at(const kvn_cuda_watch *watch, uint64_t address)
{
    const size_t at = first_behind(watch, address);

    return at < watch->num_parts && holds(&watch->parts[at], address) ? &watch->parts[at] : NULL;
}

/* Returns true if the watch knows another allocation at the address. The caller holds the mutex. */
static bool is_of_other(const kvn_cuda_watch *watch, uint64_t address, uint64_t id)
{
    const kvn_cuda_range *part = watch->is_over ? NULL : part_at(watch, address);

    return part && part->id != id;
}

/* Returns true if the address was registered, and its memory was replaced since. */
static bool is_replaced(const kvn_device *device, uint64_t address, uint64_t id)
{
    kvn_cuda_device *state = kvn_cuda_state(device);
    bool any = false;

    pthread_mutex_lock(&state->mutex);
    for (kvn_cuda_watch *other = state->watches; other; other = other->next) {
        if (is_of_other(other, address, id)) {
            atomic_store(&other->is_replaced, true);
            any = true;
        }
    }
    pthread_mutex_unlock(&state->mutex);
    return any;
}

static int compare_parts(const void *a, const void *b)
{
    const kvn_cuda_range *one = a, *other = b;

    return (one->first > other->first) - (one->first < other->first);
}

/* Adds the allocations of a range that the watch does not have yet; NULL: out of memory. */
static kvn_cuda_watch *add_parts(kvn_cuda_watch *watch, const kvn_device *device, uint64_t address, uint64_t nbytes)
{
    const uint64_t end = address + nbytes;

    while (watch && address < end) {
        const size_t count = watch->num_parts;
        kvn_cuda_watch *larger;
        kvn_cuda_range range;

        if (count && holds(&watch->parts[count - 1], address)) {
            address = watch->parts[count - 1].last;
            continue;
        }
        range = ask(device, address);
        if (range.reach < KVN_CUDA_COPIED || !range.id)
            break; /* a transfer refuses memory that the driver does not know */
        larger = realloc(watch, sizeof *watch + (count + 1) * sizeof *watch->parts);
        if (!larger)
            free(watch);
        watch = larger;
        if (watch)
            watch->parts[watch->num_parts++] = range;
        address = range.last;
    }
    return watch;
}

/* Sorts the parts by address, and drops duplicates. */
static void sort_parts(kvn_cuda_watch *watch)
{
    size_t kept = 0;

    qsort(watch->parts, watch->num_parts, sizeof *watch->parts, compare_parts);
    for (size_t i = 0; i < watch->num_parts; i++)
        if (kept == 0 || watch->parts[i].first >= watch->parts[kept - 1].last)
            watch->parts[kept++] = watch->parts[i];
    watch->num_parts = kept;
}

/* Returns true if the watch knows another allocation at a byte of the range. The caller holds the mutex. */
static bool has_other(const kvn_cuda_watch *watch, const kvn_cuda_range *range)
{
    size_t at = first_behind(watch, range->first);

    while (at < watch->num_parts && watch->parts[at].first < range->last && watch->parts[at].id == range->id)
        at++;
    return at < watch->num_parts && watch->parts[at].first < range->last;
}

/* Ends a watch whose memory `by` has replaced; returns true if that was not known yet. The caller holds the mutex. */
static bool replace(kvn_cuda_watch *other, const kvn_cuda_watch *by)
{
    for (size_t i = 0; i < by->num_parts && !other->is_over; i++) {
        if (has_other(other, &by->parts[i])) {
            other->is_over = true;
            return !atomic_exchange(&other->is_replaced, true);
        }
    }
    return false;
}

int kvn_cuda_watch_create(const kvn_device *device, const uint64_t *addresses, const uint64_t *nbytes, size_t count,
                          kvn_cuda_watch **out, size_t *replaced, kvn_failure *failure)
{
    kvn_cuda_device *state = kvn_cuda_state(device);
    kvn_cuda_watch *made;
    void *previous = NULL;

    if (kvn_device_enter(device, &previous, failure) != KVN_OK)
        return failure->status;
    made = calloc(1, sizeof *made);
    for (size_t i = 0; i < count && made; i++)
        made = add_parts(made, device, addresses[i], nbytes[i]);
    kvn_device_leave(device, previous);
    *out = made;
    if (!made)
        return kvn_fail(failure, KVN_NO_MEMORY, ENOMEM, "no memory to note what is registered");
    sort_parts(made);
    *replaced = 0;
    pthread_mutex_lock(&state->mutex);
    for (kvn_cuda_watch *other = state->watches; other; other = other->next)
        *replaced += replace(other, made);
    made->next = state->watches;
    state->watches = made;
    pthread_mutex_unlock(&state->mutex);
    return KVN_OK;
}

void kvn_cuda_watch_destroy(const kvn_device *device, kvn_cuda_watch *watch)
{
    kvn_cuda_device *state = kvn_cuda_state(device);
    kvn_cuda_watch **link = &state->watches;

    pthread_mutex_lock(&state->mutex);
    while (*link != watch)
        link = &(*link)->next;
    *link = watch->next;
    pthread_mutex_unlock(&state->mutex);
    free(watch);
}

bool kvn_cuda_watch_is_replaced(const kvn_cuda_watch *watch) { return atomic_load(&watch->is_replaced); }

/* ---- reach ---- */

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
        if (ranges->known[at].id && is_replaced(ranges->device, address, ranges->known[at].id))
            ranges->known[at].reach = KVN_CUDA_REPLACED;
    }
    ranges->latest = ranges->known[at];
    return &ranges->latest;
}

bool kvn_cuda_is_far(kvn_cuda_ranges *ranges, uint64_t address) { return look_up(ranges, address)->is_far; }

kvn_cuda_reach kvn_cuda_reach_of(kvn_cuda_ranges *ranges, uint64_t address, uint64_t nbytes)
{
    kvn_cuda_reach least = KVN_CUDA_REACHED;

    /* Mapped memory may consist of several adjacent ranges. If the driver does not report the range, its answer for the
     * first byte counts for all: asking for each byte would take too long. */
    while (nbytes > 0 && least > KVN_CUDA_UNMAPPED) {
        const kvn_cuda_range *range = look_up(ranges, address);
        const bool is_byte = range->reach < KVN_CUDA_REACHED && range->last - range->first == 1;
        const uint64_t left = is_byte ? nbytes : range->last - address;

        if (range->reach < least)
            least = range->reach;
        address += left;
        nbytes -= nbytes < left ? nbytes : left;
    }
    return least;
}

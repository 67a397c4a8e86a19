/* Allocates device memory that other processes can map, by handles of the virtual-memory API. */
#include "cuda/memory.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/pin.h"
#include "cuda/reclaim.h"

static int ask(const kvn_device *device, int attribute)
{
    int value = 0; /* also if the driver does not know the attribute */

    kvn_cuda_of(device)->cuDeviceGetAttribute(&value, attribute, kvn_cuda_state(device)->number);
    return value;
}

static int ask_granularity(const kvn_device *device, kvn_failure *failure)
{
    kvn_cuda_device *state = kvn_cuda_state(device);

    return KVN_CUDA_CALL(device, failure, cuMemGetAllocationGranularity, &state->granularity, &state->allocation,
                         KVN_CUDA_GRANULARITY_MINIMUM);
}

int kvn_cuda_memory_init(const kvn_device *device, kvn_failure *failure)
{
    kvn_cuda_device *state = kvn_cuda_state(device);

    state->max_registered = KVN_CUDA_MAX_REGISTERED;
    state->maps_registered = ask(device, KVN_CUDA_HOST_POINTER_OF_REGISTERED) != 0;
    state->can_export = ask(device, KVN_CUDA_FILE_DESCRIPTORS) != 0;
    state->allocation = (kvn_cuda_allocation){
        .type = KVN_CUDA_ALLOCATION_PINNED,
        .handle_types = state->can_export ? KVN_CUDA_HANDLE_FILE_DESCRIPTOR : 0,
        .location = {.type = KVN_CUDA_LOCATION_DEVICE, .id = state->number},
        .gpu_direct_rdma = ask(device, KVN_CUDA_GPU_DIRECT_RDMA) != 0,
    };
    if (!ask(device, KVN_CUDA_VIRTUAL_MEMORY) || ask_granularity(device, failure) == KVN_OK)
        return KVN_OK;
    /* A machine may refuse memory that network cards can reach, although its GPU supports it. */
    state->allocation.gpu_direct_rdma = 0;
    return ask_granularity(device, failure);
}

/* ---- the table of allocations ---- */

/* Returns the index of the first allocation that ends beyond `address`. The caller holds the mutex. */
static size_t find(const kvn_cuda_device *state, uint64_t address)
{
    size_t low = 0, high = state->num_allocated;

    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        if (state->allocated[middle].address + state->allocated[middle].nbytes > address)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

static bool note(kvn_cuda_device *state, kvn_cuda_allocated block)
{
    kvn_cuda_allocated *allocated;
    size_t at;

    pthread_mutex_lock(&state->mutex);
    allocated = realloc(state->allocated, (state->num_allocated + 1) * sizeof *allocated);
    if (allocated) {
        state->allocated = allocated; /* before `find`: realloc has freed the old array */
        at = find(state, block.address);
        memmove(allocated + at + 1, allocated + at, (state->num_allocated - at) * sizeof *allocated);
        allocated[at] = block;
        state->num_allocated++;
    }
    pthread_mutex_unlock(&state->mutex);
    return allocated != NULL;
}

/* Removes the allocation that begins at `address` from the table; returns false if none does. */
static bool forget(kvn_cuda_device *state, uint64_t address, kvn_cuda_allocated *out)
{
    bool found;
    size_t at;

    pthread_mutex_lock(&state->mutex);
    at = find(state, address);
    found = at < state->num_allocated && state->allocated[at].address == address;
    if (found) {
        *out = state->allocated[at];
        state->num_allocated--;
        memmove(state->allocated + at, state->allocated + at + 1,
                (state->num_allocated - at) * sizeof *state->allocated);
    }
    pthread_mutex_unlock(&state->mutex);
    return found;
}

bool kvn_cuda_allocated_at(const kvn_device *device, uint64_t address, kvn_cuda_allocated *out)
{
    kvn_cuda_device *state = kvn_cuda_state(device);
    bool found;
    size_t at;

    pthread_mutex_lock(&state->mutex);
    at = find(state, address);
    found = at < state->num_allocated && state->allocated[at].address <= address;
    if (found)
        *out = state->allocated[at];
    pthread_mutex_unlock(&state->mutex);
    return found && state->can_export;
}

/* ---- mapping ---- */

int kvn_cuda_give_access(const kvn_device *device, CUdeviceptr address, uint64_t nbytes, kvn_failure *failure)
{
    const kvn_cuda_access access = {
        .location = {.type = KVN_CUDA_LOCATION_DEVICE, .id = kvn_cuda_state(device)->number},
        .flags = KVN_CUDA_ACCESS_READ_WRITE,
    };

    return KVN_CUDA_CALL(device, failure, cuMemSetAccess, address, nbytes, &access, 1);
}

static int map_handle(const kvn_device *device, CUmemGenericAllocationHandle handle, uint64_t nbytes,
                      CUdeviceptr *address, kvn_failure *failure)
{
    const kvn_cuda *cuda = kvn_cuda_of(device);

    if (KVN_CUDA_CALL(device, failure, cuMemAddressReserve, address, nbytes, 0, 0, 0) != KVN_OK)
        return failure->status;
    if (KVN_CUDA_CALL(device, failure, cuMemMap, *address, nbytes, 0, handle, 0) == KVN_OK) {
        if (kvn_cuda_give_access(device, *address, nbytes, failure) == KVN_OK)
            return KVN_OK;
        cuda->cuMemUnmap(*address, nbytes);
    }
    cuda->cuMemAddressFree(*address, nbytes);
    return failure->status;
}

static int allocate_plain(const kvn_device *device, uint64_t nbytes, void **out, kvn_failure *failure)
{
    CUdeviceptr address = 0;
    const int status = KVN_CUDA_CALL(device, failure, cuMemAlloc_v2, &address, nbytes);

    *out = (void *)(uintptr_t)address;
    return status;
}

/* Tries again without access of network cards, which some machines refuse only here. */
static int create(const kvn_device *device, kvn_cuda_allocated *block, kvn_failure *failure)
{
    kvn_cuda_allocation wanted = kvn_cuda_state(device)->allocation;
    const int status = KVN_CUDA_CALL(device, failure, cuMemCreate, &block->handle, block->nbytes, &wanted, 0);

    if (status != KVN_INVALID || !wanted.gpu_direct_rdma)
        return status;
    wanted.gpu_direct_rdma = 0;
    return KVN_CUDA_CALL(device, failure, cuMemCreate, &block->handle, block->nbytes, &wanted, 0);
}

int kvn_cuda_allocate(const kvn_device *device, uint64_t nbytes, void **out, kvn_failure *failure)
{
    kvn_cuda_device *state = kvn_cuda_state(device);
    kvn_cuda_allocated block = {0};
    int status;

    if (state->granularity == 0)
        return allocate_plain(device, nbytes, out, failure);
    kvn_cuda_reclaim_rest(device);
    block.nbytes = (nbytes + state->granularity - 1) / state->granularity * state->granularity;
    if (block.nbytes < nbytes)
        return kvn_fail(failure, KVN_NO_DEVICE_MEMORY, 0, "%" PRIu64 " bytes are more than any device has",
                        nbytes);
    status = create(device, &block, failure);
    if (status == KVN_UNSUPPORTED || status == KVN_DENIED) /* such as on virtual GPUs */
        return allocate_plain(device, nbytes, out, failure);
    if (status != KVN_OK)
        return status;
    status = map_handle(device, block.handle, block.nbytes, &block.address, failure);
    if (status != KVN_OK) {
        kvn_cuda_of(device)->cuMemRelease(block.handle);
        return status;
    }
    if (!note(state, block)) {
        kvn_cuda_unmap_block(kvn_cuda_of(device), &block, failure);
        return kvn_fail(failure, KVN_NO_MEMORY, ENOMEM, "no memory to note an allocation");
    }
    *out = (void *)(uintptr_t)block.address;
    return KVN_OK;
}

/* ---- freeing ---- */

/* In a context of the device's own, only this library's copies use the memory. The caller has waited for them, or given
 * them up. The latter may wait for an event that never comes, so they are not waited for here. */
int kvn_cuda_free(const kvn_device *device, void *address, kvn_failure *failure)
{
    const bool is_own = ((const kvn_cuda_library *)device->runtime)->own_context;
    kvn_cuda_allocated block = {.address = (uintptr_t)address};

    if (forget(kvn_cuda_state(device), (uintptr_t)address, &block) && is_own)
        return kvn_cuda_unmap_block(kvn_cuda_of(device), &block, failure);
    return kvn_cuda_reclaim(device, &block, failure);
}

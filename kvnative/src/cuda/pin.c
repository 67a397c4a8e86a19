/* Registers host memory part by part, and copies from and to it. */
#include "cuda/pin.h"

static uint64_t smaller(uint64_t a, uint64_t b) { return a < b ? a : b; }

static int unregister(const kvn_device *device, uint64_t address, kvn_failure *failure)
{
    const int status = KVN_CUDA_CALL(device, failure, cuMemHostUnregister, (void *)(uintptr_t)address);

    /* Other code may have unregistered it. */
    return status != KVN_OK && failure->code == KVN_CUDA_HOST_MEMORY_NOT_REGISTERED ? KVN_OK : status;
}

/* Unregisters all parts, even if one fails, and returns the first failure. */
static int unregister_parts(const kvn_device *device, uint64_t address, uint64_t nbytes, kvn_failure *failure)
{
    const uint64_t most = kvn_cuda_state(device)->max_registered;
    kvn_failure ignored;
    int status = KVN_OK;

    for (uint64_t done = 0; done < nbytes; done += smaller(most, nbytes - done)) {
        if (status == KVN_OK)
            status = unregister(device, address + done, failure);
        else
            unregister(device, address + done, &ignored);
    }
    return status;
}

int kvn_cuda_pin(const kvn_device *device, void *address, uint64_t nbytes, kvn_failure *failure)
{
    kvn_cuda_device *state = kvn_cuda_state(device);
    const uint64_t most = state->max_registered;
    kvn_failure ignored;

    if (nbytes > most)
        atomic_store(&state->has_parts, true);
    for (uint64_t done = 0; done < nbytes; done += smaller(most, nbytes - done)) {
        if (KVN_CUDA_CALL(device, failure, cuMemHostRegister_v2, (char *)address + done, smaller(most, nbytes - done),
                          KVN_CUDA_HOST_PORTABLE | KVN_CUDA_HOST_MAPPED) == KVN_OK)
            continue;
        unregister_parts(device, (uintptr_t)address, done, &ignored);
        return failure->status;
    }
    return KVN_OK;
}

int kvn_cuda_unpin(const kvn_device *device, void *address, kvn_failure *failure)
{
    const uint64_t first = (uintptr_t)address;
    kvn_pinned pinned;

    if (!kvn_device_pinned_at((kvn_device *)device, first, &pinned) || pinned.first != first)
        return KVN_OK;
    return unregister_parts(device, first, pinned.last - first, failure);
}

void kvn_cuda_limit_registered(const kvn_device *device, uint64_t nbytes)
{
    kvn_cuda_state(device)->max_registered = nbytes;
}

uint64_t kvn_cuda_part_left(const kvn_device *device, uint64_t address)
{
    kvn_cuda_device *state = kvn_cuda_state(device);
    kvn_pinned pinned;

    if (!atomic_load(&state->has_parts) || !kvn_device_pinned_at((kvn_device *)device, address, &pinned) ||
        pinned.is_allocated)
        return UINT64_MAX;
    return state->max_registered - (address - pinned.first) % state->max_registered;
}

int kvn_cuda_copy_parts(const kvn_device *device, uint64_t dst, uint64_t src, uint64_t nbytes, CUstream stream,
                        kvn_failure *failure)
{
    int status = KVN_OK;

    while (nbytes && status == KVN_OK) {
        const uint64_t left = smaller(kvn_cuda_part_left(device, dst), kvn_cuda_part_left(device, src));
        const uint64_t part = smaller(left, nbytes);

        status = KVN_CUDA_CALL(device, failure, cuMemcpyAsync, dst, src, part, stream);
        dst += part;
        src += part;
        nbytes -= part;
    }
    return status;
}

/* Finds the memory of a range of addresses, and checks the access to it. */
#include <stdlib.h>
#include <string.h>

#include "cuda_sim.h"

static uint64_t bit_of(int device) { return (uint64_t)1 << device; }

/* Asks for the access that cuMemSetAccess gave to a device: memory of cuMemMap has no context. */
static int has_access(const sim_traits *traits, int device, int writes) {
    return ((writes ? traits->writable : traits->readable) & bit_of(device)) != 0;
}

/* Checks one end of a copy. Returns 0, INVALID_VALUE for the call, or ILLEGAL_ADDRESS for its work. */
static int check_copy(const cuda_context *context, const sim_memory *memory, int writes) {
    sim_traits traits = sim_memory_traits(memory);
    if (memory->kind != SIM_MEMORY_DEVICE) {
        return 0;
    }
    if (traits.origin == CUDA_MAPPED) {
        return has_access(&traits, context->device, writes) ? 0 : ILLEGAL_ADDRESS;
    }
    const cuda_context *owner = traits.owner;
    if (owner == context || owner->device != context->device) {
        return 0; /* drivers copy between any two devices, if necessary through the host */
    }
    sim_violation("a copy in one context of memory that another context of device %d owns",
                  context->device);
    return sim_error(INVALID_VALUE, "0x%llx belongs to another context of the same device",
                     (unsigned long long)memory->address);
}

int cuda_kernel_may(const cuda_context *context, const sim_memory *memory, int writes) {
    sim_traits traits = sim_memory_traits(memory);
    switch (traits.origin) {
    case CUDA_MAPPED:
        return has_access(&traits, context->device, writes);
    case CUDA_HOST_ALLOCATED:
        return !(traits.flags & HOST_COMBINED) && /* write-combined memory has another address for kernels */
               sim_settings_now().cuda_host_register;
    case CUDA_MANAGED:
        return 1;
    case CUDA_HOST_REGISTERED:
        return (traits.flags & HOST_DEVICEMAP) &&
               (traits.owner == context || (traits.flags & HOST_PORTABLE));
    case CUDA_ALLOCATED:
    case CUDA_OPENED:
        return cuda_context_reaches(context, traits.owner);
    default:
        return 0;
    }
}

/* Registered host memory is pageable in other contexts unless it is portable. */
static int is_pinned_for(const cuda_context *context, const sim_memory *memory) {
    sim_traits traits = sim_memory_traits(memory);
    return traits.origin == CUDA_HOST_ALLOCATED || traits.origin == CUDA_MANAGED ||
           (traits.origin == CUDA_HOST_REGISTERED &&
            (traits.owner == context || (traits.flags & HOST_PORTABLE)));
}

static int find_host(const cuda_context *context, cuda_range *range) {
    sim_memory *memory = sim_find(range->address, range->nbytes);
    range->side = CUDA_PAGEABLE_SIDE;
    if (memory && is_pinned_for(context, memory)) {
        range->side = CUDA_PINNED_SIDE;
        range->memories[range->count++] = memory;
        return 0;
    }
    sim_memory_release(memory);
    if (!memory && sim_overlaps_memory(range->address, range->nbytes)) {
        sim_violation("a copy of host memory of which a part is pinned");
        return sim_error(INVALID_VALUE, "[0x%llx, +%llu) is pinned in part",
                         (unsigned long long)range->address, (unsigned long long)range->nbytes);
    }
    return 0;
}

int cuda_range_find(const cuda_context *context, uint64_t address, uint64_t nbytes, int writes,
                    cuda_range *range) {
    int code = 0;
    *range = (cuda_range){.side = CUDA_DEVICE_SIDE, .address = address, .nbytes = nbytes};
    if (!sim_is_device_space(address, nbytes)) {
        return find_host(context, range);
    }
    for (uint64_t done = 0; done < nbytes && !range->fault && !code;) {
        sim_memory *memory = sim_find(address + done, 1);
        if (!memory || range->count == MAX_PIECES) {
            sim_memory_release(memory);
            sim_violation("work on device memory that is not mapped, or was freed: 0x%llx",
                          (unsigned long long)(address + done));
            range->fault = ILLEGAL_ADDRESS;
            break;
        }
        range->memories[range->count++] = memory;
        code = check_copy(context, memory, writes);
        if (code == ILLEGAL_ADDRESS) {
            sim_violation("work on device memory without access to it: 0x%llx",
                          (unsigned long long)(address + done));
            range->fault = ILLEGAL_ADDRESS;
            code = 0;
        }
        done = memory->address + memory->nbytes - address;
    }
    if (code) {
        cuda_range_release(range);
    }
    return code;
}

void cuda_range_release(cuda_range *range) {
    for (int i = 0; i < range->count; i++) {
        sim_memory_release(range->memories[i]);
    }
    range->count = 0;
}

int cuda_range_check(const cuda_context *context, const cuda_range *range, int writes) {
    int code = range->fault;
    for (int i = 0; i < range->count && !code; i++) {
        const sim_memory *memory = range->memories[i];
        sim_memory *now = sim_find(memory->address, memory->nbytes);
        sim_traits traits = sim_memory_traits(memory);
        if (now != memory ||
            (traits.origin == CUDA_MAPPED && !has_access(&traits, context->device, writes))) {
            sim_violation("memory was freed, unmapped or unregistered while queued work uses it");
            code = ILLEGAL_ADDRESS;
        }
        sim_memory_release(now);
        if (!code && traits.origin == CUDA_OPENED && cuda_ipc_is_freed(memory->address)) {
            sim_violation("work on memory of another process, which has freed it");
            code = ILLEGAL_ADDRESS;
        }
    }
    return code;
}

unsigned char *cuda_range_view(const cuda_range *range, uint64_t offset, uint64_t *nbytes) {
    uint64_t at = range->address + offset;
    *nbytes = range->nbytes - offset;
    for (int i = 0; i < range->count; i++) {
        const sim_memory *memory = range->memories[i];
        if (at >= memory->address && at < memory->address + memory->nbytes) {
            uint64_t left = memory->address + memory->nbytes - at;
            *nbytes = left < *nbytes ? left : *nbytes;
            return memory->view + (at - memory->address);
        }
    }
    return (unsigned char *)(uintptr_t)at; /* pageable */
}

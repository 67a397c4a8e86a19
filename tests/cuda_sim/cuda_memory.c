/* Device memory and pinned host memory: allocation, registration, queries. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "cuda_sim.h"

CUDA cuMemGetInfo_v2(size_t *available, size_t *total);
CUDA cuMemAlloc_v2(cuda_address *address, size_t nbytes);
CUDA cuMemAllocManaged(cuda_address *address, size_t nbytes, unsigned flags);
CUDA cuMemFree_v2(cuda_address address);
CUDA cuMemGetAddressRange_v2(cuda_address *start, size_t *nbytes, cuda_address address);
CUDA cuMemHostAlloc(void **address, size_t nbytes, unsigned flags);
CUDA cuMemFreeHost(void *address);
CUDA cuMemHostRegister_v2(void *address, size_t nbytes, unsigned flags);
CUDA cuMemHostUnregister(void *address);
CUDA cuPointerGetAttributes(unsigned count, int *attributes, void **values, cuda_address address);

CUDA cuMemGetInfo_v2(size_t *available, size_t *total) {
    sim_call call;
    cuda_context *context;
    int code = cuda_enter_context(&call, __func__, &context);
    code = CUDA_CHECK(code, available);
    code = CUDA_CHECK(code, total);
    if (!code) {
        uint64_t hbm = sim_settings_now().hbm_bytes;
        uint64_t used = sim_memory_used(context->device);
        *total = hbm;
        *available = used < hbm ? hbm - used : 0;
    }
    return cuda_leave(&call, code, "%s", "");
}

static int allocate(cuda_context *context, sim_memory_kind kind, size_t nbytes, int origin,
                    unsigned flags, uint64_t *address) {
    if (!nbytes) {
        return sim_error(INVALID_VALUE, "bytesize=0: at least 1");
    }
    int code = sim_memory_allocate(kind, context->device, nbytes, address);
    if (!code) {
        sim_memory_describe(*address, (sim_traits){.owner = context, .origin = origin, .flags = flags});
    }
    return code;
}

CUDA cuMemAlloc_v2(cuda_address *out, size_t nbytes) {
    sim_call call;
    cuda_context *context;
    uint64_t address = 0;
    int code = cuda_enter_context(&call, __func__, &context);
    code = CUDA_CHECK(code, out);
    code = code ? code : allocate(context, SIM_MEMORY_DEVICE, nbytes, CUDA_ALLOCATED, 0, &address);
    if (!code) {
        *out = address;
    }
    return cuda_leave(&call, code, "\"bytes\":%zu,\"address\":%llu", nbytes, (unsigned long long)address);
}

/* Managed memory, which the driver moves between device and host. In the simulator, it stays on the host. */
CUDA cuMemAllocManaged(cuda_address *out, size_t nbytes, unsigned flags) {
    sim_call call;
    cuda_context *context;
    uint64_t address = 0;
    int code = cuda_enter_context(&call, __func__, &context);
    code = CUDA_CHECK(code, out);
    if (!code && flags != 1 && flags != 2) {
        code = sim_error(INVALID_VALUE, "flags=%u: CU_MEM_ATTACH_GLOBAL or _HOST", flags);
    }
    code = code ? code : allocate(context, SIM_MEMORY_PINNED, nbytes, CUDA_MANAGED, flags, &address);
    if (!code) {
        *out = address;
    }
    return cuda_leave(&call, code, "\"bytes\":%zu,\"address\":%llu", nbytes, (unsigned long long)address);
}

/* Refuses to free memory by the wrong call or at an address inside of the memory, or memory of cuMemAlloc in another
 * context. */
static int check_owned(const cuda_context *context, uint64_t address, int origin, int otherwise) {
    sim_memory *memory = sim_find(address, 1);
    sim_traits traits = memory ? sim_memory_traits(memory) : (sim_traits){0};
    int is_beginning = memory && memory->address == address;
    sim_memory_release(memory);
    if (!is_beginning || traits.origin != origin) {
        sim_violation("0x%llx is given back, but is not the beginning of such memory, or was given "
                      "back before", (unsigned long long)address);
        return sim_error(otherwise, "0x%llx is not the beginning of such memory",
                         (unsigned long long)address);
    }
    if (origin == CUDA_ALLOCATED && traits.owner != context) {
        sim_violation("memory of one context is freed in another");
        return sim_error(INVALID_VALUE, "0x%llx belongs to another context",
                         (unsigned long long)address);
    }
    return 0;
}

/* Gives the address to the next memory of the same size, as drivers nearly always do. */
static void reuse(uint64_t address, uint64_t nbytes) {
    uint64_t page = nbytes >= PAGE_2M / 2 ? PAGE_2M : 4096;
    if (sim_settings_now().cuda_reuse) {
        sim_space_give(address, (nbytes + page - 1) / page * page);
    }
}

static int origin_of(uint64_t address) {
    sim_memory *memory = sim_find(address, 1);
    int origin = memory ? sim_memory_traits(memory).origin : 0;
    sim_memory_release(memory);
    return origin;
}

/* Waits for all work of the context, as drivers do. */
CUDA cuMemFree_v2(cuda_address address) {
    sim_call call;
    cuda_context *context;
    int code = cuda_enter_context(&call, __func__, &context);
    if (!code && address) { /* NULL is accepted, as by free() */
        int is_managed = origin_of(address) == CUDA_MANAGED;
        sim_memory *memory = sim_find(address, 1);
        uint64_t nbytes = memory ? memory->nbytes : 0;
        sim_memory_release(memory);
        code = check_owned(context, address, is_managed ? CUDA_MANAGED : CUDA_ALLOCATED, INVALID_VALUE);
        code = code ? code : sim_context_wait_for(context->handle);
        code = code ? code : sim_memory_free(is_managed ? SIM_MEMORY_PINNED : SIM_MEMORY_DEVICE, address);
        if (!code && !is_managed) {
            reuse(address, nbytes);
        }
    }
    return cuda_leave(&call, code, "\"address\":%llu", address);
}

CUDA cuMemGetAddressRange_v2(cuda_address *start, size_t *nbytes, cuda_address address) {
    sim_call call;
    cuda_context *context;
    int code = cuda_enter_context(&call, __func__, &context);
    sim_memory *memory = code ? NULL : sim_find(address, 1);
    if (!code && !memory) {
        code = sim_error(NOT_FOUND, "0x%llx is not memory of CUDA", address);
    } else if (!code) {
        if (start) {
            *start = memory->address;
        }
        if (nbytes) {
            *nbytes = memory->nbytes;
        }
    }
    sim_memory_release(memory);
    return cuda_leave(&call, code, "\"address\":%llu", address);
}

CUDA cuMemHostAlloc(void **out, size_t nbytes, unsigned flags) {
    sim_call call;
    cuda_context *context;
    uint64_t address = 0;
    int code = cuda_enter_context(&call, __func__, &context);
    code = CUDA_CHECK(code, out);
    if (!code && flags & ~7U) {
        code = sim_error(INVALID_VALUE, "Flags=0x%x", flags);
    }
    code = code ? code : allocate(context, SIM_MEMORY_PINNED, nbytes, CUDA_HOST_ALLOCATED, flags,
                                  &address);
    if (!code) {
        *out = (void *)(uintptr_t)address;
    }
    return cuda_leave(&call, code, "\"bytes\":%zu,\"address\":%llu,\"flags\":%u", nbytes,
                      (unsigned long long)address, flags);
}

/* Hardware accesses host memory after it was freed, and perhaps allocated again, so such work is a violation. */
static void check_unused(uint64_t address) {
    if (sim_memory_is_used(address)) {
        sim_violation("pinned memory is given back while queued work uses it: 0x%llx",
                      (unsigned long long)address);
    }
}

CUDA cuMemFreeHost(void *pointer) {
    sim_call call;
    cuda_context *context;
    uint64_t address = (uint64_t)(uintptr_t)pointer;
    int code = cuda_enter_context(&call, __func__, &context);
    if (!code && pointer) {
        code = check_owned(context, address, CUDA_HOST_ALLOCATED, INVALID_VALUE);
        if (!code) {
            check_unused(address);
            code = sim_memory_free(SIM_MEMORY_PINNED, address);
        }
    }
    return cuda_leave(&call, code, "\"address\":%llu", ID(pointer));
}

/* Refuses a range unless all of its pages are mapped, and none is pinned. */
static int check_pages(uint64_t address, size_t nbytes) {
    uint64_t page = sim_settings_now().page_bytes;
    uint64_t first = address / page * page;
    uint64_t length = (address + nbytes - first + page - 1) / page * page;
    if (sim_is_device_space(address, nbytes)) {
        return sim_error(INVALID_VALUE, "0x%llx is device memory", (unsigned long long)address);
    }
    if (sim_overlaps_memory(first, length)) {
        return sim_error(ALREADY_REGISTERED, "pages of [0x%llx, +%zu) are pinned before",
                         (unsigned long long)address, nbytes);
    }
    unsigned char *there = malloc(length / 4096 + 1);
    int is_missing = mincore((void *)(uintptr_t)first, length, there) && errno == ENOMEM;
    free(there);
    if (is_missing) {
        return sim_error(INVALID_VALUE, "[0x%llx, +%zu) is not mapped", (unsigned long long)address,
                         nbytes);
    }
    return 0;
}

CUDA cuMemHostRegister_v2(void *pointer, size_t nbytes, unsigned flags) {
    static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    sim_call call;
    cuda_context *context;
    uint64_t address = (uint64_t)(uintptr_t)pointer;
    int code = cuda_enter_context(&call, __func__, &context);
    code = CUDA_CHECK(code, pointer);
    if (!code && (!nbytes || flags & ~0xFU)) {
        code = sim_error(INVALID_VALUE, "bytesize=%zu, Flags=0x%x", nbytes, flags);
    }
    if (!code && !sim_settings_now().cuda_host_register) {
        code = sim_error(NOT_SUPPORTED, "this GPU registers no host memory");
    }
    if (!code && flags & ~3U) {
        code = sim_error(NOT_SUPPORTED, "Flags=0x%x: the simulator has no such memory", flags);
    }
    if (!code) {
        pthread_mutex_lock(&mutex);
        code = check_pages(address, nbytes);
        code = code ? code : sim_memory_register(context->device, address, nbytes, 0);
        if (!code) {
            sim_memory_describe(address, (sim_traits){.owner = context, .origin = CUDA_HOST_REGISTERED,
                                                      .flags = flags});
        }
        pthread_mutex_unlock(&mutex);
    }
    return cuda_leave(&call, code, "\"address\":%llu,\"bytes\":%zu,\"flags\":%u", ID(pointer), nbytes,
                      flags);
}

CUDA cuMemHostUnregister(void *pointer) {
    sim_call call;
    cuda_context *context;
    uint64_t address = (uint64_t)(uintptr_t)pointer;
    int code = cuda_enter_context(&call, __func__, &context);
    code = CUDA_CHECK(code, pointer);
    sim_memory *memory = code ? NULL : sim_find(address, 1);
    int is_registered = memory && memory->address == address && memory->kind == SIM_MEMORY_REGISTERED;
    sim_memory_release(memory);
    if (!code && !is_registered) {
        code = sim_error(NOT_REGISTERED, "%p is not the beginning of registered memory", pointer);
    } else if (!code) {
        check_unused(address);
        code = sim_memory_free(SIM_MEMORY_REGISTERED, address);
    }
    return cuda_leave(&call, code, "\"address\":%llu", ID(pointer));
}

/* ---- attributes of pointers ---- */

typedef struct {
    int is_known;
    int is_mapped;
    int memory_type; /* 1: CU_MEMORYTYPE_HOST, 2: CU_MEMORYTYPE_DEVICE */
    int device;
    void *context;
    int is_ipc;
    int is_managed;
    unsigned handle_types;
    uint64_t on_device; /* address for kernels; 0: none */
    uint64_t start;
    uint64_t nbytes;
    uint64_t serial;
} pointer_facts;

/* Marks the address of write-combined memory for kernels, which differs from that for the host. Not simulated. */
#define APART ((uint64_t)1 << 60)

/* The start and nbytes of memory of cuMemMap are those of the whole reservation. */
static pointer_facts facts_of(uint64_t address) {
    pointer_facts facts = {0};
    sim_memory *memory = sim_find(address, 1);
    if (!memory) {
        facts.is_known = cuda_reservation_find(address, &facts.start, &facts.nbytes);
        return facts;
    }
    sim_traits traits = sim_memory_traits(memory);
    const cuda_context *owner = traits.owner;
    facts = (pointer_facts){
        .is_known = 1,
        .is_mapped = 1,
        .memory_type = memory->kind == SIM_MEMORY_DEVICE || traits.origin == CUDA_MANAGED ? 2 : 1,
        .is_managed = traits.origin == CUDA_MANAGED,
        .device = cuda_ordinal(memory->device),
        .context = owner ? owner->handle : NULL,
        .is_ipc = traits.origin == CUDA_ALLOCATED,
        .handle_types = traits.origin == CUDA_MAPPED ? traits.flags : 0,
        .on_device = traits.origin == CUDA_HOST_ALLOCATED && traits.flags & HOST_COMBINED
                         ? address | APART
                         : address,
        .start = memory->address,
        .nbytes = memory->nbytes,
        .serial = memory->serial,
    };
    if (traits.origin == CUDA_MAPPED) {
        cuda_reservation_find(address, &facts.start, &facts.nbytes);
    }
    sim_memory_release(memory);
    return facts;
}

/* Stores 0, and succeeds, for memory unknown to CUDA. */
static int store(int attribute, const pointer_facts *facts, uint64_t address, void *value) {
    switch (attribute) {
    case 1:
        *(void **)value = facts->context;
        return 0;
    case 2:
        *(unsigned *)value = (unsigned)facts->memory_type;
        return 0;
    case 3:
        *(uint64_t *)value = facts->on_device;
        return 0;
    case 4:
        *(uint64_t *)value = facts->memory_type == 1 ? address : 0;
        return 0;
    case 7:
        *(uint64_t *)value = facts->serial;
        return 0;
    case 8:
        *(unsigned *)value = (unsigned)facts->is_managed;
        return 0;
    case 9:
        *(int *)value = facts->device;
        return 0;
    case 10:
        *(int *)value = facts->is_ipc && sim_settings_now().cuda_ipc;
        return 0;
    case 11:
        *(uint64_t *)value = facts->start;
        return 0;
    case 12:
        *(size_t *)value = facts->nbytes;
        return 0;
    case 13:
        *(int *)value = facts->is_mapped;
        return 0;
    case 14:
        *(unsigned *)value = facts->handle_types;
        return 0;
    case 17: /* memory pools are not simulated */
        *(void **)value = NULL;
        return 0;
    default:
        return sim_error(INVALID_VALUE, "attribute %d: the simulator has none", attribute);
    }
}

CUDA cuPointerGetAttributes(unsigned count, int *attributes, void **values, cuda_address address) {
    sim_call call;
    cuda_context *context;
    int code = cuda_enter_context(&call, __func__, &context);
    code = CUDA_CHECK(code, attributes);
    code = CUDA_CHECK(code, values);
    if (!code && !count) {
        code = sim_error(INVALID_VALUE, "numAttributes=0");
    }
    pointer_facts facts = code ? (pointer_facts){0} : facts_of(address);
    for (unsigned i = 0; i < count && !code; i++) {
        code = CUDA_CHECK(code, values[i]);
        code = code ? code : store(attributes[i], &facts, address, values[i]);
    }
    return cuda_leave(&call, code, "\"address\":%llu,\"type\":%d", address, facts.memory_type);
}

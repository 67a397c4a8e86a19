#include <stdlib.h>
#include <string.h>

#include "hccl_sim.h"

#define MAX_DEVICE_BYTES (UINT64_C(64) << 30)
#define MAX_GLOBAL 256
#define MAX_HOST_BYTES (UINT64_C(1) << 40)
/* An unreadable address: reading through a handle crashes the program. */
#define HANDLE_BASE UINT64_C(0x00c1000000000000)

static region *regions;
static uint64_t last_handle;

HcclResult region_check(hccl_call *call, const HcclMem *memory)
{
    if (!memory->addr || !memory->size)
        return hccl_refuse(call, HCCL_E_PARA, "memory at %p of %llu bytes", memory->addr,
                           (unsigned long long)memory->size);
    if (memory->type != HCCL_MEM_DEVICE && memory->type != HCCL_MEM_HOST)
        return hccl_refuse(call, HCCL_E_PARA, "memory of type %d; it must be 0 (device) or 1 (host)",
                           memory->type);
    const uint64_t most = memory->type == HCCL_MEM_DEVICE ? MAX_DEVICE_BYTES : MAX_HOST_BYTES;
    if (memory->size > most || (uint64_t)(uintptr_t)memory->addr + memory->size < memory->size)
        return hccl_refuse(call, HCCL_E_PARA, "memory of %llu bytes; there can be %llu",
                           (unsigned long long)memory->size, (unsigned long long)most);
    return HCCL_SUCCESS;
}

static int num_global(void)
{
    int count = 0;
    for (const region *r = regions; r; r = r->next)
        count += r->global;
    return count;
}

HcclResult region_add(hccl_call *call, int global, int device, const HcclMem *memory, region **out)
{
    const uint64_t address = (uint64_t)(uintptr_t)memory->addr;
    for (region *r = regions; r; r = r->next) {
        if (r->global != global || r->device != device || r->type != memory->type ||
            address >= r->address + r->nbytes || r->address >= address + memory->size)
            continue;
        if (r->address == address && r->nbytes == memory->size) {
            *out = r;
            return HCCL_SUCCESS;
        }
        return hccl_refuse(call, global ? HCCL_E_PARA : HCCL_E_INTERNAL,
                           "[%#llx, +%llu) overlaps the registered [%#llx, +%llu)",
                           (unsigned long long)address, (unsigned long long)memory->size,
                           (unsigned long long)r->address, (unsigned long long)r->nbytes);
    }
    if (global && num_global() == MAX_GLOBAL)
        return hccl_refuse(call, HCCL_E_UNAVAIL, "%d ranges are registered, the most of a process",
                           MAX_GLOBAL);
    region *added = calloc(1, sizeof *added);
    if (!added || board_take(&added->place)) {
        free(added);
        return hccl_refuse(call, HCCL_E_MEMORY, "no memory for another region");
    }
    added->handle = HANDLE_BASE | ++last_handle << 8;
    added->global = global;
    added->device = device;
    added->address = address;
    added->nbytes = memory->size;
    added->type = memory->type;
    added->next = regions;
    regions = added;
    sim_count(SIM_COUNT_REGIONS, 1);
    *out = added;
    return HCCL_SUCCESS;
}

region *region_of_handle(void *handle, int device)
{
    for (region *r = regions; r; r = r->next)
        if (r->global && r->device == device && r->handle == (uint64_t)(uintptr_t)handle)
            return r;
    return NULL;
}

void region_drop(region *r)
{
    region **at = &regions;
    while (*at != r)
        at = &(*at)->next;
    *at = r->next;
    board_clear(&r->place);
    sim_memory *memory = sim_find_pages(r->address, r->nbytes);
    if (memory)
        sim_memory_release(memory);
    else if (r->type == HCCL_MEM_DEVICE || r->mapped) /* the core does not know other host memory */
        sim_note("violation", "\"what\":\"memory was freed before it was deregistered\","
                              "\"address\":%llu,\"nbytes\":%llu",
                 (unsigned long long)r->address, (unsigned long long)r->nbytes);
    if (r->mapped)
        sim_host_unmap(r->device, r->address, r->nbytes);
    free(r);
    sim_count(SIM_COUNT_REGIONS, -1);
}

HcclResult region_resolve(hccl_call *call, int device, const region *r, sim_memory **memory)
{
    sim_memory *found = sim_find_pages(r->address, r->nbytes);
    *memory = NULL;
    if (!found)
        return hccl_refuse(call, HCCL_E_RUNTIME, "[%#llx, +%llu) is no %s",
                           (unsigned long long)r->address, (unsigned long long)r->nbytes,
                           r->type == HCCL_MEM_DEVICE ? "device memory" : "pinned host memory");
    const int is_device = found->kind == SIM_MEMORY_DEVICE;
    if (is_device != (r->type == HCCL_MEM_DEVICE) || (is_device && found->device != device)) {
        const HcclResult code = hccl_refuse(
            call, HCCL_E_RUNTIME, "[%#llx, +%llu) is %s memory of device %d, registered as %s of %d",
            (unsigned long long)r->address, (unsigned long long)r->nbytes,
            is_device ? "device" : "host", found->device,
            r->type == HCCL_MEM_DEVICE ? "device" : "host", device);
        sim_memory_release(found);
        return code;
    }
    *memory = found;
    return HCCL_SUCCESS;
}

/* ---- HcclRegisterGlobalMem: not on 950 ---- */

/* Stores the thread's device, which global registrations belong to. */
static HcclResult check_here(hccl_call *call, int *device)
{
    if (sim_settings_now().product == SIM_950)
        return hccl_refuse(call, HCCL_E_NOT_SUPPORT, "this product registers for a communicator");
    *device = sim_current_device();
    return *device < 0 ? hccl_refuse(call, HCCL_E_RUNTIME, "the thread has no device")
                       : HCCL_SUCCESS;
}

static HcclResult register_global(hccl_call *call, const HcclMem *mem, void **memHandle)
{
    int device;
    region *r;
    HcclResult code = check_here(call, &device);
    if (code)
        return code;
    if (!mem || !memHandle)
        return hccl_refuse(call, HCCL_E_PTR, "%s is NULL", mem ? "memHandle" : "mem");
    if ((code = region_check(call, mem)))
        return code;
    pthread_mutex_lock(&hccl_mutex);
    code = region_add(call, 1, device, mem, &r);
    if (!code)
        *memHandle = (void *)(uintptr_t)r->handle;
    pthread_mutex_unlock(&hccl_mutex);
    return code;
}

HcclResult HcclRegisterGlobalMem(const HcclMem *mem, void **memHandle)
{
    hccl_call call;
    HcclResult code = hccl_enter(&call, "HcclRegisterGlobalMem");
    if (!code)
        code = register_global(&call, mem, memHandle);
    return hccl_leave(&call, code, "\"type\":%d,\"address\":%llu,\"nbytes\":%llu,\"handle\":%llu",
                      mem ? mem->type : -1, mem ? (unsigned long long)(uintptr_t)mem->addr : 0,
                      mem ? (unsigned long long)mem->size : 0,
                      code ? 0 : (unsigned long long)(uintptr_t)*memHandle);
}

static HcclResult deregister_global(hccl_call *call, void *memHandle)
{
    int device;
    HcclResult code = check_here(call, &device);
    if (code)
        return code;
    pthread_mutex_lock(&hccl_mutex);
    region *r = region_of_handle(memHandle, device);
    if (!r)
        code = hccl_refuse(call, HCCL_E_PARA, "no such handle on device %d", device);
    else if (r->uses)
        code = hccl_refuse(call, HCCL_E_PARA, "bound to %u communicators", r->uses);
    else
        region_drop(r);
    pthread_mutex_unlock(&hccl_mutex);
    return code;
}

HcclResult HcclDeregisterGlobalMem(void *memHandle)
{
    hccl_call call;
    HcclResult code = hccl_enter(&call, "HcclDeregisterGlobalMem");
    if (!code)
        code = deregister_global(&call, memHandle);
    return hccl_leave(&call, code, "\"handle\":%llu", (unsigned long long)(uintptr_t)memHandle);
}

/* Common code of servers and clients of HIXL: calls, registrations, endpoints. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "hixl_sim.h"

#define HANDLE_BASE UINT64_C(0x00c3000000000000)

pthread_mutex_t hixl_mutex = PTHREAD_MUTEX_INITIALIZER;
static uint64_t last_handle;

int64_t hixl_now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

HixlStatus hixl_enter(hixl_call *call, const char *name, int *device)
{
    call->reason[0] = '\0';
    const int code = sim_enter(&call->call, name);
    if (code == SIM_FORKED)
        return hixl_refuse(call, HIXL_FAILED, "in a child of fork()");
    if (device && !code && (*device = sim_current_device()) < 0)
        return hixl_refuse(call, HIXL_FAILED, "the thread has no device");
    return (HixlStatus)code;
}

HixlStatus hixl_refuse(hixl_call *call, HixlStatus code, const char *text, ...)
{
    va_list arguments;
    va_start(arguments, text);
    vsnprintf(call->reason, sizeof call->reason, text, arguments);
    va_end(arguments);
    sim_error(0, "%s: %s", call->call.name, call->reason);
    return code;
}

HixlStatus hixl_leave(hixl_call *call, HixlStatus code, const char *fields, ...)
{
    char text[400];
    va_list arguments;
    va_start(arguments, fields);
    vsnprintf(text, sizeof text, fields, arguments);
    va_end(arguments);
    if (call->reason[0])
        sim_leave(&call->call, (int)code, "%s%s\"reason\":\"%s\"", text, *text ? "," : "", call->reason);
    else
        sim_leave(&call->call, (int)code, "%s", text);
    return code;
}

/* ---- registrations ---- */

static HixlStatus resolve(hixl_call *call, int device, const CommMem *mem, sim_memory **out)
{
    const uint64_t address = (uint64_t)(uintptr_t)mem->addr;
    if (mem->type != COMM_MEM_TYPE_DEVICE)
        return hixl_refuse(call, HIXL_PARAM_INVALID, "memory of type %d: no endpoint of a device matches it",
                           mem->type);
    *out = mem->size ? sim_find_pages(address, mem->size) : NULL;
    if (*out && (*out)->kind == SIM_MEMORY_DEVICE && (*out)->device == device && (*out)->fd >= 0)
        return HIXL_SUCCESS;
    if (*out)
        sim_memory_release(*out);
    return hixl_refuse(call, HIXL_FAILED, "[%#llx, +%llu) is not memory of device %d", (unsigned long long)address,
                       (unsigned long long)mem->size, device);
}

HixlStatus hixl_register(hixl_call *call, registration *all, int device, const CommMem *mem, void **handle)
{
    sim_memory *memory = NULL;
    if (!mem || !handle)
        return hixl_refuse(call, HIXL_PARAM_INVALID, "%s is NULL", mem ? "mem_handle" : "mem");
    const uint64_t address = (uint64_t)(uintptr_t)mem->addr;
    for (int i = 0; i < HIXL_MAX_MEMORIES; i++)
        if (all[i].handle && address < all[i].address + all[i].nbytes && all[i].address < address + mem->size &&
            (all[i].address != address || all[i].nbytes != mem->size))
            return hixl_refuse(call, HIXL_PARAM_INVALID, "[%#llx, +%llu) overlaps a registration",
                               (unsigned long long)address, (unsigned long long)mem->size);
    const HixlStatus code = resolve(call, device, mem, &memory);
    if (code)
        return code;
    for (int i = 0; i < HIXL_MAX_MEMORIES; i++) {
        if (all[i].handle)
            continue;
        all[i] = (registration){HANDLE_BASE | ++last_handle << 8, address, mem->size, memory};
        *handle = (void *)(uintptr_t)all[i].handle;
        sim_count(SIM_COUNT_REGIONS, 1);
        return HIXL_SUCCESS;
    }
    sim_memory_release(memory);
    return hixl_refuse(call, HIXL_FAILED, "more registrations than are simulated");
}

static void drop(registration *r)
{
    sim_memory *living = sim_find_pages(r->address, r->nbytes);
    if (!living || living->serial != r->memory->serial)
        sim_violation("memory at %#llx was freed before HIXL had unregistered it", (unsigned long long)r->address);
    if (living)
        sim_memory_release(living);
    sim_memory_release(r->memory);
    r->handle = 0;
    sim_count(SIM_COUNT_REGIONS, -1);
}

HixlStatus hixl_unregister(hixl_call *call, registration *all, void *handle, int *index)
{
    for (int i = 0; i < HIXL_MAX_MEMORIES; i++)
        if (handle && all[i].handle == (uint64_t)(uintptr_t)handle) {
            drop(&all[i]);
            *index = i;
            return HIXL_SUCCESS;
        }
    return hixl_refuse(call, HIXL_PARAM_INVALID, "no such memory handle");
}

void hixl_unregister_all(registration *all)
{
    for (int i = 0; i < HIXL_MAX_MEMORIES; i++)
        if (all[i].handle)
            drop(&all[i]);
}

/* ---- endpoints ---- */

int hixl_check_endpoint(const EndpointDesc *e, int device)
{
    const int is_ub = e->protocol == COMM_PROTOCOL_UBC_CTP || e->protocol == COMM_PROTOCOL_UBC_TP;
    const int is_ip = e->commAddr.type == COMM_ADDR_TYPE_IP_V4 || e->commAddr.type == COMM_ADDR_TYPE_IP_V6;
    const int fits = is_ub                                 ? e->commAddr.type == COMM_ADDR_TYPE_EID
                     : e->protocol == COMM_PROTOCOL_HCCS   ? e->commAddr.type == COMM_ADDR_TYPE_ID
                     : e->protocol == COMM_PROTOCOL_ROCE ||
                               e->protocol == COMM_PROTOCOL_UBOE
                         ? is_ip
                         : 0;
    if (!fits || e->loc.locType != ENDPOINT_LOC_TYPE_DEVICE)
        return -1;
    return device >= 0 && e->loc.devPhyId != (uint32_t)sim_settings_now().physical[device] ? -1 : 0;
}

int hixl_is_same_endpoint(const EndpointDesc *a, const EndpointDesc *b)
{
    return a->protocol == b->protocol && memcmp(&a->commAddr, &b->commAddr, sizeof a->commAddr) == 0;
}

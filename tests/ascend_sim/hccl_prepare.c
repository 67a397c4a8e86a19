/* The interface of A2 and A3: a program binds registered memory to communicators, and prepare exchanges all of it. */
#include <stdlib.h>
#include <string.h>

#include "hccl_sim.h"

static HcclResult find_global(hccl_call *call, HcclComm handle, void *memHandle, comm **c, region **r)
{
    if (sim_settings_now().product == SIM_950)
        return hccl_refuse(call, HCCL_E_NOT_SUPPORT, "this product registers for a communicator");
    const HcclResult code = comm_find_here(call, handle, c);
    if (code)
        return code;
    *r = region_of_handle(memHandle, (*c)->device);
    return *r ? HCCL_SUCCESS
              : hccl_refuse(call, HCCL_E_PARA, "no such memory handle on device %d", (*c)->device);
}

static local_region *bound(comm *c, const region *r)
{
    for (size_t i = 0; i < c->num_locals; i++)
        if (c->locals[i].of == r)
            return &c->locals[i];
    return NULL;
}

static HcclResult bind_locked(hccl_call *call, HcclComm handle, void *memHandle)
{
    comm *c;
    region *r;
    const HcclResult code = find_global(call, handle, memHandle, &c, &r);
    if (code)
        return code;
    if (bound(c, r))
        return hccl_refuse(call, HCCL_E_PARA, "the memory is bound to %s already", c->name);
    if (c->prepared || c->busy)
        return hccl_refuse(call, HCCL_E_PARA, "%s is prepared: bind before", c->name);
    const local_region added = {.of = r};
    if (comm_add_local(c, &added))
        return hccl_refuse(call, HCCL_E_MEMORY, "no memory");
    r->uses++;
    return HCCL_SUCCESS;
}

/* Transfers may use prepared memory until its deregistration. */
static HcclResult unbind_locked(hccl_call *call, HcclComm handle, void *memHandle)
{
    comm *c;
    region *r;
    const HcclResult code = find_global(call, handle, memHandle, &c, &r);
    if (code)
        return code;
    local_region *local = bound(c, r);
    if (!local)
        return hccl_refuse(call, HCCL_E_PARA, "the memory is not bound to %s", c->name);
    if (c->busy)
        return hccl_refuse(call, HCCL_E_PARA, "%s is being prepared", c->name);
    local->of = NULL;
    r->uses--;
    if (!c->prepared)
        *local = c->locals[--c->num_locals];
    return HCCL_SUCCESS;
}

static HcclResult handle_memory(const char *name, HcclComm handle, void *memHandle,
                                HcclResult (*work)(hccl_call *, HcclComm, void *))
{
    hccl_call call;
    HcclResult code = hccl_enter(&call, name);
    if (!code) {
        pthread_mutex_lock(&hccl_mutex);
        code = work(&call, handle, memHandle);
        pthread_mutex_unlock(&hccl_mutex);
    }
    return hccl_leave(&call, code, "\"comm\":%llu,\"handle\":%llu",
                      (unsigned long long)(uintptr_t)handle,
                      (unsigned long long)(uintptr_t)memHandle);
}

HcclResult HcclCommBindMem(HcclComm comm_handle, void *memHandle)
{
    return handle_memory("HcclCommBindMem", comm_handle, memHandle, bind_locked);
}

HcclResult HcclCommUnbindMem(HcclComm comm_handle, void *memHandle)
{
    return handle_memory("HcclCommUnbindMem", comm_handle, memHandle, unbind_locked);
}

/* ---- prepare ---- */

/* Checks the arguments, and marks the communicator busy for a blocking call. */
static HcclResult begin(hccl_call *call, HcclComm handle, const HcclPrepareConfig *config,
                        int timeout, comm **out)
{
    if (sim_settings_now().product == SIM_950)
        return hccl_refuse(call, HCCL_E_NOT_SUPPORT, "this product exchanges descriptors");
    if (handle && !config)
        return hccl_refuse(call, HCCL_E_PTR, "prepareConfig is NULL");
    const HcclResult code = comm_find_here(call, handle, out);
    if (code)
        return code;
    if (timeout <= -2)
        return hccl_refuse(call, HCCL_E_PARA, "timeout is %d; it must be -1 or more", timeout);
    if (config->topoType || config->rsvd[0] || config->rsvd[1] || config->rsvd[2])
        return hccl_refuse(call, HCCL_E_PARA, "prepareConfig has topoType %d; all must be 0",
                           config->topoType);
    if ((*out)->busy)
        return hccl_refuse(call, HCCL_E_INTERNAL, "%s is being prepared", (*out)->name);
    if ((*out)->peer && !(*out)->prepared)
        return hccl_refuse(call, HCCL_E_INTERNAL, "%s exchanges descriptors", (*out)->name);
    (*out)->busy = 1;
    return HCCL_SUCCESS;
}

static HcclResult check_pages(hccl_call *call, const region *r, const sim_memory *memory)
{
    const uint64_t page = memory->page;
    if (r->address % page == 0)
        return HCCL_SUCCESS;
    return hccl_refuse(call, HCCL_E_RUNTIME, "%#llx is not aligned to a page of %llu, which HCCS "
                       "needs", (unsigned long long)r->address, (unsigned long long)page);
}

/* Enforces the vendor's limits on the registered bytes of a device, and on host memory in its page tables. */
static HcclResult check_totals(hccl_call *call, const comm *c)
{
    const sim_settings settings = sim_settings_now();
    const uint64_t most_host = settings.hdk < 2505 ? UINT64_C(20) << 30 : UINT64_C(1) << 40;
    uint64_t device = 0, host = 0;
    for (size_t i = 0; i < c->num_locals; i++)
        *(c->locals[i].of->type == HCCL_MEM_DEVICE ? &device : &host) += c->locals[i].of->nbytes;
    if (device > UINT64_C(50) << 30 || host > most_host)
        return hccl_refuse(call, HCCL_E_NETWORK, "ra reg global mr fail: %llu bytes of the device, "
                           "%llu of the host", (unsigned long long)device, (unsigned long long)host);
    if (host > settings.page_table_bytes)
        return hccl_refuse(call, HCCL_E_RUNTIME, "aclrtHostRegister failed, ret[507899]");
    return HCCL_SUCCESS;
}

/* Maps host memory, as HCCL does at the first prepare. */
static HcclResult map_host(hccl_call *call, region *r)
{
    if (r->type != HCCL_MEM_HOST || r->mapped)
        return HCCL_SUCCESS;
    const int code = sim_host_map(r->device, r->address, r->nbytes);
    if (code)
        return hccl_refuse(call, HCCL_E_RUNTIME, "aclrtHostRegister of [%#llx, +%llu) failed, ret[%d]",
                           (unsigned long long)r->address, (unsigned long long)r->nbytes, code);
    r->mapped = 1;
    return HCCL_SUCCESS;
}

/* Stores the regions for the other rank in *told; over HCCS, those of host memory are not sent. */
static HcclResult resolve_locals(hccl_call *call, comm *c, wire_region *told, uint32_t *num_told)
{
    const int shared = nic_is_hccs(c);
    const HcclResult refused = check_totals(call, c);
    if (refused)
        return refused;
    for (size_t i = 0; i < c->num_locals; i++) {
        local_region *local = &c->locals[i];
        region *r = local->of;
        HcclResult code = map_host(call, r);
        if (!code)
            code = region_resolve(call, c->device, r, &local->memory);
        if (!code && shared && r->type == HCCL_MEM_DEVICE)
            code = check_pages(call, r, local->memory);
        if (code)
            return code;
        local->range = local_range(c, r, local->memory);
        local->uses = 1;
        if (!shared || r->type == HCCL_MEM_DEVICE)
            told[(*num_told)++] = local->range;
    }
    return HCCL_SUCCESS;
}

static HcclResult import_remotes(hccl_call *call, comm *c, peer *p, const wire_region *regions,
                                 uint32_t num_regions)
{
    for (uint32_t i = 0; i < num_regions; i++) {
        remote_region added = {.range = regions[i], .enabled = 1};
        if (peer_open(p, &regions[i], &added.fd) || comm_add_remote(c, &added))
            return hccl_refuse(call, HCCL_E_INTERNAL, "cannot open region %u of the other end", i);
    }
    return HCCL_SUCCESS;
}

static HcclResult meet(hccl_call *call, comm *c, int64_t deadline_us)
{
    wire_region *told = calloc(c->num_locals + 1, sizeof *told), *regions = NULL;
    uint32_t num_told = 0, num_regions;
    HcclResult code;
    if (!told)
        return hccl_refuse(call, HCCL_E_MEMORY, "no memory");
    pthread_mutex_lock(&hccl_mutex);
    code = nic_open(call, c);
    pthread_mutex_unlock(&hccl_mutex);
    if (!code)
        code = resolve_locals(call, c, told, &num_told);
    if (!code)
        code = peer_meet(call, c, MEET_PREPARE, told, num_told, deadline_us, &c->peer,
                         &regions, &num_regions);
    if (!code)
        code = import_remotes(call, c, c->peer, regions, num_regions);
    free(told);
    free(regions);
    return code;
}

/* Undoes a failed prepare, which the program may repeat. */
static void undo(comm *c)
{
    for (size_t i = 0; i < c->num_locals; i++)
        local_close(&c->locals[i]);
    for (size_t i = 0; i < c->num_remotes; i++)
        remote_close(&c->remotes[i]);
    c->num_remotes = 0;
    nic_close(c);
    peer_close(c->peer);
    c->peer = NULL;
}

static HcclResult prepare(hccl_call *call, comm *c, int timeout)
{
    const int64_t deadline_us = hccl_deadline(timeout);
    if (c->prepared)
        return HCCL_SUCCESS;
    if (call->call.fault.kind == SIM_FAULT_HANG) {
        hccl_wait_until(deadline_us);
        return hccl_refuse(call, HCCL_E_TIMEOUT, "hangs: a fault");
    }
    if (call->call.fault.kind != SIM_FAULT_NONE)
        return hccl_refuse(call, (HcclResult)call->call.fault.code, "a fault");
    return meet(call, c, deadline_us);
}

HcclResult HcclCommPrepare(HcclComm handle, const HcclPrepareConfig *config, int timeout)
{
    hccl_call call;
    comm *c = NULL;
    char name[128] = "";
    size_t num_locals = 0, num_remotes = 0;
    HcclResult code = hccl_enter(&call, "HcclCommPrepare");
    if (!code) {
        pthread_mutex_lock(&hccl_mutex);
        code = begin(&call, handle, config, timeout, &c);
        pthread_mutex_unlock(&hccl_mutex);
    }
    if (!code) {
        code = prepare(&call, c, timeout);
        pthread_mutex_lock(&hccl_mutex);
        if (code)
            undo(c);
        c->prepared |= !code;
        c->busy = 0;
        strcpy(name, c->name);
        num_locals = c->num_locals;
        num_remotes = c->num_remotes;
        pthread_cond_broadcast(&hccl_changed);
        pthread_mutex_unlock(&hccl_mutex);
    }
    return hccl_leave(&call, code,
                      "\"name\":\"%s\",\"timeout\":%d,\"local_regions\":%zu,\"remote_regions\":%zu",
                      name, timeout, num_locals, num_remotes);
}

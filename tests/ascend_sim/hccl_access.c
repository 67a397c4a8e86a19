/* HcclEnableMemAccess, HcclDisableMemAccess, and HcclRemapRegistedMemory. */
#include <string.h>

#include "hccl_describe.h"

static remote_region *same(comm *c, const wire_region *range)
{
    for (size_t i = 0; i < c->num_remotes; i++)
        if (c->remotes[i].enabled && c->remotes[i].range.place.generation == range->place.generation)
            return &c->remotes[i];
    return NULL;
}

static int overlaps(const comm *c, const wire_region *range)
{
    for (size_t i = 0; i < c->num_remotes; i++) {
        const wire_region *other = &c->remotes[i].range;
        if (c->remotes[i].enabled && range->address < other->address + other->nbytes &&
            other->address < range->address + range->nbytes)
            return 1;
    }
    return 0;
}

static HcclResult find_described(hccl_call *call, HcclComm handle, const HcclMemDesc *desc, comm **c,
                                 described *d)
{
    HcclResult code = comm_find_here(call, handle, c);
    if (code || (code = read_desc(call, desc, 1 - (*c)->rank, d)))
        return code;
    if (!(*c)->peer)
        return hccl_refuse(call, HCCL_E_INTERNAL, "%s is not connected: exchange before", (*c)->name);
    if (d->range.pid != peer_pid((*c)->peer))
        return hccl_refuse(call, HCCL_E_INTERNAL, "a description of memory of process %d",
                           d->range.pid);
    return HCCL_SUCCESS;
}

static HcclResult enable(hccl_call *call, HcclComm handle, const HcclMemDesc *desc, HcclMem *out)
{
    comm *c;
    described d;
    if (handle && !out)
        return hccl_refuse(call, HCCL_E_PTR, "remoteMem is NULL");
    const HcclResult code = find_described(call, handle, desc, &c, &d);
    if (code)
        return code;
    remote_region *known = same(c, &d.range), added = {.range = d.range, .enabled = 1};
    if (known)
        known->enabled++;
    else if (overlaps(c, &d.range))
        return hccl_refuse(call, HCCL_E_INTERNAL, "the memory overlaps memory that is enabled");
    else if (peer_open(c->peer, &d.range, &added.fd) || comm_add_remote(c, &added))
        return hccl_refuse(call, HCCL_E_INTERNAL, "the memory cannot be opened");
    *out = (HcclMem){d.range.type, (void *)(uintptr_t)d.range.address, d.range.nbytes};
    return HCCL_SUCCESS;
}

HcclResult HcclEnableMemAccess(HcclComm handle, HcclMemDesc *remoteDesc, HcclMem *remoteMem)
{
    hccl_call call;
    HcclResult code = hccl_enter(&call, "HcclEnableMemAccess");
    if (!code) {
        pthread_mutex_lock(&hccl_mutex);
        code = enable(&call, handle, remoteDesc, remoteMem);
        pthread_mutex_unlock(&hccl_mutex);
    }
    return hccl_leave(&call, code, "\"comm\":%llu,\"address\":%llu,\"nbytes\":%llu",
                      (unsigned long long)(uintptr_t)handle,
                      code ? 0 : (unsigned long long)(uintptr_t)remoteMem->addr,
                      code ? 0 : (unsigned long long)remoteMem->size);
}

/* Leaves the memory open, because queued work may use it. */
static HcclResult disable(hccl_call *call, HcclComm handle, const HcclMemDesc *desc)
{
    comm *c;
    described d;
    const HcclResult code = find_described(call, handle, desc, &c, &d);
    if (code)
        return code;
    remote_region *known = same(c, &d.range);
    if (!known)
        return hccl_refuse(call, HCCL_E_INTERNAL, "the memory is not enabled");
    known->enabled--;
    return HCCL_SUCCESS;
}

HcclResult HcclDisableMemAccess(HcclComm handle, HcclMemDesc *remoteDesc)
{
    hccl_call call;
    HcclResult code = hccl_enter(&call, "HcclDisableMemAccess");
    if (!code) {
        pthread_mutex_lock(&hccl_mutex);
        code = disable(&call, handle, remoteDesc);
        pthread_mutex_unlock(&hccl_mutex);
    }
    return hccl_leave(&call, code, "\"comm\":%llu", (unsigned long long)(uintptr_t)handle);
}

/* A remap changes nothing in the simulator. Each device range must begin in a region of the communicator. */
static HcclResult remap_one(hccl_call *call, HcclComm handle, const HcclMem *mems, uint64_t num_mems)
{
    comm *c;
    const HcclResult code = comm_find(call, handle, &c);
    if (code)
        return code;
    for (uint64_t i = 0; i < num_mems; i++) {
        const uint64_t address = (uint64_t)(uintptr_t)mems[i].addr;
        if (mems[i].type != HCCL_MEM_DEVICE || !mems[i].addr || !mems[i].size)
            return hccl_refuse(call, HCCL_E_PARA, "memory %llu is not device memory",
                               (unsigned long long)i);
        if (!comm_local(c, address, 1))
            return hccl_refuse(call, HCCL_E_PARA, "memory %llu is not registered with %s",
                               (unsigned long long)i, c->name);
    }
    return HCCL_SUCCESS;
}

HcclResult HcclRemapRegistedMemory(HcclComm *comms, HcclMem *mems, uint64_t numComms,
                                   uint64_t numMems)
{
    hccl_call call;
    HcclResult code = hccl_enter(&call, "HcclRemapRegistedMemory");
    if (!code && sim_settings_now().product == SIM_950)
        code = hccl_refuse(&call, HCCL_E_NOT_SUPPORT, "not on this product");
    else if (!code && (!comms || !mems))
        code = hccl_refuse(&call, HCCL_E_PTR, "%s is NULL", comms ? "memInfoArray" : "comm");
    else if (!code && (!numComms || !numMems))
        code = hccl_refuse(&call, HCCL_E_PARA, "%llu communicators and %llu ranges; at least 1 each",
                           (unsigned long long)numComms, (unsigned long long)numMems);
    for (uint64_t i = 0; !code && i < numComms; i++) {
        pthread_mutex_lock(&hccl_mutex);
        code = remap_one(&call, comms[i], mems, numMems);
        pthread_mutex_unlock(&hccl_mutex);
    }
    return hccl_leave(&call, code, "\"comms\":%llu,\"ranges\":%llu", (unsigned long long)numComms,
                      (unsigned long long)numMems);
}

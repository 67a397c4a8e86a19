/*
 * The older interface, and the only one on 950: a program registers memory for one communicator, exchanges
 * its descriptors, and enables each received descriptor.
 */
#include <stdlib.h>
#include <string.h>

#include "hccl_describe.h"

#define DESC_MAGIC UINT64_C(0x6b7673696d64)

void describe(const comm *c, const wire_region *range, HcclMemDesc *out)
{
    described d;
    memset(&d, 0, sizeof d);
    memset(out, 0, sizeof *out);
    d.local_rank = c->rank;
    d.remote_rank = 1 - c->rank;
    d.magic = DESC_MAGIC;
    d.range = *range;
    memcpy(out, &d, sizeof d);
}

HcclResult read_desc(hccl_call *call, const HcclMemDesc *desc, uint32_t owner, described *out)
{
    if (!desc)
        return hccl_refuse(call, HCCL_E_PTR, "the memory description is NULL");
    memcpy(out, desc, sizeof *out);
    if (out->magic != DESC_MAGIC || out->local_rank != owner || out->remote_rank != 1 - owner)
        return hccl_refuse(call, HCCL_E_INTERNAL, "not a description of memory of rank %u", owner);
    return HCCL_SUCCESS;
}

static HcclResult find_remote(hccl_call *call, HcclComm handle, uint32_t remote_rank, comm **out)
{
    const HcclResult code = comm_find_here(call, handle, out);
    if (code)
        return code;
    if (remote_rank != 1 - (*out)->rank)
        return hccl_refuse(call, HCCL_E_PARA, "remoteRank is %u; it must be %u", remote_rank,
                           1 - (*out)->rank);
    return HCCL_SUCCESS;
}

/* ---- registration ---- */

static HcclResult add_memory(hccl_call *call, comm *c, const HcclMem *memory, HcclMemDesc *desc)
{
    region *r;
    local_region added = {.uses = 1};
    HcclResult code = region_add(call, 0, c->device, memory, &r);
    if (code)
        return code;
    for (size_t i = 0; i < c->num_locals; i++)
        if (c->locals[i].of == r) {
            c->locals[i].uses++;
            describe(c, &c->locals[i].range, desc);
            return HCCL_SUCCESS;
        }
    code = region_resolve(call, c->device, r, &added.memory);
    if (!code) {
        added.of = r;
        added.range = local_range(c, r, added.memory);
        if (comm_add_local(c, &added))
            code = hccl_refuse(call, HCCL_E_MEMORY, "no memory");
    }
    if (!code) {
        r->uses++;
        describe(c, &added.range, desc);
        return HCCL_SUCCESS;
    }
    local_close(&added);
    if (!r->uses)
        region_drop(r);
    return code;
}

static HcclResult register_memory(hccl_call *call, HcclComm handle, uint32_t remote_rank,
                                  const HcclMem *memory, HcclMemDesc *desc)
{
    comm *c;
    HcclResult code = find_remote(call, handle, remote_rank, &c);
    if (code)
        return code;
    if (!memory->addr || !desc)
        return hccl_refuse(call, HCCL_E_PTR, "%s is NULL", desc ? "addr" : "desc");
    if ((code = region_check(call, memory)))
        return code;
    if (c->product == SIM_950 && memory->type == HCCL_MEM_HOST)
        return hccl_refuse(call, HCCL_E_NOT_SUPPORT, "this product registers no host memory");
    return add_memory(call, c, memory, desc);
}

HcclResult HcclRegisterMem(HcclComm handle, uint32_t remoteRank, int type, void *addr, uint64_t size,
                           HcclMemDesc *desc)
{
    hccl_call call;
    const HcclMem memory = {type, addr, size};
    HcclResult code = hccl_enter(&call, "HcclRegisterMem");
    if (!code) {
        pthread_mutex_lock(&hccl_mutex);
        code = register_memory(&call, handle, remoteRank, &memory, desc);
        pthread_mutex_unlock(&hccl_mutex);
    }
    return hccl_leave(&call, code, "\"comm\":%llu,\"type\":%d,\"address\":%llu,\"nbytes\":%llu",
                      (unsigned long long)(uintptr_t)handle, type,
                      (unsigned long long)(uintptr_t)addr, (unsigned long long)size);
}

static HcclResult deregister_memory(hccl_call *call, HcclComm handle, const HcclMemDesc *desc)
{
    comm *c;
    described d;
    HcclResult code = comm_find_here(call, handle, &c);
    if (code || (code = read_desc(call, desc, c->rank, &d)))
        return code;
    for (size_t i = 0; i < c->num_locals; i++) {
        local_region *local = &c->locals[i];
        if (!local->of || local->of->global || local->range.place.generation != d.range.place.generation)
            continue;
        if (--local->uses == 0) {
            if (--local->of->uses == 0)
                region_drop(local->of);
            local->of = NULL; /* queued work may use the bytes, so they stay mapped */
        }
        return HCCL_SUCCESS;
    }
    return hccl_refuse(call, HCCL_E_NOT_FOUND, "the memory is not registered");
}

HcclResult HcclDeregisterMem(HcclComm handle, HcclMemDesc *desc)
{
    hccl_call call;
    HcclResult code = hccl_enter(&call, "HcclDeregisterMem");
    if (!code) {
        pthread_mutex_lock(&hccl_mutex);
        code = deregister_memory(&call, handle, desc);
        pthread_mutex_unlock(&hccl_mutex);
    }
    return hccl_leave(&call, code, "\"comm\":%llu", (unsigned long long)(uintptr_t)handle);
}

/* ---- exchange ---- */

static HcclResult begin_exchange(hccl_call *call, HcclComm handle, uint32_t remote_rank,
                                 const HcclMemDescs *local, int timeout, const HcclMemDescs *remote,
                                 const uint32_t *actual, comm **out)
{
    if (handle && (!local || !remote || !actual || (local->arrayLength && !local->array) ||
                   (remote->arrayLength && !remote->array)))
        return hccl_refuse(call, HCCL_E_PTR, "local, remote, their arrays or actualNum is NULL");
    const HcclResult code = find_remote(call, handle, remote_rank, out);
    if (code)
        return code;
    if (timeout <= -2)
        return hccl_refuse(call, HCCL_E_PARA, "timeout is %d; it must be -1 or more", timeout);
    for (uint32_t i = 0; i < local->arrayLength; i++) {
        described d;
        const HcclResult bad = read_desc(call, &local->array[i], (*out)->rank, &d);
        if (bad)
            return bad;
    }
    if ((*out)->busy)
        return hccl_refuse(call, HCCL_E_INTERNAL, "%s is busy", (*out)->name);
    (*out)->busy = 1;
    return HCCL_SUCCESS;
}

static HcclResult exchange(hccl_call *call, comm *c, const HcclMemDescs *local, int timeout,
                           HcclMemDescs *remote, uint32_t *actual)
{
    const int64_t deadline_us = hccl_deadline(timeout);
    HcclResult code = HCCL_SUCCESS;
    wire_region *none = NULL;
    uint32_t num_none, nbytes;
    void *theirs = NULL;
    if (call->call.fault.kind == SIM_FAULT_HANG) {
        hccl_wait_until(deadline_us);
        return hccl_refuse(call, HCCL_E_TIMEOUT, "hangs: a fault");
    }
    if (call->call.fault.kind != SIM_FAULT_NONE)
        return hccl_refuse(call, (HcclResult)call->call.fault.code, "a fault");
    if (!c->peer)
        code = peer_meet(call, c, MEET_EXCHANGE, NULL, 0, deadline_us, &c->peer, &none, &num_none);
    free(none);
    if (!code)
        code = peer_swap(call, c->peer, local->array,
                         local->arrayLength * (uint32_t)sizeof(HcclMemDesc), deadline_us, &theirs,
                         &nbytes);
    if (code)
        return code;
    *actual = nbytes / (uint32_t)sizeof(HcclMemDesc);
    if (*actual > remote->arrayLength)
        code = hccl_refuse(call, HCCL_E_PARA, "room for %u descriptors, the other end has %u",
                           remote->arrayLength, *actual);
    else if (*actual)
        memcpy(remote->array, theirs, nbytes);
    free(theirs);
    return code;
}

HcclResult HcclExchangeMemDesc(HcclComm handle, uint32_t remoteRank, HcclMemDescs *local, int timeout,
                               HcclMemDescs *remote, uint32_t *actualNum)
{
    hccl_call call;
    comm *c = NULL;
    HcclResult code = hccl_enter(&call, "HcclExchangeMemDesc");
    if (!code) {
        pthread_mutex_lock(&hccl_mutex);
        code = begin_exchange(&call, handle, remoteRank, local, timeout, remote, actualNum, &c);
        pthread_mutex_unlock(&hccl_mutex);
    }
    if (!code) {
        code = exchange(&call, c, local, timeout, remote, actualNum);
        pthread_mutex_lock(&hccl_mutex);
        c->busy = 0;
        pthread_cond_broadcast(&hccl_changed);
        pthread_mutex_unlock(&hccl_mutex);
    }
    return hccl_leave(&call, code, "\"comm\":%llu,\"timeout\":%d,\"local\":%u,\"remote\":%u",
                      (unsigned long long)(uintptr_t)handle, timeout, local ? local->arrayLength : 0,
                      code ? 0 : *actualNum);
}

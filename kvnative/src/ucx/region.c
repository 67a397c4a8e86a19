/* Registers memory with UCX once for all users, and keeps it until transfers have ended. */
#include "ucx/region.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>

/* ---- one region ---- */

static void release(kvn_ucx_region *region)
{
    const kvn_ucx *calls = region->worker->calls;

    if (atomic_fetch_sub(&region->num_holders, 1) != 1)
        return;
    if (!kvn_ucx_worker_is_forked(region->worker)) {
        calls->ucp_rkey_buffer_release(region->key);
        calls->ucp_mem_unmap(region->worker->context, region->memory);
    }
    kvn_ucx_worker_release(region->worker);
    free(region);
}

static int map(kvn_ucx_region *region, kvn_failure *failure)
{
    const kvn_ucx *calls = region->worker->calls;
    const kvn_ucx_library *library = region->worker->library;
    const kvn_ucp_mem_map_params params = {
        .field_mask = KVN_UCP_MEM_MAP_PARAM_ADDRESS | KVN_UCP_MEM_MAP_PARAM_LENGTH |
                      KVN_UCP_MEM_MAP_PARAM_MEMORY_TYPE,
        .address = (void *)(uintptr_t)region->address,
        .length = region->nbytes,
        .memory_type = region->memory_type,
    };
    kvn_ucp_context_h context = region->worker->context;
    kvn_ucs_status status = calls->ucp_mem_map(context, &params, &region->memory);

    if (status != KVN_UCS_OK)
        return kvn_ucx_fail(library, "ucp_mem_map", status, failure);
    status = calls->ucp_rkey_pack(context, region->memory, &region->key, &region->key_nbytes);
    if (status == KVN_UCS_OK)
        return KVN_OK;
    calls->ucp_mem_unmap(context, region->memory);
    return kvn_ucx_fail(library, "ucp_rkey_pack", status, failure);
}

/* ---- the snapshot ---- */

void kvn_ucx_snapshot_release(kvn_ucx_snapshot *snapshot)
{
    if (!snapshot || atomic_fetch_sub(&snapshot->num_holders, 1) != 1)
        return;
    for (size_t i = 0; i < snapshot->count; i++)
        release(snapshot->regions[i]);
    free(snapshot);
}

/* Makes a snapshot; NULL: out of memory. The caller holds the mutex. */
static kvn_ucx_snapshot *make_snapshot(const kvn_ucx_regions *self)
{
    size_t count = 0;
    for (kvn_ucx_region *it = self->first; it; it = it->next)
        count++;
    kvn_ucx_snapshot *snapshot =
        malloc(sizeof *snapshot + count * (sizeof *snapshot->items + sizeof *snapshot->regions));
    if (!snapshot)
        return NULL;
    atomic_init(&snapshot->num_holders, 1);
    snapshot->count = count;
    snapshot->items = (kvn_interval *)(snapshot + 1);
    snapshot->regions = (kvn_ucx_region **)(snapshot->items + count);
    count = 0;
    for (kvn_ucx_region *it = self->first; it; it = it->next, count++) {
        atomic_fetch_add(&it->num_holders, 1);
        snapshot->regions[count] = it;
        snapshot->items[count] = (kvn_interval){
            .first = it->address, .last = it->address + (it->nbytes - 1), .index = count};
    }
    kvn_intervals_sort(snapshot->items, count);
    return snapshot;
}

/* Returns the previous snapshot. The caller holds the mutex, and releases the snapshot after unlocking it. */
static kvn_ucx_snapshot *replace_snapshot(kvn_ucx_regions *self)
{
    kvn_ucx_snapshot *before = self->snapshot;
    self->snapshot = make_snapshot(self);
    return before;
}

kvn_ucx_snapshot *kvn_ucx_snapshot_take(kvn_ucx_regions *self)
{
    pthread_mutex_lock(&self->mutex);
    kvn_ucx_snapshot *snapshot = self->snapshot;
    if (snapshot)
        atomic_fetch_add(&snapshot->num_holders, 1);
    pthread_mutex_unlock(&self->mutex);
    return snapshot;
}

kvn_ucx_region *kvn_ucx_snapshot_find(const kvn_ucx_snapshot *snapshot, uint64_t address,
                                      uint64_t nbytes, size_t *hint)
{
    if (!snapshot)
        return NULL;
    const size_t found = kvn_intervals_find(snapshot->items, snapshot->count, address, nbytes, *hint);
    if (found == KVN_NO_INTERVAL)
        return NULL;
    *hint = found;
    return snapshot->regions[snapshot->items[found].index];
}

/* ---- all of them ---- */

void kvn_ucx_regions_init(kvn_ucx_regions *self, kvn_ucx_worker *worker)
{
    kvn_ucx_worker_hold(worker);
    *self = (kvn_ucx_regions){.worker = worker};
    pthread_mutex_init(&self->mutex, NULL);
}

void kvn_ucx_regions_fini(kvn_ucx_regions *self)
{
    kvn_ucx_snapshot_release(self->snapshot);
    pthread_mutex_destroy(&self->mutex);
    kvn_ucx_worker_release(self->worker);
}

/* Adds a user to a range that is mapped already; NULL: it is not. */
static kvn_ucx_region *find_mapped(kvn_ucx_regions *self, uint64_t address, uint64_t nbytes,
                                   int memory_type)
{
    pthread_mutex_lock(&self->mutex);
    kvn_ucx_region *it = self->first;
    while (it && (it->address != address || it->nbytes != nbytes || it->memory_type != memory_type))
        it = it->next;
    if (it)
        it->num_users++;
    pthread_mutex_unlock(&self->mutex);
    return it;
}

int kvn_ucx_region_use(kvn_ucx_regions *self, uint64_t address, uint64_t nbytes, int memory_type,
                       kvn_ucx_region **out, kvn_failure *failure)
{
    if (nbytes < 1 || address + (nbytes - 1) < address)
        return kvn_fail(failure, KVN_INVALID, 0,
                        "address is 0x%" PRIx64 " and nbytes %" PRIu64
                        "; the range must have at least 1 byte and end at 2**64 or before",
                        address, nbytes);
    *out = find_mapped(self, address, nbytes, memory_type);
    if (*out)
        return KVN_OK;
    kvn_ucx_region *region = malloc(sizeof *region);
    if (!region)
        return kvn_fail(failure, KVN_NO_MEMORY, ENOMEM, "no memory for a region");
    *region = (kvn_ucx_region){.worker = self->worker,
                               .address = address,
                               .nbytes = nbytes,
                               .memory_type = memory_type,
                               .num_users = 1,
                               .num_holders = 1};
    /* Map without the mutex, since it may take seconds. If two threads map one range at the same time, it is mapped
     * twice, which UCX allows. */
    if (map(region, failure) != KVN_OK) {
        free(region);
        return failure->status;
    }
    kvn_ucx_worker_hold(region->worker);
    pthread_mutex_lock(&self->mutex);
    region->next = self->first;
    self->first = region;
    kvn_ucx_snapshot *before = replace_snapshot(self);
    pthread_mutex_unlock(&self->mutex);
    kvn_ucx_snapshot_release(before);
    *out = region;
    return KVN_OK;
}

void kvn_ucx_region_drop(kvn_ucx_regions *self, kvn_ucx_region *region)
{
    kvn_ucx_region **link = &self->first;
    kvn_ucx_snapshot *before = NULL;

    pthread_mutex_lock(&self->mutex);
    const bool is_last = --region->num_users == 0;
    if (is_last) {
        while (*link != region)
            link = &(*link)->next;
        *link = region->next;
        before = replace_snapshot(self);
    }
    pthread_mutex_unlock(&self->mutex);
    kvn_ucx_snapshot_release(before);
    if (is_last)
        release(region);
}

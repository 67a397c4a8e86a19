/* Registers memory with HCCL, once for all communicators or with each of them, or with a server of HIXL. */
#include "hccl/region.h"

#include <inttypes.h>
#include <string.h>

#include "hccl/server.h"

/* Maximum of one registration of HCCL. */
#define MAX_DEVICE_NBYTES (UINT64_C(64) << 30)
#define MAX_HOST_NBYTES (UINT64_C(1) << 40)

static const char *kind(const kvn_region *region) { return region->on_device ? "device" : "host"; }

static int check_size(const kvn_region *region, kvn_failure *failure)
{
    const uint64_t most = region->on_device ? MAX_DEVICE_NBYTES : MAX_HOST_NBYTES;
    uint64_t end;
    if (region->nbytes < 1 || region->nbytes > most)
        return kvn_fail(failure, KVN_INVALID, 0,
                        "nbytes is %" PRIu64 "; of %s memory HCCL registers 1 to %" PRIu64
                        " bytes at a time", region->nbytes, kind(region), most);
    if (region->address == 0 ||
        __builtin_add_overflow(region->address, region->nbytes, &end))
        return kvn_fail(failure, KVN_INVALID, 0,
                        "address is 0x%" PRIx64 ", nbytes is %" PRIu64
                        ": not a range of memory", region->address, region->nbytes);
    return KVN_OK;
}

/* Call it with the registry's mutex. Host memory is registered separately for each device. */
static int check_overlap(const kvn_region *region, kvn_failure *failure)
{
    for (const kvn_region *it = region->hccl->regions; it; it = it->next)
        if (it->device->id == region->device->id && it->on_device == region->on_device &&
            it->address < region->address + region->nbytes &&
            region->address < it->address + it->nbytes)
            return kvn_fail(failure, KVN_INVALID, 0,
                            "[0x%" PRIx64 ", 0x%" PRIx64 ") overlaps the %s region [0x%" PRIx64
                            ", 0x%" PRIx64 ") of device %d",
                            region->address, region->address + region->nbytes, kind(it),
                            it->address, it->address + it->nbytes, it->device->id);
    return KVN_OK;
}

/* Under the registry's mutex. */
static int check_number(const kvn_region *region, kvn_failure *failure)
{
    unsigned count = 0;
    for (const kvn_region *it = region->hccl->regions; it; it = it->next)
        count++;
    if (count < KVN_HCCL_MAX_REGIONS)
        return KVN_OK;
    return kvn_fail(failure, KVN_NO_MEMORY, 0,
                    "%u ranges are registered with HCCL, the maximum: use pools, or register "
                    "larger ranges", count);
}

/* Under the registry's mutex. */
static uint64_t count_registered(const kvn_hccl *hccl, int32_t device_id, bool on_device)
{
    uint64_t total = 0;
    for (const kvn_region *it = hccl->regions; it; it = it->next)
        if (it->device->id == device_id && it->on_device == on_device)
            total += it->nbytes;
    return total;
}

void kvn_hccl_registered(kvn_hccl *hccl, int32_t device_id, uint64_t nbytes[2])
{
    pthread_mutex_lock(&hccl->registry);
    for (int on_device = 0; on_device < 2; on_device++)
        nbytes[on_device] = count_registered(hccl, device_id, on_device);
    pthread_mutex_unlock(&hccl->registry);
}

/* Call it with the registry's mutex. Beyond this limit HCCL fails to prepare a connection, without a reason. */
static int check_total(const kvn_region *region, kvn_failure *failure)
{
    const kvn_hccl *hccl = region->hccl;
    const uint64_t most = hccl->most[region->on_device];
    const uint64_t total =
        region->nbytes + count_registered(hccl, region->device->id, region->on_device);
    if (total <= most || hccl->is_per_comm || hccl->is_client_server)
        return KVN_OK;
    return kvn_fail(failure, region->on_device ? KVN_NO_DEVICE_MEMORY : KVN_NO_MEMORY, 0,
                    "%" PRIu64 " bytes of %s memory would be registered with HCCL on device %d, which takes "
                    "%" PRIu64 " GiB with HDK %s", total, kind(region), (int)region->device->id,
                    most >> 30, *hccl->driver ? hccl->driver : "of unknown version");
}

/* Adds an entry to the list, if there is room. */
static int enlist(kvn_region *region, kvn_failure *failure)
{
    int status;
    pthread_mutex_lock(&region->hccl->registry);
    status = check_overlap(region, failure);
    if (status == KVN_OK)
        status = check_number(region, failure);
    if (status == KVN_OK)
        status = check_total(region, failure);
    if (status == KVN_OK) {
        region->next = region->hccl->regions;
        region->hccl->regions = region;
        region->is_open = true;
    }
    pthread_mutex_unlock(&region->hccl->registry);
    return status;
}

/* Under the registry's mutex. */
static void take_out(kvn_region *region)
{
    kvn_region **at = &region->hccl->regions;
    while (*at && *at != region)
        at = &(*at)->next;
    if (*at)
        *at = region->next;
    region->is_open = false;
}

/* The server of the region's device, under the registry's mutex; NULL without HIXL. */
static const kvn_hixl_server *server_of(const kvn_region *region)
{
    return region->hccl->is_client_server ? kvn_hixl_server_of(region->hccl, region->device->id) : NULL;
}

/* With HIXL, under the registry's mutex. */
static int register_once(kvn_region *region, kvn_failure *failure)
{
    const kvn_hccl_mem mem = kvn_region_memory(region);
    kvn_hccl *hccl = region->hccl;
    const kvn_hixl_server *server = server_of(region);
    void *previous;
    kvn_hccl_result result;
    if (hccl->is_client_server && !server)
        return kvn_fail(failure, KVN_INVALID, 0, "device %d has no server", (int)region->device->id);
    if (kvn_device_enter(region->device, &previous, failure) != KVN_OK)
        return failure->status;
    result = server ? hccl->hixl.server_register(server->handle, NULL, &mem, &region->handle)
                    : hccl->calls.register_global(&mem, &region->handle);
    region->server = server ? server->number : 0;
    if (result != KVN_HCCL_SUCCESS)
        kvn_hccl_fail(hccl, server ? "HixlCSServerRegMem" : "HcclRegisterGlobalMem", result, failure);
    kvn_device_leave(region->device, previous);
    return kvn_hccl_status(result);
}

int kvn_region_open(kvn_hccl *hccl, const kvn_device *device, uint64_t address, uint64_t nbytes,
                    bool on_device, kvn_region *out, kvn_failure *failure)
{
    *out = (kvn_region){.hccl = hccl, .device = device, .address = address, .nbytes = nbytes,
                        .on_device = on_device};
    if (check_size(out, failure) != KVN_OK || enlist(out, failure) != KVN_OK)
        return failure->status;
    if (hccl->is_per_comm)
        return KVN_OK;
    if (hccl->is_client_server) /* so that the server is not closed meanwhile */
        pthread_mutex_lock(&hccl->registry);
    const int status = register_once(out, failure);
    if (!hccl->is_client_server)
        pthread_mutex_lock(&hccl->registry);
    if (status != KVN_OK)
        take_out(out);
    pthread_mutex_unlock(&hccl->registry);
    return status;
}

/* Under the registry's mutex. */
static int deregister(kvn_region *region, kvn_failure *failure)
{
    kvn_hccl *hccl = region->hccl;
    const kvn_hixl_server *server = server_of(region);
    void *previous;
    kvn_hccl_result result;
    if (hccl->is_client_server && !(server && server->number == region->server))
        return KVN_OK; /* the registration has ended with the server */
    if (kvn_device_enter(region->device, &previous, failure) != KVN_OK)
        return failure->status;
    result = server ? hccl->hixl.server_unregister(server->handle, region->handle)
                    : hccl->calls.deregister_global(region->handle);
    if (result != KVN_HCCL_SUCCESS)
        kvn_hccl_fail(hccl, server ? "HixlCSServerUnregMem" : "HcclDeregisterGlobalMem", result, failure);
    kvn_device_leave(region->device, previous);
    return kvn_hccl_status(result);
}

int kvn_region_close(kvn_region *region, kvn_failure *failure)
{
    int status = KVN_OK;
    pthread_mutex_lock(&region->hccl->registry);
    if (region->is_open && region->num_bound > 0) {
        status = kvn_fail(failure, KVN_INVALID, 0,
                          "the region [0x%" PRIx64 ", 0x%" PRIx64 ") is bound to %" PRIu32
                          " communicator(s)",
                          region->address, region->address + region->nbytes, region->num_bound);
    } else if (region->is_open) {
        /* Deregister with the mutex held, so that a new registration of the range comes after it. */
        if (region->handle)
            status = deregister(region, failure);
        take_out(region);
    }
    pthread_mutex_unlock(&region->hccl->registry);
    return status;
}

int kvn_region_retain(kvn_region *region, kvn_failure *failure)
{
    int status = KVN_OK;
    pthread_mutex_lock(&region->hccl->registry);
    if (region->is_open)
        region->num_bound++;
    else
        status = kvn_fail(failure, KVN_INVALID, 0,
                          "the region [0x%" PRIx64 ", 0x%" PRIx64 ") is closed", region->address,
                          region->address + region->nbytes);
    pthread_mutex_unlock(&region->hccl->registry);
    return status;
}

void kvn_region_release(kvn_region *region)
{
    pthread_mutex_lock(&region->hccl->registry);
    region->num_bound--;
    pthread_mutex_unlock(&region->hccl->registry);
}

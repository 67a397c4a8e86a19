/* Holds the handle of a communicator, its bound regions, and the regions of the peer that it may reach. */
#include "hccl/connection.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

#define RETRIES 5
#define FIRST_PAUSE_MS 20
/* HCCL's minimum. One-sided operations use no buffer; the default of 200 would take 400 MB of device memory for each
 * link. */
#define BUFFER_MB 2
/* Timeouts of HIXL are milliseconds in a signed number. */
#define MAX_CONNECT_S 2000000

int kvn_connection_init(kvn_connection *self, kvn_hccl *hccl, const kvn_device *device,
                        uint32_t remote_rank, const char *name, kvn_failure *failure)
{
    *self = (kvn_connection){.hccl = hccl, .device = device, .remote_rank = remote_rank};
    if (!*name || strlen(name) >= sizeof self->name)
        return kvn_fail(failure, KVN_INVALID, 0, "name is %zu bytes long; it must be 1 to %zu",
                        strlen(name), sizeof self->name - 1);
    memcpy(self->name, name, strlen(name) + 1);
    /* Untouched pages cost nothing. */
    self->bound = calloc(KVN_HCCL_MAX_REGIONS, sizeof *self->bound);
    if (hccl->is_per_comm)
        self->remote = calloc(KVN_HCCL_MAX_REGIONS, sizeof *self->remote);
    if (!self->bound || (hccl->is_per_comm && !self->remote))
        return kvn_fail(failure, KVN_NO_MEMORY, ENOMEM, "no memory for a communicator's regions");
    return KVN_OK;
}

void kvn_connection_free(kvn_connection *self)
{
    free(self->bound);
    free(self->remote);
}

/* Returns true if a retry may succeed. If processes of a node make communicators at the same time, the call fails for
 * some of them. Refusals of the arguments, or for lack of memory, are permanent. */
static bool is_momentary(kvn_hccl_result result)
{
    switch (result) {
    case KVN_HCCL_SUCCESS:
    case KVN_HCCL_E_PARA:
    case KVN_HCCL_E_PTR:
    case KVN_HCCL_E_NOT_SUPPORT:
    case KVN_HCCL_E_OOM: return false;
    default: return true;
    }
}

/* Waits for a random time, between half and all of a limit that doubles, so that processes do not collide again. */
static void pause_before(int retry)
{
    const uint32_t most_us = (UINT32_C(1000) * FIRST_PAUSE_MS) << retry;
    uint32_t chance = 0;
    uint64_t ns;

    if (getrandom(&chance, sizeof chance, GRND_NONBLOCK) != sizeof chance)
        chance = 0;
    ns = UINT64_C(1000) * (most_us / 2 + chance % (most_us / 2));
    nanosleep(&(struct timespec){.tv_sec = (time_t)(ns / 1000000000), .tv_nsec = (long)(ns % 1000000000)}, NULL);
}

static kvn_hccl_result make_communicator(kvn_connection *self, const kvn_communicator_options *options)
{
    kvn_hccl_config config = {
        .size = sizeof config,
        .magic = KVN_HCCL_CONFIG_MAGIC,
        .version = KVN_HCCL_CONFIG_VERSION,
        .buffer_mb = BUFFER_MB,
        .traffic_class = options->traffic_class,
        .service_level = options->service_level,
    };
    kvn_hccl_result result;
    memcpy(config.name, self->name, sizeof config.name);
    for (int retry = 0;; retry++) {
        pthread_mutex_lock(&self->hccl->init);
        result = self->hccl->calls.init(options->rank_table, options->rank, &config, &self->comm);
        pthread_mutex_unlock(&self->hccl->init);
        if (retry == RETRIES || !is_momentary(result))
            break;
        kvn_acl_forget(self->hccl->acl); /* or the thread's next failure would have this attempt's text, too */
        pause_before(retry);
    }
    if (result != KVN_HCCL_SUCCESS)
        self->comm = NULL;
    return result;
}

int kvn_connection_open(kvn_connection *self, const kvn_communicator_options *options,
                        kvn_failure *failure)
{
    const bool is_hixl = self->hccl->is_client_server;
    void *previous;
    kvn_hccl_result result;
    if (kvn_device_enter(self->device, &previous, failure) != KVN_OK)
        return failure->status;
    result = is_hixl ? kvn_client_create(&self->client, self->hccl, options->peer, options->traffic_class,
                                         options->service_level)
                     : make_communicator(self, options);
    if (result != KVN_HCCL_SUCCESS)
        kvn_hccl_fail(self->hccl, is_hixl ? "HixlCSClientCreate" : "HcclCommInitClusterInfoMemConfig", result,
                      failure);
    kvn_device_leave(self->device, previous);
    return kvn_hccl_status(result);
}

/* ---- regions of this side ---- */

static kvn_bound *find(kvn_connection *self, const kvn_region *region)
{
    for (size_t i = 0; i < self->num_bound; i++)
        if (self->bound[i].region == region)
            return &self->bound[i];
    return NULL;
}

static const char *bind_call(const kvn_connection *self)
{
    return self->hccl->is_client_server ? "HixlCSClientRegMem"
           : self->hccl->is_per_comm    ? "HcclRegisterMem"
                                        : "HcclCommBindMem";
}

static kvn_hccl_result bind_one(kvn_connection *self, kvn_bound *bound)
{
    const kvn_hccl_calls *calls = &self->hccl->calls;
    const kvn_region *region = bound->region;
    if (self->hccl->is_client_server) {
        const kvn_hccl_mem memory = kvn_region_memory(region);
        return self->hccl->hixl.client_register(self->client.handle, NULL, &memory, &bound->handle);
    }
    if (!self->hccl->is_per_comm)
        return calls->bind(self->comm, region->handle);
    return calls->register_memory(self->comm, self->remote_rank,
                                  region->on_device ? KVN_HCCL_MEM_DEVICE : KVN_HCCL_MEM_HOST,
                                  (void *)(uintptr_t)region->address, region->nbytes, &bound->desc);
}

int kvn_connection_bind(kvn_connection *self, kvn_region *region, kvn_failure *failure)
{
    void *previous;
    kvn_hccl_result result;
    if (find(self, region))
        return kvn_fail(failure, KVN_INVALID, 0,
                        "the region [0x%" PRIx64 ", 0x%" PRIx64 ") is bound already",
                        region->address, region->address + region->nbytes);
    if (region->device->id != self->device->id)
        return kvn_fail(failure, KVN_INVALID, 0,
                        "the region is of device %d, the communicator of device %d",
                        region->device->id, self->device->id);
    if (self->num_bound == KVN_HCCL_MAX_REGIONS)
        return kvn_fail(failure, KVN_INVALID, 0, "%d regions are bound already, the maximum",
                        KVN_HCCL_MAX_REGIONS);
    if (kvn_region_retain(region, failure) != KVN_OK)
        return failure->status;
    if (kvn_device_enter(self->device, &previous, failure) != KVN_OK) {
        kvn_region_release(region);
        return failure->status;
    }
    self->bound[self->num_bound].region = region;
    result = bind_one(self, &self->bound[self->num_bound]);
    if (result == KVN_HCCL_SUCCESS) {
        self->num_bound++;
    } else {
        kvn_hccl_fail(self->hccl, bind_call(self), result, failure);
        kvn_region_release(region);
    }
    kvn_device_leave(self->device, previous);
    return kvn_hccl_status(result);
}

static void forget(kvn_connection *self, kvn_bound *bound)
{
    kvn_region_release(bound->region);
    *bound = self->bound[--self->num_bound];
    self->last_hit = 0;
}

/* Call it with the device's context current. The region is unbound afterwards, even if HCCL reports a failure. */
static int unbind_one(kvn_connection *self, kvn_bound *bound, kvn_failure *failure)
{
    const kvn_hccl_calls *calls = &self->hccl->calls;
    const char *call = "HcclCommUnbindMem";
    kvn_hccl_result result = KVN_HCCL_SUCCESS;
    if (self->hccl->is_client_server) {
        call = "HixlCSClientUnregMem";
        if (self->client.handle)
            result = self->hccl->hixl.client_unregister(self->client.handle, bound->handle);
    } else if (self->hccl->is_per_comm) {
        call = "HcclDeregisterMem";
        result = calls->deregister_memory(self->comm, &bound->desc);
    } else {
        result = calls->unbind(self->comm, bound->region->handle);
    }
    forget(self, bound);
    return result == KVN_HCCL_SUCCESS ? KVN_OK : kvn_hccl_fail(self->hccl, call, result, failure);
}

int kvn_connection_unbind(kvn_connection *self, kvn_region *region, kvn_failure *failure)
{
    kvn_bound *bound = find(self, region);
    void *previous;
    int status;
    if (!bound)
        return kvn_fail(failure, KVN_INVALID, 0,
                        "the region [0x%" PRIx64 ", 0x%" PRIx64 ") is not bound to communicator %s",
                        region->address, region->address + region->nbytes, self->name);
    if (kvn_device_enter(self->device, &previous, failure) != KVN_OK) {
        forget(self, bound); /* HCCL cannot be called without a context; the connection ends with it */
        return failure->status;
    }
    status = unbind_one(self, bound, failure);
    kvn_device_leave(self->device, previous);
    return status;
}

bool kvn_connection_covers(kvn_connection *self, uint64_t address, uint64_t nbytes)
{
    for (size_t i = 0; i < self->num_bound; i++) {
        const size_t at = (self->last_hit + i) % self->num_bound;
        const kvn_region *region = self->bound[at].region;
        if (address >= region->address && address - region->address < region->nbytes &&
            nbytes <= region->nbytes - (address - region->address)) {
            self->last_hit = at;
            return true;
        }
    }
    return false;
}

/* ---- connecting ---- */

static int exchange(kvn_connection *self, int timeout_s, uint32_t *num_remote,
                    kvn_failure *failure)
{
    kvn_hccl_mem_descs remote = {.array = self->remote, .count = KVN_HCCL_MAX_REGIONS};
    kvn_hccl_mem_descs local = {.count = (uint32_t)self->num_bound};
    kvn_hccl_result result;
    local.array = malloc(self->num_bound * sizeof *local.array);
    if (!local.array)
        return kvn_fail(failure, KVN_NO_MEMORY, ENOMEM, "no memory for %zu descriptions of regions",
                        self->num_bound);
    for (size_t i = 0; i < self->num_bound; i++)
        local.array[i] = self->bound[i].desc;
    result = self->hccl->calls.exchange(self->comm, self->remote_rank, &local, timeout_s, &remote,
                                        num_remote);
    free(local.array);
    if (result != KVN_HCCL_SUCCESS)
        return kvn_hccl_fail(self->hccl, "HcclExchangeMemDesc", result, failure);
    if (*num_remote > KVN_HCCL_MAX_REGIONS)
        return kvn_fail(failure, KVN_INVALID, 0, "the peer has %" PRIu32 " regions; at most %d",
                        *num_remote, KVN_HCCL_MAX_REGIONS);
    return KVN_OK;
}

static int import(kvn_connection *self, int timeout_s, kvn_failure *failure)
{
    uint32_t num_remote = 0;
    if (exchange(self, timeout_s, &num_remote, failure) != KVN_OK)
        return failure->status;
    for (uint32_t i = 0; i < num_remote; i++) {
        kvn_hccl_mem ignored = {.type = KVN_HCCL_MEM_DEVICE};
        const kvn_hccl_result result =
            self->hccl->calls.enable(self->comm, &self->remote[i], &ignored);
        if (result != KVN_HCCL_SUCCESS)
            return kvn_hccl_fail(self->hccl, "HcclEnableMemAccess", result, failure);
        self->num_remote = i + 1;
    }
    return KVN_OK;
}

int kvn_connection_prepare(kvn_connection *self, int timeout_s, kvn_failure *failure)
{
    const kvn_hccl_prepare_config config = {.topology = 0};
    void *previous;
    kvn_hccl_result result;
    int status = KVN_OK;
    if (kvn_device_enter(self->device, &previous, failure) != KVN_OK)
        return failure->status;
    if (self->hccl->is_client_server) {
        const uint32_t timeout_ms = timeout_s < MAX_CONNECT_S ? (uint32_t)timeout_s * 1000 : MAX_CONNECT_S * 1000;
        result = self->hccl->hixl.connect(self->client.handle, timeout_ms);
        if (result != KVN_HCCL_SUCCESS)
            status = kvn_hccl_fail(self->hccl, "HixlCSClientConnect", result, failure);
    } else if (self->hccl->is_per_comm) {
        status = import(self, timeout_s, failure);
    } else {
        result = self->hccl->calls.prepare(self->comm, &config, timeout_s);
        if (result != KVN_HCCL_SUCCESS)
            status = kvn_hccl_fail(self->hccl, "HcclCommPrepare", result, failure);
    }
    kvn_device_leave(self->device, previous);
    return status;
}

/* ---- the end ---- */

static void take_down(kvn_connection *self, kvn_failure *first)
{
    const kvn_hccl_calls *calls = &self->hccl->calls;
    const bool is_hixl = self->hccl->is_client_server;
    kvn_failure later;
    kvn_hccl_result result;
    while (self->num_remote > 0) {
        result = calls->disable(self->comm, &self->remote[--self->num_remote]);
        if (result != KVN_HCCL_SUCCESS) {
            kvn_hccl_fail(self->hccl, "HcclDisableMemAccess", result, &later);
            kvn_keep_first(first, &later);
        }
    }
    while (self->num_bound > 0)
        if (unbind_one(self, &self->bound[self->num_bound - 1], &later) != KVN_OK)
            kvn_keep_first(first, &later);
    result = is_hixl ? kvn_client_destroy(&self->client) : calls->destroy(self->comm);
    if (result != KVN_HCCL_SUCCESS) {
        kvn_hccl_fail(self->hccl, is_hixl ? "HixlCSClientDestroy" : "HcclCommDestroy", result, &later);
        kvn_keep_first(first, &later);
    }
    self->comm = NULL;
}

void kvn_connection_close(kvn_connection *self, kvn_failure *failure)
{
    void *previous;
    kvn_failure later;
    if (!self->comm && !self->client.handle && self->num_bound == 0)
        return;
    if (kvn_device_enter(self->device, &previous, &later) == KVN_OK) {
        take_down(self, failure);
        kvn_device_leave(self->device, previous);
        return;
    }
    /* HCCL cannot be called without a context: the connection leaks, the regions do not. */
    kvn_keep_first(failure, &later);
    while (self->num_bound > 0)
        forget(self, &self->bound[self->num_bound - 1]);
    self->comm = NULL;
}

/* ---- for transfers ---- */

kvn_hccl_result kvn_connection_async_error(kvn_connection *self, char *text, size_t room)
{
    kvn_hccl_result result = KVN_HCCL_SUCCESS;
    void *previous;
    kvn_failure failure;
    if (self->client.is_failed) {
        snprintf(text, room, "HIXL's client is given up");
        return KVN_HIXL_FAILED;
    }
    if (!self->hccl->calls.async_error ||
        kvn_device_enter(self->device, &previous, &failure) != KVN_OK)
        return KVN_HCCL_SUCCESS;
    if (self->hccl->calls.async_error(self->comm, &result) != KVN_HCCL_SUCCESS) {
        kvn_acl_forget(self->hccl->acl);
        result = KVN_HCCL_SUCCESS;
    }
    if (result != KVN_HCCL_SUCCESS)
        kvn_hccl_explain(self->hccl, "HcclGetCommAsyncError", result, text, room);
    kvn_device_leave(self->device, previous);
    return result;
}

void kvn_connection_abort(kvn_connection *self)
{
    if (self->client.num_batches > 0 || self->client.is_failed)
        kvn_client_destroy(&self->client);
}

int kvn_connection_issue(kvn_connection *self, bool is_put, kvn_one_sided *descriptors,
                         uint32_t count, kvn_stream stream, kvn_failure *failure)
{
    if (self->hccl->is_client_server)
        return kvn_client_issue(&self->client, is_put, descriptors, count, failure);
    const kvn_hccl_calls *calls = &self->hccl->calls;
    const kvn_hccl_result result = (is_put ? calls->put : calls->get)(
        self->comm, self->remote_rank, descriptors, count, stream);
    if (result == KVN_HCCL_SUCCESS)
        return KVN_OK;
    return kvn_hccl_fail(self->hccl, is_put ? "HcclBatchPut" : "HcclBatchGet", result, failure);
}

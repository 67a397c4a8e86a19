/* Makes and destroys HIXL's servers. */
#include "hccl/server.h"

#define BACKLOG 128

static int start(kvn_hixl_server *self, const kvn_hixl_server_desc *desc, kvn_failure *failure)
{
    const kvn_hixl_calls *calls = &self->hccl->hixl;
    const kvn_hixl_config config = {.resources = NULL};
    kvn_hixl_status result = calls->server_create(desc, &config, &self->handle);

    if (result != KVN_HCCL_SUCCESS) {
        self->handle = NULL;
        return kvn_hccl_fail(self->hccl, "HixlCSServerCreate", result, failure);
    }
    result = calls->server_listen(self->handle, BACKLOG);
    if (result == KVN_HCCL_SUCCESS)
        return KVN_OK;
    kvn_hccl_fail(self->hccl, "HixlCSServerListen", result, failure);
    calls->server_destroy(self->handle);
    self->handle = NULL;
    return failure->status;
}

/* Adds an entry to the list if the device has none. It has no handle until the server has started. */
static int enlist(kvn_hixl_server *self, kvn_failure *failure)
{
    const kvn_hixl_server *other;

    pthread_mutex_lock(&self->hccl->registry);
    for (other = self->hccl->servers; other && other->device->id != self->device->id;)
        other = other->next;
    if (!other) {
        self->next = self->hccl->servers;
        self->hccl->servers = self;
    }
    pthread_mutex_unlock(&self->hccl->registry);
    return other ? kvn_fail(failure, KVN_INVALID, 0, "device %d has a server of this process already",
                            (int)self->device->id)
                 : KVN_OK;
}

/* Under the registry's mutex. */
static void take_out(kvn_hixl_server *self)
{
    kvn_hixl_server **at = &self->hccl->servers;

    while (*at != self)
        at = &(*at)->next;
    *at = self->next;
    self->handle = NULL;
}

int kvn_hixl_server_open(kvn_hccl *hccl, const kvn_device *device, const kvn_hixl_endpoint *endpoints,
                         uint32_t num_endpoints, const char *ip, uint32_t port, kvn_hixl_server *out,
                         kvn_failure *failure)
{
    const kvn_hixl_server_desc desc = {
        .endpoints = endpoints, .ip = ip, .port = port, .num_endpoints = num_endpoints};
    void *previous;
    int status;

    *out = (kvn_hixl_server){.hccl = hccl, .device = device};
    if (enlist(out, failure) != KVN_OK)
        return failure->status;
    status = kvn_device_enter(device, &previous, failure);
    if (status == KVN_OK) {
        status = start(out, &desc, failure);
        kvn_device_leave(device, previous);
    }
    if (status != KVN_OK) {
        pthread_mutex_lock(&hccl->registry);
        take_out(out);
        pthread_mutex_unlock(&hccl->registry);
    }
    return status;
}

int kvn_hixl_server_close(kvn_hixl_server *server, kvn_failure *failure)
{
    void *handle, *previous;
    kvn_hixl_status result;

    pthread_mutex_lock(&server->hccl->registry);
    handle = server->handle;
    if (handle)
        take_out(server);
    pthread_mutex_unlock(&server->hccl->registry);
    if (!handle)
        return KVN_OK;
    if (kvn_device_enter(server->device, &previous, failure) != KVN_OK)
        return failure->status; /* HIXL cannot be called without a context: the server leaks */
    result = server->hccl->hixl.server_destroy(handle);
    if (result != KVN_HCCL_SUCCESS)
        kvn_hccl_fail(server->hccl, "HixlCSServerDestroy", result, failure);
    kvn_device_leave(server->device, previous);
    return kvn_hccl_status(result);
}

void *kvn_hixl_server_of(kvn_hccl *hccl, int32_t device_id)
{
    void *handle = NULL;

    for (const kvn_hixl_server *server = hccl->servers; server && !handle; server = server->next)
        if (server->device->id == device_id)
            handle = server->handle;
    return handle;
}

/* Makes HIXL's clients, and issues and queries their batches. */
#include "hccl/client.h"

#include <inttypes.h>

/* Defaults of the vendor's engine. */
#define TRAFFIC_CLASS 132
#define SERVICE_LEVEL 4

static uint8_t number_or(uint32_t given, uint8_t otherwise)
{
    return given == KVN_HCCL_NOT_SET ? otherwise : (uint8_t)given;
}

kvn_hixl_status kvn_client_create(kvn_client *self, const kvn_hccl *hccl, const kvn_hixl_peer *peer,
                                  uint32_t traffic_class, uint32_t service_level)
{
    const kvn_hixl_client_desc desc = {
        .local = &peer->local,
        .remote = &peer->remote,
        .ip = peer->ip,
        .port = peer->port,
        .traffic_class = number_or(traffic_class, TRAFFIC_CLASS),
        .service_level = number_or(service_level, SERVICE_LEVEL),
    };
    const kvn_hixl_config config = {.resources = NULL};
    kvn_hixl_status result;

    *self = (kvn_client){.hccl = hccl};
    result = hccl->hixl.client_create(&desc, &config, &self->handle);
    if (result != KVN_HCCL_SUCCESS)
        self->handle = NULL;
    return result;
}

int kvn_client_issue(kvn_client *self, bool is_put, const kvn_one_sided *descriptors, uint32_t count,
                     kvn_failure *failure)
{
    const kvn_hixl_calls *calls = &self->hccl->hixl;
    kvn_hixl_operation operations[KVN_CLIENT_MAX_OPERATIONS];
    void *batch = NULL;
    kvn_hixl_status result;

    if (!self->handle)
        return kvn_fail(failure, KVN_FAILED, 0, "HIXL's client was given up after an abort or an error");
    if (count > KVN_CLIENT_MAX_OPERATIONS || self->num_batches == KVN_CLIENT_MAX_BATCHES)
        return kvn_fail(failure, KVN_FAILED, 0, "%" PRIu32 " operations behind %" PRIu32 " batches are too many", count,
                        self->num_batches);
    for (uint32_t i = 0; i < count; i++)
        operations[i] = (kvn_hixl_operation){descriptors[i].remote, descriptors[i].local, descriptors[i].count};
    result = (is_put ? calls->put : calls->get)(self->handle, count, operations, &batch);
    if (result == KVN_HCCL_SUCCESS) {
        self->batches[self->num_batches++] = batch;
        return KVN_OK;
    }
    if (result == KVN_HIXL_RESOURCE_EXHAUSTED) {
        kvn_acl_forget(self->hccl->acl); /* or the thread's next failure would have this call's text, too */
        return KVN_PENDING;
    }
    self->is_failed = true;
    return kvn_hccl_fail(self->hccl, is_put ? "HixlCSClientBatchPutAsync" : "HixlCSClientBatchGetAsync", result,
                         failure);
}

int kvn_client_poll(kvn_client *self, kvn_failure *failure)
{
    /* The last one first: while it is in flight the others need no call. */
    while (self->num_batches > 0) {
        int32_t ending = KVN_HIXL_WAITING;
        const kvn_hixl_status result =
            self->hccl->hixl.query(self->handle, self->batches[self->num_batches - 1], &ending);
        if (result == KVN_HCCL_SUCCESS && ending == KVN_HIXL_WAITING)
            return KVN_PENDING;
        if (result == KVN_HCCL_SUCCESS)
            self->num_batches--; /* HIXL has freed it */
        if (result == KVN_HCCL_SUCCESS && ending == KVN_HIXL_COMPLETED)
            continue;
        self->is_failed = true;
        return result == KVN_HCCL_SUCCESS
                   ? kvn_fail(failure, KVN_FAILED, KVN_HIXL_FAILED, "HIXL reports status %d of a batch", (int)ending)
                   : kvn_hccl_fail(self->hccl, "HixlCSClientQueryCompleteStatus", result, failure);
    }
    return KVN_OK;
}

kvn_hixl_status kvn_client_destroy(kvn_client *self)
{
    void *handle = self->handle;

    self->handle = NULL;
    self->num_batches = 0;
    return handle ? self->hccl->hixl.client_destroy(handle) : KVN_HCCL_SUCCESS;
}

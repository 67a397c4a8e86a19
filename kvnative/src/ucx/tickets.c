/* Reads the tickets of peers. */
#include "ucx/tickets.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* Shared by the caller and UCX, which may write to it after the caller has left. */
typedef struct reading {
    kvn_ucx_endpoint *endpoint; /* held */
    atomic_uint num_holders;
    atomic_bool is_done;
    kvn_failure failure;
    uint64_t words[KVN_UCX_TICKETS];
} reading;

static void release_reading(reading *it)
{
    if (atomic_fetch_sub(&it->num_holders, 1) != 1)
        return;
    kvn_ucx_endpoint_release(it->endpoint);
    free(it);
}

static void end_reading(reading *it, kvn_ucs_status status)
{
    kvn_ucx_worker *worker = it->endpoint->worker;

    if (status != KVN_UCS_OK && !kvn_ucx_endpoint_has_failed(it->endpoint, &it->failure))
        kvn_ucx_fail(worker->library, "ucp_get", status, &it->failure);
    atomic_store(&it->is_done, true);
    kvn_ucx_notify(worker);
    release_reading(it);
}

static void on_read(void *request, kvn_ucs_status status, void *argument)
{
    reading *it = argument;

    kvn_ucx_note_read(it->endpoint, request);
    end_reading(it, status);
}

static void start_reading(void *context)
{
    reading *it = context;
    kvn_ucx_endpoint *self = it->endpoint;

    if (atomic_load(&self->state) != KVN_UCX_CONNECTED || !self->handle)
        end_reading(it, KVN_UCS_ERR_NOT_CONNECTED);
    else
        kvn_ucx_read_words(self, it->words, sizeof it->words, self->remote.tickets, self->tickets_key, on_read, it);
}

static bool is_read(const void *context)
{
    return atomic_load(&((const reading *)context)->is_done);
}

int kvn_ucx_endpoint_read_tickets(kvn_ucx_endpoint *self, int64_t deadline_ns,
                                  uint64_t out[KVN_UCX_TICKETS], kvn_failure *failure)
{
    reading *it = calloc(1, sizeof *it);

    if (!it)
        return kvn_fail(failure, KVN_NO_MEMORY, ENOMEM, "no memory for the tickets of a peer");
    it->endpoint = self;
    kvn_ucx_endpoint_hold(self);
    atomic_init(&it->num_holders, 2);
    kvn_ucx_call(self->worker, start_reading, it);
    if (!kvn_ucx_wait(self->worker, is_read, it, deadline_ns)) {
        kvn_fail(failure, KVN_TIMEOUT, 0, "the peer's tickets were not read in time");
    } else {
        *failure = it->failure;
        memcpy(out, it->words, sizeof it->words);
    }
    release_reading(it);
    return failure->status;
}

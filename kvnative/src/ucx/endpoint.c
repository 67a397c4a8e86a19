/* Connects endpoints, and ends them. */
#include "ucx/endpoint.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "core/thread.h"
#include "kvnative/backend.h"

/* UCX reads an address or a key without knowing its length. Zeros after the copy keep UCX from reading other memory if
 * the peer sent a wrong one. */
#define PADDING 4096
#define CLOSE_NS 1000000000

/* ---- making and unmaking ---- */

static void *padded(const void *bytes, size_t nbytes)
{
    char *copy = calloc(1, nbytes + PADDING);
    if (copy)
        memcpy(copy, bytes, nbytes);
    return copy;
}

static void dispose(kvn_ucx_endpoint *self)
{
    kvn_ucx_worker *worker = self->worker;

    if (self->death_fd >= 0)
        close(self->death_fd);
    free((void *)self->remote.address);
    free((void *)self->remote.generations_key);
    free((void *)self->remote.tickets_key);
    free(self);
    kvn_ucx_worker_release(worker);
}

void kvn_ucx_endpoint_hold(kvn_ucx_endpoint *self) { atomic_fetch_add(&self->num_holders, 1); }

void kvn_ucx_endpoint_release(kvn_ucx_endpoint *self)
{
    if (atomic_fetch_sub(&self->num_holders, 1) == 1 && !kvn_ucx_worker_is_forked(self->worker))
        dispose(self);
}

static void list_endpoint(void *context)
{
    kvn_ucx_endpoint *self = context;
    kvn_ucx_worker *worker = self->worker;

    if (worker->is_closed)
        return;
    kvn_ucx_endpoint_hold(self); /* held by the worker until the endpoint has ended */
    atomic_fetch_add(&worker->num_endpoints, 1);
    self->is_listed = true;
    self->next = worker->endpoints;
    worker->endpoints = self;
}

int kvn_ucx_endpoint_create(kvn_ucx_worker *worker, const kvn_ucx_remote *remote,
                            kvn_ucx_endpoint **out, kvn_failure *failure)
{
    kvn_ucx_endpoint *self = calloc(1, sizeof *self);

    if (!self)
        return kvn_fail(failure, KVN_NO_MEMORY, ENOMEM, "no memory for an endpoint");
    self->worker = worker;
    kvn_ucx_worker_hold(worker);
    atomic_init(&self->num_holders, 1);
    self->is_closed = true;
    self->remote = *remote;
    self->remote.address = padded(remote->address, remote->address_nbytes);
    self->remote.generations_key = padded(remote->generations_key, remote->generations_key_nbytes);
    self->remote.tickets_key = padded(remote->tickets_key, remote->tickets_key_nbytes);
    self->death_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (!self->remote.address || !self->remote.generations_key || !self->remote.tickets_key) {
        kvn_fail(failure, KVN_NO_MEMORY, ENOMEM, "no memory for an endpoint");
    } else if (self->death_fd < 0) {
        kvn_fail(failure, KVN_FAILED, errno, "no eventfd for an endpoint: %s", strerror(errno));
    } else {
        kvn_ucx_call(worker, list_endpoint, self);
        if (self->is_listed) {
            *out = self;
            return KVN_OK;
        }
        kvn_fail(failure, KVN_CANCELLED, 0, "this worker of UCX is closed");
    }
    dispose(self);
    return failure->status;
}

/* ---- failing; the caller holds the progress lock, outside of callbacks of UCX ---- */

static void on_closed(void *request, kvn_ucs_status status, void *argument)
{
    kvn_ucx_endpoint *self = argument;
    kvn_ucx_worker *worker = self->worker;

    (void)status; /* UCX has released the endpoint, whatever the status */
    if (request)
        worker->calls->ucp_request_free(request);
    self->is_closed = true;
    worker->has_completed = true;
}

/* UCX refuses to close an endpoint by force if it does not watch the peer. */
static void close_handle(kvn_ucx_endpoint *self)
{
    const kvn_ucp_request_param param = {
        .op_attr_mask =
            KVN_UCP_OP_ATTR_CALLBACK | KVN_UCP_OP_ATTR_USER_DATA | KVN_UCP_OP_ATTR_FLAGS,
        .flags = self->is_watched ? KVN_UCP_EP_CLOSE_FLAG_FORCE : 0,
        .send = on_closed,
        .user_data = self,
    };
    kvn_ucp_ep_h handle = self->handle;

    if (!handle)
        return;
    self->handle = NULL;
    kvn_ucs_status_ptr request = self->worker->calls->ucp_ep_close_nbx(handle, &param);
    if (request == NULL || KVN_UCS_IS_ERROR(request))
        on_closed(NULL, KVN_UCS_POINTER_STATUS(request), self);
}

static void destroy_keys(const kvn_ucx *calls, kvn_ucx_keys *keys)
{
    for (; keys->count; keys->count--)
        calls->ucp_rkey_destroy(keys->items[keys->count - 1]);
}

void kvn_ucx_keys_hold(kvn_ucx_endpoint *self, kvn_ucx_keys *keys)
{
    keys->next = self->keys;
    self->keys = keys;
}

void kvn_ucx_keys_drop(kvn_ucx_endpoint *self, kvn_ucx_keys *keys)
{
    kvn_ucx_keys **at = &self->keys;

    while (*at && *at != keys)
        at = &(*at)->next;
    if (*at)
        *at = keys->next;
    destroy_keys(self->worker->calls, keys);
}

static void destroy_all_keys(kvn_ucx_endpoint *self)
{
    const kvn_ucx *calls = self->worker->calls;

    if (self->generations_key)
        calls->ucp_rkey_destroy(self->generations_key);
    if (self->tickets_key)
        calls->ucp_rkey_destroy(self->tickets_key);
    self->generations_key = self->tickets_key = NULL;
    for (; self->keys; self->keys = self->keys->next)
        destroy_keys(calls, self->keys);
}

/* UCX on ucp_rkey_destroy (ucp/api/ucp.h, since its pull request 3876): a key "must be destroyed after all outstanding
 * operations which are using it are flushed, and before the endpoint on which it was unpacked is destroyed". Only a
 * close by force ends the operations of a peer that does not answer, so there the close comes first. */
static unsigned end(void *context)
{
    kvn_ucx_endpoint *self = context;

    if (self->num_operations > 0 && self->is_watched)
        close_handle(self);
    if (self->num_operations > 0)
        return 0;
    destroy_all_keys(self);
    close_handle(self);
    if (!self->is_closed)
        return 0;
    kvn_ucx_remove_task(self->worker, &self->ending);
    atomic_fetch_sub(&self->worker->num_endpoints, 1);
    kvn_ucx_notify(self->worker);
    kvn_ucx_endpoint_release(self); /* the worker's hold */
    return 1;
}

static void tear_down(void *context)
{
    kvn_ucx_endpoint *self = context, **at = &self->worker->endpoints;

    while (*at && *at != self)
        at = &(*at)->next;
    if (*at)
        *at = self->next;
    kvn_ucx_add_task(self->worker, &self->ending, end, self);
}

void kvn_ucx_endpoint_fail(kvn_ucx_endpoint *self, int status, int code, const char *message)
{
    const uint64_t one = 1;

    pthread_mutex_lock(&self->worker->mutex);
    const bool is_first = atomic_load(&self->state) != KVN_UCX_FAILED;
    if (is_first) {
        kvn_fail(&self->why, status, code, "%s", message);
        atomic_store(&self->state, KVN_UCX_FAILED);
    }
    pthread_mutex_unlock(&self->worker->mutex);
    if (!is_first)
        return;
    while (write(self->death_fd, &one, sizeof one) < 0 && errno == EINTR)
        ;
    kvn_ucx_post(self->worker, &self->teardown, tear_down, self);
}

bool kvn_ucx_endpoint_has_failed(const kvn_ucx_endpoint *self, kvn_failure *why)
{
    if (atomic_load(&self->state) != KVN_UCX_FAILED)
        return false;
    *why = self->why;
    return true;
}

static void fail_all(void *context)
{
    kvn_ucx_worker *worker = context;

    worker->is_closed = true;
    for (kvn_ucx_endpoint *it = worker->endpoints; it; it = it->next)
        kvn_ucx_endpoint_fail(it, KVN_CANCELLED, 0, "its engine was closed");
}

static bool has_no_endpoints(const void *context)
{
    return atomic_load(&((const kvn_ucx_worker *)context)->num_endpoints) == 0;
}

void kvn_ucx_endpoints_close(kvn_ucx_worker *worker)
{
    if (kvn_ucx_worker_is_forked(worker))
        return;
    kvn_ucx_call(worker, fail_all, worker);
    kvn_ucx_wait(worker, has_no_endpoints, worker, kvn_now_ns() + CLOSE_NS);
}

static void fail_for(kvn_ucx_endpoint *self, const char *what, kvn_ucs_status status)
{
    char text[200];

    snprintf(text, sizeof text, "%s: %s", what, self->worker->calls->ucs_status_string(status));
    kvn_ucx_endpoint_fail(self, KVN_PEER_GONE, status, text);
}

/* ---- connecting, with the progress lock ---- */

static void on_error(void *argument, kvn_ucp_ep_h ep, kvn_ucs_status status)
{
    (void)ep;
    fail_for(argument, "the connection to the peer's UCX is lost", status);
}

static kvn_ucs_status make_handle(kvn_ucx_endpoint *self, bool is_watched)
{
    const kvn_ucp_ep_params params = {
        .field_mask = KVN_UCP_EP_PARAM_REMOTE_ADDRESS | KVN_UCP_EP_PARAM_ERR_HANDLING_MODE |
                      KVN_UCP_EP_PARAM_ERR_HANDLER,
        .address = self->remote.address,
        .err_mode = is_watched ? KVN_UCP_ERR_HANDLING_MODE_PEER : KVN_UCP_ERR_HANDLING_MODE_NONE,
        .err_handler = {.cb = on_error, .arg = self},
    };

    self->is_watched = is_watched;
    return self->worker->calls->ucp_ep_create(self->worker->handle, &params, &self->handle);
}

static int open_handle(kvn_ucx_endpoint *self, kvn_failure *failure)
{
    kvn_ucx_log_clear();
    kvn_ucs_status status = make_handle(self, true);
    /* Between processes of one host, transports that read memory directly do not watch the peer. */
    if (status == KVN_UCS_ERR_UNREACHABLE)
        status = make_handle(self, false);
    self->is_closed = status != KVN_UCS_OK;
    if (status == KVN_UCS_OK)
        return KVN_OK;
    self->handle = NULL;
    kvn_fail(failure, KVN_PEER_GONE, status,
             "UCX cannot reach the peer (this side has %.60s): %s", self->worker->transports,
             self->worker->calls->ucs_status_string(status));
    kvn_ucx_log_append(failure->message, sizeof failure->message);
    return failure->status;
}

int kvn_ucx_unpack_key(kvn_ucx_endpoint *self, const void *packed, size_t nbytes,
                       kvn_ucp_rkey_h *out, kvn_failure *failure)
{
    const kvn_ucx_worker *worker = self->worker;
    void *copy = padded(packed, nbytes);

    if (!copy)
        return kvn_fail(failure, KVN_NO_MEMORY, ENOMEM, "no memory for a key");
    const kvn_ucs_status status = worker->calls->ucp_ep_rkey_unpack(self->handle, copy, out);
    free(copy);
    return status == KVN_UCS_OK
               ? KVN_OK
               : kvn_ucx_fail(worker->library, "ucp_ep_rkey_unpack", status, failure);
}

void kvn_ucx_read_words(kvn_ucx_endpoint *self, uint64_t *out, size_t nbytes, uint64_t remote,
                        kvn_ucp_rkey_h key, kvn_ucp_send_nbx_callback done, void *argument)
{
    const kvn_ucp_request_param param = {
        .op_attr_mask = KVN_UCP_OP_ATTR_CALLBACK | KVN_UCP_OP_ATTR_USER_DATA |
                        KVN_UCP_OP_ATTR_MEMORY_TYPE,
        .send = done,
        .memory_type = KVN_UCS_MEMORY_HOST,
        .user_data = argument,
    };

    self->num_operations++;
    kvn_ucs_status_ptr request =
        self->worker->calls->ucp_get_nbx(self->handle, out, nbytes, remote, key, &param);
    if (request == NULL || KVN_UCS_IS_ERROR(request))
        done(NULL, KVN_UCS_POINTER_STATUS(request), argument);
}

void kvn_ucx_note_read(kvn_ucx_endpoint *self, void *request)
{
    if (request)
        self->worker->calls->ucp_request_free(request);
    self->num_operations--;
    self->worker->has_completed = true;
}

/* Called when the requested word has arrived, or its read has failed. */
static void on_answer(void *request, kvn_ucs_status status, void *argument)
{
    kvn_ucx_endpoint *self = argument;
    int open = KVN_UCX_OPEN;

    kvn_ucx_note_read(self, request);
    if (status != KVN_UCS_OK)
        fail_for(self, "the peer's memory cannot be read", status);
    else if (atomic_compare_exchange_strong(&self->state, &open, KVN_UCX_CONNECTED))
        kvn_ucx_notify(self->worker);
    kvn_ucx_endpoint_release(self);
}

static void start_connecting(void *context)
{
    kvn_ucx_endpoint *self = context;
    const kvn_ucx_remote *remote = &self->remote;
    kvn_failure failure;

    if (self->handle || atomic_load(&self->state) != KVN_UCX_OPEN)
        return;
    if (open_handle(self, &failure) != KVN_OK ||
        kvn_ucx_find_transport(self->worker->library, self->handle, self->transport, &failure) != KVN_OK ||
        kvn_ucx_unpack_key(self, remote->generations_key, remote->generations_key_nbytes,
                           &self->generations_key, &failure) != KVN_OK ||
        kvn_ucx_unpack_key(self, remote->tickets_key, remote->tickets_key_nbytes,
                           &self->tickets_key, &failure) != KVN_OK) {
        kvn_ucx_endpoint_fail(self, failure.status, failure.code, failure.message);
        return;
    }
    kvn_ucx_endpoint_hold(self); /* held, because UCX writes to it */
    kvn_ucx_read_words(self, &self->word, sizeof self->word, remote->generations, self->generations_key, on_answer,
                       self);
}

static bool is_settled(const void *context)
{
    return atomic_load(&((const kvn_ucx_endpoint *)context)->state) != KVN_UCX_OPEN;
}

int kvn_ucx_endpoint_connect(kvn_ucx_endpoint *self, int64_t deadline_ns, kvn_failure *failure)
{
    if (!is_settled(self))
        kvn_ucx_call(self->worker, start_connecting, self);
    if (!kvn_ucx_wait(self->worker, is_settled, self, deadline_ns))
        return kvn_fail(failure, KVN_TIMEOUT, 0,
                        "the peer's memory was not read over %s within the time allowed",
                        self->transport);
    return kvn_ucx_endpoint_has_failed(self, failure) ? failure->status : KVN_OK;
}

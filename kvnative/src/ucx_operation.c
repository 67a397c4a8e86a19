/* The operations of UCX that a one-sided transfer is made of: posted, and taken when they are complete. All
 * under the end's turn. */
#include <inttypes.h>

#include "ucx_mover.h"

#define MAX_PIECE (UINT64_C(8) << 20) /* of a descriptor in one operation: what an abort may wait for */

static const kvn_ucx *calls_of(const kvn_request *request)
{
    return kvn_ucx_end_calls(kvn_ucx_link_end(request->self->link));
}

/* An error that says nothing of the connection, but of what was asked. */
static bool is_refusal(kvn_ucs_status status)
{
    return status == KVN_UCS_ERR_NO_MEMORY || status == KVN_UCS_ERR_INVALID_PARAM ||
           status == KVN_UCS_ERR_UNSUPPORTED || status == KVN_UCS_ERR_CANCELED ||
           status == KVN_UCS_ERR_NO_RESOURCE;
}

static void note_error(kvn_request *request, uint64_t descriptor, kvn_ucs_status status)
{
    kvn_ucx_one_sided *self = request->self;
    const char *call = self->direction == KVN_PEER_GET ? "ucp_get" : "ucp_put";
    const char *text = calls_of(request)->ucs_status_string(status);
    kvn_failure failure;

    if (request->failure.status != KVN_OK)
        return;
    if (kvn_ucx_link_has_failed(self->link, &failure)) {
        failure.status = KVN_PEER_GONE; /* the operation ended for that */
    } else if (is_refusal(status)) {
        /* It cancels what it finds no way for. */
        kvn_fail(&failure, status == KVN_UCS_ERR_NO_MEMORY ? KVN_NO_MEMORY : KVN_UNSUPPORTED,
                 status, "UCX refuses %s: %s%s", call, text,
                 status == KVN_UCS_ERR_CANCELED
                     ? ": it has no one-sided way for memory of these kinds over this link;"
                       " between the host and a device it needs RDMA, on one host as well"
                     : "");
    } else {
        kvn_fail(&failure, KVN_PEER_GONE, status,
                 "%s failed: %s; the peer has died, or has freed memory that was in use", call,
                 text);
        kvn_ucx_link_fail(self->link, failure.status, failure.code, failure.message);
    }
    kvn_ucx_move_fail(request, descriptor, &failure);
}

static void complete(kvn_ucx_operation *operation, kvn_ucs_status status)
{
    kvn_request *request = operation->request;

    request->in_flight--;
    request->bytes_in_flight -= operation->nbytes;
    if (status == KVN_UCS_OK)
        atomic_fetch_add_explicit(&request->moved, operation->nbytes, memory_order_relaxed);
    else if (request->why == KVN_OK)
        note_error(request, operation->descriptor, status);
    operation->next = request->free;
    request->free = operation;
}

/* What follows, the mover does in its next step: UCX is not called from here. */
static void on_complete(void *handle, kvn_ucs_status status, void *user_data)
{
    kvn_ucx_operation *operation = user_data;

    calls_of(operation->request)->ucp_request_free(handle);
    complete(operation, status);
}

static kvn_ucp_request_param parameters(kvn_ucx_operation *operation)
{
    return (kvn_ucp_request_param){
        .op_attr_mask = KVN_UCP_OP_ATTR_CALLBACK | KVN_UCP_OP_ATTR_USER_DATA,
        .send = on_complete,
        .user_data = operation,
    };
}

static kvn_ucx_operation *begin(kvn_request *request, uint64_t descriptor, uint64_t nbytes)
{
    kvn_ucx_operation *operation = request->free;

    request->free = operation->next;
    operation->request = request;
    operation->descriptor = descriptor;
    operation->nbytes = nbytes;
    request->in_flight++;
    request->bytes_in_flight += nbytes;
    return operation;
}

static void note_posted(kvn_ucx_operation *operation, kvn_ucs_status_ptr handle)
{
    if (handle == NULL || KVN_UCS_IS_ERROR(handle))
        complete(operation, KVN_UCS_POINTER_STATUS(handle));
}

void kvn_ucx_post_piece(kvn_request *request, kvn_ucp_ep_h ep)
{
    const kvn_ucx_one_sided *self = request->self;
    const kvn_ucx *calls = calls_of(request);
    const kvn_columns *batch = &request->batch;
    const bool is_get = self->direction == KVN_PEER_GET;
    const uint64_t i = request->cursor, left = batch->nbytes[i] - request->skip;
    const uint64_t nbytes = left < MAX_PIECE ? left : MAX_PIECE;
    const uint64_t local = (is_get ? batch->dst[i] : batch->src[i]) + request->skip;
    const uint64_t remote = (is_get ? batch->src[i] : batch->dst[i]) + request->skip;

    request->skip += nbytes;
    if (nbytes == left) {
        request->cursor++;
        request->skip = 0;
    }
    if (nbytes == 0)
        return;
    /* It is in one: the whole of the batch was looked up before. */
    const size_t range = kvn_ucx_range_of(self, remote, nbytes, &request->remote_hint);
    const kvn_ucx_region *region =
        kvn_ucx_atlas_find(request->atlas, local, nbytes, &request->local_hint);
    kvn_ucp_rkey_h key = self->keys[self->ranges[range].key];
    kvn_ucx_operation *operation = begin(request, i, nbytes);
    kvn_ucp_request_param param = parameters(operation);

    param.op_attr_mask |= KVN_UCP_OP_ATTR_MEMORY_TYPE;
    param.memory_type = region ? region->memory_type : self->local_type;
    if (region) {
        param.op_attr_mask |= KVN_UCP_OP_ATTR_MEMH;
        param.memh = region->memory;
    }
    if (batch->count > 1)
        param.op_attr_mask |= KVN_UCP_OP_ATTR_MULTI_SEND;
    void *buffer = (void *)(uintptr_t)local;
    note_posted(operation, is_get ? calls->ucp_get_nbx(ep, buffer, nbytes, remote, key, &param)
                                  : calls->ucp_put_nbx(ep, buffer, nbytes, remote, key, &param));
}

void kvn_ucx_post_look(kvn_request *request, kvn_ucp_ep_h ep)
{
    const kvn_ucx_one_sided *self = request->self;
    kvn_ucx_use *use = &request->uses[request->cursor++];
    const uint64_t remote = self->board + sizeof(uint64_t) * self->ranges[use->range].slot;
    kvn_ucx_operation *operation = begin(request, KVN_NO_DESCRIPTOR, 0);
    kvn_ucp_request_param param = parameters(operation);

    param.op_attr_mask |= KVN_UCP_OP_ATTR_MEMORY_TYPE;
    param.memory_type = KVN_UCS_MEMORY_HOST;
    use->word = 0;
    note_posted(operation, calls_of(request)->ucp_get_nbx(ep, &use->word, sizeof use->word, remote,
                                                           self->board_key, &param));
}

void kvn_ucx_post_flush(kvn_request *request, kvn_ucp_ep_h ep)
{
    kvn_ucx_operation *operation = begin(request, KVN_NO_DESCRIPTOR, 0);
    kvn_ucp_request_param param = parameters(operation);

    request->cursor++;
    note_posted(operation, calls_of(request)->ucp_ep_flush_nbx(ep, &param));
}

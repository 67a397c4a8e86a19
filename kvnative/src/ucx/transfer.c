/* Takes transfers through their phases, a few operations of each in turn. All functions need the progress lock. */
#include "ucx/transfer.h"

#include <inttypes.h>

#include "core/announce.h"
#include "core/report.h"

#define MAX_PIECE (UINT64_C(8) << 20) /* maximum of one operation, for which an abort may wait */
#define MAX_BYTES_IN_FLIGHT (UINT64_C(32) << 20)
#define POSTS_A_STEP 32

static const kvn_ucx *calls_of(const kvn_request *request)
{
    return request->route->endpoint->worker->calls;
}

/* ---- failures ---- */

/* Keeps the first failure. */
static void fail(kvn_request *request, uint64_t descriptor, const kvn_failure *failure)
{
    if (request->failure.status != KVN_OK)
        return;
    request->failure = *failure;
    request->failed = descriptor;
}

/* Whatever made the endpoint fail, to the transfer the peer is gone, and no descriptor is at fault. */
static void note_endpoint_failure(kvn_request *request)
{
    kvn_failure failure;

    if (!kvn_ucx_endpoint_has_failed(request->route->endpoint, &failure))
        return;
    failure.status = KVN_PEER_GONE;
    fail(request, KVN_NO_DESCRIPTOR, &failure);
}

static bool is_stopping(const kvn_request *request)
{
    return request->why != KVN_OK || request->failure.status != KVN_OK;
}

/* Returns true for an error of the request, as opposed to the connection. */
static bool is_refusal(kvn_ucs_status status)
{
    return status == KVN_UCS_ERR_NO_MEMORY || status == KVN_UCS_ERR_INVALID_PARAM ||
           status == KVN_UCS_ERR_UNSUPPORTED || status == KVN_UCS_ERR_CANCELED ||
           status == KVN_UCS_ERR_NO_RESOURCE;
}

static void note_error(kvn_request *request, uint64_t descriptor, kvn_ucs_status status)
{
    const kvn_ucx_route *route = request->route;
    const char *call = route->direction == KVN_PEER_GET ? "ucp_get" : "ucp_put";
    const char *text = calls_of(request)->ucs_status_string(status);
    kvn_failure failure;

    note_endpoint_failure(request); /* why the operation ended */
    if (request->failure.status != KVN_OK)
        return;
    if (is_refusal(status)) {
        /* UCX cancels operations that none of its transports can do. */
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
        kvn_ucx_endpoint_fail(route->endpoint, failure.status, failure.code, failure.message);
    }
    fail(request, descriptor, &failure);
}

/* ---- operations ---- */

static void complete(kvn_ucx_operation *operation, kvn_ucs_status status)
{
    kvn_request *request = operation->request;

    request->in_flight--;
    request->route->endpoint->num_operations--;
    request->bytes_in_flight -= operation->nbytes;
    if (status == KVN_UCS_OK)
        atomic_fetch_add_explicit(&request->moved, operation->nbytes, memory_order_relaxed);
    else if (request->why == KVN_OK)
        note_error(request, operation->descriptor, status);
    operation->next = request->free;
    request->free = operation;
    request->route->endpoint->worker->has_completed = true;
}

/* The next step does the rest, since a callback must not call UCX. */
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
    request->route->endpoint->num_operations++;
    request->bytes_in_flight += nbytes;
    return operation;
}

static void note_posted(kvn_ucx_operation *operation, kvn_ucs_status_ptr handle)
{
    if (handle == NULL || KVN_UCS_IS_ERROR(handle))
        complete(operation, KVN_UCS_POINTER_STATUS(handle));
}

static void post_piece(kvn_request *request, kvn_ucp_ep_h ep)
{
    const kvn_ucx_route *route = request->route;
    const kvn_ucx *calls = calls_of(request);
    const kvn_columns *batch = &request->batch;
    const bool is_get = route->direction == KVN_PEER_GET;
    const uint64_t i = request->descriptor, left = batch->nbytes[i] - request->skip;
    const uint64_t nbytes = left < MAX_PIECE ? left : MAX_PIECE;
    const uint64_t local = (is_get ? batch->dst[i] : batch->src[i]) + request->skip;
    const uint64_t remote = (is_get ? batch->src[i] : batch->dst[i]) + request->skip;

    request->skip += nbytes;
    if (nbytes == left) {
        request->descriptor++;
        request->skip = 0;
    }
    if (!is_get)
        request->round_left -= nbytes < request->round_left ? nbytes : request->round_left;
    if (nbytes == 0)
        return;
    /* Always found: all of the batch was looked up before. */
    const size_t range = kvn_ucx_range_of(route, remote, nbytes, &request->remote_hint);
    const kvn_ucx_region *region =
        kvn_ucx_snapshot_find(request->snapshot, local, nbytes, &request->local_hint);
    kvn_ucp_rkey_h key = route->keys.items[route->ranges[range].key];
    kvn_ucx_operation *operation = begin(request, i, nbytes);
    kvn_ucp_request_param param = parameters(operation);

    param.op_attr_mask |= KVN_UCP_OP_ATTR_MEMORY_TYPE;
    param.memory_type = region ? region->memory_type : route->local_type;
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

static void post_check(kvn_request *request, kvn_ucp_ep_h ep)
{
    const kvn_ucx_route *route = request->route;
    const kvn_ucx_endpoint *endpoint = route->endpoint;
    kvn_ucx_use *use = &request->uses[request->cursor++];
    const uint64_t remote = endpoint->remote.generations + sizeof(uint64_t) * use->slot;
    kvn_ucx_operation *operation = begin(request, KVN_NO_DESCRIPTOR, 0);
    kvn_ucp_request_param param = parameters(operation);

    param.op_attr_mask |= KVN_UCP_OP_ATTR_MEMORY_TYPE;
    param.memory_type = KVN_UCS_MEMORY_HOST;
    use->found = 0;
    note_posted(operation, calls_of(request)->ucp_get_nbx(ep, &use->found, sizeof use->found, remote,
                                                          endpoint->generations_key, &param));
}

static void post_flush(kvn_request *request, kvn_ucp_ep_h ep)
{
    kvn_ucx_operation *operation = begin(request, KVN_NO_DESCRIPTOR, 0);
    kvn_ucp_request_param param = parameters(operation);

    request->cursor++;
    note_posted(operation, calls_of(request)->ucp_ep_flush_nbx(ep, &param));
}

/* ---- announcing: core/announce.h ---- */

static void put_ticket(kvn_request *request, unsigned place)
{
    kvn_ucx_worker *worker = request->route->endpoint->worker;
    const uint64_t ticket = kvn_next_ticket(request->route->endpoint->remote.tag, &worker->num_announced);

    atomic_store_explicit(&worker->tickets[place], ticket, memory_order_relaxed);
    /* UCX may read the generations by plain loads of mapped memory. Without a fence these may come before the store. */
    atomic_thread_fence(memory_order_seq_cst);
    request->ticket = place + 1;
}

/* Returns false without room for a ticket. */
static bool announce(kvn_request *request)
{
    const kvn_ucx_worker *worker = request->route->endpoint->worker;

    if (request->ticket || request->route->direction != KVN_PEER_PUT)
        return true;
    for (unsigned i = 0; i < KVN_UCX_TICKETS; i++)
        if (atomic_load_explicit(&worker->tickets[i], memory_order_relaxed) == 0) {
            put_ticket(request, i);
            return true;
        }
    return false;
}

/* ---- phases ---- */

static bool is_check(const kvn_request *request)
{
    return request->phase == KVN_UCX_CHECKING_BEFORE || request->phase == KVN_UCX_CHECKING_AFTER;
}

static void compare_generations(kvn_request *request)
{
    const bool has_begun = request->descriptor || request->skip;

    for (uint64_t i = 0; i < request->num_uses; i++) {
        const kvn_ucx_use *use = &request->uses[i];
        kvn_failure failure;

        if (use->found == use->expected)
            continue;
        if (use->lease)
            kvn_fail(&failure, KVN_UNMAPPED, 0, "%s was released or moved by the peer, or has expired%s", use->lease->name,
                     has_begun ? " meanwhile" : "");
        else
            kvn_fail(&failure, KVN_UNMAPPED, 0,
                     "the peer has deregistered [0x%" PRIx64 ", 0x%" PRIx64 ") %s (slot %" PRIu64
                     " of its generation table has %" PRIu64 ", expected %" PRIu64 ")",
                     use->range->address, use->range->address + use->range->nbytes,
                     has_begun ? "meanwhile" : "before", use->slot, use->found, use->expected);
        fail(request, use->first, &failure);
        return;
    }
}

/* Returns true if this phase has operations to post. */
static bool has_posts(const kvn_request *request)
{
    switch (request->phase) {
    case KVN_UCX_MOVING:
        return request->descriptor < request->batch.count && request->round_left > 0 &&
               !is_stopping(request);
    case KVN_UCX_FLUSHING: return request->route->direction == KVN_PEER_PUT && request->cursor == 0;
    case KVN_UCX_CHECKING_BEFORE:
    case KVN_UCX_CHECKING_AFTER: return request->cursor < request->num_uses;
    default: return false;
    }
}

static void post(kvn_request *request, kvn_ucp_ep_h ep)
{
    switch (request->phase) {
    case KVN_UCX_MOVING: post_piece(request, ep); break;
    case KVN_UCX_FLUSHING: post_flush(request, ep); break;
    default: post_check(request, ep); break;
    }
}

static void advance(kvn_request *request)
{
    const bool is_round_over =
        request->phase == KVN_UCX_FLUSHING && request->descriptor < request->batch.count;

    /* Order the accesses of one phase before those of the next, even if UCX makes them by plain loads and stores:
     * generations are read before the bytes, and again after them. */
    atomic_thread_fence(memory_order_seq_cst);
    if (is_check(request))
        compare_generations(request);
    request->cursor = 0;
    request->round_left = KVN_ROUND_NBYTES;
    if (is_round_over && !is_stopping(request)) {
        put_ticket(request, request->ticket - 1); /* a new ticket, because all earlier bytes have arrived */
        request->phase = KVN_UCX_CHECKING_BEFORE;
    } else {
        request->phase++;
    }
}

/* ---- steps ---- */

static void fill_report(kvn_request *request)
{
    kvn_report *report = request->report;

    kvn_report_begin(report);
    report->status = KVN_OK;
    report->bytes_done = atomic_load_explicit(&request->moved, memory_order_relaxed);
    if (!is_stopping(request))
        return;
    kvn_report_add_span(report, 0, request->batch.count);
    if (request->why != KVN_OK) {
        kvn_report_abandoned(report, request->why, request->batch.count, request->total);
        return;
    }
    report->status = request->failure.status;
    report->code = request->failure.code;
    report->failed = request->failed;
    snprintf(report->message, sizeof report->message, "%s", request->failure.message);
}

/* Finishes the request, which may be freed from then on. */
static void finish(kvn_request *request)
{
    kvn_ucx_worker *worker = request->route->endpoint->worker;

    kvn_ucx_remove_task(worker, &request->task);
    if (request->ticket) /* an owner that reads the 0 also sees the bytes */
        atomic_store_explicit(&worker->tickets[request->ticket - 1], 0, memory_order_release);
    fill_report(request);
    if (request->batch.end)
        request->batch.end->call(request->batch.end, request->report->status);
    atomic_store(&request->finished, true);
    kvn_ucx_notify(worker);
}

/* Takes a bounded step, and returns its number of actions. The request may be freed afterwards. */
static unsigned step(void *context)
{
    kvn_request *request = context;
    const kvn_ucx_endpoint *endpoint = request->route->endpoint;
    unsigned count = 0;

    note_endpoint_failure(request);
    for (;;) {
        /* Always flush, because puts may be in flight until a flush has ended. */
        if (is_stopping(request) && is_check(request))
            request->phase = KVN_UCX_DONE;
        if (request->phase == KVN_UCX_DONE)
            break;
        if (!has_posts(request)) {
            if (request->in_flight > 0)
                return count;
            advance(request);
        } else if (!endpoint->handle) { /* it has failed */
            if (!endpoint->is_closed)
                return count;
            request->phase = KVN_UCX_DONE;
        } else if (count == POSTS_A_STEP || !request->free ||
                   request->bytes_in_flight >= MAX_BYTES_IN_FLIGHT || !announce(request)) {
            return count;
        } else {
            post(request, endpoint->handle);
            count++;
        }
    }
    if (request->in_flight > 0)
        return count;
    finish(request);
    return count + 1;
}

void kvn_ucx_begin_transfer(void *context)
{
    kvn_request *request = context;

    kvn_ucx_add_task(request->route->endpoint->worker, &request->task, step, request);
}

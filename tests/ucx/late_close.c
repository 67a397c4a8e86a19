/* A UCX that closes no endpoint before it may, and ends what is large only then. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>

#include "kvnative/ucx.h"

#define LARGE 65536
#define ROOM 1024

static struct held {
    kvn_ucp_send_nbx_callback send;
    void *user_data;
} held[ROOM + 1]; /* the last one is the close */

static _Atomic unsigned num_held;
static kvn_ucp_ep_h closing;
static _Atomic int64_t due_ns = INT64_MAX;

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

/* How many transfers were begun, and are held. */
unsigned num_begun(void) { return num_held; }

/* From then on. */
void may_close_in(int64_t ms) { due_ns = now_ns() + ms * 1000000; }

static void *hold(struct held *it, const kvn_ucp_request_param *param)
{
    *it = (struct held){param->send, param->user_data};
    return it;
}

kvn_ucs_status_ptr ucp_get_nbx(kvn_ucp_ep_h ep, void *buffer, size_t count, uint64_t remote,
                               kvn_ucp_rkey_h rkey, const kvn_ucp_request_param *param)
{
    kvn_ucs_status_ptr (*real)(kvn_ucp_ep_h, void *, size_t, uint64_t, kvn_ucp_rkey_h,
                               const kvn_ucp_request_param *) = dlsym(RTLD_NEXT, "ucp_get_nbx");

    return count < LARGE || num_held == ROOM ? real(ep, buffer, count, remote, rkey, param)
                                             : hold(&held[num_held++], param);
}

kvn_ucs_status_ptr ucp_ep_close_nbx(kvn_ucp_ep_h ep, const kvn_ucp_request_param *param)
{
    closing = ep;
    return hold(&held[ROOM], param);
}

void ucp_request_free(void *request)
{
    void (*real)(void *) = dlsym(RTLD_NEXT, "ucp_request_free");

    if ((struct held *)request < held || (struct held *)request > held + ROOM)
        real(request);
}

static void end_all(void)
{
    kvn_ucs_status_ptr (*real)(kvn_ucp_ep_h, const kvn_ucp_request_param *) =
        dlsym(RTLD_NEXT, "ucp_ep_close_nbx");
    const kvn_ucp_request_param param = {.op_attr_mask = 0};

    real(closing, &param);
    closing = NULL;
    for (; num_held; num_held--)
        held[num_held - 1].send(&held[num_held - 1], KVN_UCS_ERR_CANCELED,
                                held[num_held - 1].user_data);
    held[ROOM].send(&held[ROOM], KVN_UCS_OK, held[ROOM].user_data);
}

unsigned ucp_worker_progress(kvn_ucp_worker_h worker)
{
    unsigned (*real)(kvn_ucp_worker_h) = dlsym(RTLD_NEXT, "ucp_worker_progress");

    if (closing && now_ns() >= due_ns)
        end_all();
    return real(worker);
}

/* A UCX that holds large gets and closes of endpoints until may_close_in, and counts destroyed keys. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <time.h>

#include "kvnative/ucx.h"

#define LARGE 65536
#define ROOM 1024
#define HOLD_NS 200000000
#define BUSY ((kvn_ucs_status)-15) /* UCS_ERR_BUSY */
#define REAL(name) (*(__typeof__(&name))dlsym(RTLD_NEXT, #name))

static struct held {
    kvn_ucp_send_nbx_callback send;
    void *user_data;
    kvn_ucp_rkey_h key;
} held[ROOM + 1]; /* gets; the last one is a close */

static struct unpacked {
    kvn_ucp_rkey_h key;
    kvn_ucp_ep_h ep;
} unpacked[ROOM];

static _Atomic unsigned num_held, num_unpacked, num_destroyed, num_in_use, num_after_close;
static kvn_ucp_ep_h closing, closed;
static _Atomic int64_t due_ns = INT64_MAX;
static _Atomic bool is_watching, is_slow;
static pthread_t closing_thread;

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

/* Returns the number of held gets. */
unsigned num_begun(void) { return num_held; }

/* Return the number of destroyed keys: all, those that a held get uses, those of a closed endpoint. */
unsigned keys_destroyed(void) { return num_destroyed; }
unsigned keys_destroyed_in_use(void) { return num_in_use; }
unsigned keys_destroyed_after_close(void) { return num_after_close; }

/* Ends the held operations after `ms`. */
void may_close_in(int64_t ms) { due_ns = now_ns() + ms * 1000000; }

/* From now on, creates endpoints without error handling, although the caller asks for error handling. */
void watch_peers(void) { is_watching = true; }

/* From now on, the calling thread does not end closes. The thread that ends a close returns late from that progress. */
void pass_slowly(void)
{
    closing_thread = pthread_self();
    is_slow = true;
}

static void *hold(struct held *it, const kvn_ucp_request_param *param, kvn_ucp_rkey_h key)
{
    *it = (struct held){param->send, param->user_data, key};
    return it;
}

kvn_ucs_status ucp_ep_create(kvn_ucp_worker_h worker, const kvn_ucp_ep_params *params, kvn_ucp_ep_h *out)
{
    kvn_ucp_ep_params changed = *params;

    if (is_watching)
        changed.field_mask = KVN_UCP_EP_PARAM_REMOTE_ADDRESS;
    return REAL(ucp_ep_create)(worker, &changed, out);
}

kvn_ucs_status ucp_ep_rkey_unpack(kvn_ucp_ep_h ep, const void *packed, kvn_ucp_rkey_h *out)
{
    const kvn_ucs_status status = REAL(ucp_ep_rkey_unpack)(ep, packed, out);

    if (status == KVN_UCS_OK && num_unpacked < ROOM)
        unpacked[num_unpacked++] = (struct unpacked){*out, ep};
    return status;
}

void ucp_rkey_destroy(kvn_ucp_rkey_h key)
{
    for (unsigned i = 0; i < num_held; i++)
        if (held[i].key == key) {
            num_in_use++;
            break;
        }
    for (unsigned i = num_unpacked; i-- > 0;)
        if (unpacked[i].key == key) {
            num_after_close += closed && unpacked[i].ep == closed;
            break;
        }
    num_destroyed++;
    REAL(ucp_rkey_destroy)(key);
}

kvn_ucs_status_ptr ucp_get_nbx(kvn_ucp_ep_h ep, void *buffer, size_t count, uint64_t remote,
                               kvn_ucp_rkey_h rkey, const kvn_ucp_request_param *param)
{
    if (count < LARGE || num_held == ROOM)
        return REAL(ucp_get_nbx)(ep, buffer, count, remote, rkey, param);
    void *made = hold(&held[num_held], param, rkey);
    num_held++;
    return made;
}

kvn_ucs_status_ptr ucp_ep_close_nbx(kvn_ucp_ep_h ep, const kvn_ucp_request_param *param)
{
    closing = closed = ep;
    return hold(&held[ROOM], param, NULL);
}

void ucp_request_free(void *request)
{
    if ((struct held *)request < held || (struct held *)request > held + ROOM)
        REAL(ucp_request_free)(request);
}

static void end_all(void)
{
    const kvn_ucp_request_param param = {.op_attr_mask = 0};
    const kvn_ucp_ep_h ep = closing;

    closing = NULL;
    if (ep)
        REAL(ucp_ep_close_nbx)(ep, &param);
    while (num_held) {
        const struct held it = held[num_held - 1];
        num_held--;
        it.send(&held[num_held], KVN_UCS_ERR_CANCELED, it.user_data);
    }
    if (ep)
        held[ROOM].send(&held[ROOM], KVN_UCS_OK, held[ROOM].user_data);
}

unsigned ucp_worker_progress(kvn_ucp_worker_h worker)
{
    const bool is_mine = !is_slow || !pthread_equal(closing_thread, pthread_self());
    const bool is_late = is_slow && closing;

    if (!is_mine || now_ns() < due_ns)
        return REAL(ucp_worker_progress)(worker);
    end_all();
    if (is_late)
        nanosleep(&(struct timespec){.tv_nsec = HOLD_NS}, NULL);
    return REAL(ucp_worker_progress)(worker);
}

kvn_ucs_status ucp_worker_arm(kvn_ucp_worker_h worker)
{
    return is_slow && closing ? BUSY : REAL(ucp_worker_arm)(worker);
}

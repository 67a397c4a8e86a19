/* BYE, which tells the peer that a link has ended here: he would not notice by himself, since his connection
 * to this end stays up. If messages are queued on the link's line, which is cut, or BYE does not
 * get through before that, it goes by a line of its own. */
#include <stdlib.h>
#include <string.h>

#include "ucx_inside.h"

#define MAX_REASON_NBYTES 160

struct kvn_ucx_farewell {
    kvn_ucx_line line; /* its own, if it has one */
    kvn_ucx_errand errand;
    kvn_ucx_link *link; /* held */
    kvn_ucx_farewell *next;
    kvn_ucx_farewell *previous;
    bool has_line;
    size_t nbytes;
    char reason[MAX_REASON_NBYTES];
};

static void finish(kvn_ucx_farewell *it)
{
    kvn_ucx_end *end = it->link->end;

    if (it->previous)
        it->previous->next = it->next;
    else
        end->farewells = it->next;
    if (it->next)
        it->next->previous = it->previous;
    if (it->has_line && atomic_fetch_sub(&end->num_endpoints, 1) == 1)
        kvn_ucx_notify(end);
    kvn_ucx_link_release(it->link);
    free(it);
}

static void on_closed(kvn_ucx_line *line) { finish((kvn_ucx_farewell *)line); }

static void on_lost(kvn_ucx_line *line, kvn_ucs_status status)
{
    (void)status; /* the peer is not there to be told */
    kvn_ucx_line_close(line);
}

static void call(kvn_ucx_end *end, kvn_ucx_errand *errand);

static void call_later(kvn_ucx_farewell *it)
{
    it->errand.run = call;
    it->errand.is_awaited = false;
    kvn_ucx_do_later(it->link->end, &it->errand);
}

static void on_said(void *request, kvn_ucs_status status, void *argument)
{
    kvn_ucx_farewell *it = argument;

    it->link->end->calls->ucp_request_free(request);
    if (it->has_line)
        kvn_ucx_line_close(&it->line);
    else if (status == KVN_UCS_OK)
        finish(it);
    else
        call_later(it);
}

static kvn_ucs_status_ptr say(kvn_ucx_farewell *it, kvn_ucp_ep_h ep)
{
    const kvn_ucp_request_param param = {
        .op_attr_mask =
            KVN_UCP_OP_ATTR_CALLBACK | KVN_UCP_OP_ATTR_USER_DATA | KVN_UCP_OP_ATTR_FLAGS,
        .flags = KVN_UCP_AM_SEND_FLAG_EAGER,
        .send = on_said,
        .user_data = it,
    };
    return it->link->end->calls->ucp_am_send_nbx(ep, KVN_UCX_BYE, it->link->token,
                                                 sizeof it->link->token, it->reason, it->nbytes,
                                                 &param);
}

/* By a line of its own: the link's is closed by now. */
static void call(kvn_ucx_end *end, kvn_ucx_errand *errand)
{
    kvn_ucx_farewell *it =
        (kvn_ucx_farewell *)((char *)errand - offsetof(kvn_ucx_farewell, errand));

    it->line.on_lost = on_lost;
    it->line.on_closed = on_closed;
    if (kvn_ucx_line_open(&it->line, end, it->link->peer, true) != KVN_UCS_OK) {
        finish(it);
        return;
    }
    it->has_line = true;
    atomic_fetch_add(&end->num_endpoints, 1);
    kvn_ucs_status_ptr request = say(it, it->line.ep);
    if (request == NULL || KVN_UCS_IS_ERROR(request))
        kvn_ucx_line_close(&it->line);
}

void kvn_ucx_say_bye(kvn_ucx_link *link, const char *reason)
{
    kvn_ucx_end *end = link->end;
    kvn_ucx_farewell *it = link->ep && !link->is_lost ? calloc(1, sizeof *it) : NULL;

    if (!it)
        return;
    it->link = link;
    kvn_ucx_link_hold(link);
    it->nbytes = strnlen(reason, sizeof it->reason);
    memcpy(it->reason, reason, it->nbytes);
    it->next = end->farewells;
    if (it->next)
        it->next->previous = it;
    end->farewells = it;
    if (link->num_sending && link->line.is_watched) {
        call_later(it);
        return;
    }
    kvn_ucs_status_ptr request = say(it, link->ep);
    if (request == NULL)
        finish(it);
    else if (KVN_UCS_IS_ERROR(request))
        call_later(it);
}

void kvn_ucx_leave_unsaid(kvn_ucx_end *end)
{
    for (kvn_ucx_farewell *it = end->farewells; it; it = it->next)
        if (it->has_line)
            kvn_ucx_line_close(&it->line);
}

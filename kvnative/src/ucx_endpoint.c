/* A link's endpoint of UCX: made, sent through, described, closed. All under the turn.
 *
 * One that has sends in flight is not closed by force, unless UCX itself has said that it is dead: UCX's TCP
 * leaves such a connection open in mid-message, and runs into freed memory (seen with 1.22). The endpoint of a
 * link that has failed for another reason is left alone until the last of its sends is through. */
#include <stdlib.h>
#include <string.h>

#include "ucx_inside.h"
#include "ucx_log.h"

static void close_now(kvn_ucx_end *end, kvn_ucx_errand *errand)
{
    kvn_ucx_link *link = (kvn_ucx_link *)((char *)errand - offsetof(kvn_ucx_link, closing));

    (void)end;
    kvn_ucx_close_endpoint(link);
}

/* What was left open may go by now. The endpoint holds the link until then. */
static void close_left(kvn_ucx_link *link)
{
    if (!link->is_left || (link->num_sending && !link->is_dead))
        return;
    link->is_left = false;
    link->closing = (kvn_ucx_errand){.run = close_now};
    kvn_ucx_do_later(link->end, &link->closing);
}

static void on_error(void *argument, kvn_ucp_ep_h ep, kvn_ucs_status status)
{
    kvn_ucx_link *link = argument;
    char text[200];

    if (ep)
        link->is_dead = true;
    snprintf(text, sizeof text, "the connection to the peer's UCX is lost: %s",
             link->end->calls->ucs_status_string(status));
    kvn_ucx_link_fail(link, KVN_PEER_GONE, status, text);
    close_left(link);
}

int kvn_ucx_make_endpoint(kvn_ucx_link *link, kvn_failure *failure)
{
    kvn_ucx_end *end = link->end;
    kvn_ucp_ep_params params = {
        .field_mask = KVN_UCP_EP_PARAM_REMOTE_ADDRESS | KVN_UCP_EP_PARAM_ERR_HANDLING_MODE |
                      KVN_UCP_EP_PARAM_ERR_HANDLER,
        .address = link->peer,
        .err_mode = KVN_UCP_ERR_HANDLING_MODE_PEER,
        .err_handler = {.cb = on_error, .arg = link},
    };
    kvn_ucx_log_clear();
    kvn_ucs_status status = end->calls->ucp_ep_create(end->worker, &params, &link->ep);

    /* Between processes of one host, what reads memory itself does not watch over the peer. */
    link->is_unwatched = status == KVN_UCS_ERR_UNREACHABLE && end->mode == KVN_UCX_ONE_SIDED;
    if (link->is_unwatched) {
        params.err_mode = KVN_UCP_ERR_HANDLING_MODE_NONE;
        status = end->calls->ucp_ep_create(end->worker, &params, &link->ep);
    }
    if (status != KVN_UCS_OK) { /* no network in common, or nobody is there any more */
        link->ep = NULL;
        kvn_fail(failure, kvn_ucx_status(status), status,
                 "UCX cannot reach the peer (this side has %.60s): %s", end->transports,
                 end->calls->ucs_status_string(status));
        kvn_ucx_log_append(failure->message, sizeof failure->message);
        return failure->status;
    }
    kvn_ucx_link_hold(link); /* until the endpoint is closed */
    atomic_fetch_add(&end->num_endpoints, 1);
    return KVN_OK;
}

static void forget_endpoint(kvn_ucx_link *link)
{
    kvn_ucx_end *end = link->end;

    if (atomic_fetch_sub(&end->num_endpoints, 1) == 1)
        kvn_ucx_notify(end);
    kvn_ucx_link_release(link);
}

static void on_closed(void *request, kvn_ucs_status status, void *argument)
{
    kvn_ucx_link *link = argument;

    (void)status; /* whatever it is, the endpoint is gone */
    link->end->calls->ucp_request_free(request);
    forget_endpoint(link);
}

void kvn_ucx_close_endpoint(kvn_ucx_link *link)
{
    kvn_ucp_request_param param = {
        .op_attr_mask =
            KVN_UCP_OP_ATTR_CALLBACK | KVN_UCP_OP_ATTR_USER_DATA | KVN_UCP_OP_ATTR_FLAGS,
        .flags = link->is_unwatched ? 0 : KVN_UCP_EP_CLOSE_FLAG_FORCE, /* UCX refuses it there */
        .send = on_closed,
        .user_data = link,
    };
    kvn_ucp_ep_h ep = link->ep;

    if (!ep)
        return;
    link->ep = NULL;
    kvn_ucs_status_ptr request = link->end->calls->ucp_ep_close_nbx(ep, &param);
    if (request == NULL || KVN_UCS_IS_ERROR(request))
        forget_endpoint(link);
}

static void on_sent(void *request, kvn_ucs_status status, void *argument)
{
    kvn_ucx_send *send = argument;
    kvn_ucx_link *link = send->link;
    kvn_failure why;

    link->end->calls->ucp_request_free(request);
    link->num_sending--;
    if (status != KVN_UCS_OK)
        on_error(link, NULL, status); /* mostly it has failed before, and this is why it was cancelled */
    if (status == KVN_UCS_OK || !kvn_ucx_link_has_failed(link, &why))
        why.status = KVN_OK;
    send->on_sent(send, why.status);
    close_left(link);
    kvn_ucx_link_release(link);
}

int kvn_ucx_link_send(kvn_ucx_link *link, unsigned id, const void *header, size_t header_nbytes,
                      const kvn_ucp_dt_iov *pieces, size_t num_pieces, kvn_ucx_send *send)
{
    kvn_ucx_end *end = link->end;
    kvn_ucp_request_param param = {
        .op_attr_mask = KVN_UCP_OP_ATTR_CALLBACK | KVN_UCP_OP_ATTR_USER_DATA |
                        KVN_UCP_OP_ATTR_FLAGS | KVN_UCP_OP_ATTR_DATATYPE,
        .flags = KVN_UCP_AM_SEND_FLAG_EAGER,
        .send = on_sent,
        .datatype = num_pieces > 1 ? KVN_UCP_DATATYPE_IOV : KVN_UCP_DATATYPE_BYTES,
        .user_data = send,
    };
    const void *buffer = num_pieces > 1 ? (const void *)pieces : num_pieces ? pieces->buffer : NULL;
    const size_t count = num_pieces > 1 ? num_pieces : num_pieces ? pieces->length : 0;
    size_t nbytes = header_nbytes;
    kvn_failure why;

    for (size_t i = 0; i < num_pieces; i++)
        nbytes += pieces[i].length;
    if (num_pieces > KVN_UCX_MESSAGE_PIECES || nbytes > KVN_UCX_MESSAGE_NBYTES)
        return KVN_INVALID;
    if (kvn_ucx_link_has_failed(link, &why))
        return why.status;
    if (!link->ep)
        return KVN_INVALID;
    send->link = link;
    link->num_sending++;
    kvn_ucs_status_ptr request =
        end->calls->ucp_am_send_nbx(link->ep, id, header, header_nbytes, buffer, count, &param);
    if (request && !KVN_UCS_IS_ERROR(request)) {
        kvn_ucx_link_hold(link); /* for on_sent */
        return KVN_PENDING;
    }
    link->num_sending--;
    if (!request)
        return KVN_OK;
    on_error(link, NULL, KVN_UCS_POINTER_STATUS(request));
    return kvn_ucx_link_has_failed(link, &why) ? why.status : KVN_FAILED;
}

/* Of the lanes in UCX's own description, "lane[0]:  2:tcp/eth0.0 md[1] ...", the first; or, for remote access,
 * the first that does it itself. */
static bool find_way(const char *text, bool is_one_sided, char *out, size_t room)
{
    static const char *const direct[] = {"rc_", "dc_", "srd", "gga_", "cma/", "knem/", "xpmem/"};

    while ((text = strstr(text, "lane[")) && (text = strchr(text, ':')) &&
           (text = strchr(text + 1, ':'))) {
        bool is_fit = !is_one_sided;
        text++;
        for (size_t i = 0; i < sizeof direct / sizeof *direct; i++)
            is_fit |= strncmp(text, direct[i], strlen(direct[i])) == 0;
        if (is_fit) {
            snprintf(out, room, "%.*s", (int)strcspn(text, " .\n"), text);
            return true;
        }
    }
    return false;
}

bool kvn_ucx_describe_endpoint(kvn_ucx_link *link)
{
    const bool is_one_sided = link->end->mode == KVN_UCX_ONE_SIDED;
    char *text = NULL, way[sizeof link->way];
    size_t nbytes;
    FILE *file = link->ep ? open_memstream(&text, &nbytes) : NULL;

    if (!file)
        return !is_one_sided;
    link->end->calls->ucp_ep_print_info(link->ep, file);
    fclose(file);
    const bool is_found = find_way(text, is_one_sided, way, sizeof way);
    if (is_found) {
        pthread_mutex_lock(&link->mutex);
        memcpy(link->way, way, sizeof way);
        pthread_mutex_unlock(&link->mutex);
    }
    free(text);
    return is_found || !is_one_sided;
}

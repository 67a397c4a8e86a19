/* A link's endpoint of UCX: made, sent through, described, closed. All under the turn. */
#include <stdlib.h>
#include <string.h>

#include "ucx_inside.h"
#include "ucx_log.h"

static void lose(kvn_ucx_link *link, kvn_ucs_status status)
{
    char text[200];

    snprintf(text, sizeof text, "the connection to the peer's UCX is lost: %s",
             link->end->calls->ucs_status_string(status));
    link->is_lost = true;
    kvn_ucx_link_fail(link, KVN_PEER_GONE, status, text);
}

static kvn_ucx_link *link_of(kvn_ucx_line *line)
{
    return (kvn_ucx_link *)((char *)line - offsetof(kvn_ucx_link, line));
}

static void on_lost(kvn_ucx_line *line, kvn_ucs_status status) { lose(link_of(line), status); }

static void on_closed(kvn_ucx_line *line)
{
    kvn_ucx_end *end = line->end;

    if (atomic_fetch_sub(&end->num_endpoints, 1) == 1)
        kvn_ucx_notify(end);
    kvn_ucx_link_release(link_of(line));
}

int kvn_ucx_make_endpoint(kvn_ucx_link *link, kvn_failure *failure)
{
    kvn_ucx_end *end = link->end;

    kvn_ucx_log_clear();
    link->line.on_lost = on_lost;
    link->line.on_closed = on_closed;
    kvn_ucs_status status = kvn_ucx_line_open(&link->line, end, link->peer, true);
    /* Between processes of one host, what reads memory itself does not watch over the peer. */
    if (status == KVN_UCS_ERR_UNREACHABLE && end->mode == KVN_UCX_ONE_SIDED)
        status = kvn_ucx_line_open(&link->line, end, link->peer, false);
    if (status != KVN_UCS_OK) { /* no network in common, or nobody is there any more */
        kvn_fail(failure, kvn_ucx_status(status), status,
                 "UCX cannot reach the peer (this side has %.60s): %s", end->transports,
                 end->calls->ucs_status_string(status));
        kvn_ucx_log_append(failure->message, sizeof failure->message);
        return failure->status;
    }
    link->ep = link->line.ep;
    kvn_ucx_link_hold(link); /* until the line is closed */
    atomic_fetch_add(&end->num_endpoints, 1);
    return KVN_OK;
}

void kvn_ucx_close_endpoint(kvn_ucx_link *link)
{
    if (link->ep)
        kvn_ucx_line_close(&link->line);
    link->ep = NULL;
}

static void on_sent(void *request, kvn_ucs_status status, void *argument)
{
    kvn_ucx_send *send = argument;
    kvn_ucx_link *link = send->link;
    kvn_failure why;

    link->end->calls->ucp_request_free(request);
    link->num_sending--;
    link->end->num_sending--;
    if (status != KVN_UCS_OK)
        lose(link, status); /* mostly it has failed before, and this is why it was cancelled */
    if (status == KVN_UCS_OK || !kvn_ucx_link_has_failed(link, &why))
        why.status = KVN_OK;
    send->on_sent(send, why.status);
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
        end->num_sending++;
        return KVN_PENDING;
    }
    link->num_sending--;
    if (!request)
        return KVN_OK;
    lose(link, KVN_UCS_POINTER_STATUS(request));
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

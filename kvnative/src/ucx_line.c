#include "ucx_line.h"

#include <linux/tcp.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include "ucx_inside.h"

#define MAX_SOCKETS 16384 /* of all lines of an end that are looked at */

static ino_t inode_of(int file)
{
    struct stat found;
    return fstat(file, &found) == 0 ? found.st_ino : 0;
}

static bool is_among(const int *files, size_t count, int file)
{
    for (size_t i = 0; i < count; i++)
        if (files[i] == file)
            return true;
    return false;
}

static void on_closed(void *request, kvn_ucs_status status, void *argument)
{
    kvn_ucx_line *self = argument;

    (void)status; /* whatever it is, the endpoint is gone */
    self->end->calls->ucp_request_free(request);
    self->on_closed(self);
}

/* UCX refuses to use force with an endpoint that it does not watch. */
static void close_endpoint(kvn_ucx_end *end, kvn_ucx_errand *errand)
{
    kvn_ucx_line *self = (kvn_ucx_line *)errand;
    const kvn_ucp_request_param param = {
        .op_attr_mask =
            KVN_UCP_OP_ATTR_CALLBACK | KVN_UCP_OP_ATTR_USER_DATA | KVN_UCP_OP_ATTR_FLAGS,
        .flags = self->is_watched ? KVN_UCP_EP_CLOSE_FLAG_FORCE : 0,
        .send = on_closed,
        .user_data = self,
    };
    kvn_ucs_status_ptr request = end->calls->ucp_ep_close_nbx(self->ep, &param);

    if (request == NULL || KVN_UCS_IS_ERROR(request))
        self->on_closed(self);
}

static void close_soon(kvn_ucx_line *self)
{
    if (self->is_due)
        return;
    self->is_due = true;
    self->errand.run = close_endpoint;
    self->errand.is_awaited = false;
    kvn_ucx_do_later(self->end, &self->errand);
}

static void on_error(void *argument, kvn_ucp_ep_h ep, kvn_ucs_status status)
{
    kvn_ucx_line *self = argument;

    (void)ep;
    if (self->is_lost)
        return;
    self->is_lost = true;
    if (self->is_closing)
        close_soon(self);
    else
        self->on_lost(self, status);
}

/* The sockets that have come since. */
static void note_sockets(kvn_ucx_line *self, const int *before, size_t num_before)
{
    int *after = malloc(MAX_SOCKETS * sizeof *after);
    const size_t count = after ? kvn_ucx_sockets(self->end->sender_fd, after, MAX_SOCKETS) : 0;

    for (size_t i = 0; i < count && self->num_sockets < KVN_UCX_LINE_SOCKETS; i++)
        if (!is_among(before, num_before, after[i])) {
            self->sockets[self->num_sockets].inode = inode_of(after[i]);
            self->sockets[self->num_sockets++].file = after[i];
        }
    free(after);
}

kvn_ucs_status kvn_ucx_line_open(kvn_ucx_line *self, kvn_ucx_end *end, void *peer, bool is_watched)
{
    const kvn_ucp_ep_params params = {
        .field_mask = KVN_UCP_EP_PARAM_REMOTE_ADDRESS | KVN_UCP_EP_PARAM_ERR_HANDLING_MODE |
                      KVN_UCP_EP_PARAM_ERR_HANDLER,
        .address = peer,
        .err_mode = is_watched ? KVN_UCP_ERR_HANDLING_MODE_PEER : KVN_UCP_ERR_HANDLING_MODE_NONE,
        .err_handler = {.cb = on_error, .arg = self},
    };
    int *before = malloc(MAX_SOCKETS * sizeof *before);
    const size_t count = before ? kvn_ucx_sockets(end->sender_fd, before, MAX_SOCKETS) : 0;

    self->end = end;
    self->is_watched = is_watched;
    self->is_lost = self->is_closing = self->is_due = false;
    self->num_sockets = 0;
    const kvn_ucs_status status = end->calls->ucp_ep_create(end->sender, &params, &self->ep);
    if (status == KVN_UCS_OK && before)
        note_sockets(self, before, count);
    free(before);
    return status;
}

static bool is_answered(int file)
{
    struct tcp_info found = {0};
    socklen_t nbytes = sizeof found;

    return getsockopt(file, IPPROTO_TCP, TCP_INFO, &found, &nbytes) == 0 &&
           found.tcpi_bytes_received > 0;
}

/* True: one of them was connected, so that UCX will say that it has lost the peer. */
static bool shut_down(const kvn_ucx_line *self)
{
    bool is_any = false;

    /* A file's number may have got another owner, but not its inode. */
    for (unsigned i = 0; i < self->num_sockets; i++)
        if (self->sockets[i].inode && inode_of(self->sockets[i].file) == self->sockets[i].inode &&
            is_answered(self->sockets[i].file))
            is_any |= shutdown(self->sockets[i].file, SHUT_RDWR) == 0;
    return is_any;
}

void kvn_ucx_line_close(kvn_ucx_line *self)
{
    if (self->is_closing)
        return;
    self->is_closing = true;
    if (self->is_lost || !shut_down(self))
        close_soon(self);
}

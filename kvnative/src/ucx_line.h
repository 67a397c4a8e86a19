/* A line: an endpoint of UCX and the sockets below it, if there are any. Everything is under the turn.
 *
 * UCX's TCP does not close the connection of an endpoint that is closed while the other side lives: it writes
 * into the stream that nothing more comes, even in the middle of a message, and keeps the socket. So a line
 * is closed by shutting its sockets down first. To UCX, on either side, that is a peer who has died. Before
 * the peer's UCX has answered it would connect anew, by another socket, and say nothing; but then closing the
 * endpoint closes the socket. */
#ifndef KVN_UCX_LINE_H
#define KVN_UCX_LINE_H

#include <sys/types.h>

#include "ucx_end.h"

#define KVN_UCX_LINE_SOCKETS 8

typedef struct kvn_ucx_line kvn_ucx_line;

struct kvn_ucx_line {
    kvn_ucx_errand errand; /* the line's, as all but the two functions */
    /* UCX has lost the peer: once, within a callback; not after kvn_ucx_line_close. */
    void (*on_lost)(kvn_ucx_line *self, kvn_ucs_status status);
    /* After kvn_ucx_line_close, not within it: UCX has let go, and the line may be freed. */
    void (*on_closed)(kvn_ucx_line *self);
    kvn_ucx_end *end;
    kvn_ucp_ep_h ep;
    bool is_watched; /* UCX tells when the peer dies */
    bool is_lost;
    bool is_closing;
    bool is_due; /* the endpoint is being closed */
    unsigned num_sockets;
    struct {
        int file;
        ino_t inode;
    } sockets[KVN_UCX_LINE_SOCKETS];
};

/* The endpoint to a worker's address. Not watched: for transports that cannot. */
kvn_ucs_status kvn_ucx_line_open(kvn_ucx_line *self, kvn_ucx_end *end, void *peer, bool is_watched);
/* Idempotent; within a callback, too. What is in flight ends a little later, in error. */
void kvn_ucx_line_close(kvn_ucx_line *self);

/* ---- ucx_socket.c ---- */

/* The sockets that an epoll set has, and the sets within it: at most `room`. */
size_t kvn_ucx_sockets(int set, int *out, size_t room);

#endif

/* A link between two ends: an endpoint, and the token that both sides know and nobody else does.
 *
 * A link is made (its token is in the table from then on), connected (each side has heard of the other:
 * HELLO and WELCOME), and ends by failing: a fault, the peer's BYE, or close on this side. It fails once;
 * the reason stays. When it fails, `death_fd` becomes readable, its open requests are told, and its
 * endpoint is closed by force: after that, UCX touches no memory of a send any more. */
#ifndef KVN_UCX_LINK_H
#define KVN_UCX_LINK_H

#include "ucx_end.h"

/* What of a request a link needs to know: embedded in the request, on the link's list while it is open. */
typedef struct kvn_ucx_open kvn_ucx_open;

struct kvn_ucx_open {
    /* The link has failed: under the turn, once, after it was taken off the list. Sends that are in flight
     * still end by their own `on_sent`, a little later. */
    void (*on_failed)(kvn_ucx_open *self, const kvn_failure *why);
    kvn_ucx_open *next; /* the link's */
    kvn_ucx_open *previous;
    bool is_listed;
};

/* Makes a link and puts its token into the table. `address` is that of the peer's end; NULL, 0: not known,
 * HELLO will bring it. KVN_INVALID: the token is in use, or the address is none; KVN_UNSUPPORTED: that end
 * and this one do not go together. Whoever makes it holds it. */
int kvn_ucx_link_create(kvn_ucx_end *end, const uint8_t token[KVN_UCX_TOKEN_NBYTES],
                        const void *address, size_t address_nbytes, kvn_ucx_link **out,
                        kvn_failure *failure);
/* Returns when the peer has answered: KVN_OK. KVN_TIMEOUT: it has not (connect may be called again; the
 * link is not failed). KVN_PEER_GONE and others: the link has failed. Blocks, attends. */
int kvn_ucx_link_connect(kvn_ucx_link *link, int64_t deadline_ns, kvn_failure *failure);
/* Fails the link with KVN_CANCELLED and `reason`. Idempotent; does not wait for what follows. */
void kvn_ucx_link_close(kvn_ucx_link *link, const char *reason);
/* Fails it: under the turn or not. The first reason stays. A little later, not within the call, which may come
 * from a callback, the peer is told (BYE), unless it is he who has gone, and the endpoint is closed. */
void kvn_ucx_link_fail(kvn_ucx_link *link, int status, int code, const char *message);

/* Held by the maker and by each request that uses it; freed with the last. Any thread. */
void kvn_ucx_link_hold(kvn_ucx_link *link);
void kvn_ucx_link_release(kvn_ucx_link *link);

kvn_ucx_end *kvn_ucx_link_end(const kvn_ucx_link *link);
const uint8_t *kvn_ucx_link_token(const kvn_ucx_link *link);
bool kvn_ucx_link_is_connected(const kvn_ucx_link *link); /* and not failed; any thread */
/* The reason is filled in once it has failed; false before. Any thread. */
bool kvn_ucx_link_has_failed(const kvn_ucx_link *link, kvn_failure *why);
/* Readable once it has failed. The link's: whoever keeps it longer duplicates it. */
int kvn_ucx_link_death_fd(const kvn_ucx_link *link);
/* "tcp/eth0", or "" when there is no endpoint yet. Any thread. */
void kvn_ucx_link_way(kvn_ucx_link *link, char *out, size_t room);

/* ---- under the turn ---- */

/* NULL before it is connected and after it failed. */
kvn_ucp_ep_h kvn_ucx_link_endpoint(const kvn_ucx_link *link);
/* KVN_OK; or the link's failure, and it is not listed. */
int kvn_ucx_link_add(kvn_ucx_link *link, kvn_ucx_open *request, kvn_failure *failure);
void kvn_ucx_link_remove(kvn_ucx_link *link, kvn_ucx_open *request); /* no-op if it is not listed */
/* A place for what a part keeps for each link; NULL at first. */
void **kvn_ucx_link_kept(kvn_ucx_link *link);

/* A message in flight. The struct, the header, the pieces and the memory that they show stay in place until
 * `on_sent`: KVN_OK, or why not (KVN_PEER_GONE, KVN_CANCELLED...: the link has failed then). */
typedef struct kvn_ucx_send kvn_ucx_send;

struct kvn_ucx_send {
    void (*on_sent)(kvn_ucx_send *self, int status);
    kvn_ucx_link *link; /* the link's */
};

/* Sends header and pieces as one message: at most KVN_UCX_MESSAGE_NBYTES, KVN_UCX_MESSAGE_PIECES.
 * KVN_OK: sent, everything may be reused at once, `on_sent` does NOT come. KVN_PENDING: `on_sent` will come,
 * never within this call. Else it is a failure, and `on_sent` does not come; the link has failed too, or
 * (KVN_INVALID) the message is too large. That a message was sent means that its memory may be reused, not
 * that it arrived. One piece is sent as plain bytes; small messages are copied and mostly KVN_OK. */
int kvn_ucx_link_send(kvn_ucx_link *link, unsigned id, const void *header, size_t header_nbytes,
                      const kvn_ucp_dt_iov *pieces, size_t num_pieces, kvn_ucx_send *send);

#endif

/* The end of a connection that asks: cuts transfers into requests, keeps some of them in flight, and moves
 * their bytes between the socket and this process's memory. Who waits for a transfer drives the socket
 * himself for as long as bytes keep coming, then the service's thread does. */
#ifndef KVN_TCP_CLIENT_H
#define KVN_TCP_CLIENT_H

#include "tcp/transfer.h"

/* The stream and on_failed are set, all else is 0. */
void kvn_tcp_client_init(kvn_tcp_client *self);
void kvn_tcp_client_fini(kvn_tcp_client *self);
/* Begins to ask for a transfer; `waits`: the caller will wait for it at once. If the connection has failed
 * it is finished on return. */
void kvn_tcp_client_begin(kvn_request *transfer, bool waits);
/* Until it is finished or the deadline has passed. */
void kvn_tcp_client_wait(kvn_request *transfer, int64_t deadline_ns);
/* Until it is finished; nothing of its memory is touched afterwards. A push that does not stop in time
 * costs the connection. */
void kvn_tcp_client_give_up(kvn_request *transfer, int why);
/* After it is finished, before its memory is freed. */
void kvn_tcp_client_let_go(kvn_request *transfer);
/* Ends all transfers with KVN_PEER_GONE, and takes none. */
void kvn_tcp_client_fail(kvn_tcp_client *self, int code, const char *why);

#endif

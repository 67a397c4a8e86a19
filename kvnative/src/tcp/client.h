/* The requesting end of a connection: splits transfers into requests, keeps some of them in flight, and moves their
 * bytes between the socket and memory of this process. A thread that waits for a transfer drives the socket while bytes
 * keep coming; otherwise the thread of the service does. */
#ifndef KVN_TCP_CLIENT_H
#define KVN_TCP_CLIENT_H

#include "tcp/transfer.h"

/* The caller has set the stream and on_failed; all other fields are 0. */
void kvn_tcp_client_init(kvn_tcp_client *self);
void kvn_tcp_client_fini(kvn_tcp_client *self);
/* Begins a transfer for a kvn_caller: one that waits drives the socket, one that hurries leaves the first request to
 * the service. On a failed connection the transfer is finished on return. */
void kvn_tcp_client_begin(kvn_request *transfer, uint32_t caller);
/* Waits until the transfer is finished, or until the deadline. */
void kvn_tcp_client_wait(kvn_request *transfer, int64_t deadline_ns);
/* Stops the transfer, and waits until it is finished and its memory is not touched any more. A push that does not stop
 * in time ends the connection. */
void kvn_tcp_client_give_up(kvn_request *transfer, int why);
/* Call it after the transfer is finished, before its memory is freed. */
void kvn_tcp_client_let_go(kvn_request *transfer);
/* Returns true if the client can move memory of a device. */
bool kvn_tcp_client_has_stage(kvn_tcp_client *self);
/* Takes over the stage. False: the client has one, or has failed. */
bool kvn_tcp_client_take_stage(kvn_tcp_client *self, kvn_tcp_stage *stage);
/* Ends all transfers with KVN_PEER_GONE, and accepts no more. */
void kvn_tcp_client_fail(kvn_tcp_client *self, int code, const char *why);

#endif

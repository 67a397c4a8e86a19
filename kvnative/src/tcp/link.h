/* A link to a peer: some pairs of connections, over one of each pair this side asks, over the other it answers.
 * One that fails ends all of them. */
#ifndef KVN_TCP_LINK_H
#define KVN_TCP_LINK_H

#include "tcp/client.h"
#include "tcp/server.h"

#define KVN_TCP_MAX_CONNECTIONS 16u

typedef struct kvn_tcp_link kvn_tcp_link;

/* Takes over the sockets, `count` of each kind, connected and non-blocking; also when it fails. With a
 * `secret` all is encrypted; `dials`: this side has opened the sockets. */
int kvn_tcp_link_create(kvn_tcp_service *service, const int *clients, const int *servers,
                        unsigned count, const uint8_t *secret, bool dials, kvn_tcp_link **out,
                        kvn_failure *failure);
unsigned kvn_tcp_link_connections(const kvn_tcp_link *self);
kvn_tcp_client *kvn_tcp_link_client(kvn_tcp_link *self, unsigned index);
/* Polls readable once the link has failed; -1: it is closed. */
int kvn_tcp_link_death(kvn_tcp_link *self);
/* Whether it has ended by itself, and then why. */
bool kvn_tcp_link_has_failed(kvn_tcp_link *self, kvn_failure *why);
/* Transfers in flight end with `why`; on return nothing is read or written for the peer. A second time
 * is fine. */
void kvn_tcp_link_close(kvn_tcp_link *self, const char *why);
/* After close, when no thread uses the link. */
void kvn_tcp_link_destroy(kvn_tcp_link *self);

/* A backend that reaches the peer's memory by a connection. The local side is on `device`, the service's, or of
 * the host where that is NULL. It takes `known` over on success. */
kvn_backend *kvn_tcp_backend_create(kvn_tcp_client *client, kvn_direction direction,
                                    const kvn_device *device, const kvn_tcp_known *known);

#endif

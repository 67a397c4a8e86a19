/* A link to a peer: pairs of connections, one of each for requests of this side and one for those of the peer. If one
 * connection fails, all end. */
#ifndef KVN_TCP_LINK_H
#define KVN_TCP_LINK_H

#include "tcp/client.h"
#include "tcp/server.h"

#define KVN_TCP_MAX_CONNECTIONS 16u

typedef struct kvn_tcp_link kvn_tcp_link;

/* Takes over the connected, non-blocking sockets, `count` of each kind, also on failure. With a `secret` all traffic is
 * encrypted. `dials`: this side has opened the sockets. */
int kvn_tcp_link_create(kvn_tcp_service *service, const int *clients, const int *servers,
                        unsigned count, const uint8_t *secret, bool dials, kvn_tcp_link **out,
                        kvn_failure *failure);
unsigned kvn_tcp_link_connections(const kvn_tcp_link *self);
kvn_tcp_client *kvn_tcp_link_client(kvn_tcp_link *self, unsigned index);
/* Pins the slots through which the client of a connection moves memory of the service's device; no effect a second
 * time. Call it before a transfer waits for anything: pinning may wait for all work of the device. KVN_OK, also on a
 * closed link, or the failure to pin. */
int kvn_tcp_link_stage(kvn_tcp_link *self, unsigned index, kvn_failure *failure);
/* Descriptor that polls readable once the link has failed; -1 after close. */
int kvn_tcp_link_death(kvn_tcp_link *self);
/* True until the link fails or is closed; takes no mutex. */
bool kvn_tcp_link_is_up(const kvn_tcp_link *self);
/* True, with the reason, if the link has failed. */
bool kvn_tcp_link_has_failed(kvn_tcp_link *self, kvn_failure *why);
/* Ends transfers in flight with `why`; after that no memory is read or written for the peer. Idempotent. */
void kvn_tcp_link_close(kvn_tcp_link *self, const char *why);
/* Call it after close, when no thread uses the link. */
void kvn_tcp_link_destroy(kvn_tcp_link *self);

/* A backend that reaches the peer's memory by a connection. The local side is on the service's `device`, after
 * kvn_tcp_link_stage, or host memory if that is NULL. Takes over `known` on success. */
kvn_backend *kvn_tcp_backend_create(kvn_tcp_client *client, kvn_direction direction,
                                    const kvn_device *device, const kvn_tcp_known *known);

#endif

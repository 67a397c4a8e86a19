/* Sending by a client: transfers, split into requests, and the bytes of pushes. With its mutex held. */
#ifndef KVN_TCP_ASKING_H
#define KVN_TCP_ASKING_H

#include "tcp/transfer.h"

/* True if nothing is left to send. */
bool kvn_tcp_is_sent(const kvn_tcp_client *self);
/* Sends at most about KVN_TCP_TURN_NBYTES. True if something was sent. */
bool kvn_tcp_send_some(kvn_tcp_client *self, uint64_t *moved);

#endif

/* What a client sends: transfers, cut into requests, and the bytes of pushes. With its mutex held. */
#ifndef KVN_TCP_ASKING_H
#define KVN_TCP_ASKING_H

#include "tcp/transfer.h"

/* Whether nothing is left of what was begun to be sent. */
bool kvn_tcp_is_sent(const kvn_tcp_client *self);
/* Sends what there is room for, until about KVN_TCP_TURN_NBYTES were moved. Whether anything was. */
bool kvn_tcp_send_some(kvn_tcp_client *self, uint64_t *moved);

#endif

/* What comes back to a client: answers, and the bytes of pulls. With its mutex held. */
#ifndef KVN_TCP_ANSWERS_H
#define KVN_TCP_ANSWERS_H

#include "tcp/transfer.h"

/* Receives what there is, until about KVN_TCP_TURN_NBYTES were moved. Whether anything came. */
bool kvn_tcp_receive_some(kvn_tcp_client *self, uint64_t *moved);

#endif

/* Receipt by a client: answers, and the bytes of pulls. With its mutex held. */
#ifndef KVN_TCP_ANSWERS_H
#define KVN_TCP_ANSWERS_H

#include "tcp/transfer.h"

/* Receives at most about KVN_TCP_TURN_NBYTES. True if bytes came. */
bool kvn_tcp_receive_some(kvn_tcp_client *self, uint64_t *moved);

#endif

/* A transfer of a client: where its bytes lie here, and how it ends. All with the client's mutex held. */
#ifndef KVN_TCP_TRANSFER_H
#define KVN_TCP_TRANSFER_H

#include "tcp/client.h"

/* Behind all others of the client. */
void kvn_tcp_transfer_put_in(kvn_tcp_client *self, kvn_request *it);
/* With the outcome in `end`. Nothing of its memory is touched from here on. */
void kvn_tcp_transfer_finish(kvn_request *it);
/* Asks for nothing more. A push goes on until what is on the wire was taken: the peer writes it. The first
 * outcome of a transfer counts. */
void kvn_tcp_transfer_end(kvn_request *it, int status, int code, uint64_t failed);
/* The peer does not move, or will not, what lies `offset` bytes behind `from`. */
void kvn_tcp_transfer_refuse(kvn_request *it, kvn_tcp_reason reason, const kvn_cursor *from, uint64_t offset);
/* The memory of descriptor `index` here is not mapped; or, of a device, it was not copied: its stream says why. */
void kvn_tcp_transfer_end_local(kvn_request *it, uint64_t index, bool is_device);
/* The connection is of no use any more: ends all transfers, once. */
void kvn_tcp_transfers_fail(kvn_tcp_client *self, int code, const char *why);
/* Adds at most `limit` bytes of the local memory; a part is left for an answer. */
void kvn_tcp_transfer_add_local(const kvn_request *it, kvn_cursor at, uint64_t limit, kvn_tcp_parts *parts);

#endif

/* The address of an end: that of UCX's worker, and before it what shows whether this end may give it to UCX
 * at all, which aborts the process for an address that it cannot read. That finds damage, and ends that do
 * not go together; not a peer who means harm and has a token: addresses come from a handshake that knows
 * its peer, and from links with its token. */
#ifndef KVN_UCX_ADDRESS_H
#define KVN_UCX_ADDRESS_H

#include "ucx_end.h"

/* Wraps the worker's address; *out is malloc's. 0 bytes: no memory. */
size_t kvn_ucx_address_wrap(const kvn_ucx_end *end, const void *worker, size_t nbytes, void **out);
/* The worker's address within, a copy of its own: *out is malloc's. KVN_INVALID: it is damaged;
 * KVN_UNSUPPORTED: that end and this one cannot have a link, with what to do about it. */
int kvn_ucx_address_unwrap(const kvn_ucx_end *end, const void *address, size_t nbytes, void **out,
                           kvn_failure *failure);

#endif

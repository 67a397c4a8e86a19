/* The backend that reaches another process's own memory: process_vm_readv and process_vm_writev
 * over the pool's threads. One-sided: the other process takes no part. */
#ifndef KVN_PROCESS_H
#define KVN_PROCESS_H

#include "host/pool.h"

/* `direction`: KVN_PEER_GET (source addresses are the peer's) or KVN_PEER_PUT. The pool outlives
 * the backend. NULL with errno set (EINVAL, ENOMEM) on failure. A failed descriptor is reported as
 * KVN_PEER_GONE, KVN_DENIED, KVN_UNMAPPED (the message says whose side) or KVN_UNSUPPORTED. */
kvn_backend *kvn_process_create(kvn_pool *pool, int pid, kvn_direction direction);

#endif

/* A backend that copies memory of another process by process_vm_readv and process_vm_writev, on the threads of a pool.
 * One-sided: the other process does nothing. */
#ifndef KVN_PROCESS_H
#define KVN_PROCESS_H

#include <stdbool.h>

#include "host/pool.h"

/* `direction`: KVN_PEER_GET (source addresses belong to the peer) or KVN_PEER_PUT. The pool must outlive the backend.
 * NULL with errno set (EINVAL, ENOMEM) on failure. Descriptors fail with KVN_PEER_GONE, KVN_DENIED, KVN_UNMAPPED (the
 * message names the side), KVN_UNSUPPORTED, KVN_NO_MEMORY or KVN_FAILED. */
kvn_backend *kvn_process_create(kvn_pool *pool, int pid, kvn_direction direction);

#define KVN_READ_NOW 64 /* descriptors */

/* Reads all descriptors from process `pid` by one call, in this thread. False: there are more than KVN_READ_NOW, or not
 * every byte was moved. To learn why, submit the batch to a backend. */
bool kvn_process_read_now(int pid, const kvn_columns *batch);

#endif

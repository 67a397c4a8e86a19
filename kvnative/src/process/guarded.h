/* A backend that announces, batch by batch, what another one writes to the memory of a peer: of a
 * device, say, whose copies are no pieces of the thread pool. */
#ifndef KVN_GUARDED_H
#define KVN_GUARDED_H

#include "host/writers.h"

/* Takes the guard over, also when it fails: NULL with errno set. `inner` must outlive it. */
kvn_backend *kvn_guarded_create(kvn_backend *inner, kvn_guard *guard);

#endif

/* A backend that announces each batch that another backend writes to memory of a peer. It is for devices, whose copies
 * are not pieces of the thread pool. */
#ifndef KVN_GUARDED_H
#define KVN_GUARDED_H

#include "host/writers.h"

/* Takes over the guard, also on failure: NULL with errno set. `inner` must outlive the backend. */
kvn_backend *kvn_guarded_create(kvn_backend *inner, kvn_guard *guard);

#endif

/* A backend that announces each batch that another backend writes to a peer's memory. Devices use it, because their
 * copies do not run on the thread pool. */
#ifndef KVN_GUARDED_H
#define KVN_GUARDED_H

#include "host/writers.h"

/* NULL with errno set on failure. Takes ownership of the guard in any case. `inner` must outlive the backend. */
kvn_backend *kvn_guarded_create(kvn_backend *inner, kvn_guard *guard);

#endif

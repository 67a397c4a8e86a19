/* The backend for memory that this process can address: copies with the threads of a pool. */
#ifndef KVNATIVE_HOST_HOST_H
#define KVNATIVE_HOST_HOST_H

#include "host/copy.h"
#include "host/pool.h"

/* The pool must outlive the backend. `copy`: of all batches; NULL: as the pool is tuned. NULL with
 * errno set on failure (ENOMEM). */
kvn_backend *kvn_host_create(kvn_pool *pool, kvn_copy copy);

#endif

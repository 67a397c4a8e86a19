/* The backend for memory that this process can address: copies with the threads of a pool. */
#ifndef KVNATIVE_HOST_HOST_H
#define KVNATIVE_HOST_HOST_H

#include "host/pool.h"

/* The pool must outlive the backend. NULL with errno set on failure (ENOMEM). */
kvn_backend *kvn_host_create(kvn_pool *pool);

#endif

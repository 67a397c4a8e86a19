/* One device of the ACL library. Every thread that calls ACL must have a context: threads of ours
 * set the device once, calls on threads of others go between enter and leave, which put back
 * what was current (a framework in the same process has contexts of its own). */
#ifndef KVN_ACL_DEVICE_H
#define KVN_ACL_DEVICE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "acl/library.h"

/* How batches between host and device are copied. */
typedef enum kvn_copying {
    KVN_COPY_BATCH_ASYNC, /* aclrtMemcpyBatchAsync, and aclrtMemcpyBatch for pageable memory */
    KVN_COPY_BATCH,       /* aclrtMemcpyBatch alone */
    KVN_COPY_SINGLE       /* aclrtMemcpyAsync for each descriptor */
} kvn_copying;

/* Host memory known to be pinned: [first, last). */
typedef struct kvn_pinned {
    uint64_t first;
    uint64_t last;
} kvn_pinned;

/* One per device id and process; it must stay in place. */
typedef struct kvn_device {
    const kvn_acl_library *library;
    const kvn_acl *acl; /* its calls */
    int32_t id;
    aclrtContext context; /* the device's primary one; never destroyed by us */
    atomic_int copying;   /* kvn_copying: only ever goes down the list */
    pthread_mutex_t mutex; /* guards what follows */
    char fallback[256];    /* why `copying` is not the first; "" while it is */
    kvn_pinned *pinned;    /* ascending, disjoint */
    size_t num_pinned;
} kvn_device;

/* aclrtSetDevice, and its primary context. The library is initialized, and outlives the device. */
int kvn_device_open(const kvn_acl_library *library, int32_t id, kvn_device *out,
                    kvn_failure *failure);
/* Nothing of it is in use. The device itself is not reset: others in the process may use it. */
void kvn_device_close(kvn_device *device);

/* Makes the device's context current on this thread; *previous is for kvn_device_leave. */
int kvn_device_enter(const kvn_device *device, aclrtContext *previous, kvn_failure *failure);
/* Puts back the context that was current, if there was one. */
void kvn_device_leave(const kvn_device *device, aclrtContext previous);

/* ---- from any thread; each enters and leaves ---- */

/* aclrtMalloc, huge pages first. */
int kvn_device_allocate(const kvn_device *device, uint64_t nbytes, void **out,
                        kvn_failure *failure);
int kvn_device_free(const kvn_device *device, void *address, kvn_failure *failure);
/* Pinned host memory. */
int kvn_device_allocate_host(const kvn_device *device, uint64_t nbytes, void **out,
                             kvn_failure *failure);
int kvn_device_free_host(const kvn_device *device, void *address, kvn_failure *failure);
/* Pins host memory of others, so that copies need no help of the processor. */
int kvn_device_pin(kvn_device *device, uint64_t address, uint64_t nbytes, kvn_failure *failure);
int kvn_device_unpin(kvn_device *device, uint64_t address, kvn_failure *failure);
/* Where memory lies, and the size of its pages; what ACL does not know is the host's, unregistered. */
int kvn_device_locate(const kvn_device *device, uint64_t address, kvn_acl_pointer *out,
                      kvn_failure *failure);
/* Synchronous aclrtMemcpy; `kind` is KVN_ACL_HOST_TO_DEVICE or KVN_ACL_DEVICE_TO_HOST. */
int kvn_device_copy(const kvn_device *device, uint64_t dst, uint64_t src, uint64_t nbytes, int kind,
                    kvn_failure *failure);
/* Zeroes device memory, and waits. */
int kvn_device_clear(const kvn_device *device, uint64_t address, uint64_t nbytes,
                     kvn_failure *failure);
int kvn_device_memory(const kvn_device *device, size_t *free_nbytes, size_t *total_nbytes,
                      kvn_failure *failure);

/* ---- what the copying backends ask ---- */

/* The range pinned by kvn_device_pin that holds `address`; false where there is none. */
bool kvn_device_pinned_at(kvn_device *device, uint64_t address, kvn_pinned *out);
/* From now on `copying` at most; the reason of the latest step down is kept. */
void kvn_device_fall_back(kvn_device *device, kvn_copying copying, const char *why);
/* Copies the reason, "" when there is none. */
void kvn_device_fallback(kvn_device *device, char *out, size_t room);

#endif

/* Copies for code that stages device memory. They run on a thread and a stream of their own, while the caller does
 * something else. */
#ifndef KVN_DEVICE_COPIER_H
#define KVN_DEVICE_COPIER_H

#include "device/channel.h"
#include "kvnative/backend.h"

/* A copier must stay in place. */
typedef struct kvn_copier {
    kvn_device *device; /* outlives the copier */
    kvn_channel *channel;
    kvn_backend *backends[KVN_DEVICE_TO_DEVICE]; /* by direction - 1 */
} kvn_copier;

/* A copy in flight: from start until wait has returned an outcome, or abort has returned. It must stay in place. */
typedef struct kvn_staged_copy {
    kvn_backend *backend;
    kvn_request *request; /* NULL: none, or it has ended */
    kvn_report report;
} kvn_staged_copy;

/* KVN_OK; KVN_NO_MEMORY: no memory or no thread; KVN_INVALID: in a forked child. */
int kvn_copier_init(kvn_copier *self, kvn_device *device, kvn_failure *failure);
/* Accepts a zeroed copier. Idempotent; call it when no copy is in flight. */
void kvn_copier_fini(kvn_copier *self);

/* Begins to copy a batch, whose columns stay in place; a failure is the outcome of the wait. */
void kvn_copier_start(const kvn_copier *self, kvn_direction direction, const kvn_columns *batch, kvn_staged_copy *out);
/* Waits for the copy until a deadline: KVN_PENDING, or the outcome. `report.failed` is the number of the failed
 * descriptor in the batch; the failure's message does not contain it. */
int kvn_staged_copy_wait(kvn_staged_copy *self, int64_t deadline_ns, kvn_failure *failure);
/* Stops the copy, which touches no byte after the return. */
void kvn_staged_copy_abort(kvn_staged_copy *self);

#endif

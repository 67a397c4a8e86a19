/* The table of calls that differ between kinds of accelerators. The folder of a kind fills it in (for Ascend,
 * acl/ops.c). Everything else in device/, the backends included, works with any such table.
 *
 * A call returns KVN_OK, or a negative kvn_status with `failure` filled in: the runtime's own code, and a
 * message of one line, "call: code (words): the runtime's text". A failed call also takes the error text that the
 * runtime keeps for the thread, so that a later failure does not repeat it. `failure` is never NULL, but callers often
 * ignore it, so filling it in must be cheap.
 *
 * Unless its comment says otherwise, a call may be made on any thread on which the device's context is current. Calls
 * on one stream are made by one thread at a time, except abort_stream, and record_event without `can_abort`. Sizes are
 * bytes, and not 0. */
#ifndef KVN_DEVICE_OPS_H
#define KVN_DEVICE_OPS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/library.h"
#include "kvnative/backend.h"

typedef struct kvn_device kvn_device;
typedef void *kvn_stream; /* the runtime's handle; NULL is none */

typedef enum kvn_memory_kind {
    KVN_MEMORY_PAGEABLE, /* of the host; also memory that the runtime does not know */
    KVN_MEMORY_PINNED,   /* of the host */
    KVN_MEMORY_DEVICE,
    KVN_MEMORY_MANAGED, /* the driver migrates it between host and device */
    KVN_MEMORY_FOREIGN  /* of this device, but of another context in this process: out of reach in ours */
} kvn_memory_kind;

/* The place of memory. */
typedef struct kvn_memory_place {
    kvn_memory_kind kind;
    uint32_t device;      /* its number; for host memory, the runtime's answer */
    uint32_t page_nbytes; /* 0: unknown */
} kvn_memory_place;

/* The batch copies that work on a device: flags. */
typedef enum kvn_batch_copies {
    KVN_BATCH_ASYNC = 1 << 0,    /* copy_batch on a stream, between host and device */
    KVN_BATCH_BLOCKING = 1 << 1, /* copy_batch without a stream: faster for pageable memory */
    KVN_BATCH_WITHIN = 1 << 2,   /* copy_batch on a stream, within the device */
    KVN_BATCH_PINNED = 1 << 3    /* copy_batch on a stream takes only pinned host memory: use copy_async for other */
} kvn_batch_copies;

/* Fixed costs, as the number of bytes that are copied in the same time. */
typedef struct kvn_copy_costs {
    uint64_t shard;      /* of using one more channel: no shard is smaller; UINT64_MAX: batches are never split */
    uint64_t descriptor; /* of each descriptor, besides its bytes */
} kvn_copy_costs;

/* Maximum bytes of one call that possibly nothing can stop: an abort waits for them, and so does a peer that frees
 * its memory. A stream has at most two such calls: about 26 ms at 5 GB/s. Copies within a device, or between two, are
 * faster, so their limit is higher. */
#define KVN_UNSTOPPABLE_HOST (UINT64_C(64) << 20)
#define KVN_UNSTOPPABLE_WITHIN (UINT64_C(256) << 20)

static inline uint64_t kvn_most_unstoppable(kvn_direction direction)
{
    return direction == KVN_DEVICE_TO_DEVICE ? KVN_UNSTOPPABLE_WITHIN : KVN_UNSTOPPABLE_HOST;
}

typedef struct kvn_device_ops {
    const char *name;    /* of backends, and a part of thread names, so keep it short: "acl" */
    const char *runtime; /* its name in messages: "the Ascend runtime" */
    int aborted_code;    /* the error code of work whose stream was aborted; 0: there is none */
    uint64_t max_batch;  /* maximum descriptors of one copy_batch */
    bool can_abort;      /* abort_stream stops all work, even work that waits for an event; else see copy_held */
    unsigned max_batches; /* maximum copy_batch calls on a stream between two waits for it; 0: any number */
    kvn_copy_costs host_costs; /* of copies from and to the host */
    kvn_copy_costs within_costs;

    /* ---- the runtime: a struct whose first member is the table of its calls. These calls are made on any thread,
     * once the runtime is initialized ---- */

    const kvn_symbols *symbols; /* of the table of calls */
    /* Counts the devices that this process may use: environment variables of the runtime may hide some. */
    int (*count_devices)(const void *runtime, uint32_t *count, kvn_failure *failure);
    /* KVN_UNSUPPORTED: this version of the runtime does not know the attribute. */
    int (*attribute)(const void *runtime, int32_t device, int attribute, int64_t *value,
                     kvn_failure *failure);

    /* ---- contexts; on any thread ---- */

    /* Opens the context that kvplan works in. It is a new one if an error of one stream fails all streams of a
     * context, because a framework in the same process uses the device too. *primary (preset to NULL) becomes current
     * on a thread that had no context before a call of kvplan, so that its other code finds one; NULL: such a thread
     * has none afterwards. On return either context may be current. The call may set the device's `state`. */
    int (*open_context)(kvn_device *device, void **context, void **primary, kvn_failure *failure);
    /* Call it when no object of the context is left. */
    void (*close_context)(kvn_device *device, void *context);
    /* The context that is current on this thread; NULL when there is none, which is not a failure. */
    void *(*get_context)(const kvn_device *device);
    /* The context may be NULL if get_context has returned NULL, for kinds that leave *primary NULL. */
    int (*set_context)(const kvn_device *device, void *context, kvn_failure *failure);
    /* The context that a stream of the program is in. *context is preset to the primary one, or to kvplan's without a
     * primary one. NULL: the preset is always right. */
    int (*context_of)(const kvn_device *device, kvn_stream stream, void **context, kvn_failure *failure);
    /* Called around calls on a thread of the program, and at the beginning of a thread of kvplan, if a thread of the
     * program can restrict the calls of other threads. They nest. NULL: not needed. */
    void (*begin_calls)(const kvn_device *device);
    void (*end_calls)(const kvn_device *device);

    /* ---- memory ---- */

    /* Device memory, in pages that can be shared with other devices. */
    int (*allocate)(const kvn_device *device, uint64_t nbytes, void **out, kvn_failure *failure);
    int (*free)(const kvn_device *device, void *address, kvn_failure *failure);
    /* Pinned host memory. */
    int (*allocate_host)(const kvn_device *device, uint64_t nbytes, void **out, kvn_failure *failure);
    int (*free_host)(const kvn_device *device, void *address, kvn_failure *failure);
    /* Pins allocated host memory; a page begins at `address`. */
    int (*pin)(const kvn_device *device, void *address, uint64_t nbytes, kvn_failure *failure);
    /* KVN_OK also if other code has unpinned the memory. */
    int (*unpin)(const kvn_device *device, void *address, kvn_failure *failure);
    /* *out is preset to pageable memory: the answer, with KVN_OK, for memory that the runtime does not know. */
    int (*locate)(const kvn_device *device, uint64_t address, kvn_memory_place *out, kvn_failure *failure);
    /* Copies, and waits for it: KVN_HOST_TO_DEVICE or KVN_DEVICE_TO_HOST, with host memory of any kind. */
    int (*copy)(const kvn_device *device, kvn_direction direction, uint64_t dst, uint64_t src,
                uint64_t nbytes, kvn_failure *failure);
    /* Zeroes device memory, and waits for it. */
    int (*clear)(const kvn_device *device, uint64_t address, uint64_t nbytes, kvn_failure *failure);
    int (*memory)(const kvn_device *device, size_t *free_nbytes, size_t *total_nbytes,
                  kvn_failure *failure);

    /* ---- streams ---- */

    int (*create_stream)(const kvn_device *device, kvn_stream *out, kvn_failure *failure);
    /* Waits for the work on the stream. */
    int (*destroy_stream)(const kvn_device *device, kvn_stream stream, kvn_failure *failure);
    /* Stops the work on the stream, running and queued. KVN_OK: the work no longer touches memory, and the stream
     * can be destroyed. Any failure: the work may go on. Called from any thread, while another waits for the stream. */
    int (*abort_stream)(const kvn_device *device, kvn_stream stream, kvn_failure *failure);
    /* Stops the work on the stream, and destroys it. KVN_OK: the work no longer touches memory. Any failure: the
     * stream still exists. Must fail if the runtime would destroy the stream and let its work go on. */
    int (*drop_stream)(const kvn_device *device, kvn_stream stream, kvn_failure *failure);
    /* Waits for the work on the stream, at most `ms` >= 1 milliseconds. KVN_PENDING: it is not done. A failure of the
     * work itself is returned here, once. */
    int (*wait_stream)(const kvn_device *device, kvn_stream stream, int ms, kvn_failure *failure);

    /* ---- events: points in the work of streams ---- */

    /* An event that can be recorded any number of times. */
    int (*create_event)(const kvn_device *device, void **out, kvn_failure *failure);
    /* Allowed while its work is not done; streams that wait for the event still do. */
    int (*destroy_event)(const kvn_device *device, void *event, kvn_failure *failure);
    /* Records the event behind the work on a stream of the current context; NULL: the context's default stream.
     * Refuses a stream that is being captured into a graph, and does not disturb the capture. */
    int (*record_event)(const kvn_device *device, void *event, kvn_stream stream, kvn_failure *failure);
    /* Refuses an event that the program recorded on a captured stream. NULL: streams cannot be captured. */
    int (*check_event)(const kvn_device *device, void *event, kvn_failure *failure);
    /* Makes later work of the stream wait for the last recording of the event, which may be the program's. After the
     * return the event may be recorded again or destroyed. The stream is as for record_event, and refused as there. */
    int (*wait_event)(const kvn_device *device, kvn_stream stream, void *event, kvn_failure *failure);
    /* KVN_OK if the work before the last recording of the event is done, else KVN_PENDING. Never waits. */
    int (*query_event)(const kvn_device *device, void *event, kvn_failure *failure);

    /* ---- copies of backends: KVN_HOST_TO_DEVICE, _DEVICE_TO_HOST, _DEVICE_TO_DEVICE ---- */

    /* Issues one copy. A copy of pageable memory may already be done on return. */
    int (*copy_async)(const kvn_device *device, kvn_direction direction, uint64_t dst, uint64_t src,
                      uint64_t nbytes, kvn_stream stream, kvn_failure *failure);
    /* Returns the kvn_batch_copies of the runtime. If it lacks the fastest ones, `why` (preset to "") gets a
     * sentence. */
    unsigned (*batch_copies)(const kvn_device *device, char *why, size_t room);
    /* Copies 1 to max_batch descriptors: on the stream or, if that is NULL, before it returns. It may take fewer
     * than it is given, but at least one, and sets batch->count to their number. Only dst, src, nbytes and count are
     * set. If abort_stream cannot stop the copies, it takes at most kvn_most_unstoppable bytes, or a single larger
     * descriptor. KVN_UNSUPPORTED: nothing was copied, and no batch ever will be. After other failures, *failed
     * (preset to SIZE_MAX) is the index of the descriptor at fault, if it is known. NULL if batch_copies is always
     * 0. */
    int (*copy_batch)(kvn_device *device, kvn_direction direction, kvn_columns *batch, kvn_stream stream,
                      size_t *failed, kvn_failure *failure);
    /* Like copy_batch, on a stream that waits for an event which may never come, without `can_abort`. It takes only
     * descriptors that abort_stream can stop until the event comes. KVN_PENDING: it cannot stop the first one, which
     * must wait until the event has come. NULL: either it can stop none of them, or `can_abort` is true and it can
     * stop all. */
    int (*copy_held)(kvn_device *device, kvn_direction direction, kvn_columns *batch, kvn_stream stream,
                     size_t *failed, kvn_failure *failure);
    /* True if abort_stream would stop all work that is on the stream now. NULL: always, because of `can_abort`. */
    bool (*can_stop)(const kvn_device *device, kvn_stream stream);
} kvn_device_ops;

#endif

/* What a kind of accelerator gives to device/: a table of calls, which its own folder fills in (acl/ops.c
 * for Ascend). Everything else of a device, its backends included, is written once, over this table.
 *
 * A call returns KVN_OK, or a negative kvn_status with `failure` filled in: the runtime's own code, and a
 * message of one line, "call: code (words): the runtime's text". What a failed call leaves behind for its
 * thread, a text say, is taken by then, so that it does not come with a later failure. Failures that are
 * expected cost little more than that: `failure` is never NULL, but often ignored.
 *
 * Calls are made by any thread on which the device's context is current, unless they say otherwise; of one
 * stream by one thread at a time, but for abort_stream, and record_event where it cannot abort (`can_abort`).
 * Sizes are bytes, and not 0. */
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
    KVN_MEMORY_MANAGED, /* moves between the two by itself */
    KVN_MEMORY_FOREIGN  /* of this device, but of another context in this process: out of reach in ours */
} kvn_memory_kind;

/* Where memory lies. */
typedef struct kvn_memory_place {
    kvn_memory_kind kind;
    uint32_t device;      /* its number; of host memory as the runtime says */
    uint32_t page_nbytes; /* 0: unknown */
} kvn_memory_place;

/* The batch copies that work on a device: flags. */
typedef enum kvn_batch_copies {
    KVN_BATCH_ASYNC = 1 << 0,    /* copy_batch on a stream, between host and device */
    KVN_BATCH_BLOCKING = 1 << 1, /* copy_batch without a stream: the better way for pageable memory */
    KVN_BATCH_WITHIN = 1 << 2,   /* copy_batch on a stream, within the device */
    KVN_BATCH_PINNED = 1 << 3    /* on a stream of pinned host memory only: other goes by copy_async */
} kvn_batch_copies;

/* In bytes that move in the same time. */
typedef struct kvn_copy_costs {
    uint64_t shard;      /* of one more channel: less than that is not cut; UINT64_MAX: nothing is */
    uint64_t descriptor; /* of each, besides its bytes */
} kvn_copy_costs;

/* Bytes of one call that nothing may be able to stop: an abort waits for them, and so does a peer that frees its
 * memory. Two such calls may be on a stream: at 5 GB/s some 26 ms. Within a device, or between two, memory is
 * faster. */
#define KVN_UNSTOPPABLE_HOST (UINT64_C(64) << 20)
#define KVN_UNSTOPPABLE_WITHIN (UINT64_C(256) << 20)

static inline uint64_t kvn_most_unstoppable(kvn_direction direction)
{
    return direction == KVN_DEVICE_TO_DEVICE ? KVN_UNSTOPPABLE_WITHIN : KVN_UNSTOPPABLE_HOST;
}

typedef struct kvn_device_ops {
    const char *name;    /* of backends, and in names of threads, so short: "acl" */
    const char *runtime; /* as messages call it: "the Ascend runtime" */
    int aborted_code;    /* the code of work whose stream was aborted; 0: none exists */
    uint64_t max_batch;  /* descriptors of one copy_batch */
    bool can_abort;      /* abort_stream stops all work, even behind an event; else see copy_held */
    unsigned max_batches; /* calls of copy_batch on a stream, until it was waited for; 0: any number */
    kvn_copy_costs host_costs; /* of copies from and to the host */
    kvn_copy_costs within_costs;

    /* ---- the runtime: a struct whose first member is the table of its calls; on any thread, once it is
     * ready for its first device ---- */

    const kvn_symbols *symbols; /* of these calls */
    /* How many devices this process may use, which the runtime's own variables may restrict. */
    int (*count_devices)(const void *runtime, uint32_t *count, kvn_failure *failure);
    /* KVN_UNSUPPORTED: this version does not know it. */
    int (*attribute)(const void *runtime, int32_t device, int attribute, int64_t *value,
                     kvn_failure *failure);

    /* ---- contexts; on any thread ---- */

    /* A context to work in: one of our own where an error of a stream would be that of all streams of its
     * context, as a framework in the same process has one too. *primary (preset to NULL) is what threads have
     * current that had none before a call of ours: others go on in them; NULL: none again. On return either
     * may be current. It may set the device's `state`. */
    int (*open_context)(kvn_device *device, void **context, void **primary, kvn_failure *failure);
    /* Call it when no object of the context is left. */
    void (*close_context)(kvn_device *device, void *context);
    /* The context that is current on this thread; NULL when there is none, which is not a failure. */
    void *(*get_context)(const kvn_device *device);
    /* The context may be NULL if get_context has returned NULL, for kinds that leave *primary NULL. */
    int (*set_context)(const kvn_device *device, void *context, kvn_failure *failure);
    /* The context that a stream of the program is in; *context is preset to the primary one, or else to that we
     * work in. NULL: always that. */
    int (*context_of)(const kvn_device *device, kvn_stream stream, void **context, kvn_failure *failure);
    /* Called around calls on a thread of the program, and at the beginning of an own thread, where threads of the
     * program can restrict the calls of others. They nest. NULL: not needed. */
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
    /* *out is preset to pageable memory, which is the answer for memory that the runtime does not know: KVN_OK. */
    int (*locate)(const kvn_device *device, uint64_t address, kvn_memory_place *out, kvn_failure *failure);
    /* Copies, and waits: KVN_HOST_TO_DEVICE or KVN_DEVICE_TO_HOST, any host memory. */
    int (*copy)(const kvn_device *device, kvn_direction direction, uint64_t dst, uint64_t src,
                uint64_t nbytes, kvn_failure *failure);
    /* Zeroes device memory, and waits. */
    int (*clear)(const kvn_device *device, uint64_t address, uint64_t nbytes, kvn_failure *failure);
    int (*memory)(const kvn_device *device, size_t *free_nbytes, size_t *total_nbytes,
                  kvn_failure *failure);

    /* ---- streams ---- */

    int (*create_stream)(const kvn_device *device, kvn_stream *out, kvn_failure *failure);
    /* Waits for the work on it. */
    int (*destroy_stream)(const kvn_device *device, kvn_stream stream, kvn_failure *failure);
    /* Stops the work on it, running and queued. KVN_OK: none of it touches memory any more, and the stream
     * can be destroyed. Any failure: it may go on. From any thread, while another waits for the stream. */
    int (*abort_stream)(const kvn_device *device, kvn_stream stream, kvn_failure *failure);
    /* Destroys it with the work on it. KVN_OK: none of that touches memory any more. Any failure: the stream
     * is still there; so say where a runtime would let the work go on. */
    int (*drop_stream)(const kvn_device *device, kvn_stream stream, kvn_failure *failure);
    /* Waits for the work on it, at most `ms` >= 1: KVN_PENDING when it is not done. The failure of the work
     * itself is returned here, once. */
    int (*wait_stream)(const kvn_device *device, kvn_stream stream, int ms, kvn_failure *failure);

    /* ---- events: points in the work of streams ---- */

    /* One to be recorded again and again. */
    int (*create_event)(const kvn_device *device, void **out, kvn_failure *failure);
    /* Whatever it was recorded for; a wait that was ordered stays. */
    int (*destroy_event)(const kvn_device *device, void *event, kvn_failure *failure);
    /* Behind the work on the stream, which is one of the current context; NULL: its default stream. A stream
     * whose work is not run now, but captured to be run later, is refused, and the capture not disturbed. */
    int (*record_event)(const kvn_device *device, void *event, kvn_stream stream, kvn_failure *failure);
    /* Refuses an event of the program that was recorded on such a stream. NULL: there are none. */
    int (*check_event)(const kvn_device *device, void *event, kvn_failure *failure);
    /* What comes onto the stream from here on waits for what the event, ours or the program's, was last recorded for.
     * That is settled when this returns: the event may be recorded again, or destroyed. The stream, and what is
     * refused, as of record_event. */
    int (*wait_event)(const kvn_device *device, kvn_stream stream, void *event, kvn_failure *failure);
    /* Returns KVN_OK once the work before its last recording is done, or KVN_PENDING. Never waits. */
    int (*query_event)(const kvn_device *device, void *event, kvn_failure *failure);

    /* ---- copies of backends: KVN_HOST_TO_DEVICE, _DEVICE_TO_HOST, _DEVICE_TO_DEVICE ---- */

    /* Issues one copy. Of pageable memory it may be done on return. */
    int (*copy_async)(const kvn_device *device, kvn_direction direction, uint64_t dst, uint64_t src,
                      uint64_t nbytes, kvn_stream stream, kvn_failure *failure);
    /* Returns the kvn_batch_copies of the runtime. If it lacks the fastest ones, `why` (preset to "") gets a
     * sentence. */
    unsigned (*batch_copies)(const kvn_device *device, char *why, size_t room);
    /* Copies 1 to max_batch descriptors, on the stream; or, where that is NULL, before it returns. It may take
     * fewer than it is given, at least one: then batch->count is how many. Only dst, src, nbytes and count are set.
     * KVN_UNSUPPORTED: nothing was copied, and no batch ever will be. Other failures: *failed (preset to
     * SIZE_MAX) is the index of the descriptor at fault, where that is known. NULL where batch_copies is
     * always 0. Of what abort_stream would not stop it takes no more bytes than kvn_most_unstoppable, but for a
     * descriptor that alone has more. */
    int (*copy_batch)(kvn_device *device, kvn_direction direction, kvn_columns *batch, kvn_stream stream,
                      size_t *failed, kvn_failure *failure);
    /* As copy_batch, on a stream that waits for an event which may never come: of a device whose streams cannot
     * be aborted, for what abort_stream can stop until then. KVN_PENDING: the first descriptor is no such; it
     * has to wait for the event. NULL: nothing is, or `can_abort`, and then all is. */
    int (*copy_held)(kvn_device *device, kvn_direction direction, kvn_columns *batch, kvn_stream stream,
                     size_t *failed, kvn_failure *failure);
    /* Returns true if abort_stream would stop all work on the stream now. NULL: it does, since it `can_abort`. */
    bool (*can_stop)(const kvn_device *device, kvn_stream stream);
} kvn_device_ops;

#endif

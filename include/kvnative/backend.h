/* Contract 2: backends move bytes. A backend takes batches of descriptors, and answers poll, wait and abort for each. A
 * backend may wrap another one: the wrappers of the tests produce every failure on any machine.
 *
 * Rules:
 * - No call holds the GIL or allocates per descriptor.
 * - `submit` copies the three column pointers, not the columns: they outlive the request.
 * - After `wait` returned an outcome, or `abort` returned, the backend touches no byte of the
 *   batch any more.
 * - `abort` may be called while other threads are in `wait` on the same request.
 * - A batch has any number of descriptors, and a descriptor any size: a backend whose system has a
 *   limit cuts what it is given.
 * - A request goes on whether or not a thread is in a call on it, and the backend tells its `end`: no one polls.
 * - What cannot be honoured is refused by `submit` with a reason in the report; nothing is ignored. */
#ifndef KVNATIVE_BACKEND_H
#define KVNATIVE_BACKEND_H

#include <stdbool.h>

#include "kvnative/descriptor.h"
#include "kvnative/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum kvn_direction {
    KVN_HOST_TO_DEVICE = 1,
    KVN_DEVICE_TO_HOST,
    KVN_DEVICE_TO_DEVICE,
    KVN_PEER_GET, /* source addresses are the peer's */
    KVN_PEER_PUT  /* destination addresses are the peer's */
} kvn_direction;

/* Half-open range of descriptor indices. */
typedef struct kvn_span {
    uint64_t first;
    uint64_t last;
} kvn_span;

#define KVN_NO_DESCRIPTOR UINT64_MAX
#define KVN_MAX_SPANS 66 /* a piece per thread, and the unclaimed tail */

/* The outcome of a request, or its progress. Spans are ascending and disjoint; a descriptor outside of them is
 * confirmed. While KVN_PENDING, only `bytes_done` is meaningful. */
typedef struct kvn_report {
    int32_t status;
    int32_t code;            /* errno, aclError, HcclResult: as the system gave it */
    uint64_t failed;         /* first descriptor known to have failed, or KVN_NO_DESCRIPTOR */
    uint64_t bytes_done;
    uint32_t num_unconfirmed;
    uint32_t reserved;
    kvn_span unconfirmed[KVN_MAX_SPANS];
    char message[256];       /* "" when status is KVN_OK or KVN_PENDING */
} kvn_report;

typedef struct kvn_backend kvn_backend;
typedef struct kvn_request kvn_request; /* one submitted batch; each backend has its own */

/* Deadlines are absolute CLOCK_MONOTONIC nanoseconds; KVN_FOREVER never passes. */
#define KVN_FOREVER INT64_MAX

typedef struct kvn_backend_vtable {
    const char *name;
    /* True: it takes batches with an `after`, and moves no byte of them before that. Other backends get such a batch
     * when its gate has opened. */
    bool orders;
    /* Issues the batch. On KVN_OK *out is a request to poll, wait and release; otherwise *out is
     * NULL and `report` says why. Small batches may be complete on return. KVN_PENDING, only of a batch with an
     * `after` or of a caller that hurries: not taken now, as it would stand behind another or wait for a place. It
     * is given again now and then, and without its `after` when that has come. */
    int (*submit)(kvn_backend *self, const kvn_columns *batch, kvn_request **out, kvn_report *report);
    /* KVN_PENDING or the outcome; never blocks. */
    int (*poll)(kvn_backend *self, kvn_request *request, kvn_report *report);
    /* As poll, but blocks until the outcome or the deadline; the caller's thread may help.
     * Returning KVN_PENDING means that the deadline passed and the request is still in flight. */
    int (*wait)(kvn_backend *self, kvn_request *request, int64_t deadline_ns, kvn_report *report);
    /* Stops promptly and returns when no byte is touched any more. Idempotent; `why` is the
     * status to report for what was still open: one of those that kvn_is_given_up (core/report.h) knows. */
    int (*abort)(kvn_backend *self, kvn_request *request, int why, kvn_report *report);
    /* Of a batch with an `after`: cancels it if that has not come, and does not wait for the outcome. NULL where
     * no batch with one is taken, or it is left to `abort`. */
    void (*cancel_held)(kvn_backend *self, kvn_request *request);
    /* Lets what comes onto `stream`, the program's, from here on come after the request, by the device's own
     * order: no thread waits for the bytes. Waits, until the deadline, for the request to be given to the device
     * whole. KVN_OK, also where the request is over; KVN_PENDING: the deadline passed, and nothing was ordered;
     * else why not, in `report`. A request that is given up afterwards does not hold the stream. May be called
     * while other threads are in `wait` and `abort`; the request advances without them. NULL: no stream can wait
     * for what moves these bytes. */
    int (*block_stream)(kvn_backend *self, kvn_request *request, void *stream, int64_t deadline_ns,
                        kvn_report *report);
    void (*release)(kvn_backend *self, kvn_request *request); /* after an outcome */
    void (*destroy)(kvn_backend *self);                       /* no request is left */
} kvn_backend_vtable;

struct kvn_backend {
    const kvn_backend_vtable *vtable;
};

#ifdef __cplusplus
}
#endif
#endif

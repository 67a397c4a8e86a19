/* Contract 2: backends move bytes. A backend takes batches of descriptors, and answers poll, wait and abort for each. A
 * backend may wrap another one: the wrappers of the tests produce every failure on any machine.
 *
 * Rules:
 * - No call holds the GIL, or makes an allocation for each descriptor.
 * - `submit` copies the three column pointers, not the columns, which outlive the request.
 * - The report of a batch is the caller's, and stays in place until `release`. The backend writes it, in `submit` if it
 *   refuses the batch, else before it calls the batch's `end`. The caller reads it once a call has returned the outcome.
 *   No one writes it after that, because the backend reads it too.
 * - Once `wait` has returned an outcome, or `abort` has returned, the backend no longer touches a byte of the batch.
 * - From then on `poll` returns the outcome too, even if another thread is still in `wait`.
 * - `abort` may be called while other threads are in `wait` on the same request.
 * - A batch has any number of descriptors of any size: a backend splits those that exceed a limit of its system.
 * - A request advances even if no thread is in a call on it, and the backend calls its `end`: no caller has to poll.
 * - `submit` refuses a batch that it cannot execute completely, with the reason in the report. */
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
#define KVN_MAX_SPANS 66 /* a piece per thread, and the unclaimed tail; a report that needs more unites spans */

/* The outcome of a request. Spans are ascending and disjoint; a descriptor outside of them is confirmed. */
typedef struct kvn_report {
    int32_t status;
    int32_t code;            /* errno, or the code of the library: aclError, HcclResult, CUresult, ucs_status_t */
    uint64_t failed;         /* first descriptor known to have failed, or KVN_NO_DESCRIPTOR */
    uint64_t bytes_done;
    uint32_t num_unconfirmed;
    uint32_t reserved;
    kvn_span unconfirmed[KVN_MAX_SPANS];
    char message[256];       /* "" when status is KVN_OK */
} kvn_report;

typedef struct kvn_backend kvn_backend;
typedef struct kvn_request kvn_request; /* one submitted batch; each backend has its own */

/* Deadlines are absolute CLOCK_MONOTONIC nanoseconds; KVN_FOREVER never passes. */
#define KVN_FOREVER INT64_MAX

typedef struct kvn_backend_vtable {
    const char *name;
    /* True: the backend takes batches with an `after`, and moves none of their bytes before that gate opens. Other
     * backends get such a batch after its gate has opened. */
    bool orders;
    /* Issues the batch. On KVN_OK *out is a request to poll, wait and release; otherwise *out is NULL and the report has
     * the reason. Small batches may be complete on return. KVN_PENDING (only for a batch with an `after`, or with
     * KVN_CALLER_HURRIES): the batch was not taken, because it would have to wait for another one or for a free slot.
     * The caller submits it again from time to time, and without its `after` once that gate has opened. */
    int (*submit)(kvn_backend *self, const kvn_columns *batch, kvn_request **out, kvn_report *report);
    /* KVN_PENDING, or the status of the outcome; `bytes_done` gets the bytes that have moved so far. Never blocks; may
     * run beside `wait`, `abort` and `block_stream` of other threads. */
    int (*poll)(kvn_backend *self, kvn_request *request, uint64_t *bytes_done);
    /* Like poll, but blocks until the outcome or the deadline; the caller's thread may help. KVN_PENDING: the deadline
     * passed, and the request is still in flight. */
    int (*wait)(kvn_backend *self, kvn_request *request, int64_t deadline_ns);
    /* Stops promptly and returns once the backend no longer touches a byte. Idempotent. `why` is the status to
     * report for the descriptors that were not complete: one for which kvn_is_given_up (core/report.h) is true. */
    int (*abort)(kvn_backend *self, kvn_request *request, int why);
    /* Cancels a batch whose `after` has not opened, and does not wait for the outcome. NULL: the backend takes no
     * batch with an `after`, or leaves this to `abort`. */
    void (*cancel_held)(kvn_backend *self, kvn_request *request);
    /* Makes the work that the program enqueues on its `stream` from now on wait for the request, as
     * cudaStreamWaitEvent does: the device waits, not a thread. Waits, until the deadline, until the whole request is
     * enqueued on the device. KVN_OK: ordered, or the request is already over. KVN_PENDING: the deadline passed, and
     * nothing was ordered. Any other status: `why` has the reason. If the request is aborted afterwards, the stream
     * does not wait for it. May be called while other threads are in `wait` and `abort`. NULL: no stream can wait for
     * this backend. */
    int (*block_stream)(kvn_backend *self, kvn_request *request, void *stream, int64_t deadline_ns,
                        struct kvn_failure *why);
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

/* Moves a column array with a backend, as one batch: what a thread may do with a transfer while others
 * do the same. A backend takes batches of any size: one whose system has a limit cuts them itself. */
#ifndef KVNATIVE_CORE_EXECUTOR_H
#define KVNATIVE_CORE_EXECUTOR_H

#include <pthread.h>
#include <stdbool.h>

#include "core/completions.h"
#include "core/gate.h"
#include "kvnative/backend.h"

/* Embed it where it stays in place until kvn_task_release; the fields are executor.c's. */
typedef struct kvn_task {
    kvn_backend *backend;
    kvn_columns columns;
    kvn_batch_end end;      /* the backend's, of the batch */
    kvn_ending *ending;     /* a part of it ends with the task; NULL: none */
    atomic_bool ended;      /* so it has, but for who looks at the outcome */
    bool begun;             /* it was submitted: before, nothing moves */
    kvn_gate_waiter waiter; /* with a gate while the backend has to be given the batch by us */
    uint64_t bytes_done;    /* when last looked at */
    kvn_request *request;   /* NULL before it is submitted and after the outcome */
    pthread_mutex_t mutex;
    pthread_cond_t changed; /* a thread has left a call of the backend's, or there is an outcome */
    bool driven;            /* a thread is in backend->wait */
    uint32_t aborting;      /* threads in backend->abort */
    uint32_t ordering;      /* threads in backend->block_stream */
    bool settled;
    kvn_report outcome;
} kvn_task;

/* Makes a task that does nothing yet: it can be aborted already, and waited for. The backend, the columns and the
 * ending must outlive the outcome. */
void kvn_task_init(kvn_task *task, kvn_backend *backend, const kvn_columns *columns, kvn_ending *ending);
/* Submits the descriptors, once; does nothing if the task was aborted. Returns the status, KVN_PENDING
 * if in flight; what is refused has its outcome at once. Where the columns come `after` something, and the
 * backend does not order, they are submitted by a thread of that gate's, which outlives the outcome. */
int kvn_task_begin(kvn_task *task);
/* KVN_PENDING or the outcome; never blocks. */
int kvn_task_poll(kvn_task *task);
/* Whether kvn_task_wait returns the outcome at once; of a task with an ending. */
bool kvn_task_has_ended(const kvn_task *task);
/* Blocks until the outcome or the deadline; KVN_PENDING when that passed, with the task still in
 * flight. */
int kvn_task_wait(kvn_task *task, int64_t deadline_ns);
/* Stops promptly; on return no byte is touched any more. `why` is KVN_TIMEOUT, KVN_CANCELLED or KVN_REVOKED. */
int kvn_task_abort(kvn_task *task, int why);
/* Lets what comes onto the program's stream from here on come after the task, as the backend's block_stream: nothing
 * is to be ordered where the task has an outcome. KVN_UNSUPPORTED where the backend cannot, or the task stands at a
 * gate that has not opened. */
int kvn_task_block_stream(kvn_task *task, void *stream, int64_t deadline_ns, kvn_report *report);
/* Gives it up, as KVN_CANCELLED, if it stands at a gate that has not opened; never waits. */
void kvn_task_cancel_held(kvn_task *task);
/* Whether it stands at a gate that has not opened: nothing was submitted. */
bool kvn_task_is_held(kvn_task *task);
/* Bytes moved so far, and the outcome if there is one. */
int kvn_task_report(kvn_task *task, kvn_report *report);
/* The outcome, once there is one; as long as the task stays in place. */
const kvn_report *kvn_task_outcome(const kvn_task *task);
/* After the outcome, once, when no thread is in another call. */
void kvn_task_release(kvn_task *task);

#endif

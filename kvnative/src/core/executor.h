/* Tasks: each is an array of descriptors, which a backend moves as one batch. All calls but init and release are
 * thread-safe. */
#ifndef KVNATIVE_CORE_EXECUTOR_H
#define KVNATIVE_CORE_EXECUTOR_H

#include <pthread.h>
#include <stdbool.h>

#include "core/completions.h"
#include "core/gate.h"
#include "kvnative/backend.h"

/* Embed it where it stays in place until kvn_task_release; the fields are executor.c's.
 *
 * The end of a transfer is seen three times, because each holder lets go under a lock of its own, and none may take the
 * next one's. The backend has written the report and touches no byte (on its thread, with its locks). The task has
 * released the request, which no thread uses any more (`status`, with the mutex). Python has released descriptors and
 * memory (`AnyTask.outcome`, with the GIL). The outcome itself exists once, in `outcome`. */
typedef struct kvn_task {
    kvn_backend *backend;
    kvn_columns columns;
    kvn_batch_end end;      /* called by the backend */
    kvn_ending *ending;     /* or NULL; one of its parts ends with the task */
    atomic_bool ended;      /* the backend has reported the end */
    kvn_gate_waiter waiter; /* at a gate that the task, not the backend, waits for */
    kvn_request *request;   /* NULL before the batch is submitted and after the outcome */
    pthread_mutex_t mutex;
    pthread_cond_t changed; /* a thread has returned from the backend, or the outcome has come */
    bool driven;            /* a thread is in backend->wait */
    uint32_t aborting;      /* threads in backend->abort */
    uint32_t ordering;      /* threads in backend->block_stream */
    int status;             /* KVN_PENDING, or that of the outcome */
    kvn_report outcome;     /* the backend's until the outcome has come */
} kvn_task;

/* Makes a task that moves nothing yet but can be waited for and aborted. The backend, the columns and the ending must
 * outlive the outcome. */
void kvn_task_init(kvn_task *task, kvn_backend *backend, const kvn_columns *columns, kvn_ending *ending);
/* Submits the descriptors, once; no effect on an aborted task. Returns the outcome, or KVN_PENDING. If the gate `after`
 * has to open first, or the backend has no room, the gate's thread submits. The gate must outlive the outcome. */
int kvn_task_begin(kvn_task *task);
/* KVN_PENDING or the outcome; never blocks. */
int kvn_task_poll(kvn_task *task);
/* True if kvn_task_wait returns at once. For tasks with an ending. */
bool kvn_task_has_ended(const kvn_task *task);
/* Blocks until the outcome, or returns KVN_PENDING at the deadline. */
int kvn_task_wait(kvn_task *task, int64_t deadline_ns);
/* Stops the task; after the return it touches no byte. `why` is KVN_TIMEOUT, KVN_CANCELLED or KVN_REVOKED. */
int kvn_task_abort(kvn_task *task, int why);
/* Makes later work of the program's stream wait for the task, by block_stream of the backend. No effect after the
 * outcome. KVN_UNSUPPORTED if the backend cannot, or if the task still waits at a gate. */
int kvn_task_block_stream(kvn_task *task, void *stream, int64_t deadline_ns, kvn_failure *why);
/* Cancels a task that waits at a gate, as KVN_CANCELLED. Never blocks. */
void kvn_task_cancel_held(kvn_task *task);
/* True while the task waits at a gate and is not submitted. */
bool kvn_task_is_held(kvn_task *task);
/* The bytes that have moved so far. Never blocks. */
uint64_t kvn_task_bytes_done(kvn_task *task);
/* The outcome, after it has come; valid until the task is released. */
const kvn_report *kvn_task_outcome(const kvn_task *task);
/* Call it once, after the outcome, when no other thread uses the task. */
void kvn_task_release(kvn_task *task);

#endif

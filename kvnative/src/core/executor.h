/* Moves a column array of any length with a backend: cuts it into batches that the backend takes,
 * one after another, and keeps one outcome in the indices of that array.
 *
 * A task of several batches advances inside poll and wait; the first failure ends it. Its calls may
 * come from several threads at once. */
#ifndef KVNATIVE_CORE_EXECUTOR_H
#define KVNATIVE_CORE_EXECUTOR_H

#include <pthread.h>
#include <stdbool.h>

#include "kvnative/backend.h"

/* Embed it where it stays in place until kvn_task_release; the fields are executor.c's. */
typedef struct kvn_task {
    kvn_backend *backend;
    kvn_columns columns;
    uint64_t max_batch;
    bool begun;            /* kvn_task_begin has run: before, nothing moves */
    uint64_t first;        /* task-global index of the current batch's first descriptor */
    uint64_t batch_count;
    uint64_t bytes_before; /* moved by the batches before the current one */
    uint64_t bytes_now;    /* moved in all, when last looked at */
    kvn_request *request;  /* the current batch; NULL before the first and after the outcome */
    pthread_mutex_t mutex;
    pthread_cond_t changed; /* `driven` or `aborting` ended, or there is an outcome */
    bool driven;            /* a thread is in backend->wait for the current batch */
    uint32_t aborting;      /* threads in backend->abort for the current batch */
    int give_up;            /* KVN_OK, or why no further batch may begin */
    bool settled;
    kvn_report outcome;
} kvn_task;

/* Whether a descriptor is larger than the backend takes; `report` then says which and is an outcome
 * of which nothing was moved. */
bool kvn_refuse_oversized(kvn_backend *backend, const kvn_columns *columns, kvn_report *report);

/* Makes a task that does nothing yet: it can be aborted already, and waited for. The backend and the
 * columns must outlive the outcome. */
void kvn_task_init(kvn_task *task, kvn_backend *backend, const kvn_columns *columns);
/* Checks the descriptors and issues the first batch, once; does nothing if the task was aborted.
 * Returns the status, KVN_PENDING if in flight; what is refused has its outcome at once. */
int kvn_task_begin(kvn_task *task);
/* KVN_PENDING or the outcome; never blocks. */
int kvn_task_poll(kvn_task *task);
/* Blocks until the outcome or the deadline; KVN_PENDING when that passed, with the task still in
 * flight. */
int kvn_task_wait(kvn_task *task, int64_t deadline_ns);
/* Stops promptly; on return no byte is touched any more. `why` is KVN_TIMEOUT or KVN_CANCELLED. */
int kvn_task_abort(kvn_task *task, int why);
/* Bytes moved so far, and the outcome if there is one. */
int kvn_task_report(kvn_task *task, kvn_report *report);
/* The outcome, once there is one; as long as the task stays in place. */
const kvn_report *kvn_task_outcome(const kvn_task *task);
/* After the outcome, once, when no thread is in another call. */
void kvn_task_release(kvn_task *task);

#endif

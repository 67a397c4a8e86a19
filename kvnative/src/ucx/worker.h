/* A worker of UCX: a context, its worker, a thread, and their tasks.
 *
 * How threads share it:
 * - The holder of the progress lock may call UCX, and owns the endpoints and the tasks. (Memory is mapped without it.)
 * - Other threads put work items on the submission queue, which has a short mutex of its own, and then try the lock. If
 *   it is taken, its holder runs the item: each pass of progress begins with the queue, and a thread that has released
 *   the lock checks the queue again. So submitting never blocks on the lock, and no item is left behind.
 * - A waiting caller tries the lock too. With the lock it makes progress itself, so that small transfers end without a
 *   change of threads. Without it, or after a while without progress, it sleeps on `changed`; a thread that makes a
 *   condition of waiters true calls kvn_ucx_notify. Once the worker's thread has stopped, waiters nap and try again.
 * - Only the worker's thread blocks on the lock. It sleeps on the events of UCX and on wake_fd. The lock is released
 *   either with the events armed, after a pass without work, or with the thread woken. So tasks advance even if all
 *   callers sleep.
 * - UCX calls back during progress, with the lock held. A callback notes the result and frees the request. It makes no
 *   other call of UCX, but leaves that to a work item or to the next step of a task.
 *
 * The progress lock is taken before the mutex of the queue, never after it. */
#ifndef KVN_UCX_WORKER_H
#define KVN_UCX_WORKER_H

#include <pthread.h>
#include <stdbool.h>

#include "kvnative/backend.h"
#include "ucx/library.h"

typedef struct kvn_ucx_worker kvn_ucx_worker;
typedef struct kvn_ucx_endpoint kvn_ucx_endpoint;

#define KVN_UCX_TICKETS 256 /* simultaneous transfers that write; further ones wait */

/* A work item, which runs once with the progress lock. It stays in place until then, and may free itself. */
typedef struct kvn_ucx_work kvn_ucx_work;

struct kvn_ucx_work {
    void (*run)(void *context);
    void *context;
    kvn_ucx_work *next; /* the worker's */
};

/* A task, such as a transfer, that advances in steps with the progress lock. Each pass of progress calls
 * `step(context)`, which does a bounded amount of work and returns its number of actions. A step may remove and free
 * its own task only. */
typedef struct kvn_ucx_task kvn_ucx_task;

struct kvn_ucx_task {
    unsigned (*step)(void *context);
    void *context;
    kvn_ucx_task *next; /* the worker's */
    kvn_ucx_task *previous;
};

struct kvn_ucx_worker {
    kvn_ucx_library *library;
    const kvn_ucx *calls;
    pid_t pid; /* of the process that made it; a forked child must not use it */
    atomic_uint num_holders;
    kvn_ucp_context_h context;
    kvn_ucp_address *address; /* for peers; owned by UCX */
    size_t address_nbytes;
    char transports[KVN_UCX_TRANSPORTS];
    int events_fd; /* UCX's */
    int wake_fd;   /* wakes the thread */
    /* Announces the current writes to peers' memory: for each transfer the tag of the owner and a number; 0: none.
     * Owners read them when they end a registration: transfer.c. */
    _Atomic uint64_t *tickets;
    pthread_t thread;
    atomic_bool is_stopping;
    atomic_uint num_endpoints; /* that have not ended: endpoint.c */

    pthread_mutex_t mutex; /* guards the queue, and the failures of endpoints */
    pthread_cond_t changed;
    bool has_thread; /* the thread was started and has not ended */
    kvn_ucx_work *first_work; /* the submission queue */
    kvn_ucx_work *last_work;

    pthread_mutex_t progress_lock; /* guards the fields below, and all calls of UCX except those that map memory */
    kvn_ucp_worker_h handle;
    bool is_closed; /* it refuses new endpoints */
    kvn_ucx_endpoint *endpoints;
    kvn_ucx_task *first_task; /* the task with the first step */
    kvn_ucx_task *last_task;
    atomic_uint num_announced; /* number of tickets so far */
    bool has_completed; /* an operation or a close has completed since the last steps of tasks */
};

/* Opens a context and its worker, and starts the thread. Takes about 25 ms. Later settings override earlier ones; all
 * override the environment, which overrides the presets. `name` (may be "") is for UCX's tools. The caller holds the
 * worker. One thread of a process at a time. KVN_INVALID: a setting that UCX refuses, or that lets it use TCP;
 * KVN_UNSUPPORTED: this process was forked from one that had a worker. */
int kvn_ucx_worker_create(kvn_ucx_library *library, const kvn_ucx_setting *settings,
                          size_t num_settings, const char *name, kvn_ucx_worker **out,
                          kvn_failure *failure);
/* Stops the thread. Idempotent; without the progress lock. No effect in a forked child. */
void kvn_ucx_worker_stop(kvn_ucx_worker *self);
/* The creator, endpoints and regions hold the worker. The creator stops it before releasing it. */
void kvn_ucx_worker_hold(kvn_ucx_worker *self);
void kvn_ucx_worker_release(kvn_ucx_worker *self);
bool kvn_ucx_worker_is_forked(const kvn_ucx_worker *self);

/* Queues `run(context)` as `work`, which runs at once if the progress lock is free. Never blocks; with or without the
 * lock. */
void kvn_ucx_post(kvn_ucx_worker *self, kvn_ucx_work *work, void (*run)(void *context),
                  void *context);
/* Like kvn_ucx_post, but returns after the run. Without the progress lock. */
void kvn_ucx_call(kvn_ucx_worker *self, void (*run)(void *context), void *context);
/* Waits until `is_done(context)`, which reads atomics, is true; false at the deadline. The thread that makes it true
 * calls kvn_ucx_notify. Without the progress lock. */
bool kvn_ucx_wait(kvn_ucx_worker *self, bool (*is_done)(const void *context), const void *context,
                  int64_t deadline_ns);
void kvn_ucx_notify(kvn_ucx_worker *self);

/* Call these with the progress lock. */
void kvn_ucx_add_task(kvn_ucx_worker *self, kvn_ucx_task *task, unsigned (*step)(void *context),
                      void *context);
void kvn_ucx_remove_task(kvn_ucx_worker *self, kvn_ucx_task *task);

#endif

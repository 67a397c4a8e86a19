/* A worker of UCX: one context, one worker, what goes on over it, and a thread.
 *
 * How threads share it:
 * - Whoever holds the progress lock may call UCX, and owns the endpoints and the tasks. (Memory is mapped without it.)
 * - What others want done they put on the submission queue, which has a short mutex of its own, and then try the
 *   lock. If it is taken, its holder runs the work item: each pass of progress begins with the queue, and whoever has
 *   released the lock looks into the queue again. So nobody who submits waits for the lock, and no item is left behind.
 * - A caller that waits tries the lock, too. If it gets it, it makes progress itself: what is small ends without a
 *   change of threads. If it does not, or when nothing has happened for a while, it sleeps on `changed`: whoever makes
 *   true what somebody may wait for, calls kvn_ucx_notify. When the thread has stopped it only naps, and tries again.
 * - The worker's thread alone blocks on the lock. It sleeps on UCX's events and on wake_fd. The lock is released
 *   with the events armed, after a pass that found nothing to do, or else with the thread woken. So whatever is under
 *   way goes on, though everybody sleeps.
 * - UCX calls back during progress, with the lock. A callback notes what has happened and frees the request; it makes
 *   no other call of UCX: what follows is a work item, or the next step of a task.
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

#define KVN_UCX_TICKETS 256 /* transfers that write at one time; further ones wait */

/* A work item: done once, with the progress lock. It stays in place until it runs, and may be freed by that. */
typedef struct kvn_ucx_work kvn_ucx_work;

struct kvn_ucx_work {
    void (*run)(void *context);
    void *context;
    kvn_ucx_work *next; /* the worker's */
};

/* What goes on in steps, with the progress lock, such as a transfer. Each pass of progress calls `step(context)`, which
 * does a bounded part of it and returns how many things it did. It may remove its task, and free it, but no other. */
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
    pid_t pid; /* of the process that made it: a forked child leaves everything alone */
    atomic_uint num_holders;
    kvn_ucp_context_h context;
    kvn_ucp_address *address; /* for peers; UCX's */
    size_t address_nbytes;
    char transports[KVN_UCX_TRANSPORTS];
    int events_fd; /* UCX's */
    int wake_fd;   /* wakes the thread */
    /* What this process writes to its peers' memory now: for each transfer the tag of the owner and a number,
     * 0: none. Owners read it when they end a registration: transfer.c. */
    _Atomic uint64_t *tickets;
    pthread_t thread;
    atomic_bool is_stopping;
    atomic_uint num_endpoints; /* that UCX has, open or being closed: endpoint.c */

    pthread_mutex_t mutex; /* guards the queue, and why endpoints have failed */
    pthread_cond_t changed;
    bool has_thread; /* that has not ended */
    kvn_ucx_work *first_work; /* the submission queue */
    kvn_ucx_work *last_work;

    pthread_mutex_t progress_lock; /* guards what follows, and all calls of UCX but those that map memory */
    kvn_ucp_worker_h handle;
    bool is_closed; /* it takes no endpoints any more */
    kvn_ucx_endpoint *endpoints;
    kvn_ucx_task *first_task; /* whose step comes first */
    kvn_ucx_task *last_task;
    atomic_uint num_announced; /* tickets, ever */
    bool has_completed; /* an operation, or a close, since the tasks had a step */
};

/* Opens a context and its worker, and starts the thread. Takes about 25 ms. Later settings override earlier
 * ones, and all of them the environment's, which override the presets. `name` (may be "") is for UCX's tools.
 * The caller holds it. One thread at a time in a process. KVN_INVALID: a setting that UCX does not take, or
 * that lets it use TCP; KVN_UNSUPPORTED: this process was forked from one while that had a worker. */
int kvn_ucx_worker_create(kvn_ucx_library *library, const kvn_ucx_setting *settings,
                          size_t num_settings, const char *name, kvn_ucx_worker **out,
                          kvn_failure *failure);
/* Stops the thread. Idempotent; by any thread without the progress lock. Nothing is done in a forked child. */
void kvn_ucx_worker_stop(kvn_ucx_worker *self);
/* Held by its maker, who stops it before it lets go, by endpoints and by regions. */
void kvn_ucx_worker_hold(kvn_ucx_worker *self);
void kvn_ucx_worker_release(kvn_ucx_worker *self);
bool kvn_ucx_worker_is_forked(const kvn_ucx_worker *self);

/* Queues `run(context)` as `work`. It runs soon: at once if the progress lock is free. Never blocks; with the lock,
 * too. */
void kvn_ucx_post(kvn_ucx_worker *self, kvn_ucx_work *work, void (*run)(void *context),
                  void *context);
/* As kvn_ucx_post, and returns when it has run. Not with the progress lock. */
void kvn_ucx_call(kvn_ucx_worker *self, void (*run)(void *context), void *context);
/* Waits until `is_done(context)`, which reads atomics, and returns it: false when the deadline has passed.
 * Whoever makes it true calls kvn_ucx_notify. Not with the progress lock. */
bool kvn_ucx_wait(kvn_ucx_worker *self, bool (*is_done)(const void *context), const void *context,
                  int64_t deadline_ns);
void kvn_ucx_notify(kvn_ucx_worker *self);

/* With the progress lock. */
void kvn_ucx_add_task(kvn_ucx_worker *self, kvn_ucx_task *task, unsigned (*step)(void *context),
                      void *context);
void kvn_ucx_remove_task(kvn_ucx_worker *self, kvn_ucx_task *task);

#endif

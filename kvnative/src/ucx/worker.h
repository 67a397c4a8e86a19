/* A worker of UCX: one context, one worker, its endpoints and transfers, and a thread.
 *
 * The holder of the progress lock may call UCX. Only the worker's thread blocks on that lock: others queue a work
 * item and try it. If it is taken, its holder runs the item, before it progresses UCX again or after it has
 * released the lock, so no item is left behind. A caller that waits progresses UCX itself while something
 * happens, then sleeps on a condition, and the thread goes on. The thread sleeps on UCX's events: the lock is
 * released with the events armed, or with the thread woken. */
#ifndef KVN_UCX_WORKER_H
#define KVN_UCX_WORKER_H

#include <pthread.h>
#include <stdbool.h>

#include "kvnative/backend.h"
#include "ucx/library.h"

typedef struct kvn_ucx_worker kvn_ucx_worker;
typedef struct kvn_ucx_endpoint kvn_ucx_endpoint;

#define KVN_UCX_TICKETS 256 /* transfers that write at one time; further ones wait */

/* Something to be done with the progress lock. It stays in place until it runs, and may be freed by that. */
typedef struct kvn_ucx_work kvn_ucx_work;

struct kvn_ucx_work {
    void (*run)(kvn_ucx_work *self);
    kvn_ucx_work *next;  /* the worker's */
    atomic_bool is_done; /* of kvn_ucx_call */
    bool is_awaited;
};

/* A setting of UCX without its prefix: {"TLS", "rc"}. */
typedef struct kvn_ucx_setting {
    const char *name;
    const char *value;
} kvn_ucx_setting;

struct kvn_ucx_worker {
    kvn_ucx_library *library;
    const kvn_ucx *calls;
    pid_t pid; /* of the process that made it: a forked child leaves everything alone */
    atomic_uint num_holders;
    kvn_ucp_context_h context;
    kvn_ucp_address *address; /* for peers; UCX's */
    size_t address_nbytes;
    char transports[512]; /* "rc_mlx5/mlx5_0:1 cma/memory": what UCX may use */
    int events_fd;        /* UCX's */
    int wake_fd;          /* wakes the thread */
    /* What this process writes to its peers' memory now: for each transfer the tag of the owner and a number,
     * 0: none. Owners read it when they end a registration: ucx_transfer.c. */
    _Atomic uint64_t *tickets;
    pthread_t thread;
    bool has_thread;
    atomic_bool is_stopping;
    atomic_uint num_endpoints; /* that UCX has, open or being closed */

    pthread_mutex_t mutex; /* guards the queue, and why endpoints have failed */
    pthread_cond_t changed;
    kvn_ucx_work *first; /* of the queue */
    kvn_ucx_work *last;

    pthread_mutex_t progress; /* guards what follows, and all calls of UCX but those that map memory */
    kvn_ucp_worker_h handle;
    bool is_closed;
    kvn_ucx_endpoint *endpoints;
    kvn_request *head; /* transfers: whose step comes first */
    kvn_request *tail;
    uint32_t num_announced;
    bool has_completed; /* an operation, or a close, since the transfers had a step */
};

/* Opens a context and its worker, and starts the thread. Takes about 25 ms. Later settings override earlier
 * ones, and all of them the environment's, which override the presets. `name` (may be "") is for UCX's tools.
 * The caller holds it. One thread at a time in a process. KVN_INVALID: a setting that UCX does not take, or
 * that lets it use TCP; KVN_UNSUPPORTED: this process was forked from one while that had a worker. */
int kvn_ucx_worker_create(kvn_ucx_library *library, const kvn_ucx_setting *settings,
                          size_t num_settings, const char *name, kvn_ucx_worker **out,
                          kvn_failure *failure);
/* Fails its endpoints, waits for UCX to close them (a second at most), stops the thread. Idempotent; by any
 * thread without the progress lock. Nothing is done in a forked child. */
void kvn_ucx_worker_close(kvn_ucx_worker *self);
/* Held by its maker, who closes it before he lets go, by endpoints and by regions. */
void kvn_ucx_worker_hold(kvn_ucx_worker *self);
void kvn_ucx_worker_release(kvn_ucx_worker *self);
bool kvn_ucx_worker_is_forked(const kvn_ucx_worker *self);

/* Runs it soon: at once if the progress lock is free. Never blocks; with the lock, too. */
void kvn_ucx_post(kvn_ucx_worker *self, kvn_ucx_work *work);
/* As kvn_ucx_post, and returns when it has run. Not with the progress lock. */
void kvn_ucx_call(kvn_ucx_worker *self, kvn_ucx_work *work);
/* Waits until `is_done(context)`, which reads atomics, and returns it: false when the deadline has passed.
 * Whoever makes it true calls kvn_ucx_notify. Not with the progress lock. */
bool kvn_ucx_wait(kvn_ucx_worker *self, bool (*is_done)(const void *context), const void *context,
                  int64_t deadline_ns);
void kvn_ucx_notify(kvn_ucx_worker *self);

/* ---- ucx_transfer.c ---- */

/* With the progress lock: one bounded step of each transfer. Returns how many things were done. */
unsigned kvn_ucx_progress_transfers(kvn_ucx_worker *self);

#endif

/* Threads that move bytes whenever a connection is ready, and the connections that they watch. */
#ifndef KVN_TCP_SERVICE_H
#define KVN_TCP_SERVICE_H

#include <pthread.h>
#include <stdatomic.h>

#include "device/copier.h"
#include "tcp/stream.h"
#include "tcp/table.h"

typedef struct kvn_tcp_service kvn_tcp_service;
typedef struct kvn_tcp_thread kvn_tcp_thread;
typedef struct kvn_tcp_watched kvn_tcp_watched;

typedef enum kvn_tcp_progress {
    KVN_TCP_SLEEPS, /* until the system reports an event */
    KVN_TCP_SPINS,  /* the same, but its event may come at once */
    KVN_TCP_GOES_ON /* it has more to do, after the turns of others */
} kvn_tcp_progress;

/* A connection that a thread of the service watches. Embed it. */
struct kvn_tcp_watched {
    kvn_tcp_stream stream;
    kvn_tcp_thread *thread;
    uint64_t key; /* identifies it in events */
    uint32_t events; /* requested events */
    bool is_listed;  /* it waits for a turn; only the thread uses this and the fields below */
    uint32_t came;   /* events since its last turn */
    /* Called by the thread with `events` of epoll, or 0 to continue. */
    kvn_tcp_progress (*on_ready)(kvn_tcp_watched *self, uint32_t events);
};

/* The service moves memory of `device` too, which outlives it; or NULL. KVN_OK, _NO_MEMORY, _FAILED or _INVALID. */
int kvn_tcp_service_create(unsigned num_threads, uint32_t num_rows, kvn_device *device,
                           const char *name, kvn_tcp_service **out, kvn_failure *failure);
/* Ends the threads and the creator's hold; after that links may only be closed. */
void kvn_tcp_service_destroy(kvn_tcp_service *self);
kvn_tcp_table *kvn_tcp_service_table(kvn_tcp_service *self);
/* Copies memory of the device; NULL if the service has no device. */
kvn_copier *kvn_tcp_service_copier(kvn_tcp_service *self);
/* Adds or removes a hold of a link. The last one frees the service. */
void kvn_tcp_service_hold(kvn_tcp_service *self);
void kvn_tcp_service_let_go(kvn_tcp_service *self);

/* The thread for the next connections: threads take turns. */
unsigned kvn_tcp_service_next_thread(kvn_tcp_service *self);
/* Begins to watch for `events`. The caller has set the stream and on_ready. */
int kvn_tcp_service_watch(kvn_tcp_service *self, unsigned thread, kvn_tcp_watched *it,
                          uint32_t events, kvn_failure *failure);
/* Changes the requested events. Only one thread at a time may call it. */
void kvn_tcp_ask_for(kvn_tcp_watched *it, uint32_t events);
/* After the return on_ready does not run and is not called. Must not be called by on_ready. Idempotent. */
void kvn_tcp_service_forget(kvn_tcp_watched *it);

/* The index of its thread, for kvn_tcp_table_enter. */
unsigned kvn_tcp_thread_index(const kvn_tcp_watched *it);

#endif

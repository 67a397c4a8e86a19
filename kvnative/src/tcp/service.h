/* Threads that move bytes whenever a connection is ready, and the connections that they watch. */
#ifndef KVN_TCP_SERVICE_H
#define KVN_TCP_SERVICE_H

#include <pthread.h>
#include <stdatomic.h>

#include "tcp/stream.h"
#include "tcp/table.h"

typedef struct kvn_tcp_service kvn_tcp_service;
typedef struct kvn_tcp_thread kvn_tcp_thread;
typedef struct kvn_tcp_watched kvn_tcp_watched;

typedef enum kvn_tcp_progress {
    KVN_TCP_SLEEPS, /* until the system says that it is ready */
    KVN_TCP_SPINS,  /* the same, but its event may come at once */
    KVN_TCP_GOES_ON /* it has more to do, and others have their turn first */
} kvn_tcp_progress;

/* A connection that a thread of the service looks after. Embed it. */
struct kvn_tcp_watched {
    kvn_tcp_stream stream;
    kvn_tcp_thread *thread;
    uint64_t key; /* its name in events */
    uint32_t events; /* that are asked for now */
    bool is_listed;  /* it must have a turn; only the thread uses this and the fields below */
    uint32_t came;   /* events since its last turn */
    /* On the thread; `events` of epoll, 0 where it goes on. */
    kvn_tcp_progress (*on_ready)(kvn_tcp_watched *self, uint32_t events);
};

/* `device`: whose memory is moved as well, which outlives it; or NULL. KVN_OK, KVN_NO_MEMORY, KVN_FAILED. */
int kvn_tcp_service_create(unsigned num_threads, uint32_t num_rows, kvn_device *device,
                           const char *name, kvn_tcp_service **out, kvn_failure *failure);
/* Ends the threads and the creator's use of it; links that are left may only be closed. */
void kvn_tcp_service_destroy(kvn_tcp_service *self);
kvn_tcp_table *kvn_tcp_service_table(kvn_tcp_service *self);
/* Copies memory of the device; NULL if the service has no device. */
kvn_tcp_copier *kvn_tcp_service_copier(kvn_tcp_service *self);
/* A link uses it; it does no more. The last one frees it. */
void kvn_tcp_service_hold(kvn_tcp_service *self);
void kvn_tcp_service_let_go(kvn_tcp_service *self);

/* Which thread the next connections go to: in turn. */
unsigned kvn_tcp_service_next_thread(kvn_tcp_service *self);
/* Begins to watch, for `events`. The stream and on_ready are set. */
int kvn_tcp_service_watch(kvn_tcp_service *self, unsigned thread, kvn_tcp_watched *it,
                          uint32_t events, kvn_failure *failure);
/* Asks for other events; one thread at a time. */
void kvn_tcp_ask_for(kvn_tcp_watched *it, uint32_t events);
/* On return on_ready is not running and is not called again. Not from on_ready. A second time is fine. */
void kvn_tcp_service_forget(kvn_tcp_watched *it);

/* Of the table: which thread this is looked after by. */
unsigned kvn_tcp_thread_index(const kvn_tcp_watched *it);

#endif

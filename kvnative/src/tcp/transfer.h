/* The transfers of a client: their local memory, their requests on the wire, and their ends. */
#ifndef KVN_TCP_TRANSFER_H
#define KVN_TCP_TRANSFER_H

#include "core/columns.h"
#include "core/intervals.h"
#include "kvnative/backend.h"
#include "tcp/flight.h"
#include "tcp/service.h"

#define KVN_TCP_WINDOW 64u /* requests in flight */
#define KVN_TCP_CALL_NBYTES (1u << 20) /* moved by one system call: a whole request */
#define KVN_TCP_TURN_NBYTES (1u << 20) /* moved before other threads get the mutex */

/* Memory of the peer that a backend may use. */
typedef struct kvn_tcp_known {
    kvn_interval *places; /* sorted; the `index` of each is that of its range */
    kvn_tcp_range *ranges; /* of the places, followed by those of the leases, which each request names too */
    size_t count;
    uint32_t num_leases; /* below KVN_TCP_MAX_RANGES */
    char leases[128]; /* their names in messages */
} kvn_tcp_known;

typedef struct kvn_tcp_client kvn_tcp_client;

/* A transfer; the backend's request. */
struct kvn_request {
    kvn_tcp_client *client;
    const kvn_tcp_known *known;
    kvn_columns batch;
    const uint64_t *local, *remote; /* columns of the batch */
    kvn_tcp_kind kind;
    const kvn_device *device; /* device of the local side; NULL: host memory */
    /* Under the client's mutex: */
    kvn_request *previous, *next;
    kvn_cursor cut;       /* position up to which bytes are requested */
    uint64_t uncut;           /* bytes that are not requested yet */
    kvn_cursor confirmed; /* position up to which bytes have arrived */
    uint64_t total;           /* bytes */
    unsigned in_flight;       /* requests on the wire */
    kvn_report *report;       /* its status is KVN_PENDING until the outcome is known; complete once finished */
    pthread_cond_t changed;
    atomic_uint_fast64_t moved;
    atomic_bool finished;
};

/* A request on the wire. */
typedef struct kvn_tcp_asked {
    kvn_request *transfer; /* NULL: the transfer has ended; its bytes are dropped */
    kvn_tcp_departure departure;
    kvn_cursor from, to;
    uint64_t nbytes;
    uint64_t id;
    kvn_tcp_kind kind;
    bool has_leases;  /* else the answer KVN_TCP_RELEASED is wrong */
    bool sends_zeros; /* for the rest of a push whose local memory cannot be read */
} kvn_tcp_asked;

struct kvn_tcp_client {
    kvn_tcp_watched watched;
    /* Called once with the mutex held, when the connection cannot be used any more. */
    void (*on_failed)(void *context, int code, const char *why);
    void *context;
    pthread_mutex_t mutex;
    atomic_uint wanted; /* a hint: threads that want the mutex and should not wait long */
    bool has_failed;
    bool is_closed;   /* by the peer; earlier bytes may still be unread */
    bool has_spinner; /* a waiting thread drives the socket */
    kvn_request *transfers; /* the ring of transfers without outcome; the next one to cut */
    kvn_tcp_asked window[KVN_TCP_WINDOW];
    uint32_t first, num_asked; /* of the window, a ring */
    kvn_tcp_flight flight;
    uint64_t next_id;
    /* Sending the newest request of the window. */
    kvn_tcp_request out;
    uint32_t out_nbytes, out_sent; /* bytes of the head and table */
    uint64_t out_left;             /* unsent bytes of a push */
    kvn_cursor out_at;
    bool out_is_blocked;
    /* Receiving for the oldest request. */
    kvn_tcp_answer answer;
    uint32_t answer_got;
    bool is_at_end; /* the answer is the second one, after the bytes */
    uint64_t in_left;
    kvn_cursor in_at;
};

/* ---- all with the client's mutex held ---- */


/* Adds a transfer after all others of the client. */
void kvn_tcp_transfer_put_in(kvn_tcp_client *self, kvn_request *it);
/* Finishes with the outcome in the report. The memory of the transfer is not touched any more. */
void kvn_tcp_transfer_finish(kvn_request *it);
/* Sends no more requests of the transfer. A push continues until the peer has taken the bytes on the wire, which it
 * writes to its memory. The first outcome of a transfer counts. */
void kvn_tcp_transfer_end(kvn_request *it, int status, int code, uint64_t failed);
/* Ends the transfer because the peer refuses the bytes at `offset` after `from`. */
void kvn_tcp_transfer_refuse(kvn_request *it, kvn_tcp_reason reason, const kvn_cursor *from, uint64_t offset);
/* Ends the transfer because local memory of descriptor `index` is not mapped or, on a device, was not copied; the
 * stream has the reason. */
void kvn_tcp_transfer_end_local(kvn_request *it, uint64_t index, bool is_device);
/* Ends all transfers, once, because the connection has failed. */
void kvn_tcp_transfers_fail(kvn_tcp_client *self, int code, const char *why);
/* Adds at most `limit` bytes of the local memory; leaves a part for an answer. */
void kvn_tcp_transfer_add_local(const kvn_request *it, kvn_cursor at, uint64_t limit, kvn_tcp_parts *parts);

#endif

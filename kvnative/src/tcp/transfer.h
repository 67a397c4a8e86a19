/* The transfers of a client: their local places, their requests on the wire, and their ends. */
#ifndef KVN_TCP_TRANSFER_H
#define KVN_TCP_TRANSFER_H

#include "core/columns.h"
#include "core/intervals.h"
#include "kvnative/backend.h"
#include "tcp/service.h"

#define KVN_TCP_WINDOW 64u /* requests in flight */
#define KVN_TCP_CALL_NBYTES (1u << 20) /* that one system call moves: a whole request */
#define KVN_TCP_TURN_NBYTES (1u << 20) /* before the mutex is free for others */

/* Memory of the peer that a backend may use. */
typedef struct kvn_tcp_known {
    kvn_interval *places; /* sorted; the index of a place is that of its range */
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
    const kvn_device *device; /* where the local side lies; NULL: of the host */
    /* Under the client's mutex: */
    kvn_request *previous, *next;
    kvn_cursor cut;       /* position up to which bytes are requested */
    uint64_t uncut;           /* bytes that are not */
    kvn_cursor confirmed; /* bytes that are known to have arrived */
    uint64_t total;           /* bytes */
    unsigned in_flight;       /* requests on the wire */
    kvn_report end;           /* the status to end with; KVN_PENDING unless it is being given up */
    pthread_cond_t changed;
    atomic_uint_fast64_t moved;
    atomic_bool finished;
    kvn_report report; /* once finished */
};

/* A request on the wire. */
typedef struct kvn_tcp_asked {
    kvn_request *transfer; /* NULL: it has ended; the bytes are dropped */
    kvn_cursor from, to;
    uint64_t nbytes;
    uint64_t id;
    kvn_tcp_kind kind;
    bool has_leases;  /* only then it may be answered that one was released */
    bool sends_zeros; /* of a push whose local memory cannot be read, for the rest */
} kvn_tcp_asked;

struct kvn_tcp_client {
    kvn_tcp_watched watched;
    /* Called once with the mutex held, when the connection cannot be used any more. */
    void (*on_failed)(void *context, int code, const char *why);
    void *context;
    pthread_mutex_t mutex;
    atomic_uint wanted; /* threads that want the mutex, and should not wait long: a hint */
    bool has_failed;
    bool is_closed;   /* by the peer; earlier bytes may be left to read */
    bool has_spinner; /* a thread that waits drives the socket */
    kvn_request *transfers; /* the ring of transfers without outcome; the next one to cut */
    kvn_tcp_asked window[KVN_TCP_WINDOW];
    uint32_t first, num_asked; /* of the window, a ring */
    uint64_t asked_nbytes;
    uint64_t next_id;
    /* Sending: the newest request of the window. */
    kvn_tcp_request out;
    uint32_t out_nbytes, out_sent; /* of the head and table */
    uint64_t out_left;             /* of a push's bytes */
    kvn_cursor out_at;
    bool out_is_blocked;
    /* Receiving: the oldest. */
    kvn_tcp_answer answer;
    uint32_t answer_got;
    bool is_at_end; /* the answer is the one behind the bytes */
    uint64_t in_left;
    kvn_cursor in_at;
};

/* ---- all with the client's mutex held ---- */


/* Behind all others of the client. */
void kvn_tcp_transfer_put_in(kvn_tcp_client *self, kvn_request *it);
/* With the outcome in `end`. Nothing of its memory is touched from here on. */
void kvn_tcp_transfer_finish(kvn_request *it);
/* Sends no more requests of the transfer. A push goes on until the peer has taken the bytes on the wire, since it
 * writes them. The first outcome of a transfer counts. */
void kvn_tcp_transfer_end(kvn_request *it, int status, int code, uint64_t failed);
/* Notes that the peer does not move the bytes at `offset` behind `from`. */
void kvn_tcp_transfer_refuse(kvn_request *it, kvn_tcp_reason reason, const kvn_cursor *from, uint64_t offset);
/* The memory of descriptor `index` here is not mapped; or, of a device, it was not copied: its stream says why. */
void kvn_tcp_transfer_end_local(kvn_request *it, uint64_t index, bool is_device);
/* The connection is of no use any more: ends all transfers, once. */
void kvn_tcp_transfers_fail(kvn_tcp_client *self, int code, const char *why);
/* Adds at most `limit` bytes of the local memory; a part is left for an answer. */
void kvn_tcp_transfer_add_local(const kvn_request *it, kvn_cursor at, uint64_t limit, kvn_tcp_parts *parts);

#endif

/* A batch on its way by the gathered protocol: ucx_request.c is what a pull and a push have in common,
 * ucx_pull.c and ucx_push.c send and receive. All under the end's turn, but for what is atomic. */
#ifndef KVN_UCX_REQUEST_H
#define KVN_UCX_REQUEST_H

#include <pthread.h>
#include <stdatomic.h>

#include "ucx_cut.h"
#include "ucx_gathered.h"
#include "ucx_peer.h"

typedef struct kvn_gathered {
    kvn_backend base; /* first */
    kvn_ucx_serve *serve;
    kvn_ucx_link *link;
    kvn_ucx_remote remote;
    kvn_direction direction;
    bool hands_over; /* requests are begun by the end's thread, if that sleeps */
    pthread_mutex_t error_mutex;
    char error[256];       /* message of the latest failed request */
    char error_shown[256]; /* the copy of it that last_error returns */
} kvn_gathered;

/* What a request has in flight at most: parts of a pull, or asked confirmations of a push. */
#define KVN_GATHERED_WINDOW 8

/* A part that was asked for. */
typedef struct kvn_ucx_awaited {
    kvn_ucx_section section;
    uint64_t number;
    uint64_t received;
    bool is_open;
} kvn_ucx_awaited;

/* A confirmation that was asked for. */
typedef struct kvn_ucx_ask {
    uint64_t number;    /* messages up to there */
    uint64_t confirmed; /* descriptors that are whole then */
    uint64_t moved;     /* bytes */
} kvn_ucx_ask;

struct kvn_request {
    kvn_ucx_open open; /* first */
    kvn_ucx_errand start;
    kvn_gathered *self;
    kvn_ucx_peer *peer;  /* while it is open */
    kvn_request *next;   /* in its line */
    kvn_request *previous;
    bool is_lined;
    bool is_started;
    bool is_over;        /* what it comes to is known: it only waits for sends in flight */
    atomic_bool finished; /* read without the turn; `report` is stable then */
    atomic_bool told;
    atomic_bool is_settled;          /* who publishes it is decided: its last send, or who leaves it */
    atomic_int_fast64_t over_since;  /* monotonic ns; 0 while it is not over */
    atomic_uint_fast64_t moved;
    int why;             /* why it was given up: KVN_TIMEOUT or KVN_CANCELLED */
    uint64_t id;
    uint64_t total;
    uint64_t first;      /* index of descriptor 0 in the task: for messages */
    kvn_ucx_batch batch;
    kvn_ucx_cursor at;   /* what is cut */

    /* of a pull */
    kvn_ucx_awaited parts[KVN_GATHERED_WINDOW]; /* by number, modulo */
    uint64_t next_part;
    unsigned num_parts;

    /* of a push */
    kvn_ucx_ask asks[KVN_GATHERED_WINDOW]; /* a ring */
    unsigned first_ask;
    unsigned num_asks;
    unsigned in_flight; /* messages that show the caller's memory */
    uint64_t sequence;
    uint64_t cut_nbytes;
    uint64_t asked_nbytes;
    uint64_t confirmed;
    bool is_open; /* counted as a push of several messages */

    kvn_report report;
};

/* Requests up to that size go before larger ones, and do not count among their parts. */
#define KVN_GATHERED_SMALL (64u << 10)

static inline bool kvn_request_is_small(const kvn_request *request)
{
    return request->total <= KVN_GATHERED_SMALL;
}

static inline bool kvn_request_is_pull(const kvn_request *request)
{
    return request->self->direction == KVN_PEER_GET;
}

/* Begins it: an errand of submit. */
void kvn_ucx_request_start(kvn_ucx_end *end, kvn_ucx_errand *errand);
/* It is over, with that outcome; the first counts. The caller must not look at it afterwards. */
void kvn_ucx_request_end(kvn_request *request, int status, int code, uint64_t failed,
                         const char *message);
/* The same where the peer has refused a piece. */
void kvn_ucx_request_refused(kvn_request *request, kvn_wire_reason reason, uint64_t failed);
/* The same where the caller's memory is not mapped any more. */
void kvn_ucx_request_unmapped(kvn_request *request, uint64_t failed);
/* A message that showed the caller's memory is through; when the last is and the request is over, others
 * may see that. */
void kvn_ucx_request_landed(kvn_request *request);

/* An errand of who has set is_settled: it is over, and its sends in flight are waited for no longer. Their
 * link has failed; until its connection ends, UCX may read the memory that they show. */
void kvn_ucx_request_leave(kvn_ucx_end *end, kvn_ucx_errand *errand);

/* It has something to send, or has not. */
void kvn_ucx_request_line_up(kvn_request *request);
void kvn_ucx_request_step_out(kvn_request *request);
/* One of the line goes to its end. */
void kvn_ucx_line_turn(kvn_ucx_line *line, kvn_request *request);

/* What it has in flight counts no more; tells the peer, if that still has to do with it. */
void kvn_ucx_pull_forget(kvn_request *request);
void kvn_ucx_push_forget(kvn_request *request);
void kvn_ucx_request_cancel(kvn_ucx_peer *peer, uint64_t id, uint32_t of);

#endif

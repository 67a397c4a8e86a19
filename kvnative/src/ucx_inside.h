/* What the sources of an end and its links share, and nobody else sees. */
#ifndef KVN_UCX_INSIDE_H
#define KVN_UCX_INSIDE_H

#include <pthread.h>
#include <sys/types.h>

#include "clock.h"
#include "kvnative/backend.h"
#include "ucx_line.h"
#include "ucx_link.h"

/* How long who drives spins after the last event before it sleeps: an answer from a peer on the same
 * network comes within. */
#define KVN_UCX_ATTEND_SPIN_NS 50000
#define KVN_UCX_THREAD_SPIN_NS 30000
#define KVN_UCX_IDLE_ROUNDS 8
#define KVN_UCX_TABLE_SIZE 1024

/* Who sleeps on the worker's events: it is armed then. */
enum { KVN_UCX_NOBODY = 0, KVN_UCX_THREAD = 1, KVN_UCX_CALLER = 2 };

typedef struct kvn_ucx_handler {
    kvn_ucx_end *end;
    kvn_ucx_on_message call; /* NULL: none */
    void *context;
    unsigned id;
} kvn_ucx_handler;

typedef struct kvn_ucx_farewell kvn_ucx_farewell;

struct kvn_ucx_end {
    const kvn_ucx_library *library;
    const kvn_ucx *calls;
    kvn_ucx_mode mode;
    const bool *is_here; /* on a page that a forked child finds empty; NULL: the system has no such */
    pid_t pid;
    atomic_uint holders;
    kvn_ucp_context_h context;
    kvn_ucp_worker_h sender;   /* has the endpoints */
    kvn_ucp_worker_h receiver; /* has the address; nobody makes an endpoint of it */
    void *address; /* as peers get it: ucx_address.h */
    size_t address_nbytes;
    char transports[512];

    /* ucx_turn.c */
    _Atomic(uintptr_t) holder; /* the thread that has the turn; 0: nobody */
    _Atomic(kvn_ucx_errand *) inbox;
    int worker_fd; /* epoll: events of both */
    int sender_fd, receiver_fd; /* UCX's */
    int thread_event;  /* wakes the thread */
    int caller_event;  /* wakes the caller that sleeps on the worker */
    int thread_set;    /* epoll: the worker's events, if it shall see them, and thread_event */
    atomic_int asleep; /* KVN_UCX_NOBODY... */
    atomic_bool is_parked; /* the thread is in epoll_wait, or about to be */
    atomic_bool is_stopping;
    atomic_uint num_attending;
    atomic_uint num_following;
    pthread_mutex_t roles; /* guards what follows, and changes of num_attending from and to 0 */
    pthread_cond_t changed;
    uint64_t num_changes;
    bool is_watching; /* thread_set has the worker's events */
    pthread_t thread;
    bool has_thread;

    /* under the turn */
    kvn_ucx_part *parts;
    kvn_ucx_handler handlers[KVN_UCX_MAX_MESSAGES];
    kvn_ucx_link *table[KVN_UCX_TABLE_SIZE]; /* by the token's first bytes */
    kvn_ucx_farewell *farewells;             /* that are being said */
    bool is_closed;
    bool shows_events; /* the workers' files are readable as long as there is something: arming adds nothing */
    bool is_sending;   /* the sender had something to do when it was asked last */
    uint64_t num_sending; /* messages of links, of which UCX has not told yet that they are sent */
    unsigned num_idle; /* rounds since something has happened */
    unsigned num_unasked; /* rounds since the sender was asked */
    int64_t acks_due_ns; /* when they may be told to wait again: ucx_acks.c */
    int64_t departed_ns; /* when the last call left a settled worker: ucx_attend.c */
    bool is_still;     /* since the last round only events can bring something to do */
    atomic_uint num_endpoints; /* that are open or being closed; changed under the turn */

    _Atomic uint64_t messages, unknown_tokens, malformed, wakeups, rounds, links_failed;
};

/* ---- ucx_turn.c ---- */

void kvn_ucx_turn_init(kvn_ucx_end *end);
int kvn_ucx_turn_start(kvn_ucx_end *end, kvn_failure *failure); /* the worker is there */
void kvn_ucx_turn_stop(kvn_ucx_end *end);                      /* ends the thread */
void kvn_ucx_turn_fini(kvn_ucx_end *end);
/* Puts the errand, with its `is_awaited`, into the inbox: it never runs within a callback of UCX. */
void kvn_ucx_do_later(kvn_ucx_end *end, kvn_ucx_errand *errand);
/* Under the turn: errands, one step of the worker, one of each part. How many things were done. */
unsigned kvn_ucx_round(kvn_ucx_end *end);
/* Under the turn: true once the worker will tell of its next event; false when there is something now. */
bool kvn_ucx_arm(kvn_ucx_end *end);
/* Under the turn: rounds, a few at most, until all that there is to do will wake who sleeps on the worker. */
bool kvn_ucx_settle(kvn_ucx_end *end);
/* Leaves the turn with the worker settled for the one who sleeps on it, or with nobody asleep. */
void kvn_ucx_drop_turn(kvn_ucx_end *end);
void kvn_ucx_ring(int event);     /* an eventfd */
void kvn_ucx_unring(int event);

/* In each of so many idle rounds: for what is not to be done in all of them. */
static inline bool kvn_ucx_is_due(const kvn_ucx_end *end)
{
    return end->num_idle % KVN_UCX_IDLE_ROUNDS == KVN_UCX_IDLE_ROUNDS - 1;
}

/* ---- ucx_attend.c ---- */

void *kvn_ucx_thread(void *end); /* what the end's own thread does */

/* ---- ucx_acks.c ---- */

/* Under the turn, before it is left to one who sleeps: the next messages take less time. */
void kvn_ucx_delay_acks(kvn_ucx_end *end);

/* ---- ucx_table.c ---- */

int kvn_ucx_table_install(kvn_ucx_end *end, kvn_failure *failure); /* UCX's handlers; the worker is there */
/* Under the turn. NULL: no link has it. */
kvn_ucx_link *kvn_ucx_find_link(kvn_ucx_end *end, const void *token);
void kvn_ucx_list_link(kvn_ucx_link *link);
void kvn_ucx_unlist_link(kvn_ucx_link *link);

/* ---- ucx_link.c, ucx_endpoint.c, ucx_hello.c ---- */

enum { KVN_UCX_LINK_OPEN = 0, KVN_UCX_LINK_CONNECTED = 1, KVN_UCX_LINK_FAILED = 2 };

struct kvn_ucx_link {
    kvn_ucx_end *end;
    uint8_t token[KVN_UCX_TOKEN_NBYTES];
    atomic_uint holders;
    atomic_int state;
    int death_fd;
    pthread_mutex_t mutex; /* guards `why` and `way` */
    kvn_failure why;
    char way[128];
    /* under the turn */
    void *peer; /* the address of its worker; NULL: not known yet */
    kvn_ucp_ep_h ep; /* the line's, until the link fails; NULL */
    kvn_ucx_line line;
    unsigned num_sending;
    bool has_hello; /* one is in flight */
    bool is_lost;   /* the peer has gone, or has said BYE */
    kvn_ucx_open *open;
    void *kept;
    kvn_ucx_link *next; /* in the table's chain */
    kvn_ucx_errand ending;
};

/* Under the turn. */
int kvn_ucx_make_endpoint(kvn_ucx_link *link, kvn_failure *failure);
void kvn_ucx_close_endpoint(kvn_ucx_link *link);
/* False: nothing in it reads and writes memory itself, which the mode needs. */
bool kvn_ucx_describe_endpoint(kvn_ucx_link *link);
/* The handlers of HELLO, WELCOME and BYE. */
void kvn_ucx_hello_install(kvn_ucx_end *end);

/* ---- ucx_farewell.c: under the turn, not within a callback of UCX ---- */

/* Tells the peer that the link has ended. Before its endpoint is closed. */
void kvn_ucx_say_bye(kvn_ucx_link *link, const char *reason);
/* Gives up those that have not reached their peer. */
void kvn_ucx_leave_unsaid(kvn_ucx_end *end);

#endif

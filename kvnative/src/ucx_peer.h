/* What the gathered protocol keeps for one link, in both roles: parts that the peer asks for and pushes of
 * its that arrive; requests of this end and what of them is in flight. All of it under the end's turn. */
#ifndef KVN_UCX_PEER_H
#define KVN_UCX_PEER_H

#include <stdatomic.h>

#include "kvnative/backend.h"
#include "ucx_check.h"
#include "ucx_end.h"
#include "ucx_link.h"
#include "ucx_message.h"
#include "ucx_serve.h"

typedef struct kvn_ucx_asked kvn_ucx_asked; /* a part that the peer asked for: ucx_serve_pull.c */

typedef struct kvn_ucx_asked_queue {
    kvn_ucx_asked *head;
    kvn_ucx_asked *tail;
} kvn_ucx_asked_queue;

/* A request of several PUSHes that has begun to arrive. */
typedef struct kvn_ucx_arriving {
    uint64_t request;
    uint64_t count; /* messages so far */
    uint64_t failed;
    uint32_t reason; /* of the first piece that was refused; from there on nothing is written */
    bool is_used;
} kvn_ucx_arriving;

/* Requests of this end that have something to send, in turns. */
typedef struct kvn_ucx_line {
    kvn_request *head;
    kvn_request *tail;
} kvn_ucx_line;

struct kvn_ucx_peer {
    kvn_ucx_serve *serve;
    kvn_ucx_link *link;
    kvn_ucx_peer *next; /* in the ring of those that may have something to send */
    kvn_ucx_peer *previous;
    unsigned refs; /* of its link, of messages in flight, of who is in a call */
    bool is_ready; /* in the ring */
    bool gone;     /* the link has failed */

    /* as the serving end */
    kvn_ucx_asked_queue asked[2]; /* large parts, and small ones, which need not wait behind those */
    unsigned next_queue;
    unsigned num_asked; /* also those that are out of the queues, with sends in flight */
    unsigned num_data;  /* DATA in flight */
    unsigned num_answers;
    kvn_ucx_arriving *arriving; /* KVN_WIRE_PUSHES, from the first on */

    /* as the asking end */
    kvn_request **requests; /* by the lower half of their id */
    uint32_t room;
    uint32_t next_place;
    uint64_t serial;
    kvn_ucx_line pulls;
    kvn_ucx_line pushes;
    unsigned num_parts[2]; /* asked for and not answered: of large requests, of small ones */
    unsigned num_push;  /* PUSHes in flight */
    unsigned num_asks;  /* for a DONE that has not come */
    unsigned num_open;  /* pushes of several messages that are not through */
};

/* The link's; made when it is first needed. NULL without memory. */
kvn_ucx_peer *kvn_ucx_peer_of(kvn_ucx_serve *serve, kvn_ucx_link *link);
void kvn_ucx_peer_hold(kvn_ucx_peer *self);
void kvn_ucx_peer_let_go(kvn_ucx_peer *self);
/* It may have something to send: it gets its turn. */
void kvn_ucx_peer_wake(kvn_ucx_peer *self);
/* The peer has broken the protocol by a message of that name: its link fails. */
void kvn_ucx_peer_refuse(kvn_ucx_peer *self, const char *name, const char *wrong);
/* This end cannot go on with the link, for want of memory. */
void kvn_ucx_peer_fail(kvn_ucx_peer *self);
/* What a message showed need not stay any longer. */
void kvn_ucx_peer_let_go_ranges(kvn_ucx_peer *self, kvn_ucx_message *message);

/* Sends a DONE; the peer may have few of them on their way. */
void kvn_ucx_peer_answer(kvn_ucx_peer *self, uint64_t request, uint64_t number,
                         kvn_wire_reason reason, uint64_t failed, uint32_t of);

/* ---- the roles: each does one message's worth of what is due, and tells how many it sent ---- */

unsigned kvn_ucx_serve_pull_step(kvn_ucx_peer *self);
unsigned kvn_ucx_pull_step(kvn_ucx_peer *self);
unsigned kvn_ucx_push_step(kvn_ucx_peer *self);

/* ---- messages that arrived ---- */

void kvn_ucx_serve_on_pull(kvn_ucx_peer *self, const kvn_wire_pull *header,
                           const void *payload, size_t nbytes, uint64_t data_nbytes);
void kvn_ucx_serve_on_push(kvn_ucx_peer *self, const kvn_wire_push *header,
                           const kvn_ucx_tables *tables);
void kvn_ucx_serve_on_cancel(kvn_ucx_peer *self, const kvn_wire_cancel *header);
void kvn_ucx_pull_on_data(kvn_ucx_peer *self, const kvn_wire_data *header, const uint8_t *payload,
                          size_t nbytes);
void kvn_ucx_pull_on_done(kvn_ucx_peer *self, const kvn_wire_done *header);
void kvn_ucx_push_on_done(kvn_ucx_peer *self, const kvn_wire_done *header);

/* The link is gone: nothing that was asked for is sent any more. */
void kvn_ucx_serve_drop_asked(kvn_ucx_peer *self);

/* The open request of that id, or NULL. */
kvn_request *kvn_ucx_peer_request(kvn_ucx_peer *self, uint64_t id);

#endif

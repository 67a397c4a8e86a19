/* An end: what an engine has of UCX. One context, two workers, the thread that drives both when nobody else
 * does, the table of the links' tokens, and the parts that other files add: who serves requests, say.
 *
 * One worker has the endpoints, the other the address that peers send to, so every connection goes one way.
 * Where UCX makes one TCP connection of both directions, an endpoint that is closed by force leaves it open
 * in mid-message, and UCX runs into freed memory (seen with 1.22; ucx_line.h).
 *
 * Two modes, and both ends of a link have the same: `gathered` has the feature of active messages alone,
 * over TCP, and kvplan's own checks of each; `one_sided` has remote access too, over whatever the system
 * offers. */
#ifndef KVN_UCX_END_H
#define KVN_UCX_END_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "failure.h"
#include "ucx_library.h"
#include "ucx_turn.h"

typedef enum kvn_ucx_mode { KVN_UCX_GATHERED = 0, KVN_UCX_ONE_SIDED = 1 } kvn_ucx_mode;

typedef struct kvn_ucx_link kvn_ucx_link;

/* A setting of UCX without its prefix: {"TLS", "tcp"}. */
typedef struct kvn_ucx_setting {
    const char *name;
    const char *value;
} kvn_ucx_setting;

/* A message to a link has at most that many bytes, header and payload together, and at most that many
 * pieces of payload, so that it travels as one segment and arrives in one callback. */
#define KVN_UCX_MESSAGE_NBYTES ((size_t)(256 << 10) - 512)
#define KVN_UCX_MESSAGE_PIECES 30
/* The token that each header begins with. */
#define KVN_UCX_TOKEN_NBYTES 16

/* Ids of active messages. 1 to 3 are ucx_link.c's; the others belong to who registers them. */
enum {
    KVN_UCX_HELLO = 1,
    KVN_UCX_WELCOME = 2,
    KVN_UCX_BYE = 3,
    KVN_UCX_FIRST_MESSAGE = 4, /* ucx_wire.h numbers its own from here */
    KVN_UCX_MAX_MESSAGES = 16
};

/* Opens a context and its workers, starts the thread. Takes about 25 ms. Later settings override earlier
 * ones, and all of them the environment's, which override the mode's own. `name` (may be "") is told to
 * UCX's tools. Whoever makes it holds it. One thread at a time in a process. */
int kvn_ucx_end_create(const kvn_ucx_library *library, kvn_ucx_mode mode,
                       const kvn_ucx_setting *settings, size_t num_settings, const char *name,
                       kvn_ucx_end **out, kvn_failure *failure);
/* Fails the links that are open and closes their endpoints (at most about a second), stops the thread. No
 * link can be made any more; everything else can still be called. Idempotent; not under the turn. */
void kvn_ucx_end_close(kvn_ucx_end *end);
/* Held by the maker, who closes it before he lets go, and by each link; with the last, the workers, the
 * parts and the context are destroyed. In a forked child it does nothing but forget. Whoever calls anything
 * here holds the end, or a link of it. */
void kvn_ucx_end_hold(kvn_ucx_end *end);
void kvn_ucx_end_release(kvn_ucx_end *end);

const kvn_ucx_library *kvn_ucx_end_library(const kvn_ucx_end *end);
const kvn_ucx *kvn_ucx_end_calls(const kvn_ucx_end *end);
kvn_ucx_mode kvn_ucx_end_mode(const kvn_ucx_end *end);
kvn_ucp_context_h kvn_ucx_end_context(const kvn_ucx_end *end); /* ucp_mem_map: any thread may */
/* What a peer needs to make a link (ucx_address.h): valid as long as the end is. */
const void *kvn_ucx_end_address(const kvn_ucx_end *end, size_t *nbytes);
/* "tcp/eth0 tcp/lo": what the workers may use. */
void kvn_ucx_end_transports(const kvn_ucx_end *end, char *out, size_t room);
bool kvn_ucx_end_is_forked(const kvn_ucx_end *end); /* this process is a child of the one that made it */

/* ---- parts: what other files add to an end ---- */

typedef struct kvn_ucx_part kvn_ucx_part;

/* First member of the part's own struct. All under the turn, but destroy. */
struct kvn_ucx_part {
    /* NULL, or called once in each round: does a bounded step (about 100 us at most) of what is due and
     * tells how many things it did. While it is not 0, the driver does not sleep; when it is 0, the part
     * waits for an event: a message, a completion, an errand. */
    unsigned (*serve)(kvn_ucx_part *self);
    bool has_more; /* set by `serve`: it is to be called again, whatever happens meanwhile */
    /* NULL, or: this link has failed or was closed. Its open requests are told already. */
    void (*on_link_gone)(kvn_ucx_part *self, kvn_ucx_link *link);
    /* After the workers are gone: no callback comes any more. */
    void (*destroy)(kvn_ucx_part *self);
    kvn_ucx_part *next; /* the end's */
};

/* Before the end has any link. From then on the end owns it. */
void kvn_ucx_end_add_part(kvn_ucx_end *end, kvn_ucx_part *part);

/* A message that arrived on a link that is not failed: `header` begins with the token and has at least its
 * length; `data` is NULL or `nbytes` of payload, valid during the call alone. Both may lie at any address and
 * hold anything: the peer is not trusted. */
typedef void (*kvn_ucx_on_message)(void *context, kvn_ucx_link *link, const void *header,
                                   size_t header_nbytes, const void *data, size_t nbytes);

/* Before the end has any link. Messages without a handler are dropped and counted. */
int kvn_ucx_end_on_message(kvn_ucx_end *end, unsigned id, kvn_ucx_on_message handler, void *context,
                           kvn_failure *failure);

/* What has been counted; read at any time. */
typedef struct kvn_ucx_counters {
    uint64_t messages;       /* that came to a handler */
    uint64_t unknown_tokens; /* dropped */
    uint64_t malformed;      /* dropped: too short, or nobody handles them */
    uint64_t wakeups;        /* of the thread */
    uint64_t rounds;         /* of progress, by any thread */
    uint64_t links_failed;
} kvn_ucx_counters;

void kvn_ucx_end_count(const kvn_ucx_end *end, kvn_ucx_counters *out);

#endif

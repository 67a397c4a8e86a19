#include "ucx_serve.h"

#include <stdlib.h>
#include <string.h>

#include "ucx_check.h"
#include "ucx_serve_state.h"

/* Messages sent in one round: each takes about 50 us. */
#define MOST_PER_ROUND 2

/* ---- sending, to each link in turn ---- */

static unsigned step(kvn_ucx_peer *peer)
{
    unsigned did = 0;

    if (!peer->gone)
        did += kvn_ucx_serve_pull_step(peer);
    if (!peer->gone)
        did += kvn_ucx_pull_step(peer);
    if (!peer->gone)
        did += kvn_ucx_push_step(peer);
    return did;
}

static void rest(kvn_ucx_serve *self, kvn_ucx_peer *peer)
{
    peer->next->previous = peer->previous;
    peer->previous->next = peer->next;
    if (self->ready == peer)
        self->ready = peer->next == peer ? NULL : peer->next;
    peer->is_ready = false;
    kvn_ucx_peer_let_go(peer);
}

void kvn_ucx_peer_wake(kvn_ucx_peer *peer)
{
    kvn_ucx_serve *self = peer->serve;

    if (peer->is_ready || peer->gone)
        return;
    kvn_ucx_peer_hold(peer);
    peer->is_ready = true;
    if (self->ready) { /* last of the ring */
        peer->next = self->ready;
        peer->previous = self->ready->previous;
        peer->previous->next = peer->next->previous = peer;
    } else {
        self->ready = peer->next = peer->previous = peer;
    }
}

static unsigned serve(kvn_ucx_part *part)
{
    kvn_ucx_serve *self = (kvn_ucx_serve *)part;
    unsigned did = 0;

    while (self->ready && did < MOST_PER_ROUND) {
        kvn_ucx_peer *peer = self->ready;
        unsigned sent;

        self->ready = peer->next;
        kvn_ucx_peer_hold(peer); /* a send may find its link failed */
        sent = step(peer);
        did += sent;
        if (sent == 0 && peer->is_ready)
            rest(self, peer);
        kvn_ucx_peer_let_go(peer);
    }
    self->part.has_more = self->ready != NULL;
    return did;
}

static void on_link_gone(kvn_ucx_part *part, kvn_ucx_link *link)
{
    kvn_ucx_serve *self = (kvn_ucx_serve *)part;
    kvn_ucx_peer *peer = *kvn_ucx_link_kept(link);

    if (!peer)
        return;
    *kvn_ucx_link_kept(link) = NULL;
    peer->gone = true;
    kvn_ucx_serve_drop_asked(peer);
    if (peer->is_ready)
        rest(self, peer);
    kvn_ucx_peer_let_go(peer);
}

/* ---- messages ---- */

static kvn_ucx_peer *peer_of(void *context, kvn_ucx_link *link)
{
    kvn_ucx_peer *peer = kvn_ucx_peer_of(context, link);

    if (peer)
        kvn_ucx_peer_hold(peer);
    else
        kvn_ucx_link_fail(link, KVN_NO_MEMORY, 0, "no memory to serve the link");
    return peer;
}

static void on_pull(void *context, kvn_ucx_link *link, const void *header, size_t header_nbytes,
                    const void *data, size_t nbytes)
{
    kvn_ucx_peer *peer = peer_of(context, link);
    kvn_ucx_tables tables;
    kvn_wire_pull pull;
    const char *wrong;

    if (!peer)
        return;
    wrong = kvn_ucx_check_pull(header, header_nbytes, data, nbytes, &pull, &tables);
    if (wrong)
        kvn_ucx_peer_refuse(peer, "PULL", wrong);
    else
        kvn_ucx_serve_on_pull(peer, &pull, data, nbytes, tables.nbytes);
    kvn_ucx_peer_let_go(peer);
}

static void on_data(void *context, kvn_ucx_link *link, const void *header, size_t header_nbytes,
                    const void *data, size_t nbytes)
{
    kvn_ucx_peer *peer = peer_of(context, link);
    kvn_wire_data it;
    const char *wrong;

    if (!peer)
        return;
    wrong = kvn_ucx_check_data(header, header_nbytes, nbytes, &it);
    if (wrong)
        kvn_ucx_peer_refuse(peer, "DATA", wrong);
    else
        kvn_ucx_pull_on_data(peer, &it, data, nbytes);
    kvn_ucx_peer_let_go(peer);
}

static void on_push(void *context, kvn_ucx_link *link, const void *header, size_t header_nbytes,
                    const void *data, size_t nbytes)
{
    kvn_ucx_peer *peer = peer_of(context, link);
    kvn_ucx_tables tables;
    kvn_wire_push push;
    const char *wrong;

    if (!peer)
        return;
    wrong = kvn_ucx_check_push(header, header_nbytes, data, nbytes, &push, &tables);
    if (wrong)
        kvn_ucx_peer_refuse(peer, "PUSH", wrong);
    else
        kvn_ucx_serve_on_push(peer, &push, &tables);
    kvn_ucx_peer_let_go(peer);
}

static void on_done(void *context, kvn_ucx_link *link, const void *header, size_t header_nbytes,
                    const void *data, size_t nbytes)
{
    kvn_ucx_peer *peer = peer_of(context, link);
    kvn_wire_done done;
    const char *wrong;

    (void)data;
    if (!peer)
        return;
    wrong = kvn_ucx_check_done(header, header_nbytes, nbytes, &done);
    if (wrong)
        kvn_ucx_peer_refuse(peer, "DONE", wrong);
    else if (done.of == KVN_WIRE_OF_PULL)
        kvn_ucx_pull_on_done(peer, &done);
    else
        kvn_ucx_push_on_done(peer, &done);
    kvn_ucx_peer_let_go(peer);
}

static void on_cancel(void *context, kvn_ucx_link *link, const void *header, size_t header_nbytes,
                      const void *data, size_t nbytes)
{
    kvn_ucx_peer *peer = peer_of(context, link);
    kvn_wire_cancel cancel;
    const char *wrong;

    (void)data;
    if (!peer)
        return;
    wrong = kvn_ucx_check_cancel(header, header_nbytes, nbytes, &cancel);
    if (wrong)
        kvn_ucx_peer_refuse(peer, "CANCEL", wrong);
    else
        kvn_ucx_serve_on_cancel(peer, &cancel);
    kvn_ucx_peer_let_go(peer);
}

/* ---- life ---- */

static void destroy(kvn_ucx_part *part)
{
    kvn_ucx_serve *self = (kvn_ucx_serve *)part;

    kvn_ucx_messages_fini(&self->messages);
    kvn_ucx_ranges_fini(&self->ranges);
    free(self);
}

typedef struct joining {
    kvn_ucx_errand errand; /* first */
    kvn_ucx_serve *serve;
    kvn_failure *failure;
    int status;
} joining;

/* Under the turn: the end's thread runs already. */
static void join(kvn_ucx_end *end, kvn_ucx_errand *errand)
{
    static const struct {
        unsigned id;
        kvn_ucx_on_message handler;
    } handlers[] = {{KVN_WIRE_PULL, on_pull},
                    {KVN_WIRE_DATA, on_data},
                    {KVN_WIRE_PUSH, on_push},
                    {KVN_WIRE_DONE, on_done},
                    {KVN_WIRE_CANCEL, on_cancel}};
    joining *it = (joining *)errand;

    kvn_ucx_end_add_part(end, &it->serve->part);
    for (size_t i = 0; i < sizeof handlers / sizeof *handlers && it->status == KVN_OK; i++)
        it->status = kvn_ucx_end_on_message(end, handlers[i].id, handlers[i].handler, it->serve,
                                            it->failure);
}

kvn_ucx_serve *kvn_ucx_serve_create(kvn_ucx_end *end, uint32_t max_ranges, kvn_failure *failure)
{
    joining it = {.errand = {.run = join}, .failure = failure};
    kvn_ucx_serve *self;

    if (max_ranges < 1 || max_ranges > 1u << 24) {
        kvn_fail(failure, KVN_INVALID, 0, "max_ranges is %u; it must be in [1, %u]", max_ranges,
                 1u << 24);
        return NULL;
    }
    self = calloc(1, sizeof *self);
    if (!self || kvn_ucx_ranges_init(&self->ranges, max_ranges) != KVN_OK) {
        free(self);
        kvn_fail(failure, KVN_NO_MEMORY, 0, "no memory for a table of %u ranges", max_ranges);
        return NULL;
    }
    self->end = end;
    self->stream = kvn_copy_function(KVN_COPY_STREAM);
    self->part = (kvn_ucx_part){.serve = serve, .on_link_gone = on_link_gone, .destroy = destroy};
    it.serve = self;
    kvn_ucx_do_and_wait(end, &it.errand);
    return it.status == KVN_OK ? self : NULL;
}

void kvn_ucx_serve_count(const kvn_ucx_serve *self, kvn_ucx_served *out)
{
    *out = (kvn_ucx_served){
        .pulled_nbytes = atomic_load_explicit(&self->pulled_nbytes, memory_order_relaxed),
        .pushed_nbytes = atomic_load_explicit(&self->pushed_nbytes, memory_order_relaxed),
        .parts = atomic_load_explicit(&self->parts, memory_order_relaxed),
        .refused = atomic_load_explicit(&self->refused, memory_order_relaxed),
        .broken = atomic_load_explicit(&self->broken, memory_order_relaxed),
        .stalled = atomic_load_explicit(&self->stalled, memory_order_relaxed),
    };
}

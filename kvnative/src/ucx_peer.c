#include "ucx_peer.h"

#include <stdio.h>
#include <stdlib.h>

#include "ucx_serve_state.h"

kvn_ucx_peer *kvn_ucx_peer_of(kvn_ucx_serve *serve, kvn_ucx_link *link)
{
    kvn_ucx_peer **kept = (kvn_ucx_peer **)kvn_ucx_link_kept(link);

    if (!*kept) {
        *kept = calloc(1, sizeof **kept);
        if (!*kept)
            return NULL;
        (*kept)->serve = serve;
        (*kept)->link = link;
        (*kept)->refs = 1;
    }
    return *kept;
}

void kvn_ucx_peer_hold(kvn_ucx_peer *self) { self->refs++; }

void kvn_ucx_peer_let_go(kvn_ucx_peer *self)
{
    if (--self->refs > 0)
        return;
    free(self->arriving);
    free(self->requests);
    free(self);
}

void kvn_ucx_peer_refuse(kvn_ucx_peer *self, const char *name, const char *wrong)
{
    char message[256];

    kvn_ucx_add(&self->serve->broken, 1);
    snprintf(message, sizeof message, "the peer sent a %s that is not allowed: %s", name, wrong);
    kvn_ucx_link_fail(self->link, KVN_PEER_GONE, 0, message);
}

void kvn_ucx_peer_fail(kvn_ucx_peer *self)
{
    kvn_ucx_link_fail(self->link, KVN_NO_MEMORY, 0, "no memory for a message of the link");
}

/* ---- answers ---- */

static void on_answered(kvn_ucx_message *message, int status)
{
    (void)status;
    message->peer->num_answers--;
}

void kvn_ucx_peer_answer(kvn_ucx_peer *self, uint64_t request, uint64_t number,
                         kvn_wire_reason reason, uint64_t failed, uint32_t of)
{
    kvn_ucx_message *message;

    if (self->gone)
        return;
    if (self->num_answers == KVN_WIRE_ANSWERS) {
        kvn_ucx_peer_refuse(self, "request", "it does not take the answers to those before");
        return;
    }
    message = kvn_ucx_message_take(&self->serve->messages);
    if (!message) {
        kvn_ucx_peer_fail(self);
        return;
    }
    message->header.done = (kvn_wire_done){
        .request = request, .number = number, .failed = failed, .reason = reason, .of = of};
    message->on_through = on_answered;
    self->num_answers++;
    if (reason != KVN_WIRE_NONE)
        kvn_ucx_add(&self->serve->refused, 1);
    kvn_ucx_message_post(message, self, KVN_WIRE_DONE, sizeof message->header.done);
}

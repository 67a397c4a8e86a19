#include "ucx_message.h"

#include <stdlib.h>
#include <string.h>

#include "ucx_peer.h"

/* More than are in flight on a few links; the rest goes back to the system. */
#define MOST_UNUSED 48

kvn_ucx_message *kvn_ucx_message_take(kvn_ucx_messages *pool)
{
    kvn_ucx_message *self = pool->unused;

    if (self) {
        pool->unused = self->next;
        pool->num_unused--;
    } else {
        self = malloc(sizeof *self);
        if (!self)
            return NULL;
        self->buffer = malloc(KVN_UCX_BUFFER);
        if (!self->buffer) {
            free(self);
            return NULL;
        }
    }
    self->pool = pool;
    self->peer = NULL;
    self->on_through = NULL;
    self->owner = NULL;
    self->next = self->previous = NULL;
    self->nbytes = 0;
    self->used = 0;
    self->num_shown = 0;
    self->num_held = 0;
    return self;
}

static void destroy(kvn_ucx_message *self)
{
    free(self->buffer);
    free(self);
}

void kvn_ucx_message_drop(kvn_ucx_message *self)
{
    kvn_ucx_messages *pool = self->pool;

    if (pool->num_unused == MOST_UNUSED) {
        destroy(self);
        return;
    }
    self->next = pool->unused;
    pool->unused = self;
    pool->num_unused++;
}

static void destroy_all(kvn_ucx_message **head)
{
    while (*head) {
        kvn_ucx_message *self = *head;
        *head = self->next;
        destroy(self);
    }
}

void kvn_ucx_messages_fini(kvn_ucx_messages *pool)
{
    destroy_all(&pool->unused);
    destroy_all(&pool->flying); /* none, if every link was closed as it should be */
    pool->num_unused = 0;
}

/* ---- payload ---- */

static void show(kvn_ucx_message *self, const void *from, size_t nbytes)
{
    self->shown[self->num_shown++] = (kvn_ucp_dt_iov){(void *)(uintptr_t)from, nbytes};
}

/* The end of the buffer has grown by `nbytes`. */
static void grow(kvn_ucx_message *self, size_t nbytes)
{
    kvn_ucp_dt_iov *last = self->num_shown > 0 ? &self->shown[self->num_shown - 1] : NULL;
    uint8_t *end = self->buffer + self->used;

    if (last && (uint8_t *)last->buffer + last->length == end && self->used > 0)
        last->length += nbytes;
    else
        show(self, end, nbytes);
    self->used += nbytes;
    self->nbytes += nbytes;
}

void kvn_ucx_message_copy(kvn_ucx_message *self, const void *from, size_t nbytes)
{
    memcpy(self->buffer + self->used, from, nbytes);
    grow(self, nbytes);
}

bool kvn_ucx_message_add(kvn_ucx_message *self, const void *from, size_t nbytes)
{
    /* The last place is left for what is copied. */
    if (nbytes < KVN_UCX_COPY_BELOW || self->num_shown + 1 >= KVN_UCX_MESSAGE_PIECES) {
        kvn_ucx_message_copy(self, from, nbytes);
        return false;
    }
    show(self, from, nbytes);
    self->nbytes += nbytes;
    return true;
}

uint8_t *kvn_ucx_message_reserve(kvn_ucx_message *self) { return self->buffer; }

void kvn_ucx_message_reserved(kvn_ucx_message *self, size_t nbytes) { grow(self, nbytes); }

/* ---- sending ---- */

static void fly(kvn_ucx_message *self)
{
    kvn_ucx_messages *pool = self->pool;

    self->next = pool->flying;
    self->previous = NULL;
    if (self->next)
        self->next->previous = self;
    pool->flying = self;
}

static void land(kvn_ucx_message *self)
{
    if (self->next)
        self->next->previous = self->previous;
    if (self->previous)
        self->previous->next = self->next;
    else
        self->pool->flying = self->next;
}

static void end(kvn_ucx_message *self, int status)
{
    kvn_ucx_peer *peer = self->peer;

    land(self);
    kvn_ucx_peer_let_go_ranges(peer, self);
    if (self->on_through)
        self->on_through(self, status);
    kvn_ucx_message_drop(self);
    kvn_ucx_peer_let_go(peer);
}

static void on_sent(kvn_ucx_send *send, int status) { end((kvn_ucx_message *)send, status); }

int kvn_ucx_message_post(kvn_ucx_message *self, kvn_ucx_peer *peer, unsigned id,
                         size_t header_nbytes)
{
    int status;

    kvn_ucx_peer_hold(peer);
    self->peer = peer;
    self->send.on_sent = on_sent;
    fly(self);
    if (peer->gone) {
        status = KVN_PEER_GONE;
    } else {
        memcpy(&self->header, kvn_ucx_link_token(peer->link), KVN_UCX_TOKEN_NBYTES);
        status = kvn_ucx_link_send(peer->link, id, &self->header, header_nbytes, self->shown,
                                   self->num_shown, &self->send);
    }
    if (status != KVN_PENDING)
        end(self, status);
    return status;
}

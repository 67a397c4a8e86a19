/* Receives the answers to a client's requests, and the bytes of its pulls. */
#include "tcp/answers.h"

#include <errno.h>
#include <string.h>

#include "core/thread.h"

#include "tcp/asking.h"

static void pop(kvn_tcp_client *self)
{
    const kvn_tcp_asked *asked = &self->window[self->first];

    kvn_tcp_flight_arrive(&self->flight, &asked->departure, asked->nbytes, self->answer.reason == KVN_TCP_MOVED,
                          kvn_now_ns());
    self->first = (self->first + 1) % KVN_TCP_WINDOW;
    self->num_asked--;
    self->answer_got = 0;
    self->is_at_end = false;
}

/* Concludes the oldest request, which was done or refused. */
static void settle(kvn_tcp_client *self)
{
    const kvn_tcp_asked asked = self->window[self->first];
    kvn_request *it = asked.transfer;

    pop(self);
    if (!it)
        return;
    it->in_flight--;
    if (self->answer.reason != KVN_TCP_MOVED) {
        kvn_tcp_transfer_refuse(it, (kvn_tcp_reason)self->answer.reason, &asked.from, self->answer.offset);
    } else {
        if (!asked.sends_zeros && it->confirmed.index == asked.from.index &&
            it->confirmed.skip == asked.from.skip)
            it->confirmed = asked.to; /* nothing before it was refused */
        if (!asked.sends_zeros && asked.kind == KVN_TCP_PUSH)
            atomic_fetch_add_explicit(&it->moved, asked.nbytes, memory_order_relaxed);
        if (it->uncut == 0 && it->in_flight == 0)
            kvn_tcp_transfer_end(it, KVN_OK, 0, KVN_NO_DESCRIPTOR);
    }
    /* An aborted push ends once the peer has taken its last bytes. */
    if (it->in_flight == 0 && it->report->status != KVN_PENDING && !atomic_load(&it->finished))
        kvn_tcp_transfer_finish(it);
}

/* Handles a complete answer. Returns NULL, or what is wrong with it. */
static const char *take_answer(kvn_tcp_client *self)
{
    const kvn_tcp_asked *asked = &self->window[self->first];
    const kvn_tcp_answer *answer = &self->answer;

    /* No answer can precede the end of its request. */
    if ((self->num_asked == 1 && !kvn_tcp_is_sent(self)) || answer->id != asked->id ||
        answer->reason >= KVN_TCP_NUM_REASONS || answer->reserved != 0 ||
        (answer->reason == KVN_TCP_RELEASED && !asked->has_leases) ||
        (answer->reason != KVN_TCP_MOVED && answer->offset >= asked->nbytes))
        return "the peer sent an answer that does not match a request";
    self->answer_got = 0;
    if (asked->kind == KVN_TCP_PUSH || self->is_at_end || answer->reason != KVN_TCP_MOVED) {
        settle(self);
        return NULL;
    }
    self->is_at_end = true;
    self->in_left = asked->nbytes;
    self->in_at = asked->from;
    return NULL;
}

/* Distributes received bytes: the rest of an answer, data, the rest of the answer after the data. */
static const char *take(kvn_tcp_client *self, uint64_t nbytes)
{
    const char *wrong = NULL;

    while (nbytes > 0 && !wrong) {
        if (self->in_left > 0) {
            kvn_request *it = self->window[self->first].transfer;
            const uint64_t part = nbytes < self->in_left ? nbytes : self->in_left;
            self->in_left -= part;
            nbytes -= part;
            if (it) {
                kvn_cursor_advance(&self->in_at, &it->batch, part);
                atomic_fetch_add_explicit(&it->moved, part, memory_order_relaxed);
            }
        } else {
            const uint64_t room = sizeof self->answer - self->answer_got;
            const uint64_t part = nbytes < room ? nbytes : room;
            self->answer_got += (uint32_t)part;
            nbytes -= part;
            if (self->answer_got == sizeof self->answer)
                wrong = take_answer(self);
        }
    }
    return wrong;
}

/* Lists the places of the next bytes. The only answer on the wire is assumed to succeed, so the same call receives its
 * bytes. */
static void expect(kvn_tcp_client *self, uint64_t limit, kvn_tcp_parts *parts, kvn_tcp_answer *ahead,
                   uint8_t *dropped, size_t room)
{
    const kvn_tcp_asked *asked = &self->window[self->first];
    kvn_cursor at = self->in_at;
    uint64_t left = self->in_left;
    bool is_ahead = false;

    if (left == 0) {
        kvn_tcp_parts_add(parts, (uint8_t *)&self->answer + self->answer_got,
                          sizeof self->answer - self->answer_got);
        is_ahead = self->num_asked == 1 && asked->kind == KVN_TCP_PULL && !self->is_at_end;
        if (!is_ahead)
            return;
        left = asked->nbytes;
        at = asked->from;
    }
    if (asked->transfer) {
        kvn_tcp_transfer_add_local(asked->transfer, at, left < limit ? left : limit, parts);
    } else {
        if (is_ahead)
            return;
        kvn_tcp_parts_add(parts, dropped, left < room ? left : room);
        return;
    }
    const uint64_t before = is_ahead ? sizeof self->answer - self->answer_got : 0;
    if (parts->nbytes == before + left)
        kvn_tcp_parts_add(parts, is_ahead ? ahead : &self->answer, sizeof *ahead);
}

/* Returns > 0 if bytes came, -EAGAIN if none have, else a failure. */
static ssize_t receive_once(kvn_tcp_client *self)
{
    const bool began_with_answer = self->in_left == 0;
    uint8_t dropped[64 << 10];
    kvn_tcp_answer ahead;
    uint64_t limit = KVN_TCP_CALL_NBYTES;
    const char *wrong;
    ssize_t got;

    for (;;) {
        kvn_tcp_parts parts;
        kvn_tcp_parts_begin(&parts);
        expect(self, limit, &parts, &ahead, dropped, sizeof dropped);
        got = kvn_tcp_receive(&self->watched.stream, &parts);
        if (got != -EFAULT && got != -EREMOTEIO)
            break;
        if (limit == 1 || got == -EREMOTEIO) {
            const uint64_t index = began_with_answer ? self->window[self->first].from.index : self->in_at.index;
            kvn_tcp_transfer_end_local(self->window[self->first].transfer, index, got == -EREMOTEIO);
            return 1; /* the rest of the data is dropped */
        }
        limit /= 2;
    }
    if (got <= 0)
        return got;
    /* The second answer was received into `ahead`, so the first is still intact. */
    const uint64_t first = began_with_answer ? sizeof self->answer - self->answer_got : 0;
    if (began_with_answer && (uint64_t)got > first) {
        wrong = take(self, first);
        if (!wrong && self->is_at_end && self->in_left > 0) {
            const uint64_t left = self->in_left;
            const uint64_t rest = (uint64_t)got - first;
            const uint64_t bytes = rest < left ? rest : left;
            wrong = take(self, bytes);
            if (!wrong && rest > bytes) {
                memcpy(&self->answer, &ahead, rest - bytes);
                wrong = take(self, rest - bytes);
            }
        } else if (!wrong) {
            wrong = "the peer sent more bytes than were requested";
        }
    } else {
        wrong = take(self, (uint64_t)got);
    }
    if (wrong) {
        kvn_tcp_transfers_fail(self, 0, wrong);
        return -EPROTO;
    }
    return got;
}

bool kvn_tcp_receive_some(kvn_tcp_client *self, uint64_t *moved)
{
    bool has_received = false;

    while (!self->has_failed && self->num_asked > 0 && *moved < KVN_TCP_TURN_NBYTES) {
        const ssize_t got = receive_once(self);
        if (got == -EAGAIN)
            break;
        if (got == 0)
            kvn_tcp_transfers_fail(self, 0, "the peer has closed the connection");
        else if (got < 0)
            kvn_tcp_transfers_fail(self, (int)-got, kvn_tcp_explain((int)-got));
        else
            *moved += (uint64_t)got;
        has_received = got > 0;
    }
    return has_received;
}

#include "tcp/client.h"

#include <errno.h>
#include <inttypes.h>
#include <sched.h>
#include <string.h>
#include <sys/epoll.h>

#include "core/clock.h"
#include "core/report.h"

#define REQUEST_NBYTES (1u << 20) /* the smaller, the sooner others have their turn */
#define FLIGHT_NBYTES (8u << 20)  /* asked for ahead: what a network may hold */
#define CALL_NBYTES (1u << 20)    /* that one system call moves: a whole request */
#define TURN_NBYTES (1u << 20)    /* before the mutex is free for others */
#define YIELDS 64                 /* of the service to them, some 50 us: to be woken takes as long */
#define DRIVES 4                  /* the same, of small steps */
#define SPIN_NS 50000             /* longer than a wake-up takes */
#define GRACE_NS INT64_C(500000000) /* for a push that was given up to be taken whole */
#define IDLE_EVENTS (EPOLLRDHUP | EPOLLET)

static const uint8_t ZEROS[4096];

static const char *const REASONS[KVN_TCP_NUM_REASONS] = {
    [KVN_TCP_MOVED] = "for no reason",
    [KVN_TCP_DEREGISTERED] = "has deregistered it",
    [KVN_TCP_OUTSIDE] = "has not registered all of it",
    [KVN_TCP_READ_ONLY] = "has registered it with writable=False",
    [KVN_TCP_UNMAPPED] = "has it registered, but not mapped",
    [KVN_TCP_DEVICE] = "has it on a device, which did not copy it",
};

/* ---- outcomes; all with the mutex held ---- */

static void take_out(kvn_request *it)
{
    kvn_tcp_client *self = it->client;

    if (it->next == it) {
        self->transfers = NULL;
    } else {
        it->previous->next = it->next;
        it->next->previous = it->previous;
        if (self->transfers == it)
            self->transfers = it->next;
    }
    it->next = it->previous = NULL;
}

static void put_in(kvn_tcp_client *self, kvn_request *it)
{
    if (!self->transfers) {
        it->next = it->previous = it;
        self->transfers = it;
        return;
    }
    it->next = self->transfers; /* last: behind all others */
    it->previous = self->transfers->previous;
    it->previous->next = it->next->previous = it;
}

/* Nothing of its memory is touched from here on. */
static void finish(kvn_request *it)
{
    kvn_tcp_client *self = it->client;
    kvn_report *report = &it->end;

    for (uint32_t i = 0; i < self->num_asked; i++) {
        kvn_tcp_asked *asked = &self->window[(self->first + i) % KVN_TCP_WINDOW];
        if (asked->transfer == it)
            asked->transfer = NULL;
    }
    report->bytes_done = atomic_load_explicit(&it->moved, memory_order_relaxed);
    if (kvn_is_given_up(report->status) && it->confirmed.index == it->batch.count)
        report->status = KVN_OK; /* what was on the wire when it was given up was all of it */
    if (report->status != KVN_OK)
        kvn_report_add_span(report, it->confirmed.index, it->batch.count);
    if (kvn_is_given_up(report->status))
        kvn_report_abandoned(report, report->status, it->batch.count, it->total);
    kvn_report_copy(&it->report, report);
    take_out(it);
    atomic_store(&it->finished, true);
    pthread_cond_broadcast(&it->changed);
}

/* Asks for nothing more. A push goes on until what is on the wire was taken: the peer writes it. */
static void end(kvn_request *it, int status, int code, uint64_t failed)
{
    if (it->end.status != KVN_PENDING)
        return;
    it->end.status = status;
    it->end.code = code;
    it->end.failed = failed;
    it->uncut = 0;
    if (it->kind == KVN_TCP_PULL || it->in_flight == 0)
        finish(it);
}

static void end_refused(kvn_request *it, kvn_tcp_reason reason, const kvn_cursor *from,
                        uint64_t offset)
{
    uint64_t index = from->index;

    if (it->end.status != KVN_PENDING)
        return;
    for (offset += from->skip; index + 1 < it->batch.count && offset >= it->batch.nbytes[index]; index++)
        offset -= it->batch.nbytes[index];
    if (reason == KVN_TCP_RELEASED)
        snprintf(it->end.message, sizeof it->end.message,
                 "descriptor %" PRIu64 ": %s was released by the peer, or has expired", it->batch.first + index,
                 it->known->leases);
    else
        snprintf(it->end.message, sizeof it->end.message,
                 "descriptor %" PRIu64 ": %" PRIu64 " bytes at 0x%" PRIx64 " of the peer, which %s",
                     it->batch.first + index, it->batch.nbytes[index], it->remote[index], REASONS[reason]);
    end(it, reason == KVN_TCP_DEVICE ? KVN_FAILED : KVN_UNMAPPED, 0, index);
}

static void end_unmapped(kvn_request *it, uint64_t index)
{
    if (it->end.status != KVN_PENDING)
        return;
    snprintf(it->end.message, sizeof it->end.message,
             "descriptor %" PRIu64 ": local memory: %" PRIu64 " bytes at 0x%" PRIx64
             " are not mapped%s",
             it->batch.first + index, it->batch.nbytes[index], it->local[index],
             it->kind == KVN_TCP_PULL ? ", or not writable" : "");
    end(it, KVN_UNMAPPED, EFAULT, index);
}

static void end_by_device(kvn_request *it, uint64_t index)
{
    const kvn_failure *why = kvn_tcp_device_failure(&it->client->watched.stream);

    if (it->end.status != KVN_PENDING)
        return;
    snprintf(it->end.message, sizeof it->end.message, "descriptor %" PRIu64 ": %.200s",
             it->batch.first + index, why->message);
    end(it, why->status, why->code, index);
}

static void fail(kvn_tcp_client *self, int code, const char *why)
{
    if (self->has_failed)
        return;
    self->has_failed = true;
    self->on_failed(self->context, code, why);
    while (self->transfers) {
        kvn_request *it = self->transfers;
        if (it->end.status == KVN_PENDING) {
            it->end.status = KVN_PEER_GONE;
            it->end.code = code;
            snprintf(it->end.message, sizeof it->end.message, "%s", why);
        }
        finish(it);
    }
    self->num_asked = 0;
    self->out_nbytes = self->out_sent = 0;
    self->out_left = 0;
}

static void fail_by(kvn_tcp_client *self, int error) { fail(self, error, kvn_tcp_explain(error)); }

/* ---- walking over descriptors ---- */

/* Adds at most `limit` bytes of the local memory; a part is left for an answer. */
static void add_local(const kvn_request *it, kvn_cursor at, uint64_t limit, kvn_tcp_parts *parts)
{
    while (limit > 0 && parts->count < KVN_TCP_MAX_PARTS - 1) {
        uint64_t nbytes = it->batch.nbytes[at.index] - at.skip;
        nbytes = nbytes < limit ? nbytes : limit;
        kvn_tcp_parts_add_of(parts, it->device, it->local[at.index] + at.skip, nbytes);
        limit -= nbytes;
        at = (kvn_cursor){at.index + 1, 0};
    }
}

/* ---- asking ---- */

/* Index in the request of a range, added if need be; KVN_TCP_MAX_RANGES: there is no room. */
static uint32_t range_in(kvn_tcp_request *request, const kvn_tcp_range *range)
{
    uint32_t count = request->head.num_ranges;

    for (uint32_t i = count; i > 0; i--) {
        const kvn_tcp_range *known = kvn_tcp_range_at(request, i - 1);
        if (known->slot == range->slot && known->generation == range->generation)
            return i - 1;
    }
    if (count == KVN_TCP_MAX_RANGES)
        return count;
    /* The runs lie behind the ranges, and are not written yet where they would be in the way: they are
     * collected elsewhere. */
    request->head.num_ranges++;
    *kvn_tcp_range_at(request, count) = *range;
    return count;
}

/* Whether the piece goes on where the run ends, or in the same steps; then it is a part of it. */
static bool extend(kvn_tcp_run *run, uint64_t address, uint64_t nbytes, uint32_t range)
{
    if (run->range != range)
        return false;
    if (run->count == 1 && address == run->address + run->nbytes && run->nbytes + nbytes <= UINT32_MAX) {
        run->nbytes += (uint32_t)nbytes;
        return true;
    }
    if (run->nbytes != nbytes || address < run->address)
        return false;
    const uint64_t step = address - run->address;
    if (run->count == 1 ? step < nbytes || step > UINT32_MAX
                        : step != (uint64_t)run->count * run->stride)
        return false;
    if (run->count == 1)
        run->stride = (uint32_t)step;
    run->count++;
    return true;
}

/* Cuts the next request of a transfer. False: the transfer has ended, as no range holds what comes next. */
static bool cut(kvn_tcp_client *self, kvn_request *it, kvn_tcp_asked *asked)
{
    kvn_tcp_run runs[KVN_TCP_MAX_RUNS];
    kvn_tcp_request *out = &self->out;
    uint32_t num_runs = 0;
    size_t hint = 0;
    kvn_cursor at = it->cut;
    uint64_t nbytes = 0;

    out->head.num_ranges = 0;
    for (uint32_t i = 0; i < it->known->num_leases; i++)
        range_in(out, &it->known->ranges[it->known->count + i]);
    while (nbytes < REQUEST_NBYTES && nbytes < it->uncut) {
        const uint64_t address = it->remote[at.index] + at.skip;
        uint64_t part = it->batch.nbytes[at.index] - at.skip;
        part = part < REQUEST_NBYTES - nbytes ? part : REQUEST_NBYTES - nbytes;
        if (part == 0) {
            at = (kvn_cursor){at.index + 1, 0};
            continue;
        }
        hint = kvn_intervals_find(it->known->places, it->known->count, address, part, hint);
        if (hint == KVN_NO_INTERVAL) {
            if (nbytes > 0) /* what is before it is moved first */
                break;
            end_refused(it, KVN_TCP_OUTSIDE, &at, 0);
            return false;
        }
        const uint32_t range = range_in(out, &it->known->ranges[it->known->places[hint].index]);
        if (range == KVN_TCP_MAX_RANGES)
            break;
        if (num_runs == 0 || !extend(&runs[num_runs - 1], address, part, range)) {
            if (num_runs == KVN_TCP_MAX_RUNS)
                break;
            runs[num_runs++] = (kvn_tcp_run){address, (uint32_t)part, 1, 0, range};
        }
        nbytes += part;
        at.skip += part;
        if (at.skip == it->batch.nbytes[at.index])
            at = (kvn_cursor){at.index + 1, 0};
    }
    out->head.kind = (uint8_t)it->kind;
    out->head.num_runs = num_runs;
    out->head.nbytes = nbytes;
    out->head.id = self->next_id++;
    out->head.run = runs[0];
    memcpy(kvn_tcp_run_at(out, 1), runs + 1, (num_runs - 1) * sizeof *runs);
    *asked = (kvn_tcp_asked){it, it->cut, at, nbytes, out->head.id, it->kind,
                             it->known->num_leases > 0, false};
    it->cut = at;
    it->uncut -= nbytes;
    return true;
}

/* Puts the next request into the window, of each transfer in turn. False: there is none, or no room. */
static bool ask_next(kvn_tcp_client *self)
{
    kvn_request *it = self->transfers;

    if (!it || self->num_asked == KVN_TCP_WINDOW || self->asked_nbytes >= FLIGHT_NBYTES)
        return false;
    while (it->uncut == 0) {
        it = it->next;
        if (it == self->transfers)
            return false;
    }
    self->transfers = it->next;
    kvn_tcp_asked *asked = &self->window[(self->first + self->num_asked) % KVN_TCP_WINDOW];
    if (!cut(self, it, asked))
        return true;
    self->num_asked++;
    self->asked_nbytes += asked->nbytes;
    it->in_flight++;
    self->out_nbytes = (uint32_t)(sizeof self->out.head + kvn_tcp_table_nbytes(&self->out.head));
    self->out_sent = 0;
    self->out_left = it->kind == KVN_TCP_PUSH ? asked->nbytes : 0;
    self->out_at = asked->from;
    return true;
}

/* What is being sent. */
static kvn_tcp_asked *newest(kvn_tcp_client *self)
{
    return &self->window[(self->first + self->num_asked - 1) % KVN_TCP_WINDOW];
}

/* Sends on what was begun; where local memory is not mapped, up to the first byte that is not. > 0: some of
 * it; 0: there is no room; < 0: -errno. */
static ssize_t send_out(kvn_tcp_client *self)
{
    uint64_t limit = self->out_left < CALL_NBYTES ? self->out_left : CALL_NBYTES;
    ssize_t sent;

    for (;;) {
        kvn_request *it = self->out_left > 0 ? newest(self)->transfer : NULL;
        kvn_tcp_parts parts;
        kvn_tcp_parts_begin(&parts);
        kvn_tcp_parts_add(&parts, (uint8_t *)&self->out + self->out_sent,
                          self->out_nbytes - self->out_sent);
        if (it && !newest(self)->sends_zeros)
            add_local(it, self->out_at, limit, &parts);
        else if (self->out_left > 0) /* the peer was promised so many bytes */
            for (uint64_t left = limit; left > 0 && parts.count < KVN_TCP_MAX_PARTS;) {
                const uint64_t some = left < sizeof ZEROS ? left : sizeof ZEROS;
                kvn_tcp_parts_add(&parts, ZEROS, some);
                left -= some;
            }
        sent = kvn_tcp_send(&self->watched.stream, &parts);
        if ((sent != -EFAULT && sent != -EREMOTEIO) || !it || newest(self)->sends_zeros)
            return sent;
        if (limit == 1 || sent == -EREMOTEIO) {
            newest(self)->sends_zeros = true;
            (sent == -EREMOTEIO ? end_by_device : end_unmapped)(it, self->out_at.index);
            limit = self->out_left < CALL_NBYTES ? self->out_left : CALL_NBYTES;
        } else {
            limit /= 2;
        }
    }
}

/* Whether nothing of it is left. */
static bool is_sent(const kvn_tcp_client *self)
{
    return self->out_sent == self->out_nbytes && self->out_left == 0;
}

static bool send_some(kvn_tcp_client *self, uint64_t *moved)
{
    bool has_sent = false;

    self->out_is_blocked = false;
    while (!self->has_failed && *moved < TURN_NBYTES) {
        if (is_sent(self) && !ask_next(self))
            break;
        if (is_sent(self))
            continue; /* that transfer has ended */
        const ssize_t sent = send_out(self);
        if (sent < 0)
            fail_by(self, (int)-sent);
        self->out_is_blocked = sent == 0;
        if (sent <= 0)
            break;
        const uint64_t head = self->out_nbytes - self->out_sent;
        const uint64_t of_head = (uint64_t)sent < head ? (uint64_t)sent : head;
        self->out_sent += (uint32_t)of_head;
        if ((uint64_t)sent > of_head) {
            const kvn_request *it = newest(self)->transfer;
            self->out_left -= (uint64_t)sent - of_head;
            if (it)
                kvn_cursor_advance(&self->out_at, &it->batch, (uint64_t)sent - of_head);
        }
        *moved += (uint64_t)sent;
        has_sent = true;
    }
    return has_sent;
}

/* ---- what comes back ---- */

static void pop(kvn_tcp_client *self)
{
    kvn_tcp_asked *asked = &self->window[self->first];

    self->asked_nbytes -= asked->nbytes;
    self->first = (self->first + 1) % KVN_TCP_WINDOW;
    self->num_asked--;
    self->answer_got = 0;
    self->is_at_end = false;
}

/* The oldest request was done, or refused. */
static void settle(kvn_tcp_client *self)
{
    const kvn_tcp_asked asked = self->window[self->first];
    kvn_request *it = asked.transfer;

    pop(self);
    if (!it)
        return;
    it->in_flight--;
    if (self->answer.reason != KVN_TCP_MOVED) {
        end_refused(it, (kvn_tcp_reason)self->answer.reason, &asked.from, self->answer.offset);
    } else {
        if (!asked.sends_zeros && it->confirmed.index == asked.from.index &&
            it->confirmed.skip == asked.from.skip)
            it->confirmed = asked.to; /* nothing before it was refused */
        if (!asked.sends_zeros && asked.kind == KVN_TCP_PUSH)
            atomic_fetch_add_explicit(&it->moved, asked.nbytes, memory_order_relaxed);
        if (it->uncut == 0 && it->in_flight == 0)
            end(it, KVN_OK, 0, KVN_NO_DESCRIPTOR);
    }
    /* A push that was to end when the last of it was taken. */
    if (it->in_flight == 0 && it->end.status != KVN_PENDING && !atomic_load(&it->finished))
        finish(it);
}

/* A whole answer has come. NULL, or what is wrong with it. */
static const char *take_answer(kvn_tcp_client *self)
{
    const kvn_tcp_asked *asked = &self->window[self->first];
    const kvn_tcp_answer *answer = &self->answer;

    /* One that comes before all of its request was sent answers something else. */
    if ((self->num_asked == 1 && !is_sent(self)) || answer->id != asked->id ||
        answer->reason >= KVN_TCP_NUM_REASONS || answer->reserved != 0 ||
        (answer->reason == KVN_TCP_RELEASED && !asked->has_leases) ||
        (answer->reason != KVN_TCP_MOVED && answer->offset >= asked->nbytes))
        return "the peer sent what is no answer to what it was asked";
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

/* Shares out what came: rest of an answer, bytes, rest of the answer behind them. */
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

/* Where the next bytes belong. An answer that is alone on the wire is expected to be a good one: its
 * bytes are asked for in the same call. */
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
        add_local(asked->transfer, at, left < limit ? left : limit, parts);
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

/* > 0: something came; -EAGAIN: nothing; else it has failed. */
static ssize_t receive_once(kvn_tcp_client *self)
{
    const bool began_with_answer = self->in_left == 0;
    uint8_t dropped[64 << 10];
    kvn_tcp_answer ahead;
    uint64_t limit = CALL_NBYTES;
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
            (got == -EREMOTEIO ? end_by_device : end_unmapped)(self->window[self->first].transfer, index);
            return 1; /* what is left of it is dropped */
        }
        limit /= 2;
    }
    if (got <= 0)
        return got;
    /* The second answer was read to where it does not overwrite the first, which is looked at now. */
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
            wrong = "the peer sent more than it was asked for";
        }
    } else {
        wrong = take(self, (uint64_t)got);
    }
    if (wrong) {
        fail(self, 0, wrong);
        return -EPROTO;
    }
    return got;
}

static bool receive_some(kvn_tcp_client *self, uint64_t *moved)
{
    bool has_received = false;

    while (!self->has_failed && self->num_asked > 0 && *moved < TURN_NBYTES) {
        const ssize_t got = receive_once(self);
        if (got == -EAGAIN)
            break;
        if (got == 0)
            fail(self, 0, "the peer has closed the connection");
        else if (got < 0)
            fail_by(self, (int)-got);
        else
            *moved += (uint64_t)got;
        has_received = got > 0;
    }
    return has_received;
}

/* ---- who drives it ---- */

typedef enum progress { BLOCKED, MOVED, TURN_IS_OVER } progress;

/* Receives before it sends: answers make room in the window. */
static progress drive(kvn_tcp_client *self)
{
    uint64_t received = 0, sent = 0;
    bool has_moved = receive_some(self, &received);

    has_moved |= send_some(self, &sent);
    if (received >= TURN_NBYTES || sent >= TURN_NBYTES)
        return TURN_IS_OVER;
    return has_moved ? MOVED : BLOCKED;
}

/* Has the service's thread go on where nobody else does. */
static void hand_over(kvn_tcp_client *self)
{
    uint32_t events = IDLE_EVENTS;

    if (self->has_failed) /* and may be closed */
        return;
    if (!self->has_spinner) {
        events |= self->num_asked > 0 ? EPOLLIN : 0;
        /* To go on with the request, and, as there is room now, with what has been received already. */
        if (!is_sent(self) || kvn_tcp_has_received(&self->watched.stream))
            events |= EPOLLOUT;
    }
    kvn_tcp_ask_for(&self->watched, events);
}

/* Who had the mutex last gets it again before others wake: without this they would wait as long as
 * bytes move, and nothing could be given up. */
static void let_others_first(kvn_tcp_client *self)
{
    for (int i = 0; i < YIELDS && atomic_load_explicit(&self->wanted, memory_order_relaxed) > 0; i++)
        sched_yield();
}

static kvn_tcp_progress on_ready(kvn_tcp_watched *watched, uint32_t events)
{
    kvn_tcp_client *self = (kvn_tcp_client *)watched;
    progress reached = BLOCKED;

    let_others_first(self);
    pthread_mutex_lock(&self->mutex);
    self->is_closed |= (events & (EPOLLERR | EPOLLHUP | EPOLLRDHUP)) != 0;
    for (int i = 0; i < DRIVES && (reached = drive(self)) == MOVED; i++)
        ;
    if (reached == BLOCKED && self->is_closed) /* what it sent before it closed was read */
        fail(self, 0, "the peer has closed the connection");
    hand_over(self);
    pthread_mutex_unlock(&self->mutex);
    return reached == BLOCKED ? KVN_TCP_SLEEPS : KVN_TCP_GOES_ON;
}

/* Frees the mutex for a moment. */
static void let_others_in(kvn_tcp_client *self)
{
    pthread_mutex_unlock(&self->mutex);
    while (atomic_load_explicit(&self->wanted, memory_order_relaxed) > 0)
        sched_yield();
    pthread_mutex_lock(&self->mutex);
}

static void lock_soon(kvn_tcp_client *self)
{
    atomic_fetch_add(&self->wanted, 1);
    pthread_mutex_lock(&self->mutex);
    atomic_fetch_sub(&self->wanted, 1);
}

/* As long as bytes keep coming. */
static void spin(kvn_tcp_client *self, const kvn_request *it, int64_t deadline_ns)
{
    int64_t now = kvn_now_ns(), end_ns = now + SPIN_NS;

    self->has_spinner = true;
    hand_over(self);
    while (!atomic_load(&it->finished) && now < deadline_ns && now < end_ns) {
        const progress reached = drive(self);
        if (atomic_load(&it->finished))
            break;
        let_others_in(self);
        now = kvn_now_ns();
        if (reached != BLOCKED)
            end_ns = now + SPIN_NS;
    }
    self->has_spinner = false;
}

static void wait_for(kvn_tcp_client *self, kvn_request *it, int64_t deadline_ns)
{
    if (!atomic_load(&it->finished) && !self->has_spinner)
        spin(self, it, deadline_ns);
    hand_over(self);
    while (!atomic_load(&it->finished) && kvn_cond_wait(&it->changed, &self->mutex, deadline_ns))
        ;
}

void kvn_tcp_client_begin(kvn_request *it, bool waits)
{
    kvn_tcp_client *self = it->client;
    uint64_t moved = 0;

    kvn_cond_init(&it->changed);
    lock_soon(self);
    put_in(self, it);
    if (self->has_failed) {
        it->end.status = KVN_PEER_GONE;
        snprintf(it->end.message, sizeof it->end.message, "the connection has failed");
        finish(it);
    } else if (it->uncut == 0) {
        end(it, KVN_OK, 0, KVN_NO_DESCRIPTOR);
    } else if (!self->out_is_blocked) {
        send_some(self, &moved);
    }
    if (!waits)
        hand_over(self);
    pthread_mutex_unlock(&self->mutex);
}

void kvn_tcp_client_wait(kvn_request *it, int64_t deadline_ns)
{
    lock_soon(it->client);
    wait_for(it->client, it, deadline_ns);
    pthread_mutex_unlock(&it->client->mutex);
}

void kvn_tcp_client_give_up(kvn_request *it, int why)
{
    kvn_tcp_client *self = it->client;

    lock_soon(self);
    if (!atomic_load(&it->finished))
        end(it, why, 0, KVN_NO_DESCRIPTOR);
    wait_for(self, it, kvn_now_ns() + GRACE_NS); /* of a push: what is on the wire */
    if (!atomic_load(&it->finished)) {
        kvn_tcp_reset(&self->watched.stream);
        fail(self, 0, "a push that was given up did not end within 500 ms");
        hand_over(self);
    }
    pthread_mutex_unlock(&self->mutex);
}

void kvn_tcp_client_let_go(kvn_request *it)
{
    /* Who has finished it may be about to wake those who wait. */
    lock_soon(it->client);
    pthread_mutex_unlock(&it->client->mutex);
    pthread_cond_destroy(&it->changed);
}

void kvn_tcp_client_fail(kvn_tcp_client *self, int code, const char *why)
{
    lock_soon(self);
    fail(self, code, why);
    pthread_mutex_unlock(&self->mutex);
}

void kvn_tcp_client_init(kvn_tcp_client *self)
{
    self->watched.on_ready = on_ready;
    pthread_mutex_init(&self->mutex, NULL);
}

void kvn_tcp_client_fini(kvn_tcp_client *self) { pthread_mutex_destroy(&self->mutex); }

/* Answers requests of a connection one at a time: checks each against the table, and moves its bytes. */
#include "tcp/server.h"

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>

#include "tcp/stage.h"

#define CALL_NBYTES (1u << 20)      /* maximum of one system call, for which removing a range waits */
#define TURN_NBYTES (1u << 20)      /* then other connections have their turn */
#define STEP_NBYTES (2u << 10)      /* the cost of a system call, in bytes */
#define SMALL_NBYTES (64u << 10)    /* after such a request the next may come at once */
#define DROPPED_NBYTES (64u << 10)  /* read and dropped at a time */

static const uint8_t ZEROS[4096];

static void fail(kvn_tcp_server *self, int code, const char *why)
{
    if (self->has_failed)
        return;
    self->has_failed = true;
    self->on_failed(self->context, code, why);
}

/* ---- the position in the registered memory ---- */

static void add_memory(kvn_tcp_server *self, kvn_tcp_parts *parts, uint64_t limit)
{
    kvn_tcp_place at = self->at;
    uint64_t nbytes = 0;

    for (unsigned added = 0; added < KVN_TCP_MAX_PARTS - 2 && nbytes < limit; added++) {
        const kvn_tcp_run *run = kvn_tcp_run_at(&self->request, at.run);
        const kvn_device *device =
            kvn_tcp_table_device(self->table, kvn_tcp_range_at(&self->request, run->range));
        if (nbytes > 0 && device != parts->device)
            return; /* one call moves memory of either host or device */
        const uint64_t address = run->address + (uint64_t)at.piece * run->stride + at.skip;
        uint64_t part = run->nbytes - at.skip;
        part = part < limit - nbytes ? part : limit - nbytes;
        kvn_tcp_parts_add_of(parts, device, address, part);
        nbytes += part;
        at.skip = 0;
        if (++at.piece == run->count) {
            at.piece = 0;
            at.run++;
        }
    }
}

static void advance(kvn_tcp_server *self, uint64_t nbytes)
{
    self->left -= nbytes;
    self->moved += nbytes;
    while (nbytes > 0 && !self->is_refused) {
        const kvn_tcp_run *run = kvn_tcp_run_at(&self->request, self->at.run);
        const uint64_t part = run->nbytes - self->at.skip;
        if (nbytes < part) {
            self->at.skip += (uint32_t)nbytes;
            return;
        }
        nbytes -= part;
        self->at.skip = 0;
        if (++self->at.piece == run->count) {
            self->at.piece = 0;
            self->at.run++;
        }
    }
}

/* From here on no byte of the request's memory is read or written. */
static void refuse(kvn_tcp_server *self, kvn_tcp_reason reason, uint64_t offset)
{
    const bool is_pull = self->request.head.kind == KVN_TCP_PULL;
    /* Send the promised bytes, and then revoke them. */
    const bool is_late = is_pull && self->answer_left < sizeof self->answer;
    kvn_tcp_answer *answer = is_late ? &self->end : &self->answer;

    answer->reason = reason;
    answer->offset = offset;
    self->is_refused = true;
    if (is_pull && !is_late)
        self->left = self->end_left = 0;
}

/* Call it after kvn_tcp_table_enter. False: memory of the request was removed, or has expired, since its check. */
static bool is_still_registered(kvn_tcp_server *self)
{
    uint64_t offset;
    kvn_tcp_reason reason;

    if (kvn_tcp_table_is_same(self->table, &self->checked))
        return true;
    reason = kvn_tcp_table_check(self->table, &self->request, &self->checked, &offset);
    if (reason == KVN_TCP_MOVED)
        return true;
    refuse(self, reason, offset);
    return false;
}

/* Moves registered memory in one call. If some of it is not mapped, tries less and less, up to the first such byte; a
 * device reports the bad part itself. */
static ssize_t move(kvn_tcp_server *self, bool is_send)
{
    const unsigned thread = kvn_tcp_thread_index(&self->watched);
    uint64_t limit = self->left < CALL_NBYTES ? self->left : CALL_NBYTES;
    ssize_t moved;
    bool is_gone;

    do {
        kvn_tcp_parts parts;
        kvn_tcp_parts_begin(&parts);
        if (is_send)
            kvn_tcp_parts_add(&parts, (uint8_t *)(&self->answer + 1) - self->answer_left,
                              self->answer_left);
        kvn_tcp_table_enter(self->table, thread);
        if (!is_still_registered(self)) {
            kvn_tcp_table_leave(self->table, thread);
            return 0;
        }
        add_memory(self, &parts, limit);
        if (is_send && parts.nbytes == self->answer_left + self->left)
            kvn_tcp_parts_add(&parts, &self->end, sizeof self->end);
        moved = is_send ? kvn_tcp_send(&self->watched.stream, &parts)
                        : kvn_tcp_receive(&self->watched.stream, &parts);
        kvn_tcp_table_leave(self->table, thread);
        if (moved != -EFAULT && moved != -EREMOTEIO)
            return moved;
        limit /= 2;
    } while (limit > 0 && moved == -EFAULT);
    is_gone = moved == -EFAULT || kvn_tcp_device_failure(&self->watched.stream)->status == KVN_UNMAPPED;
    refuse(self, is_gone ? KVN_TCP_UNMAPPED : KVN_TCP_DEVICE, self->moved);
    return 0;
}

/* ---- answering ---- */

/* Pins the slots for the first request for memory of the device, before the table is entered, so that removing a range
 * does not wait for it. After a failure the next request tries again. */
static bool has_slots(kvn_tcp_server *self)
{
    kvn_failure ignored;

    return self->watched.stream.stage ||
           kvn_tcp_stage_create(self->copier, &self->watched.stream.stage, &ignored) == KVN_OK;
}

static void begin(kvn_tcp_server *self)
{
    const kvn_tcp_head *head = &self->request.head;
    const char *wrong = kvn_tcp_check_request(&self->request);
    kvn_tcp_reason reason;
    uint64_t offset;

    if (wrong) {
        fail(self, 0, wrong);
        return;
    }
    self->answer = self->end = (kvn_tcp_answer){.id = head->id};
    self->answer_left = sizeof self->answer;
    self->end_left = head->kind == KVN_TCP_PULL ? sizeof self->end : 0;
    self->left = head->nbytes;
    self->moved = 0;
    self->at = (kvn_tcp_place){0, 0, 0};
    self->is_refused = false;
    self->state = head->kind == KVN_TCP_PULL ? KVN_TCP_WRITES : KVN_TCP_READS_BYTES;
    reason = kvn_tcp_table_check(self->table, &self->request, &self->checked, &offset);
    if (reason != KVN_TCP_MOVED)
        refuse(self, reason, offset);
    else if (self->checked.has_device && !has_slots(self))
        refuse(self, KVN_TCP_DEVICE, 0);
}

static uint64_t taken(uint64_t *from, uint64_t most)
{
    const uint64_t nbytes = *from < most ? *from : most;
    *from -= nbytes;
    return nbytes;
}

static ssize_t send_zeros(kvn_tcp_server *self)
{
    kvn_tcp_parts parts;
    uint64_t left = self->left;

    kvn_tcp_parts_begin(&parts);
    kvn_tcp_parts_add(&parts, (uint8_t *)(&self->answer + 1) - self->answer_left, self->answer_left);
    while (left > 0 && parts.count < KVN_TCP_MAX_PARTS - 1)
        kvn_tcp_parts_add(&parts, ZEROS, taken(&left, sizeof ZEROS));
    if (left == 0)
        kvn_tcp_parts_add(&parts, (uint8_t *)(&self->end + 1) - self->end_left, self->end_left);
    return kvn_tcp_send(&self->watched.stream, &parts);
}

static ssize_t receive_into(kvn_tcp_server *self, void *own, uint64_t nbytes)
{
    kvn_tcp_parts parts;

    kvn_tcp_parts_begin(&parts);
    kvn_tcp_parts_add(&parts, own, nbytes);
    return kvn_tcp_receive(&self->watched.stream, &parts);
}

static ssize_t write_on(kvn_tcp_server *self)
{
    const bool was_refused = self->is_refused;
    const ssize_t sent = self->left > 0 && !was_refused ? move(self, true) : send_zeros(self);
    uint64_t rest = sent > 0 ? (uint64_t)sent : 0;

    self->answer_left -= (uint32_t)taken(&rest, self->answer_left);
    advance(self, taken(&rest, self->left));
    self->end_left -= (uint32_t)rest;
    return self->is_refused && !was_refused ? 1 : sent; /* refused just now: continue */
}

static ssize_t read_bytes(kvn_tcp_server *self)
{
    uint8_t dropped[DROPPED_NBYTES];
    const bool was_refused = self->is_refused;
    const uint64_t most = self->left < sizeof dropped ? self->left : sizeof dropped;
    const ssize_t got = was_refused ? receive_into(self, dropped, most) : move(self, false);

    if (got > 0)
        advance(self, (uint64_t)got);
    return self->is_refused && !was_refused ? 1 : got;
}

/* Continues to read `want` bytes into `into`. */
static ssize_t read_into(kvn_tcp_server *self, void *into, size_t want)
{
    const ssize_t got = receive_into(self, (uint8_t *)into + self->got, want - self->got);

    if (got > 0)
        self->got += (uint32_t)got;
    return got;
}

/* Takes a step of the connection. > 0: it can continue; 0: it must wait; < 0: it has ended. */
static ssize_t step(kvn_tcp_server *self)
{
    kvn_tcp_head *head = &self->request.head;
    ssize_t got;

    switch (self->state) {
    case KVN_TCP_READS_HEAD:
        got = read_into(self, head, sizeof *head);
        if (self->got == sizeof *head) {
            const char *wrong = kvn_tcp_check_head(head);
            self->got = 0;
            self->state = KVN_TCP_READS_TABLE;
            if (wrong)
                fail(self, 0, wrong);
            else if (kvn_tcp_table_nbytes(head) == 0)
                begin(self);
        }
        break;
    case KVN_TCP_READS_TABLE:
        got = read_into(self, self->request.table, kvn_tcp_table_nbytes(head));
        if (self->got == kvn_tcp_table_nbytes(head))
            begin(self);
        break;
    case KVN_TCP_READS_BYTES:
        got = read_bytes(self);
        if (self->left == 0)
            self->state = KVN_TCP_WRITES;
        break;
    default:
        got = write_on(self);
        if (self->answer_left + self->left + self->end_left == 0) {
            self->got = 0;
            self->state = KVN_TCP_READS_HEAD;
        }
        return got; /* 0: the socket has no room now */
    }
    if (got == 0)
        fail(self, 0, "the peer has closed the connection");
    return got == -EAGAIN ? 0 : got;
}

static kvn_tcp_progress on_ready(kvn_tcp_watched *watched, uint32_t events)
{
    kvn_tcp_server *self = (kvn_tcp_server *)watched;
    uint64_t before = self->moved, moved = 0;
    bool has_answered = false;

    /* Drop what the peer sent before it closed: nothing is written for a peer that has gone. */
    if (events & (EPOLLERR | EPOLLHUP | EPOLLRDHUP))
        fail(self, 0, "the peer has closed the connection");
    while (!self->has_failed) {
        const bool was_writing = self->state == KVN_TCP_WRITES;
        const ssize_t got = step(self);
        if (got < 0)
            fail(self, (int)-got, kvn_tcp_explain((int)-got));
        if (got <= 0)
            break;
        has_answered |= was_writing && self->state == KVN_TCP_READS_HEAD;
        moved += STEP_NBYTES + (self->moved > before ? self->moved - before : 0);
        before = self->moved;
        if (moved >= TURN_NBYTES)
            return KVN_TCP_GOES_ON;
    }
    return has_answered && self->request.head.nbytes <= SMALL_NBYTES && !self->has_failed
               ? KVN_TCP_SPINS
               : KVN_TCP_SLEEPS;
}

void kvn_tcp_server_init(kvn_tcp_server *self) { self->watched.on_ready = on_ready; }

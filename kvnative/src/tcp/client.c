/* Drives a requesting connection: by the thread that waits for a transfer, else by the service's thread. */
#include "tcp/client.h"

#include <inttypes.h>
#include <sched.h>
#include <stdio.h>
#include <sys/epoll.h>

#include "core/thread.h"
#include "tcp/answers.h"
#include "tcp/asking.h"

#define YIELDS 64                 /* of the service to threads that want the mutex: some 50 us, as long as a wake-up */
#define DRIVES 4                  /* small steps before the service yields */
#define SPIN_NS 50000             /* longer than a wake-up takes */
#define IDLE_EVENTS (EPOLLRDHUP | EPOLLET)

/* ---- the thread that drives the client ---- */

typedef enum progress { BLOCKED, MOVED, TURN_IS_OVER } progress;

/* Receives before it sends: answers make room in the window. */
static progress drive(kvn_tcp_client *self)
{
    uint64_t received = 0, sent = 0;
    bool has_moved = kvn_tcp_receive_some(self, &received);

    has_moved |= kvn_tcp_send_some(self, &sent);
    if (received >= KVN_TCP_TURN_NBYTES || sent >= KVN_TCP_TURN_NBYTES)
        return TURN_IS_OVER;
    return has_moved ? MOVED : BLOCKED;
}

/* Lets the service's thread continue if no other thread does. */
static void hand_over(kvn_tcp_client *self)
{
    uint32_t events = IDLE_EVENTS;

    if (self->has_failed) /* its descriptor may be closed */
        return;
    if (!self->has_spinner) {
        events |= self->num_asked > 0 ? EPOLLIN : 0;
        /* EPOLLOUT, which is ready now, also continues with bytes that were received already. */
        if (!kvn_tcp_is_sent(self) || kvn_tcp_has_received(&self->watched.stream))
            events |= EPOLLOUT;
    }
    kvn_tcp_ask_for(&self->watched, events);
}

/* The last holder of a mutex gets it again before others wake. Without this they would wait as long as bytes move, and
 * could not abort a transfer. */
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
    if (reached == BLOCKED && self->is_closed) /* all bytes that the peer sent before closing were read */
        kvn_tcp_transfers_fail(self, 0, "the peer has closed the connection");
    hand_over(self);
    pthread_mutex_unlock(&self->mutex);
    return reached == BLOCKED ? KVN_TCP_SLEEPS : KVN_TCP_GOES_ON;
}

/* Releases the mutex for a moment. */
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

/* Drives the socket as long as bytes keep coming. */
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

void kvn_tcp_client_begin(kvn_request *it, uint32_t caller)
{
    kvn_tcp_client *self = it->client;
    uint64_t moved = 0;

    kvn_cond_init(&it->changed);
    lock_soon(self);
    kvn_tcp_transfer_put_in(self, it);
    if (self->has_failed) {
        it->report->status = KVN_PEER_GONE;
        snprintf(it->report->message, sizeof it->report->message, "the connection has failed");
        kvn_tcp_transfer_finish(it);
    } else if (it->uncut == 0) {
        kvn_tcp_transfer_end(it, KVN_OK, 0, KVN_NO_DESCRIPTOR);
    } else if (!self->out_is_blocked && caller != KVN_CALLER_HURRIES) {
        kvn_tcp_send_some(self, &moved);
    }
    if (caller == KVN_CALLER_HURRIES && !self->has_failed && !self->has_spinner)
        kvn_tcp_ask_for(&self->watched, IDLE_EVENTS | EPOLLIN | EPOLLOUT); /* the service sends the first request */
    else if (caller != KVN_CALLER_WAITS)
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
    char why_not[64];

    lock_soon(self);
    if (!atomic_load(&it->finished))
        kvn_tcp_transfer_end(it, why, 0, KVN_NO_DESCRIPTOR);
    const int64_t drain_ns = kvn_tcp_flight_drain_ns(&self->flight);
    wait_for(self, it, kvn_now_ns() + drain_ns); /* for a push, whose bytes are on the wire */
    if (!atomic_load(&it->finished)) {
        kvn_tcp_reset(&self->watched.stream);
        snprintf(why_not, sizeof why_not, "an aborted push did not end within %" PRId64 " ms", drain_ns / 1000000);
        kvn_tcp_transfers_fail(self, 0, why_not);
        hand_over(self);
    }
    pthread_mutex_unlock(&self->mutex);
}

void kvn_tcp_client_let_go(kvn_request *it)
{
    /* The thread that has finished the transfer may still be waking waiters. */
    lock_soon(it->client);
    pthread_mutex_unlock(&it->client->mutex);
    pthread_cond_destroy(&it->changed);
}

void kvn_tcp_client_fail(kvn_tcp_client *self, int code, const char *why)
{
    lock_soon(self);
    kvn_tcp_transfers_fail(self, code, why);
    pthread_mutex_unlock(&self->mutex);
}

bool kvn_tcp_client_has_stage(kvn_tcp_client *self)
{
    lock_soon(self);
    const bool has_stage = self->watched.stream.stage != NULL;
    pthread_mutex_unlock(&self->mutex);
    return has_stage;
}

bool kvn_tcp_client_take_stage(kvn_tcp_client *self, kvn_tcp_stage *stage)
{
    lock_soon(self);
    const bool takes = !self->has_failed && !self->watched.stream.stage; /* a failed client may be closed */
    if (takes)
        self->watched.stream.stage = stage;
    pthread_mutex_unlock(&self->mutex);
    return takes;
}

void kvn_tcp_client_init(kvn_tcp_client *self)
{
    self->watched.on_ready = on_ready;
    kvn_tcp_flight_init(&self->flight);
    pthread_mutex_init(&self->mutex, NULL);
}

void kvn_tcp_client_fini(kvn_tcp_client *self) { pthread_mutex_destroy(&self->mutex); }

/* Runs the threads that serve the connections of a TCP service. */
#include "tcp/service.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "core/thread.h"
#include "tcp/stage.h"

#define MAX_EVENTS 64
#define WAKE_KEY UINT64_MAX
#define SPIN_NS 100000      /* longer than a wake-up, and than a peer needs for its next request */
#define LOOK_EVERY 8        /* spins, after which all connections are polled */
#define MAX_MISSES 4        /* spins in a row without an event, after which the thread sleeps at once */
#define TRY_AGAIN_EVERY 64u /* sleeps after which the thread tries spinning again */

struct kvn_tcp_thread {
    unsigned index;
    pthread_t id;
    int epoll, wake;
    atomic_bool stops;
    pthread_mutex_t mutex; /* guards the places */
    kvn_tcp_watched **places;
    uint32_t *uses; /* for each place: the high half of its key */
    uint32_t num_places;
    atomic_uint_fast64_t epoch; /* odd while the thread uses a connection */
    /* The thread's own: */
    uint64_t *ready; /* keys of connections that have more to do */
    uint32_t num_ready, room;
    uint64_t spins_for; /* key of a connection whose event may come at once; WAKE_KEY: none */
    unsigned misses, sleeps;
};

struct kvn_tcp_service {
    kvn_tcp_table table;
    kvn_copier copier; /* zeros without a device */
    atomic_uint next;
    atomic_uint users; /* the creator and the links */
    unsigned num_threads;
    kvn_tcp_thread threads[KVN_TCP_MAX_THREADS];
};

kvn_tcp_table *kvn_tcp_service_table(kvn_tcp_service *self) { return &self->table; }

kvn_copier *kvn_tcp_service_copier(kvn_tcp_service *self) { return self->copier.device ? &self->copier : NULL; }

unsigned kvn_tcp_service_next_thread(kvn_tcp_service *self)
{
    return atomic_fetch_add(&self->next, 1) % self->num_threads;
}

unsigned kvn_tcp_thread_index(const kvn_tcp_watched *it) { return it->thread->index; }

/* ---- the loop of a thread ---- */

static kvn_tcp_watched *find(kvn_tcp_thread *self, uint64_t key)
{
    const uint32_t place = (uint32_t)key;
    kvn_tcp_watched *found = NULL;

    pthread_mutex_lock(&self->mutex);
    if (place < self->num_places && self->uses[place] == key >> 32)
        found = self->places[place];
    pthread_mutex_unlock(&self->mutex);
    return found;
}

static void list(kvn_tcp_thread *self, kvn_tcp_watched *it)
{
    if (it->is_listed)
        return;
    if (self->num_ready == self->room) {
        const uint32_t room = self->room ? 2 * self->room : 64;
        uint64_t *ready = realloc(self->ready, room * sizeof *ready);
        if (!ready)
            return; /* it continues with its next event */
        self->ready = ready;
        self->room = room;
    }
    self->ready[self->num_ready++] = it->key;
    it->is_listed = true;
}

/* Gives a connection a turn. */
static kvn_tcp_progress serve(kvn_tcp_thread *self, uint64_t key, bool from_list)
{
    kvn_tcp_progress progress = KVN_TCP_SLEEPS;

    atomic_fetch_add(&self->epoch, 1); /* before `find`: see kvn_tcp_service_forget */
    kvn_tcp_watched *it = find(self, key);
    if (it) {
        const uint32_t came = it->came;
        it->came = 0;
        if (from_list)
            it->is_listed = false;
        progress = it->on_ready(it, came);
        if (progress == KVN_TCP_GOES_ON)
            list(self, it);
    }
    atomic_fetch_add(&self->epoch, 1);
    if (progress == KVN_TCP_SPINS)
        self->spins_for = key;
    return progress;
}

static void note(kvn_tcp_thread *self, uint64_t key, uint32_t events)
{
    atomic_fetch_add(&self->epoch, 1);
    kvn_tcp_watched *it = find(self, key);
    if (it) {
        it->came |= events;
        list(self, it);
    }
    atomic_fetch_add(&self->epoch, 1);
}

/* Lists the connections with events. */
static int look(kvn_tcp_thread *self, int timeout_ms)
{
    struct epoll_event events[MAX_EVENTS];
    const int count = epoll_wait(self->epoll, events, MAX_EVENTS, timeout_ms);

    for (int i = 0; i < count; i++) {
        uint64_t word;
        if (events[i].data.u64 != WAKE_KEY)
            note(self, events[i].data.u64, events[i].events);
        else if (read(self->wake, &word, sizeof word) < 0)
            continue; /* woken for an event that was handled already */
    }
    return count;
}

/* Gives each listed connection one turn. */
static void serve_ready(kvn_tcp_thread *self)
{
    const uint32_t count = self->num_ready;

    for (uint32_t i = 0; i < count; i++)
        serve(self, self->ready[i], true);
    self->num_ready -= count;
    if (self->num_ready > 0) /* else it may be NULL, which memmove does not allow */
        memmove(self->ready, self->ready + count, self->num_ready * sizeof *self->ready);
}

/* Spins for a moment, until an event comes. */
static bool spin(kvn_tcp_thread *self)
{
    const uint64_t key = self->spins_for;
    const int64_t end = kvn_now_ns() + SPIN_NS;

    self->spins_for = WAKE_KEY;
    if (self->misses >= MAX_MISSES && ++self->sleeps % TRY_AGAIN_EVERY != 0)
        return false;
    for (unsigned i = 1; kvn_now_ns() < end; i++) {
        if (serve(self, key, false) != KVN_TCP_SLEEPS ||
            (i % LOOK_EVERY == 0 && look(self, 0) > 0)) {
            self->misses = 0;
            return true;
        }
    }
    self->misses++;
    return false;
}

static void *run(void *argument)
{
    kvn_tcp_thread *self = argument;

    while (!atomic_load(&self->stops)) {
        const bool waits = self->num_ready == 0 && (self->spins_for == WAKE_KEY || !spin(self));
        look(self, waits ? -1 : 0);
        serve_ready(self);
    }
    return NULL;
}

/* ---- watched files ---- */

static int take_place(kvn_tcp_thread *self, kvn_tcp_watched *it)
{
    uint32_t place = 0;

    while (place < self->num_places && self->places[place])
        place++;
    if (place == self->num_places) {
        const uint32_t room = place ? 2 * place : 16;
        kvn_tcp_watched **places = realloc(self->places, room * sizeof *places);
        if (!places)
            return ENOMEM;
        self->places = places;
        uint32_t *uses = realloc(self->uses, room * sizeof *uses);
        if (!uses)
            return ENOMEM;
        self->uses = uses;
        memset(places + place, 0, (room - place) * sizeof *places);
        memset(uses + place, 0, (room - place) * sizeof *uses);
        self->num_places = room;
    }
    self->places[place] = it;
    it->thread = self;
    it->key = (uint64_t)self->uses[place] << 32 | place;
    return 0;
}

static void leave_place(kvn_tcp_thread *self, const kvn_tcp_watched *it)
{
    const uint32_t place = (uint32_t)it->key;

    self->places[place] = NULL;
    self->uses[place]++;
}

int kvn_tcp_service_watch(kvn_tcp_service *self, unsigned thread, kvn_tcp_watched *it,
                          uint32_t events, kvn_failure *failure)
{
    kvn_tcp_thread *by = &self->threads[thread];
    int error;

    pthread_mutex_lock(&by->mutex);
    error = take_place(by, it);
    if (error == 0) {
        struct epoll_event event = {.events = events, .data.u64 = it->key};
        it->events = events;
        it->is_listed = false;
        it->came = 0;
        if (epoll_ctl(by->epoll, EPOLL_CTL_ADD, it->stream.fd, &event) != 0) {
            error = errno;
            leave_place(by, it);
            it->thread = NULL;
        }
    }
    pthread_mutex_unlock(&by->mutex);
    if (error != 0)
        return kvn_fail(failure, KVN_FAILED, error, "cannot watch a connection: %s",
                        strerror(error));
    return KVN_OK;
}

void kvn_tcp_ask_for(kvn_tcp_watched *it, uint32_t events)
{
    struct epoll_event event = {.events = events, .data.u64 = it->key};

    if (it->events == events || !it->thread)
        return;
    it->events = events;
    epoll_ctl(it->thread->epoll, EPOLL_CTL_MOD, it->stream.fd, &event);
}

void kvn_tcp_service_forget(kvn_tcp_watched *it)
{
    kvn_tcp_thread *by = it->thread;
    bool is_first;

    if (!by)
        return;
    pthread_mutex_lock(&by->mutex);
    is_first = by->places[(uint32_t)it->key] == it;
    if (is_first) {
        epoll_ctl(by->epoll, EPOLL_CTL_DEL, it->stream.fd, NULL);
        leave_place(by, it);
    }
    pthread_mutex_unlock(&by->mutex);
    /* If the thread found the connection before, its epoch is odd; later it does not find it any more. */
    const uint64_t epoch = atomic_load(&by->epoch);
    while (epoch % 2 == 1 && atomic_load(&by->epoch) == epoch)
        sched_yield();
}

/* ---- making and ending ---- */

static int start(kvn_tcp_thread *self, const char *name)
{
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = WAKE_KEY};

    self->epoll = epoll_create1(EPOLL_CLOEXEC);
    self->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (self->epoll < 0 || self->wake < 0 ||
        epoll_ctl(self->epoll, EPOLL_CTL_ADD, self->wake, &event) != 0)
        return errno;
    return kvn_thread_start(&self->id, NULL, name, run, self);
}

static void stop(kvn_tcp_thread *self)
{
    const uint64_t one = 1;

    atomic_store(&self->stops, true);
    if (write(self->wake, &one, sizeof one) == sizeof one)
        pthread_join(self->id, NULL);
}

static void close_files(kvn_tcp_thread *self)
{
    pthread_mutex_lock(&self->mutex); /* a thread may be in kvn_tcp_service_forget */
    if (self->epoll >= 0)
        close(self->epoll);
    if (self->wake >= 0)
        close(self->wake);
    self->epoll = self->wake = -1;
    pthread_mutex_unlock(&self->mutex);
}

static void release(kvn_tcp_thread *self)
{
    pthread_mutex_destroy(&self->mutex);
    free(self->places);
    free(self->uses);
    free(self->ready);
}

int kvn_tcp_service_create(unsigned num_threads, uint32_t num_rows, kvn_device *device,
                           const char *name, kvn_tcp_service **out, kvn_failure *failure)
{
    kvn_tcp_service *self = calloc(1, sizeof *self);
    int error = 0;

    *out = NULL;
    if (!self)
        return kvn_fail(failure, KVN_NO_MEMORY, ENOMEM, "no memory for a service");
    if (kvn_tcp_table_init(&self->table, num_rows, device, failure) != KVN_OK) {
        free(self);
        return failure->status;
    }
    atomic_init(&self->users, 1);
    if (device && kvn_copier_init(&self->copier, device, failure) != KVN_OK) {
        kvn_tcp_service_destroy(self);
        return failure->status;
    }
    while (error == 0 && self->num_threads < num_threads) {
        kvn_tcp_thread *it = &self->threads[self->num_threads];
        it->index = self->num_threads;
        it->spins_for = WAKE_KEY;
        it->epoll = it->wake = -1;
        pthread_mutex_init(&it->mutex, NULL);
        error = start(it, name);
        if (error != 0) {
            close_files(it);
            release(it);
        } else {
            self->num_threads++;
        }
    }
    if (error != 0) {
        kvn_tcp_service_destroy(self);
        return kvn_fail(failure, KVN_FAILED, error, "cannot start %u threads: %s", num_threads,
                        strerror(error));
    }
    *out = self;
    return KVN_OK;
}

void kvn_tcp_service_destroy(kvn_tcp_service *self)
{
    for (unsigned i = 0; i < self->num_threads; i++)
        stop(&self->threads[i]);
    for (unsigned i = 0; i < self->num_threads; i++)
        close_files(&self->threads[i]);
    kvn_tcp_service_let_go(self);
}

void kvn_tcp_service_hold(kvn_tcp_service *self) { atomic_fetch_add(&self->users, 1); }

void kvn_tcp_service_let_go(kvn_tcp_service *self)
{
    if (atomic_fetch_sub(&self->users, 1) > 1)
        return;
    for (unsigned i = 0; i < self->num_threads; i++)
        release(&self->threads[i]);
    kvn_copier_fini(&self->copier);
    kvn_tcp_table_fini(&self->table);
    free(self);
}

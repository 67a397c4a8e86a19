#include "system.h"

#include <errno.h>
#include <stdint.h>
#include <string.h>

#include "scheduler.h"
#include "tcp/cipher.h"

#define MAX_FILES 32
#define MAX_WATCHES 8
#define MAX_CAPACITY 4096
#define MAX_MEMORIES 8
#define MAX_THREADS 16
#define FIRST_FILE 100
#define ALWAYS (EPOLLERR | EPOLLHUP)

/* ---- files ---- */

typedef struct watch {
    int file; /* 0: unused */
    uint32_t events;
    uint64_t data;
    bool is_ready;
} watch;

typedef struct file {
    enum { NONE, SOCKET, COUNTER, EPOLL } kind;
    bool is_open;
    uint64_t value; /* of an eventfd */
    watch watches[MAX_WATCHES];
    /* of a socket: a ring of bytes that its peer has sent */
    struct file *peer;
    uint8_t bytes[MAX_CAPACITY];
    unsigned first, count, capacity;
    bool is_shut, is_reset;
    bool wants_room; /* the peer's ring was full */
} file;

typedef struct memory {
    const uint8_t *bytes;
    size_t nbytes;
    const char *forbidden; /* why no call may access the bytes; NULL: calls may */
} memory;

static file files[MAX_FILES];
static int num_files;
static memory memories[MAX_MEMORIES];
static int num_memories;
/* The memory that the current call of each thread accesses. */
static struct {
    const struct iovec *parts;
    size_t count;
    const char *where;
} calls[MAX_THREADS];

void model_system_begin(void)
{
    for (int i = 0; i < num_files; i++)
        files[i].kind = NONE;
    num_files = num_memories = 0;
    memset(calls, 0, sizeof calls);
}

void model_system_end(void)
{
    for (int i = 0; i < num_files; i++)
        if (files[i].is_open)
            model_violated("descriptor %d is left open", FIRST_FILE + i);
}

static int open_file(int kind)
{
    file *it = &files[num_files];

    if (num_files == MAX_FILES)
        model_violated("there are too many files");
    memset(it, 0, sizeof *it);
    it->kind = kind;
    it->is_open = true;
    return FIRST_FILE + num_files++;
}

static file *file_of(int descriptor, int kind, const char *where)
{
    const int index = descriptor - FIRST_FILE;

    if (index < 0 || index >= num_files || !files[index].is_open)
        model_violated("%s calls the system with descriptor %d, which is %s", where, descriptor,
                       index < 0 || index >= num_files ? "none" : "closed");
    if (kind != NONE && files[index].kind != (unsigned)kind)
        model_violated("%s calls the system with a descriptor of another kind", where);
    return &files[index];
}

static bool is_gone(const file *it) { return it->is_shut || !it->is_open; }

static uint32_t state_of(const file *it)
{
    if (it->kind == COUNTER)
        return it->value > 0 ? EPOLLIN : 0;
    const bool peer_has_gone = is_gone(it->peer) || it->is_reset;
    uint32_t state = it->count > 0 ? EPOLLIN : 0;
    if (peer_has_gone || it->is_shut)
        state |= EPOLLIN | EPOLLRDHUP;
    if (it->is_shut || it->is_reset)
        state |= EPOLLHUP;
    if (it->is_reset)
        state |= EPOLLERR;
    if (it->peer->count < it->peer->capacity || peer_has_gone || it->is_shut)
        state |= EPOLLOUT;
    return state;
}

static void notify(const file *it, uint32_t what)
{
    for (int i = 0; i < num_files; i++)
        for (int j = 0; files[i].is_open && files[i].kind == EPOLL && j < MAX_WATCHES; j++) {
            watch *by = &files[i].watches[j];
            if (by->file == FIRST_FILE + (it - files) && ((by->events | ALWAYS) & what))
                by->is_ready = true;
        }
}

int system_epoll_create(void) { return open_file(EPOLL); }

int system_eventfd(unsigned value)
{
    const int made = open_file(COUNTER);

    files[made - FIRST_FILE].value = value;
    return made;
}

void system_socketpair(int made[2], unsigned capacity)
{
    for (int i = 0; i < 2; i++) {
        made[i] = open_file(SOCKET);
        files[made[i] - FIRST_FILE].capacity = capacity;
    }
    files[made[0] - FIRST_FILE].peer = &files[made[1] - FIRST_FILE];
    files[made[1] - FIRST_FILE].peer = &files[made[0] - FIRST_FILE];
}

static uint32_t ready(const watch *it)
{
    return it->file && it->is_ready ? state_of(&files[it->file - FIRST_FILE]) & (it->events | ALWAYS) : 0;
}

int system_epoll_ctl(int epoll, int what, int descriptor, struct epoll_event *event, const char *where)
{
    if (epoll == -1) { /* the service has stopped before its last link */
        errno = EBADF;
        return -1;
    }
    model_point("epoll_ctl", where);
    file *it = file_of(epoll, EPOLL, where);
    file_of(descriptor, NONE, where);
    for (int i = 0; i < MAX_WATCHES; i++) {
        watch *by = &it->watches[i];
        if (by->file != (what == EPOLL_CTL_ADD ? 0 : descriptor))
            continue;
        if (what == EPOLL_CTL_DEL) {
            by->file = 0;
            return 0;
        }
        by->file = descriptor;
        by->events = event->events;
        by->data = event->data.u64;
        by->is_ready = true;
        by->is_ready = ready(by) != 0;
        return 0;
    }
    model_violated("%s calls epoll_ctl for what is not watched, or for too much", where);
}

static bool has_events(void *of)
{
    const file *it = of;

    for (int i = 0; i < MAX_WATCHES; i++)
        if (ready(&it->watches[i]))
            return true;
    return false;
}

int system_epoll_wait(int epoll, struct epoll_event *events, int most, int timeout_ms, const char *where)
{
    file *it = file_of(epoll, EPOLL, where);
    int count = 0;

    if (timeout_ms == 0)
        model_point("epoll_wait at once", where);
    else
        model_wait(has_events, it, MODEL_FOREVER, "epoll_wait", where);
    file_of(epoll, EPOLL, where);
    for (int i = 0; i < MAX_WATCHES && count < most; i++) {
        watch *by = &it->watches[i];
        const uint32_t came = ready(by);
        if (came)
            events[count++] = (struct epoll_event){.events = came, .data.u64 = by->data};
        by->is_ready = by->is_ready && came && !(by->events & EPOLLET);
    }
    return count;
}

ssize_t system_read(int descriptor, void *to, size_t nbytes, const char *where)
{
    model_point("read", where);
    file *it = file_of(descriptor, COUNTER, where);
    if (it->value == 0) {
        errno = EAGAIN;
        return -1;
    }
    memcpy(to, &it->value, nbytes);
    it->value = 0;
    return (ssize_t)nbytes;
}

ssize_t system_write(int descriptor, const void *from, size_t nbytes, const char *where)
{
    uint64_t more;

    model_point("write", where);
    file *it = file_of(descriptor, COUNTER, where);
    memcpy(&more, from, nbytes);
    it->value += more;
    notify(it, EPOLLIN);
    return (ssize_t)nbytes;
}

int system_close(int descriptor, const char *where)
{
    model_point("close", where);
    file *it = file_of(descriptor, NONE, where);
    it->is_open = false;
    for (int i = 0; i < num_files; i++)
        for (int j = 0; j < MAX_WATCHES; j++)
            if (files[i].kind == EPOLL && files[i].watches[j].file == descriptor)
                files[i].watches[j].file = 0;
    if (it->kind == SOCKET)
        notify(it->peer, EPOLLIN | EPOLLRDHUP | EPOLLOUT);
    return 0;
}

int system_shutdown(int descriptor, const char *where)
{
    model_point("shutdown", where);
    file *it = file_of(descriptor, SOCKET, where);
    it->is_shut = true;
    notify(it, EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLOUT);
    notify(it->peer, EPOLLIN | EPOLLRDHUP | EPOLLOUT);
    return 0;
}

int system_reset(int descriptor, const char *where)
{
    model_point("reset", where);
    file *it = file_of(descriptor, SOCKET, where);
    it->is_reset = it->peer->is_reset = true;
    it->count = it->peer->count = 0;
    notify(it, EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR | EPOLLOUT);
    notify(it->peer, EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR | EPOLLOUT);
    return 0;
}

/* ---- memory accesses of calls ---- */

static bool meets(const memory *it, const struct iovec *part)
{
    const uint8_t *first = part->iov_base;
    return first < it->bytes + it->nbytes && it->bytes < first + part->iov_len;
}

static bool touches(const memory *it, const struct iovec *parts, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (meets(it, &parts[i]))
            return true;
    return false;
}

void system_watch(const void *bytes, size_t nbytes)
{
    if (num_memories == MAX_MEMORIES)
        model_violated("there are too many memories");
    memories[num_memories++] = (memory){bytes, nbytes, NULL};
}

void system_forbid(const void *bytes, size_t nbytes, const char *why)
{
    const memory it = {bytes, nbytes, why};

    for (int i = 0; i < MAX_THREADS; i++)
        if (calls[i].parts && touches(&it, calls[i].parts, calls[i].count))
            model_violated("%s is in a call on memory that must not be touched: %s", calls[i].where, why);
    system_watch(bytes, nbytes);
    memories[num_memories - 1].forbidden = why;
}

static void enter(const struct iovec *parts, size_t count, const char *what, const char *where)
{
    const int self = model_self();
    bool is_watched = false;

    model_point(what, where);
    for (int i = 0; i < num_memories; i++)
        if (touches(&memories[i], parts, count)) {
            is_watched = true;
            if (memories[i].forbidden)
                model_violated("%s touches memory that it must not: %s", where, memories[i].forbidden);
        }
    if (!is_watched)
        return;
    calls[self].parts = parts;
    calls[self].count = count;
    calls[self].where = where;
    model_point("...", where);
    calls[self].parts = NULL;
}

static ssize_t refuse(int error)
{
    errno = error;
    return -1;
}

ssize_t system_sendmsg(int descriptor, const struct msghdr *message, const char *where)
{
    size_t sent = 0, all = 0;

    file_of(descriptor, SOCKET, where);
    enter(message->msg_iov, message->msg_iovlen, "send", where);
    file *it = file_of(descriptor, SOCKET, where);
    file *to = it->peer;
    if (it->is_reset)
        return refuse(ECONNRESET);
    if (it->is_shut || is_gone(to))
        return refuse(EPIPE);
    for (size_t i = 0; i < message->msg_iovlen; i++) {
        const uint8_t *from = message->msg_iov[i].iov_base;
        all += message->msg_iov[i].iov_len;
        for (size_t j = 0; j < message->msg_iov[i].iov_len && to->count < to->capacity; j++, sent++)
            to->bytes[(to->first + to->count++) % MAX_CAPACITY] = from[j];
    }
    it->wants_room |= sent < all;
    if (sent == 0)
        return refuse(EAGAIN);
    notify(to, EPOLLIN);
    return (ssize_t)sent;
}

ssize_t system_recvmsg(int descriptor, const struct msghdr *message, const char *where)
{
    size_t got = 0;

    file_of(descriptor, SOCKET, where);
    enter(message->msg_iov, message->msg_iovlen, "receive", where);
    file *it = file_of(descriptor, SOCKET, where);
    if (it->is_reset)
        return refuse(ECONNRESET);
    if (it->count == 0)
        return it->is_shut || is_gone(it->peer) ? 0 : refuse(EAGAIN);
    for (size_t i = 0; i < message->msg_iovlen; i++) {
        uint8_t *to = message->msg_iov[i].iov_base;
        for (size_t j = 0; j < message->msg_iov[i].iov_len && it->count > 0; j++, it->count--, got++) {
            to[j] = it->bytes[it->first];
            it->first = (it->first + 1) % MAX_CAPACITY;
        }
    }
    if (it->peer->wants_room && it->peer->is_open) {
        it->peer->wants_room = false;
        notify(it->peer, EPOLLOUT);
    }
    return (ssize_t)got;
}

/* ---- encryption ---- */

static ssize_t copy(const struct iovec *parts, unsigned long count, const struct iovec *own, bool is_read)
{
    size_t copied = 0;

    enter(parts, count, is_read ? "copy to" : "copy from", __func__);
    for (unsigned long i = 0; i < count && copied < own->iov_len; i++) {
        const size_t left = own->iov_len - copied;
        const size_t some = parts[i].iov_len < left ? parts[i].iov_len : left;
        uint8_t *at = (uint8_t *)own->iov_base + copied;
        memcpy(is_read ? parts[i].iov_base : at, is_read ? at : parts[i].iov_base, some);
        copied += some;
    }
    return (ssize_t)copied;
}

ssize_t system_vm_read(pid_t pid, const struct iovec *to, unsigned long count, const struct iovec *from,
                       unsigned long one, unsigned long flags)
{
    (void)pid, (void)one, (void)flags;
    return copy(to, count, from, true);
}

ssize_t system_vm_write(pid_t pid, const struct iovec *from, unsigned long count, const struct iovec *to,
                        unsigned long one, unsigned long flags)
{
    (void)pid, (void)one, (void)flags;
    return copy(from, count, to, false);
}

int kvn_tcp_crypto_open(kvn_tcp_crypto *out, kvn_failure *failure)
{
    (void)failure;
    memset(out, 0, sizeof *out);
    return KVN_OK;
}

bool kvn_tcp_cipher_init(kvn_tcp_cipher *self, const kvn_tcp_crypto *calls, const uint8_t *secret,
                         kvn_tcp_direction direction, bool seals)
{
    *self = (kvn_tcp_cipher){.calls = *calls, .direction = direction, .seals = seals};
    memcpy(self->secret, secret, sizeof self->secret);
    return true;
}

void kvn_tcp_cipher_fini(kvn_tcp_cipher *self) { memset(self, 0, sizeof *self); }

/* Detects lost, repeated and torn records. */
int kvn_tcp_cipher_next(kvn_tcp_cipher *self, const uint8_t *header, size_t header_nbytes, uint8_t *bytes,
                        size_t nbytes, uint8_t tag[KVN_TCP_TAG_NBYTES])
{
    uint8_t made[KVN_TCP_TAG_NBYTES] = {0};

    for (size_t i = 0; i < nbytes; i++)
        bytes[i] ^= 0x5A;
    memcpy(made, &self->count, sizeof self->count);
    memcpy(made + sizeof self->count, header, header_nbytes);
    self->count++;
    if (self->seals)
        memcpy(tag, made, sizeof made);
    return memcmp(tag, made, sizeof made) == 0 ? 0 : -EBADMSG;
}

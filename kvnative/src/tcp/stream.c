#include "tcp/stream.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define RECORD_NBYTES (32u << 10) /* larger ones gain little; a pair of connections has four buffers */
#define HEADER_NBYTES sizeof(uint32_t)
#define FRONT (16 - HEADER_NBYTES) /* has the bytes of a record begin at a multiple of 16 */
#define MAX_NBYTES (HEADER_NBYTES + RECORD_NBYTES + KVN_TCP_TAG_NBYTES)

struct kvn_tcp_records {
    pid_t pid;
    kvn_tcp_cipher seals, opens;
    uint32_t out_at, out_end; /* of the record that the socket has not taken all of */
    uint32_t in_at, in_end;   /* of what came and was not used */
    uint32_t opened;          /* bytes at in_at; the tag of their record is behind them */
    uint8_t out[FRONT + MAX_NBYTES] __attribute__((aligned(16)));
    uint8_t in[FRONT + MAX_NBYTES] __attribute__((aligned(16)));
};

/* ---- the socket ---- */

static ssize_t send_plain(int fd, const struct iovec *parts, unsigned count)
{
    const struct msghdr message = {.msg_iov = (struct iovec *)parts, .msg_iovlen = count};
    ssize_t sent;

    do
        sent = sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
    if (sent >= 0)
        return sent;
    return errno == EAGAIN || errno == EWOULDBLOCK ? 0 : -errno;
}

static ssize_t receive_plain(int fd, const struct iovec *parts, unsigned count)
{
    struct msghdr message = {.msg_iov = (struct iovec *)parts, .msg_iovlen = count};
    ssize_t received;

    do
        received = recvmsg(fd, &message, MSG_DONTWAIT);
    while (received < 0 && errno == EINTR);
    if (received >= 0)
        return received;
    return errno == EWOULDBLOCK ? -EAGAIN : -errno;
}

/* ---- records ---- */

typedef ssize_t copy(pid_t, const struct iovec *, unsigned long, const struct iovec *, unsigned long,
                     unsigned long);

/* Parts of memory from byte `at` on. */
typedef struct walk {
    const struct iovec *parts;
    unsigned count;
    size_t at; /* of the first part */
} walk;

static void skip(walk *it, size_t nbytes)
{
    nbytes += it->at;
    while (it->count > 0 && nbytes >= it->parts->iov_len) {
        nbytes -= it->parts->iov_len;
        it->parts++;
        it->count--;
    }
    it->at = nbytes;
}

/* Copies between them and `own`, at most `nbytes`. By a system call, as the memory of others may not be
 * mapped: the kernel reaches what is local to this call as it does for a socket, and what is remote, which is
 * of this process as well, by its pages. */
static ssize_t copy_on(walk *it, pid_t pid, copy *by, uint8_t *own, size_t nbytes)
{
    struct iovec parts[KVN_TCP_MAX_PARTS];
    const struct iovec mine = {own, nbytes};
    unsigned count = 0;

    for (size_t has = 0; count < it->count && has < nbytes; count++) {
        parts[count] = it->parts[count];
        if (count == 0) {
            parts[0].iov_base = (uint8_t *)parts[0].iov_base + it->at;
            parts[0].iov_len -= it->at;
        }
        has += parts[count].iov_len;
    }
    const ssize_t copied = by(pid, parts, count, &mine, 1, 0);
    if (copied < 0)
        return -errno;
    skip(it, (size_t)copied);
    return copied;
}

/* 1: all was sent, 0: there is no room, or -errno. */
static int flush(kvn_tcp_stream *self)
{
    kvn_tcp_records *it = self->records;

    while (it->out_at < it->out_end) {
        const struct iovec rest = {it->out + it->out_at, it->out_end - it->out_at};
        const ssize_t sent = send_plain(self->fd, &rest, 1);
        if (sent <= 0)
            return (int)sent;
        it->out_at += (uint32_t)sent;
    }
    return 1;
}

/* A record that the socket has not taken all of counts as one byte less. So whoever sends comes again, with
 * that byte: it is not looked at any more, and the rest of the record goes out first. */
static ssize_t send_records(kvn_tcp_stream *self, const struct iovec *parts, unsigned count)
{
    kvn_tcp_records *it = self->records;
    const bool comes_again = it->out_at < it->out_end;
    walk from = {parts, count, 0};
    ssize_t total = comes_again;
    int flushed = flush(self);

    if (flushed <= 0)
        return flushed;
    skip(&from, comes_again);
    while (flushed == 1 && from.count > 0) {
        uint8_t *bytes = it->out + FRONT + HEADER_NBYTES;
        const ssize_t nbytes =
            copy_on(&from, it->pid, process_vm_writev, bytes, RECORD_NBYTES);
        if (nbytes <= 0)
            return total > 0 ? total : nbytes;
        const uint32_t header = (uint32_t)nbytes;
        memcpy(it->out + FRONT, &header, sizeof header);
        const int error = kvn_tcp_cipher_next(&it->seals, it->out + FRONT, sizeof header, bytes,
                                              header, bytes + header);
        if (error != 0)
            return error;
        it->out_at = FRONT;
        it->out_end = (uint32_t)(FRONT + sizeof header + header + KVN_TCP_TAG_NBYTES);
        total += nbytes;
        flushed = flush(self);
    }
    return flushed < 0 ? flushed : total - (flushed == 0);
}

/* Opens the next record if all of it has come. 1, 0: it has not, or -errno. */
static int open_record(kvn_tcp_records *it)
{
    uint8_t *record = it->in + it->in_at;
    const uint32_t has = it->in_end - it->in_at;
    uint32_t header;
    int error;

    if (has < sizeof header)
        return 0;
    memcpy(&header, record, sizeof header);
    if (header == 0 || header > RECORD_NBYTES)
        return -EBADMSG;
    if (has < sizeof header + header + KVN_TCP_TAG_NBYTES)
        return 0;
    error = kvn_tcp_cipher_next(&it->opens, record, sizeof header, record + sizeof header, header,
                                record + sizeof header + header);
    if (error != 0)
        return error;
    it->in_at += sizeof header;
    it->opened = header;
    return 1;
}

/* > 0: more has come; 0, -EAGAIN, -errno: as kvn_tcp_receive. */
static ssize_t fill(kvn_tcp_stream *self)
{
    kvn_tcp_records *it = self->records;

    memmove(it->in + FRONT, it->in + it->in_at, it->in_end - it->in_at);
    it->in_end = FRONT + (it->in_end - it->in_at);
    it->in_at = FRONT;
    const struct iovec room = {it->in + it->in_end, sizeof it->in - it->in_end};
    const ssize_t got = receive_plain(self->fd, &room, 1);
    if (got > 0)
        it->in_end += (uint32_t)got;
    return got;
}

static ssize_t receive_records(kvn_tcp_stream *self, const struct iovec *parts, unsigned count)
{
    kvn_tcp_records *it = self->records;
    walk to = {parts, count, 0};
    ssize_t total = 0, got = 1;

    while (to.count > 0 && got > 0) {
        if (it->opened > 0) {
            got = copy_on(&to, it->pid, process_vm_readv, it->in + it->in_at, it->opened);
            if (got <= 0)
                break;
            total += got;
            it->in_at += (uint32_t)got;
            it->opened -= (uint32_t)got;
            it->in_at += it->opened == 0 ? KVN_TCP_TAG_NBYTES : 0;
        } else {
            got = open_record(it);
            if (got == 0)
                got = fill(self);
        }
    }
    return total > 0 ? total : got; /* an error comes again */
}

/* ---- the stream ---- */

int kvn_tcp_encrypt(kvn_tcp_stream *self, const kvn_tcp_crypto *calls, const uint8_t *secret,
                    unsigned connection, bool answers, kvn_failure *failure)
{
    const kvn_tcp_direction ours = {(uint8_t)connection, answers};
    const kvn_tcp_direction theirs = {(uint8_t)connection, !answers};
    kvn_tcp_records *it = malloc(sizeof *it);

    if (!it)
        return kvn_fail(failure, KVN_NO_MEMORY, ENOMEM, "no memory to encrypt a connection");
    memset(it, 0, offsetof(kvn_tcp_records, out)); /* pages of the buffers are taken as they are used */
    self->records = it;
    it->pid = getpid();
    it->out_at = it->out_end = it->in_at = it->in_end = FRONT;
    if (!kvn_tcp_cipher_init(&it->seals, calls, secret, ours, true) ||
        !kvn_tcp_cipher_init(&it->opens, calls, secret, theirs, false))
        return kvn_fail(failure, KVN_NO_MEMORY, ENOMEM, "no memory to encrypt a connection");
    return KVN_OK;
}

void kvn_tcp_close(kvn_tcp_stream *self)
{
    close(self->fd);
    self->fd = -1;
    if (!self->records)
        return;
    kvn_tcp_cipher_fini(&self->records->seals);
    kvn_tcp_cipher_fini(&self->records->opens);
    free(self->records);
    self->records = NULL;
}

ssize_t kvn_tcp_send(kvn_tcp_stream *self, const struct iovec *parts, unsigned count)
{
    return self->records ? send_records(self, parts, count) : send_plain(self->fd, parts, count);
}

ssize_t kvn_tcp_receive(kvn_tcp_stream *self, const struct iovec *parts, unsigned count)
{
    return self->records ? receive_records(self, parts, count)
                         : receive_plain(self->fd, parts, count);
}

bool kvn_tcp_has_received(const kvn_tcp_stream *self)
{
    return self->records && self->records->in_at < self->records->in_end;
}

const char *kvn_tcp_explain(int error)
{
    return error == EBADMSG ? "a record that was not sealed by the peer" : strerror(error);
}

void kvn_tcp_reset(kvn_tcp_stream *self)
{
    const struct sockaddr nobody = {.sa_family = AF_UNSPEC};

    if (connect(self->fd, &nobody, sizeof nobody) != 0) /* of a Unix socket */
        shutdown(self->fd, SHUT_RDWR);
}

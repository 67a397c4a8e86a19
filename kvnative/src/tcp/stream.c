/* Sends and receives bytes over a socket, in encrypted records if there is a cipher. */
#include "tcp/stream.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define RECORD_NBYTES (32u << 10) /* larger records gain little, and a pair of connections has four buffers */
#define HEADER_NBYTES sizeof(uint32_t)
#define FRONT (16 - HEADER_NBYTES) /* aligns the bytes of a record to 16 */
#define AROUND (FRONT + HEADER_NBYTES + KVN_TCP_TAG_NBYTES)

struct kvn_tcp_buffers {
    pid_t pid;
    kvn_tcp_cipher seals, opens;
    uint32_t out_at, out_end; /* the unsent rest of a record */
    uint32_t in_at, in_end;   /* received and unused bytes */
    uint32_t opened;          /* decrypted bytes at in_at; the tag of their record follows */
    uint8_t *out, *in; /* AROUND + RECORD_NBYTES each; pages are allocated on use */
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

/* ---- copies between parts and a buffer ---- */

/* A position: byte `at` of a part. */
typedef struct walk {
    kvn_tcp_parts *parts;
    unsigned index;
    size_t at;
} walk;

static bool is_through(const walk *it) { return it->index == it->parts->count; }

static void skip(walk *it, size_t nbytes)
{
    nbytes += it->at;
    while (!is_through(it) && nbytes >= it->parts->items[it->index].iov_len)
        nbytes -= it->parts->items[it->index++].iov_len;
    it->at = nbytes;
}

/* Copies by a system call, because memory of the caller may not be mapped. Both sides belong to this process: the
 * kernel accesses the local one as it does for a socket, and the remote one by its pages. */
static ssize_t copy_host(const walk *it, pid_t pid, bool is_send, uint8_t *own, size_t nbytes)
{
    struct iovec parts[KVN_TCP_MAX_PARTS];
    const struct iovec mine = {own, nbytes};
    unsigned count = 0;

    for (size_t has = 0; it->index + count < it->parts->count && has < nbytes; count++) {
        parts[count] = it->parts->items[it->index + count];
        if (count == 0) {
            parts[0].iov_base = (uint8_t *)parts[0].iov_base + it->at;
            parts[0].iov_len -= it->at;
        }
        has += parts[count].iov_len;
    }
    const ssize_t copied = (is_send ? process_vm_writev : process_vm_readv)(pid, parts, count, &mine, 1, 0);
    return copied < 0 ? -errno : copied;
}

ssize_t kvn_tcp_copy_host(kvn_tcp_parts *parts, uint8_t *bytes, size_t nbytes)
{
    return copy_host(&(walk){parts, 0, 0}, getpid(), false, bytes, nbytes);
}

/* Copies at most `nbytes` to `own`, to send them, or from `own`. */
static ssize_t copy_on(const kvn_tcp_buffers *self, walk *it, bool is_send, uint8_t *own, size_t nbytes)
{
    const ssize_t some = copy_host(it, self->pid, is_send, own, nbytes);

    skip(it, some > 0 ? (size_t)some : 0);
    return some;
}

/* ---- sending through the buffer ---- */

/* Returns 1 if all was sent, 0 if the socket is full, or -errno. */
static int flush(kvn_tcp_stream *self)
{
    kvn_tcp_buffers *it = self->buffers;

    while (it->out_at < it->out_end) {
        const struct iovec rest = {it->out + it->out_at, it->out_end - it->out_at};
        const ssize_t sent = send_plain(self->fd, &rest, 1);
        if (sent <= 0)
            return (int)sent;
        it->out_at += (uint32_t)sent;
    }
    return 1;
}

/* Fills the buffer with the next bytes. Returns how many bytes of the parts it has, or -errno. */
static ssize_t prepare(kvn_tcp_buffers *it, walk *from)
{
    uint8_t *bytes = it->out + FRONT + HEADER_NBYTES;
    const ssize_t nbytes = copy_on(it, from, true, bytes, RECORD_NBYTES);
    const uint32_t header = (uint32_t)nbytes;

    if (nbytes <= 0)
        return nbytes;
    memcpy(it->out + FRONT, &header, sizeof header);
    const int error = kvn_tcp_cipher_next(&it->seals, it->out + FRONT, sizeof header, bytes, header,
                                          bytes + header);
    if (error != 0)
        return error; /* never send bytes that are not sealed */
    it->out_at = FRONT;
    it->out_end = FRONT + HEADER_NBYTES + header + KVN_TCP_TAG_NBYTES;
    return nbytes;
}

/* If the socket has not taken all of the buffer, the result is one byte less. So the caller passes that byte again. It
 * is ignored then, and the rest of the buffer is sent first. */
static ssize_t send_sealed(kvn_tcp_stream *self, kvn_tcp_parts *parts)
{
    kvn_tcp_buffers *it = self->buffers;
    const bool comes_again = it->out_at < it->out_end;
    walk from = {parts, 0, 0};
    ssize_t total = comes_again, nbytes;
    int flushed = flush(self);

    if (flushed <= 0)
        return flushed;
    skip(&from, comes_again);
    while (flushed == 1 && !is_through(&from)) {
        nbytes = prepare(it, &from);
        if (nbytes <= 0)
            return total > 0 ? total : nbytes;
        total += nbytes;
        flushed = flush(self);
    }
    return flushed < 0 ? flushed : total - (flushed == 0);
}

/* ---- receiving through the buffer ---- */

/* Opens a received record. Returns 1, 0 if it is not complete, or -errno. */
static int open_record(kvn_tcp_buffers *it)
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

/* Reads more. Returns > 0 if bytes have come, else like kvn_tcp_receive. */
static ssize_t fill(kvn_tcp_stream *self)
{
    kvn_tcp_buffers *it = self->buffers;

    memmove(it->in + FRONT, it->in + it->in_at, it->in_end - it->in_at);
    it->in_end = FRONT + (it->in_end - it->in_at);
    it->in_at = FRONT;
    const struct iovec part = {it->in + it->in_end, AROUND + RECORD_NBYTES - it->in_end};
    const ssize_t got = receive_plain(self->fd, &part, 1);
    if (got > 0)
        it->in_end += (uint32_t)got;
    return got;
}

static ssize_t receive_sealed(kvn_tcp_stream *self, kvn_tcp_parts *parts)
{
    kvn_tcp_buffers *it = self->buffers;
    walk to = {parts, 0, 0};
    uint64_t total = 0;
    ssize_t got = 1;

    while (!is_through(&to) && got > 0) {
        if (it->opened > 0) {
            got = copy_on(it, &to, false, it->in + it->in_at, it->opened);
            if (got <= 0)
                break;
            total += (uint64_t)got;
            it->in_at += (uint32_t)got;
            it->opened -= (uint32_t)got;
            it->in_at += it->opened == 0 ? KVN_TCP_TAG_NBYTES : 0;
        } else {
            got = open_record(it);
            if (got == 0)
                got = fill(self);
        }
    }
    return total > 0 ? (ssize_t)total : got; /* the next call reports the error */
}

/* ---- the stream ---- */

static int take_buffers(kvn_tcp_stream *self, kvn_failure *failure)
{
    const size_t room = (AROUND + RECORD_NBYTES + 15) / 16 * 16;
    const size_t front = (sizeof(kvn_tcp_buffers) + 15) / 16 * 16;
    uint8_t *memory = malloc(front + 2 * room);
    kvn_tcp_buffers *it = (kvn_tcp_buffers *)memory;

    if (!memory)
        return kvn_fail(failure, KVN_NO_MEMORY, ENOMEM, "no memory for the buffers of a connection");
    memset(it, 0, sizeof *it);
    it->pid = getpid();
    it->out = memory + front;
    it->in = it->out + room;
    it->out_at = it->out_end = it->in_at = it->in_end = FRONT;
    self->buffers = it;
    return KVN_OK;
}

int kvn_tcp_encrypt(kvn_tcp_stream *self, const kvn_tcp_crypto *calls, const uint8_t *secret,
                    unsigned connection, bool answers, kvn_failure *failure)
{
    const kvn_tcp_direction ours = {(uint8_t)connection, answers};
    const kvn_tcp_direction theirs = {(uint8_t)connection, !answers};

    if (take_buffers(self, failure) != KVN_OK)
        return failure->status;
    if (!kvn_tcp_cipher_init(&self->buffers->seals, calls, secret, ours, true) ||
        !kvn_tcp_cipher_init(&self->buffers->opens, calls, secret, theirs, false))
        return kvn_fail(failure, KVN_NO_MEMORY, ENOMEM, "no memory to encrypt a connection");
    return KVN_OK;
}

void kvn_tcp_close(kvn_tcp_stream *self)
{
    close(self->fd);
    self->fd = -1;
    if (self->stage)
        self->stage->calls->destroy(self->stage);
    self->stage = NULL;
    if (!self->buffers)
        return;
    kvn_tcp_cipher_fini(&self->buffers->seals);
    kvn_tcp_cipher_fini(&self->buffers->opens);
    free(self->buffers);
    self->buffers = NULL;
}

ssize_t kvn_tcp_send_host(kvn_tcp_stream *self, kvn_tcp_parts *parts)
{
    return self->buffers ? send_sealed(self, parts) : send_plain(self->fd, parts->items, parts->count);
}

ssize_t kvn_tcp_receive_host(kvn_tcp_stream *self, kvn_tcp_parts *parts)
{
    return self->buffers ? receive_sealed(self, parts) : receive_plain(self->fd, parts->items, parts->count);
}

ssize_t kvn_tcp_send(kvn_tcp_stream *self, kvn_tcp_parts *parts)
{
    if (self->stage && (parts->device || self->stage->calls->has_unsent(self->stage)))
        return self->stage->calls->send(self, parts);
    return kvn_tcp_send_host(self, parts);
}

ssize_t kvn_tcp_receive(kvn_tcp_stream *self, kvn_tcp_parts *parts)
{
    if (self->stage && (parts->device || self->stage->calls->has_received(self->stage)))
        return self->stage->calls->receive(self, parts);
    return kvn_tcp_receive_host(self, parts);
}

const kvn_failure *kvn_tcp_device_failure(const kvn_tcp_stream *self)
{
    return self->stage->calls->failure(self->stage);
}

bool kvn_tcp_has_received(const kvn_tcp_stream *self)
{
    return (self->buffers && self->buffers->in_at < self->buffers->in_end) ||
           (self->stage && self->stage->calls->has_received(self->stage));
}

const char *kvn_tcp_explain(int error)
{
    return error == EBADMSG ? "a record that was not sealed by the peer" : strerror(error);
}

void kvn_tcp_reset(kvn_tcp_stream *self)
{
    const struct sockaddr nobody = {.sa_family = AF_UNSPEC};

    if (connect(self->fd, &nobody, sizeof nobody) != 0) /* not supported by a Unix socket */
        shutdown(self->fd, SHUT_RDWR);
}

/* A connected, non-blocking socket as a stream of bytes: sent from where they lie, received to where they
 * belong. Where it is encrypted they go in records, each of which is a header (the length of the bytes,
 * uint32), the bytes, and a tag of 16 bytes for both. */
#ifndef KVN_TCP_STREAM_H
#define KVN_TCP_STREAM_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

#include "tcp/cipher.h"

#define KVN_TCP_MAX_PARTS 256u /* of memory, in one call */

typedef struct kvn_tcp_records kvn_tcp_records;

typedef struct kvn_tcp_stream {
    int fd;
    kvn_tcp_records *records; /* NULL: it is not encrypted */
} kvn_tcp_stream;

/* Encrypts what is sent and received from now on; `answers`: this is the end that does. KVN_OK or
 * KVN_NO_MEMORY. */
int kvn_tcp_encrypt(kvn_tcp_stream *self, const kvn_tcp_crypto *calls, const uint8_t *secret,
                    unsigned connection, bool answers, kvn_failure *failure);
/* Gives the descriptor back; it is -1 then. */
void kvn_tcp_close(kvn_tcp_stream *self);

/* Bytes that were taken, 0 where there was no room, or -errno. Memory that is not mapped is -EFAULT.
 * Whoever has sent less than all is to come again with the rest, when there is room. */
ssize_t kvn_tcp_send(kvn_tcp_stream *self, const struct iovec *parts, unsigned count);
/* Bytes that came; -EAGAIN: none have; 0: none will, the peer has closed its end; -errno. */
ssize_t kvn_tcp_receive(kvn_tcp_stream *self, const struct iovec *parts, unsigned count);
/* Whether bytes have come that the socket does not know of any more: no event tells of them. */
bool kvn_tcp_has_received(const kvn_tcp_stream *self);
/* What -errno of these means. */
const char *kvn_tcp_explain(int error);
/* Drops what was not sent and tells the peer so (RST), without giving the descriptor back. */
void kvn_tcp_reset(kvn_tcp_stream *self);

/* Parts of memory to be given to one call. */
typedef struct kvn_tcp_parts {
    struct iovec items[KVN_TCP_MAX_PARTS];
    unsigned count;
    uint64_t nbytes;
} kvn_tcp_parts;

/* Empty parts are left out. */
static inline void kvn_tcp_parts_add(kvn_tcp_parts *self, const void *address, uint64_t nbytes)
{
    if (nbytes == 0)
        return;
    self->items[self->count++] = (struct iovec){(void *)address, nbytes};
    self->nbytes += nbytes;
}

#endif

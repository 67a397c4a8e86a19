/* A connected, non-blocking socket as a stream of bytes, which are sent from and received into their final place. Bytes
 * of a device, which a socket does not reach, pass through slots of pinned memory (stage.h). Those of an encrypted stream
 * pass through a buffer, in records: a header (the length, uint32), the bytes, a tag of 16 bytes for both. */
#ifndef KVN_TCP_STREAM_H
#define KVN_TCP_STREAM_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

#include "device/device.h"
#include "tcp/cipher.h"

#define KVN_TCP_MAX_PARTS 256u /* of memory, in one call */

typedef struct kvn_tcp_buffers kvn_tcp_buffers;
typedef struct kvn_tcp_stage kvn_tcp_stage;
typedef struct kvn_tcp_copier kvn_tcp_copier;

struct kvn_tcp_parts;
struct kvn_tcp_stream;

/* What a stream has of its stage, which is built upon the stream. */
typedef struct kvn_tcp_stage_calls {
    /* As kvn_tcp_send and kvn_tcp_receive: for parts on a device, and for others while bytes are in the slots. */
    ssize_t (*send)(struct kvn_tcp_stream *stream, struct kvn_tcp_parts *parts);
    ssize_t (*receive)(struct kvn_tcp_stream *stream, struct kvn_tcp_parts *parts);
    bool (*has_unsent)(const kvn_tcp_stage *self); /* the socket has not taken all of the slots */
    bool (*has_received)(const kvn_tcp_stage *self);
    const kvn_failure *(*failure)(const kvn_tcp_stage *self); /* of the latest -EREMOTEIO */
    void (*destroy)(kvn_tcp_stage *self);
} kvn_tcp_stage_calls;

struct kvn_tcp_stage {
    const kvn_tcp_stage_calls *calls;
};

typedef struct kvn_tcp_stream {
    int fd;
    kvn_tcp_buffers *buffers; /* NULL: it is not encrypted */
    kvn_tcp_stage *stage;     /* NULL: it has no parts on a device. The stream frees it */
} kvn_tcp_stream;

/* Parts of memory to be given to one call. Other memory of the host than this library's own is not among
 * them where some are on a device. */
typedef struct kvn_tcp_parts {
    unsigned count;
    uint64_t nbytes;
    const kvn_device *device; /* NULL: all are of the host */
    unsigned first, last;     /* the parts on the device: [first, last) */
    struct iovec items[KVN_TCP_MAX_PARTS];
} kvn_tcp_parts;

static inline void kvn_tcp_parts_begin(kvn_tcp_parts *self)
{
    self->count = self->first = self->last = 0;
    self->nbytes = 0;
    self->device = NULL;
}

/* Empty parts are left out. */
static inline void kvn_tcp_parts_add(kvn_tcp_parts *self, const void *address, uint64_t nbytes)
{
    if (nbytes == 0)
        return;
    self->items[self->count++] = (struct iovec){(void *)address, nbytes};
    self->nbytes += nbytes;
}

/* The same, on a `device`, or of the host where that is NULL. All that are on a device are added one behind
 * the other. */
static inline void kvn_tcp_parts_add_of(kvn_tcp_parts *self, const kvn_device *device,
                                        uint64_t address, uint64_t nbytes)
{
    if (device && !self->device) {
        self->device = device;
        self->first = self->count;
    }
    kvn_tcp_parts_add(self, (void *)(uintptr_t)address, nbytes);
    if (device)
        self->last = self->count;
}

/* Encrypts all bytes from now on, in both directions; `answers`: this end answers requests. KVN_OK or KVN_NO_MEMORY. */
int kvn_tcp_encrypt(kvn_tcp_stream *self, const kvn_tcp_crypto *calls, const uint8_t *secret,
                    unsigned connection, bool answers, kvn_failure *failure);
/* Gives the descriptor back; it is -1 then. */
void kvn_tcp_close(kvn_tcp_stream *self);

/* Bytes that were taken, 0 where there was no room, or -errno. Memory that is not mapped is -EFAULT, a device
 * that fails -EREMOTEIO: the first part is then what cannot be read. Whoever has sent less than all is to come again
 * with the rest, when there is room. */
ssize_t kvn_tcp_send(kvn_tcp_stream *self, kvn_tcp_parts *parts);
/* Bytes that came; -EAGAIN: none have; 0: none will, the peer has closed its end; -errno. */
ssize_t kvn_tcp_receive(kvn_tcp_stream *self, kvn_tcp_parts *parts);
/* The same for parts of the host, as if there was no stage. */
ssize_t kvn_tcp_send_host(kvn_tcp_stream *self, kvn_tcp_parts *parts);
ssize_t kvn_tcp_receive_host(kvn_tcp_stream *self, kvn_tcp_parts *parts);
/* Copies `nbytes` to parts of the host, which may not be mapped: how many, or -errno. */
ssize_t kvn_tcp_copy_host(kvn_tcp_parts *parts, uint8_t *bytes, size_t nbytes);
/* Why the latest -EREMOTEIO. */
const kvn_failure *kvn_tcp_device_failure(const kvn_tcp_stream *self);
/* Returns true if bytes were taken from the socket and not used yet: no event reports them. */
bool kvn_tcp_has_received(const kvn_tcp_stream *self);
/* Converts -errno of these calls to a status. */
const char *kvn_tcp_explain(int error);
/* Drops unsent bytes and notifies the peer (RST), but keeps the descriptor. */
void kvn_tcp_reset(kvn_tcp_stream *self);

#endif

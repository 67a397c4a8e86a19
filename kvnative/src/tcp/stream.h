/* A connected, non-blocking socket as a stream of bytes, which are sent from and received into their final place. Bytes
 * on a device, which a socket does not reach, pass through slots of pinned memory (stage.h). Bytes of an encrypted
 * stream pass through a buffer, in records: a header (the length, uint32), the bytes, a tag of 16 bytes for both. */
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

struct kvn_tcp_parts;
struct kvn_tcp_stream;

/* The stage as the stream sees it; the stage itself includes this header. */
typedef struct kvn_tcp_stage_calls {
    /* Like kvn_tcp_send and kvn_tcp_receive, for parts on a device, and for other parts while the slots have bytes. */
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
    kvn_tcp_buffers *buffers; /* NULL: not encrypted */
    kvn_tcp_stage *stage;     /* NULL: no parts are on a device. The stream frees it */
} kvn_tcp_stream;

/* Parts of memory for one call. If some are on a device, all others are this library's own host memory. */
typedef struct kvn_tcp_parts {
    unsigned count;
    uint64_t nbytes;
    const kvn_device *device; /* NULL: all are in host memory */
    unsigned first, last;     /* the parts on the device: [first, last) */
    struct iovec items[KVN_TCP_MAX_PARTS];
} kvn_tcp_parts;

static inline void kvn_tcp_parts_begin(kvn_tcp_parts *self)
{
    self->count = self->first = self->last = 0;
    self->nbytes = 0;
    self->device = NULL;
}

/* Skips empty parts. */
static inline void kvn_tcp_parts_add(kvn_tcp_parts *self, const void *address, uint64_t nbytes)
{
    if (nbytes == 0)
        return;
    self->items[self->count++] = (struct iovec){(void *)address, nbytes};
    self->nbytes += nbytes;
}

/* The same on a `device`, or in host memory if that is NULL. Parts on a device must be added in a row. */
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
/* Closes the descriptor, and sets it to -1. */
void kvn_tcp_close(kvn_tcp_stream *self);

/* Returns the number of sent bytes, 0 if there was no room, or -errno: -EFAULT if memory is not mapped, -EREMOTEIO if a
 * device fails; then the first part cannot be read. A caller that has sent less must call again with the rest when
 * there is room. */
ssize_t kvn_tcp_send(kvn_tcp_stream *self, kvn_tcp_parts *parts);
/* Returns the number of received bytes; -EAGAIN: none yet; 0: the peer has closed its end; or -errno. */
ssize_t kvn_tcp_receive(kvn_tcp_stream *self, kvn_tcp_parts *parts);
/* The same for parts in host memory, without the stage. */
ssize_t kvn_tcp_send_host(kvn_tcp_stream *self, kvn_tcp_parts *parts);
ssize_t kvn_tcp_receive_host(kvn_tcp_stream *self, kvn_tcp_parts *parts);
/* Copies `nbytes` to parts in host memory, which may not be mapped. Returns the number of bytes, or -errno. */
ssize_t kvn_tcp_copy_host(kvn_tcp_parts *parts, uint8_t *bytes, size_t nbytes);
/* The reason of the latest -EREMOTEIO. */
const kvn_failure *kvn_tcp_device_failure(const kvn_tcp_stream *self);
/* Returns true if bytes were taken from the socket and not used yet: no event reports them. */
bool kvn_tcp_has_received(const kvn_tcp_stream *self);
/* Describes an errno of these calls. */
const char *kvn_tcp_explain(int error);
/* Drops unsent bytes and notifies the peer (RST), but keeps the descriptor. */
void kvn_tcp_reset(kvn_tcp_stream *self);

#endif

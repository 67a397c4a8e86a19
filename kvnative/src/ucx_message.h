/* A message that is put together and sent: its header, and payload that is copied into the message's own
 * buffer where it is small and shown where it is large, so that neither the number of pieces that a
 * message may have nor the cost of a copy limits anything. Under the turn. */
#ifndef KVN_UCX_MESSAGE_H
#define KVN_UCX_MESSAGE_H

#include "ucx_link.h"
#include "ucx_ranges.h"
#include "ucx_wire.h"

typedef struct kvn_ucx_message kvn_ucx_message;
typedef struct kvn_ucx_peer kvn_ucx_peer;

/* Messages that are kept for the next one, and those in flight. */
typedef struct kvn_ucx_messages {
    kvn_ucx_message *unused;
    unsigned num_unused;
    kvn_ucx_message *flying; /* in no order */
} kvn_ucx_messages;

struct kvn_ucx_message {
    kvn_ucx_send send; /* first */
    kvn_ucx_messages *pool;
    kvn_ucx_peer *peer;
    /* It was sent, or will never be: status says so. Once; the message is taken back after it. */
    void (*on_through)(kvn_ucx_message *self, int status);
    void *owner; /* for on_through */
    kvn_ucx_message *next;
    kvn_ucx_message *previous;
    uint64_t nbytes;     /* of payload */
    size_t used;         /* of the buffer */
    unsigned num_shown;
    unsigned num_held;
    union {
        kvn_wire_pull pull;
        kvn_wire_data data;
        kvn_wire_push push;
        kvn_wire_done done;
        kvn_wire_cancel cancel;
    } header;
    uint32_t held[KVN_UCX_MESSAGE_PIECES]; /* slots whose memory it shows */
    kvn_ucp_dt_iov shown[KVN_UCX_MESSAGE_PIECES];
    uint8_t *buffer; /* KVN_UCX_BUFFER */
};

/* The tables of the largest PULL, or a PUSH whole. */
#define KVN_UCX_BUFFER KVN_WIRE_MESSAGE

/* Smaller pieces are copied: blocks of 8 KiB cost less so, blocks of 16 KiB more. */
#define KVN_UCX_COPY_BELOW (12u << 10)

/* An empty one, or NULL without memory. */
kvn_ucx_message *kvn_ucx_message_take(kvn_ucx_messages *pool);
/* Gives back one that is not sent. */
void kvn_ucx_message_drop(kvn_ucx_message *self);
/* When nothing is sent any more. */
void kvn_ucx_messages_fini(kvn_ucx_messages *pool);

/* Adds payload; in all no more than KVN_UCX_BUFFER. True: the memory is shown, and must stay. */
bool kvn_ucx_message_add(kvn_ucx_message *self, const void *from, size_t nbytes);
/* The same, always by copy. */
void kvn_ucx_message_copy(kvn_ucx_message *self, const void *from, size_t nbytes);
/* Payload of that size at the beginning of the message that is written in place, when it is empty. */
uint8_t *kvn_ucx_message_reserve(kvn_ucx_message *self);
void kvn_ucx_message_reserved(kvn_ucx_message *self, size_t nbytes);

/* Sends it to the peer's link; the header is there but for its token. From here on the message is not the
 * caller's. on_through may come within the call. Returns KVN_OK, KVN_PENDING or the failure. */
int kvn_ucx_message_post(kvn_ucx_message *self, kvn_ucx_peer *peer, unsigned id,
                         size_t header_nbytes);

#endif

/* The gathered protocol as it travels: headers of active messages, and the tables in front of their
 * payload. All little-endian, without padding; every header begins with the link's token.
 *
 *   PULL    asks for a part of a request: pieces, then the ranges that they lie in
 *   DATA    bytes of a part, from where it says, over as many pieces as they fill; FINAL: and its end
 *   PUSH    pieces, ranges, then the bytes of the pieces; complete in itself
 *   DONE    the end of a part; or, to a PUSH that asks for it, what arrived of its request so far
 *   CANCEL  the peer may forget the request
 *
 * One message is one segment of the transport and one callback at the other end: what reaches the
 * speed of a bare socket. So nothing here is longer than KVN_WIRE_MESSAGE. */
#ifndef KVN_UCX_WIRE_H
#define KVN_UCX_WIRE_H

#include <stdint.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the gathered protocol is written for little-endian machines"
#endif

enum { /* ids of active messages; those below are the link's own */
    KVN_WIRE_PULL = 4,
    KVN_WIRE_DATA,
    KVN_WIRE_PUSH,
    KVN_WIRE_DONE,
    KVN_WIRE_CANCEL
};

#define KVN_WIRE_DATA_NBYTES (224u << 10) /* of data in one message */
#define KVN_WIRE_RANGES 256u              /* in one table */
#define KVN_WIRE_PUSH_PIECES 960u         /* in the table before the data */
#define KVN_WIRE_PULL_PIECES 8192u
#define KVN_WIRE_PART_NBYTES (4u << 20) /* the most that one PULL asks for */
/* A PUSH at its largest. With its header, and UCX's, it fits a segment of 256 KiB. */
#define KVN_WIRE_MESSAGE (KVN_WIRE_DATA_NBYTES + 16 * (KVN_WIRE_RANGES + KVN_WIRE_PUSH_PIECES))

/* What the serving end of a link keeps at most: a peer that wants more breaks the protocol. */
#define KVN_WIRE_PARTS 64u   /* parts asked for and not done */
#define KVN_WIRE_PUSHES 64u  /* requests of several PUSHes, begun and not through */
#define KVN_WIRE_ANSWERS 64u /* DONEs on their way */

typedef struct kvn_wire_piece {
    uint64_t address; /* of the serving end */
    uint32_t nbytes;  /* 0: the piece is skipped, whatever else it says */
    uint32_t range;   /* index in the message's ranges */
} kvn_wire_piece;

typedef struct kvn_wire_range {
    uint64_t generation;
    uint32_t slot;
    uint32_t reserved;
} kvn_wire_range;

typedef struct kvn_wire_pull {
    uint8_t token[16];
    uint64_t request;
    uint64_t part;  /* counts the parts of the request */
    uint64_t first; /* index of piece 0 in the request: a failure is told by it */
    uint32_t num_pieces;
    uint32_t num_ranges;
} kvn_wire_pull;

enum { KVN_WIRE_FINAL = 1 }; /* of DATA: the part ends with it, checked and whole */

typedef struct kvn_wire_data {
    uint8_t token[16];
    uint64_t request;
    uint64_t part;
    uint32_t piece; /* where the bytes begin */
    uint32_t skip;
    uint32_t flags;
    uint32_t reserved;
} kvn_wire_data;

enum {
    KVN_WIRE_ASK = 1, /* of PUSH: a DONE is wanted */
    KVN_WIRE_LAST = 2 /* no further PUSH of the request; with KVN_WIRE_ASK */
};

typedef struct kvn_wire_push {
    uint8_t token[16];
    uint64_t request;
    uint64_t sequence; /* counts the messages of the request */
    uint64_t first;    /* as of PULL */
    uint32_t num_pieces;
    uint32_t num_ranges;
    uint32_t flags;
    uint32_t reserved;
} kvn_wire_push;

/* Why a piece was refused. */
typedef enum kvn_wire_reason {
    KVN_WIRE_NONE = 0,
    KVN_WIRE_STALE,    /* its range is not registered, or registered anew */
    KVN_WIRE_OUTSIDE,  /* it is not inside its range */
    KVN_WIRE_READ_ONLY,
    KVN_WIRE_UNMAPPED, /* it is not mapped any more, though registered */
    KVN_WIRE_NO_MEMORY /* the serving end has none for the part */
} kvn_wire_reason;

enum { KVN_WIRE_OF_PULL = 0, KVN_WIRE_OF_PUSH = 1 };

typedef struct kvn_wire_done {
    uint8_t token[16];
    uint64_t request;
    uint64_t number; /* of the part; of a push: messages that arrived, all up to there */
    uint64_t failed; /* index of the piece in the request, where there is a reason */
    uint32_t reason; /* kvn_wire_reason */
    uint32_t of;     /* KVN_WIRE_OF_PULL or _PUSH */
} kvn_wire_done;

typedef struct kvn_wire_cancel {
    uint8_t token[16];
    uint64_t request;
    uint32_t of;
    uint32_t reserved;
} kvn_wire_cancel;

_Static_assert(sizeof(kvn_wire_piece) == 16, "pieces are packed");
_Static_assert(sizeof(kvn_wire_range) == 16, "ranges are packed");
_Static_assert(sizeof(kvn_wire_pull) == 48, "PULL is packed");
_Static_assert(sizeof(kvn_wire_data) == 48, "DATA is packed");
_Static_assert(sizeof(kvn_wire_push) == 56, "PUSH is packed");
_Static_assert(sizeof(kvn_wire_done) == 48, "DONE is packed");
_Static_assert(sizeof(kvn_wire_cancel) == 32, "CANCEL is packed");
_Static_assert(KVN_WIRE_MESSAGE <= (248u << 10), "a message fits a segment of 256 KiB");

#endif

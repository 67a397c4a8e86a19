/* The answering end of a connection: reads a request, checks it against the table, moves its bytes between the socket
 * and registered memory, and sends the outcome. It handles one request at a time; others wait in the socket, so that a
 * peer that reads no answers stops only itself. */
#ifndef KVN_TCP_SERVER_H
#define KVN_TCP_SERVER_H

#include "tcp/service.h"

typedef enum kvn_tcp_state {
    KVN_TCP_READS_HEAD,
    KVN_TCP_READS_TABLE,
    KVN_TCP_READS_BYTES, /* of a push */
    KVN_TCP_WRITES       /* an answer; for a pull also the bytes and another answer */
} kvn_tcp_state;

typedef struct kvn_tcp_server {
    kvn_tcp_watched watched;
    kvn_tcp_table *table;
    kvn_copier *copier; /* NULL: the service has no device */
    /* Called once, when the connection has become unusable; from then on on_ready does nothing. */
    void (*on_failed)(void *context, int code, const char *why);
    void *context;
    bool has_failed;
    kvn_tcp_state state;
    uint32_t got;         /* received bytes of the head, or of the table */
    uint32_t answer_left; /* unsent bytes of the first answer */
    uint32_t end_left;    /* unsent bytes of the second */
    uint64_t left;        /* bytes of the request that are not moved yet */
    uint64_t moved;
    kvn_tcp_checked checked; /* the state of the table when the request was checked */
    kvn_tcp_place at;
    bool is_refused;      /* the rest of a push is dropped, or of a pull sent as zeros */
    kvn_tcp_answer answer, end;
    kvn_tcp_request request;
} kvn_tcp_server;

/* The caller has set the stream, the table, the copier and on_failed; all other fields are 0. */
void kvn_tcp_server_init(kvn_tcp_server *self);

#endif

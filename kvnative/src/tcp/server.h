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
    KVN_TCP_WRITES       /* an answer; of a pull the bytes and another answer */
} kvn_tcp_state;

typedef struct kvn_tcp_server {
    kvn_tcp_watched watched;
    kvn_tcp_table *table;
    kvn_tcp_copier *copier; /* NULL: the service has no device, and so no range on it */
    /* Called once, when the connection is of no use any more; then on_ready does nothing. */
    void (*on_failed)(void *context, int code, const char *why);
    void *context;
    bool has_failed;
    kvn_tcp_state state;
    uint32_t got;         /* bytes of the head, or of the table */
    uint32_t answer_left; /* bytes of the first answer to be sent */
    uint32_t end_left;    /* of the second */
    uint64_t left;        /* bytes of the request to be moved */
    uint64_t moved;
    kvn_tcp_checked checked; /* the request, in the table */
    kvn_tcp_place at;
    bool is_refused;      /* the rest is read and dropped, or zeros are sent for it */
    kvn_tcp_answer answer, end;
    kvn_tcp_request request;
} kvn_tcp_server;

/* The stream, the table, the copier and on_failed are set; all else is 0. */
void kvn_tcp_server_init(kvn_tcp_server *self);

#endif

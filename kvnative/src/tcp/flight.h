/* The bytes that a client requests ahead of their answers: twice what the network holds, by measured bandwidth and
 * delay. Fewer would leave a distant network idle; more would only wait in a queue, and other transfers behind them. */
#ifndef KVN_TCP_FLIGHT_H
#define KVN_TCP_FLIGHT_H

#include <stdbool.h>
#include <stdint.h>

#define KVN_TCP_LEAST_FLIGHT (UINT64_C(8) << 20) /* bytes; enough on one host */
#define KVN_TCP_MOST_FLIGHT (UINT64_C(64) << 20) /* bytes; a window of requests has room for them */

typedef struct kvn_tcp_flight {
    uint64_t limit;      /* bytes: no request departs while `out` >= `limit` */
    uint64_t out;        /* bytes of requests without an answer */
    uint64_t moved;      /* bytes of all requests that are done; wraps */
    int64_t shortest_ns; /* from a request to its answer */
    int64_t latest_ns;   /* the same of the latest answer; 0: there was none */
} kvn_tcp_flight;

/* A request on its way. */
typedef struct kvn_tcp_departure {
    uint64_t moved;     /* of the flight, when this request departed */
    int64_t ns;
    bool fills;         /* the limit held back the next request */
} kvn_tcp_departure;

void kvn_tcp_flight_init(kvn_tcp_flight *self);
/* True if another request may depart. */
static inline bool kvn_tcp_flight_has_room(const kvn_tcp_flight *self) { return self->out < self->limit; }
kvn_tcp_departure kvn_tcp_flight_depart(kvn_tcp_flight *self, uint64_t nbytes, int64_t now_ns);
/* Takes the answer to a request into account; the peer may have refused the request, `is_moved` is false then. */
void kvn_tcp_flight_arrive(kvn_tcp_flight *self, const kvn_tcp_departure *request, uint64_t nbytes, bool is_moved,
                           int64_t now_ns);

/* Returns the time in which the peer takes what is out, unless the network has become much slower; 5 s at most. */
int64_t kvn_tcp_flight_drain_ns(const kvn_tcp_flight *self);

#endif

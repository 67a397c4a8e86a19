/* Measures the bandwidth and the delay of a connection by its requests, as BBR congestion control does. The shortest
 * delay is never forgotten, because no request meets an empty queue while a flight is full. */
#include "tcp/flight.h"

#define GRACE_NS INT64_C(500000000) /* longer than a busy host lets a thread wait */
#define MOST_GRACE_NS INT64_C(5000000000)

void kvn_tcp_flight_init(kvn_tcp_flight *self)
{
    *self = (kvn_tcp_flight){.limit = KVN_TCP_LEAST_FLIGHT, .shortest_ns = INT64_MAX};
}

kvn_tcp_departure kvn_tcp_flight_depart(kvn_tcp_flight *self, uint64_t nbytes, int64_t now_ns)
{
    self->out += nbytes;
    return (kvn_tcp_departure){self->moved, now_ns, !kvn_tcp_flight_has_room(self)};
}

void kvn_tcp_flight_arrive(kvn_tcp_flight *self, const kvn_tcp_departure *request, uint64_t nbytes, bool is_moved,
                           int64_t now_ns)
{
    const int64_t ns = now_ns > request->ns ? now_ns - request->ns : 1;
    double wanted;

    self->out -= nbytes;
    self->latest_ns = ns;
    if (!is_moved)
        return;
    self->moved += nbytes;
    if (ns < self->shortest_ns)
        self->shortest_ns = ns;
    if (!request->fills) /* the program's pace limited what moved, not the flight */
        return;
    wanted = 2.0 * (double)(self->moved - request->moved) * ((double)self->shortest_ns / (double)ns);
    self->limit = wanted < (double)KVN_TCP_LEAST_FLIGHT  ? KVN_TCP_LEAST_FLIGHT
                  : wanted > (double)KVN_TCP_MOST_FLIGHT ? KVN_TCP_MOST_FLIGHT
                                                         : (uint64_t)wanted;
}

int64_t kvn_tcp_flight_drain_ns(const kvn_tcp_flight *self)
{
    /* A request that departs now would wait for all that is out, as the latest one did. */
    return self->latest_ns < (MOST_GRACE_NS - GRACE_NS) / 2 ? GRACE_NS + 2 * self->latest_ns : MOST_GRACE_NS;
}

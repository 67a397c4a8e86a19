/* Checks of the number of bytes that a client requests ahead, in virtual time, for several bandwidths and delays. */
#include "tcp/flight.h"

#include <string.h>

#include "check.h"

#define MIB (UINT64_C(1) << 20)
#define WINDOW 64
#define GB_PER_S(n) (n) /* bytes a ns */
#define MS(n) ((int64_t)((n) * 1e6))

/* A simulated network: answers arrive in order, at the bandwidth, after the delay. */
typedef struct network {
    kvn_tcp_flight flight;
    double bytes_per_ns;
    int64_t delay_ns, now_ns, free_ns;
    kvn_tcp_departure out[WINDOW];
    uint64_t nbytes[WINDOW];
    int64_t done_ns[WINDOW];
    unsigned first, count;
} network;

static void begin(network *self, double bytes_per_ns, int64_t delay_ns)
{
    memset(self, 0, sizeof *self);
    self->bytes_per_ns = bytes_per_ns;
    self->delay_ns = delay_ns;
    self->now_ns = self->free_ns = 1;
    kvn_tcp_flight_init(&self->flight);
}

static void ask(network *self, uint64_t nbytes)
{
    const unsigned at = (self->first + self->count++) % WINDOW;
    const int64_t begins = self->now_ns + self->delay_ns / 2;

    self->free_ns = (begins > self->free_ns ? begins : self->free_ns) + (int64_t)((double)nbytes / self->bytes_per_ns);
    self->nbytes[at] = nbytes;
    self->out[at] = kvn_tcp_flight_depart(&self->flight, nbytes, self->now_ns);
    self->done_ns[at] = self->free_ns + self->delay_ns - self->delay_ns / 2;
}

static void answer(network *self, bool is_moved)
{
    self->now_ns = self->done_ns[self->first];
    kvn_tcp_flight_arrive(&self->flight, &self->out[self->first], self->nbytes[self->first], is_moved, self->now_ns);
    self->first = (self->first + 1) % WINDOW;
    self->count--;
}

/* Moves `mib` MiB in requests of 1 MiB, as far ahead as the flight has room. Returns bytes a ns. */
static double move(network *self, unsigned mib)
{
    const int64_t began = self->now_ns;
    unsigned left = mib;

    while (left > 0 || self->count > 0) {
        while (left > 0 && self->count < WINDOW && kvn_tcp_flight_has_room(&self->flight)) {
            ask(self, MIB);
            left--;
        }
        answer(self, true);
    }
    CHECK(self->flight.out == 0);
    return (double)(mib * MIB) / (double)(self->now_ns - began);
}

/* A network that holds 25 MB, three times the least flight, is kept full. */
static void far(void)
{
    network net;

    begin(&net, GB_PER_S(2.5), MS(10));
    move(&net, 64);
    CHECK(move(&net, 4096) > 0.95 * GB_PER_S(2.5));
    CHECK(net.flight.limit > 25000000 && net.flight.limit < 60000000);
}

/* Inside of a host and in a slow network, the least flight suffices: more bytes would only wait in a queue. */
static void near_or_slow(void)
{
    network net;

    begin(&net, GB_PER_S(3), MS(0.05));
    CHECK(move(&net, 4096) > 0.95 * GB_PER_S(3));
    CHECK(net.flight.limit == KVN_TCP_LEAST_FLIGHT);
    begin(&net, GB_PER_S(0.05), MS(10));
    CHECK(move(&net, 1024) > 0.95 * GB_PER_S(0.05));
    CHECK(net.flight.limit == KVN_TCP_LEAST_FLIGHT);
}

/* The flight never exceeds KVN_TCP_MOST_FLIGHT. */
static void beyond(void)
{
    network net;

    begin(&net, GB_PER_S(12.5), MS(100));
    move(&net, 4096);
    CHECK(net.flight.limit == KVN_TCP_MOST_FLIGHT);
}

/* Small transfers, one at a time, leave the limit unchanged: they measure the program and not the network. */
static void pace_of_the_program(void)
{
    network net;

    begin(&net, GB_PER_S(2.5), MS(10));
    move(&net, 1024);
    const uint64_t before = net.flight.limit;
    for (int i = 0; i < 100; i++) {
        ask(&net, 4096);
        answer(&net, true);
    }
    CHECK(before > KVN_TCP_LEAST_FLIGHT && net.flight.limit == before);
}

/* The limit falls again when other traffic takes nearly all of the bandwidth. */
static void becomes_slow(void)
{
    network net;

    begin(&net, GB_PER_S(2.5), MS(10));
    move(&net, 1024);
    net.bytes_per_ns = GB_PER_S(0.05);
    move(&net, 256);
    CHECK(net.flight.limit == KVN_TCP_LEAST_FLIGHT);
}

/* Refused bytes do not count as moved, so fast refusals do not raise the limit. */
static void refused(void)
{
    network net;

    begin(&net, GB_PER_S(2.5), MS(10));
    for (unsigned round = 0; round < 4; round++) {
        while (kvn_tcp_flight_has_room(&net.flight))
            ask(&net, MIB);
        while (net.count > 0)
            answer(&net, false);
    }
    CHECK(net.flight.out == 0 && net.flight.moved == 0);
    CHECK(net.flight.limit == KVN_TCP_LEAST_FLIGHT && net.flight.shortest_ns == INT64_MAX);
}

/* A clock that does not advance between request and answer causes no division by 0. */
static void no_time(void)
{
    kvn_tcp_flight flight;

    kvn_tcp_flight_init(&flight);
    const kvn_tcp_departure request = kvn_tcp_flight_depart(&flight, KVN_TCP_LEAST_FLIGHT, 5);
    CHECK(request.fills);
    kvn_tcp_flight_arrive(&flight, &request, KVN_TCP_LEAST_FLIGHT, true, 5);
    CHECK(flight.limit >= KVN_TCP_LEAST_FLIGHT && flight.limit <= KVN_TCP_MOST_FLIGHT && flight.out == 0);
}

/* An aborted push waits half a second plus twice the time of the latest request, but at most five seconds. */
static void drained(void)
{
    network net;

    begin(&net, GB_PER_S(2.5), MS(10));
    CHECK(kvn_tcp_flight_drain_ns(&net.flight) == MS(500));
    ask(&net, 4096);
    answer(&net, true);
    CHECK(kvn_tcp_flight_drain_ns(&net.flight) >= MS(520) && kvn_tcp_flight_drain_ns(&net.flight) < MS(521));
    net.bytes_per_ns = GB_PER_S(0.0001);
    ask(&net, MIB);
    answer(&net, false);
    CHECK(kvn_tcp_flight_drain_ns(&net.flight) == MS(5000));
}

int main(int count, char **arguments)
{
    static const check_row rows[] = {
        {"far", far},
        {"near_or_slow", near_or_slow},
        {"beyond", beyond},
        {"pace_of_the_program", pace_of_the_program},
        {"becomes_slow", becomes_slow},
        {"refused", refused},
        {"no_time", no_time},
        {"drained", drained},
    };

    return run_check(count, arguments, rows, sizeof rows / sizeof *rows);
}

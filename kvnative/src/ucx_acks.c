/* What a peer asks comes over one connection, and what it is answered goes over another: UCX's sender and
 * receiver have their own. So no segment carries an acknowledgement of the other direction, and the system
 * sends one for each message at once, which takes as long as a third of a small pull. Told that a connection
 * is a conversation it delays them, until one had to be sent by its timer, after 40 ms. Hence this is told
 * before an end sleeps, after what is due was acknowledged. */
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include "ucx_inside.h"

/* Less than the timer's, so that it is told again after every pause; not after every sleep. With a long list,
 * which is dear to read, more seldom. */
#define PERIOD_NS 20000000
#define LONG_PERIOD_NS 1000000000
/* Of connections that many are told: with more, a message is seldom waited for. */
#define MOST_SOCKETS 64

static void set_quick(int file, int is_quick)
{
    setsockopt(file, IPPROTO_TCP, TCP_QUICKACK, &is_quick, sizeof is_quick);
}

void kvn_ucx_delay_acks(kvn_ucx_end *end)
{
    int sockets[MOST_SOCKETS];
    const int64_t now = kvn_now_ns();

    if (!end->shows_events || now < end->acks_due_ns)
        return;
    const size_t count = kvn_ucx_sockets(end->receiver_fd, sockets, MOST_SOCKETS);
    end->acks_due_ns = now + (count < MOST_SOCKETS ? PERIOD_NS : LONG_PERIOD_NS);
    for (size_t i = 0; i < count; i++) {
        set_quick(sockets[i], 1); /* acknowledges now */
        set_quick(sockets[i], 0);
    }
}

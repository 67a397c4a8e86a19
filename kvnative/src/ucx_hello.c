/* How two ends find each other. Who knows the address of the peer's worker sends HELLO with its own; who
 * gets HELLO makes its endpoint from it and answers WELCOME. Either shows that the peer has the link, too.
 * HELLO is repeated, since the peer may not have made its link yet, and drops what it has no link for. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "ucx_address.h"
#include "ucx_inside.h"

#define REPEAT_NS 20000000
#define MAX_REASON_NBYTES 160

/* HELLO or WELCOME in flight. */
typedef struct greeting {
    kvn_ucx_send send;
    kvn_ucp_dt_iov piece;
    bool is_hello;
} greeting;

static void on_greeted(kvn_ucx_send *send, int status)
{
    (void)status; /* the link has failed if it is not KVN_OK */
    if (((greeting *)send)->is_hello)
        send->link->has_hello = false;
    free(send);
}

static int greet(kvn_ucx_link *link, unsigned id)
{
    const kvn_ucx_end *end = link->end;
    greeting *it = calloc(1, sizeof *it);
    if (!it)
        return KVN_NO_MEMORY;
    it->send.on_sent = on_greeted;
    it->is_hello = id == KVN_UCX_HELLO;
    it->piece.buffer = end->address;
    it->piece.length = end->address_nbytes;
    const int status = kvn_ucx_link_send(link, id, link->token, sizeof link->token, &it->piece,
                                         it->is_hello, &it->send);
    if (status != KVN_PENDING)
        free(it);
    else if (it->is_hello)
        link->has_hello = true;
    return status;
}

/* The peer has answered. */
static void settle(kvn_ucx_link *link)
{
    int open = KVN_UCX_LINK_OPEN;

    if (atomic_load(&link->state) != KVN_UCX_LINK_OPEN)
        return;
    if (!kvn_ucx_describe_endpoint(link)) {
        kvn_ucx_link_fail(link, KVN_UNSUPPORTED, 0,
                          "one-sided transfers need RDMA, or shared memory between processes of one"
                          " host, on the way to the peer, and UCX found neither: use the mode"
                          " gathered at both ends");
        return;
    }
    if (atomic_compare_exchange_strong(&link->state, &open, KVN_UCX_LINK_CONNECTED))
        kvn_ucx_notify(link->end);
}

static void on_hello(void *context, kvn_ucx_link *link, const void *header, size_t header_nbytes,
                     const void *data, size_t nbytes)
{
    kvn_failure failure;

    (void)context, (void)header, (void)header_nbytes;
    if ((!link->peer &&
         kvn_ucx_address_unwrap(link->end, data, nbytes, &link->peer, &failure) != KVN_OK) ||
        (!link->ep && kvn_ucx_make_endpoint(link, &failure) != KVN_OK)) {
        kvn_ucx_link_fail(link, failure.status, failure.code, failure.message);
        return;
    }
    greet(link, KVN_UCX_WELCOME);
    settle(link);
}

static void on_welcome(void *context, kvn_ucx_link *link, const void *header, size_t header_nbytes,
                       const void *data, size_t nbytes)
{
    (void)context, (void)header, (void)header_nbytes, (void)data, (void)nbytes;
    if (link->ep)
        settle(link);
}

static void on_bye(void *context, kvn_ucx_link *link, const void *header, size_t header_nbytes,
                   const void *data, size_t nbytes)
{
    char text[MAX_REASON_NBYTES + 64];
    const size_t length = nbytes < MAX_REASON_NBYTES ? nbytes : MAX_REASON_NBYTES;

    (void)context, (void)header, (void)header_nbytes;
    snprintf(text, sizeof text, "the peer has closed the link%s%.*s", length ? ": " : "",
             (int)length, length ? (const char *)data : "");
    for (char *it = text; *it; it++)
        if ((unsigned char)*it < ' ')
            *it = ' ';
    link->is_lost = true;
    kvn_ucx_link_fail(link, KVN_PEER_GONE, 0, text);
}

void kvn_ucx_hello_install(kvn_ucx_end *end)
{
    end->handlers[KVN_UCX_HELLO].call = on_hello;
    end->handlers[KVN_UCX_WELCOME].call = on_welcome;
    end->handlers[KVN_UCX_BYE].call = on_bye;
}

typedef struct calling {
    kvn_ucx_errand errand;
    kvn_ucx_link *link;
} calling;

/* One attempt: nothing to do where the peer is still to tell its address. */
static void call_peer(kvn_ucx_end *end, kvn_ucx_errand *errand)
{
    kvn_ucx_link *link = ((calling *)errand)->link;
    kvn_failure failure;

    (void)end;
    if (!link->peer || link->has_hello || atomic_load(&link->state) != KVN_UCX_LINK_OPEN)
        return;
    if (!link->ep && kvn_ucx_make_endpoint(link, &failure) != KVN_OK)
        kvn_ucx_link_fail(link, failure.status, failure.code, failure.message);
    else
        greet(link, KVN_UCX_HELLO);
}

static bool is_settled(void *context)
{
    const kvn_ucx_link *link = context;
    return atomic_load(&link->state) != KVN_UCX_LINK_OPEN;
}

int kvn_ucx_link_connect(kvn_ucx_link *link, int64_t deadline_ns, kvn_failure *failure)
{
    calling it = {.errand = {.run = call_peer}, .link = link};

    while (!is_settled(link)) {
        const int64_t now = kvn_now_ns();
        const int64_t next = now + REPEAT_NS;
        if (now >= deadline_ns)
            return kvn_fail(failure, KVN_TIMEOUT, 0,
                            "the peer's end of UCX has not answered within the time allowed%s",
                            link->way[0] ? "" : "");
        kvn_ucx_do_and_wait(link->end, &it.errand);
        kvn_ucx_attend(link->end, is_settled, link, next < deadline_ns ? next : deadline_ns);
    }
    return kvn_ucx_link_has_failed(link, failure) ? failure->status : KVN_OK;
}

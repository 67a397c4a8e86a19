/* An end that says what it likes: raw messages on a link, for tests/ucx/hostile.py. */
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "kvnative/backend.h"
#include "ucx_end.h"
#include "ucx_link.h"

typedef struct saying {
    kvn_ucx_errand errand;
    kvn_ucx_send send;
    kvn_ucx_link *link;
    unsigned id;
    size_t header_nbytes;
    size_t nbytes;
    unsigned times;
    uint8_t *bytes; /* header and payload, as often as it is sent */
    int status;
    atomic_uint in_flight;
} saying;

static void on_sent(kvn_ucx_send *send, int status)
{
    saying *it = (saying *)((char *)send - offsetof(saying, send));

    (void)status;
    atomic_fetch_sub(&it->in_flight, 1);
    kvn_ucx_notify(kvn_ucx_link_end(it->link));
}

static void say(kvn_ucx_end *end, kvn_ucx_errand *errand)
{
    saying *it = (saying *)errand;

    (void)end;
    for (unsigned i = 0; i < it->times; i++) {
        kvn_ucp_dt_iov piece = {it->bytes + it->header_nbytes, it->nbytes};

        it->status = kvn_ucx_link_send(it->link, it->id, it->bytes, it->header_nbytes, &piece,
                                       it->nbytes > 0, &it->send);
        if (it->status == KVN_PENDING)
            atomic_fetch_add(&it->in_flight, 1);
        else if (it->status != KVN_OK)
            return;
    }
}

static bool is_through(void *context) { return atomic_load(&((saying *)context)->in_flight) == 0; }

/* Sends the message `times` times without a pause for answers. The token is whatever the header says. */
int hostile_say(kvn_ucx_link *link, unsigned id, const void *header, size_t header_nbytes,
                const void *payload, size_t nbytes, unsigned times)
{
    saying it = {.errand = {.run = say},
                 .send = {.on_sent = on_sent},
                 .link = link,
                 .id = id,
                 .header_nbytes = header_nbytes,
                 .nbytes = nbytes,
                 .times = times,
                 .bytes = malloc(header_nbytes + nbytes + 1)};

    if (!it.bytes)
        abort();
    if (header_nbytes > 0)
        memcpy(it.bytes, header, header_nbytes);
    if (nbytes > 0)
        memcpy(it.bytes + header_nbytes, payload, nbytes);
    kvn_ucx_do_and_wait(kvn_ucx_link_end(link), &it.errand);
    kvn_ucx_attend(kvn_ucx_link_end(link), is_through, &it, KVN_FOREVER);
    free(it.bytes);
    return it.status;
}

/* The same deadline as everywhere, for callers that have no clock. */
int hostile_connect(kvn_ucx_link *link, int64_t timeout_ns, kvn_failure *failure)
{
    return kvn_ucx_link_connect(link, kvn_now_ns() + timeout_ns, failure);
}

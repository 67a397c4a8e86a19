/* The messages that arrive: each begins with the token of a link, and goes to the handler of its id with
 * that link. What has no link is dropped, and counted. */
#include <stdlib.h>
#include <string.h>

#include "ucx_inside.h"

static kvn_ucx_link **slot_of(kvn_ucx_end *end, const void *token)
{
    uint32_t word; /* tokens are random */
    memcpy(&word, token, sizeof word);
    return &end->table[word % KVN_UCX_TABLE_SIZE];
}

kvn_ucx_link *kvn_ucx_find_link(kvn_ucx_end *end, const void *token)
{
    kvn_ucx_link *it = *slot_of(end, token);
    while (it && memcmp(it->token, token, KVN_UCX_TOKEN_NBYTES) != 0)
        it = it->next;
    return it;
}

void kvn_ucx_list_link(kvn_ucx_link *link)
{
    kvn_ucx_link **slot = slot_of(link->end, link->token);
    link->next = *slot;
    *slot = link;
}

void kvn_ucx_unlist_link(kvn_ucx_link *link)
{
    kvn_ucx_link **it = slot_of(link->end, link->token);
    while (*it && *it != link)
        it = &(*it)->next;
    if (*it)
        *it = link->next;
}

static void add(_Atomic uint64_t *counter)
{
    atomic_fetch_add_explicit(counter, 1, memory_order_relaxed);
}

static kvn_ucs_status on_message(void *argument, const void *header, size_t header_nbytes,
                                 void *data, size_t nbytes, const kvn_ucp_am_recv_param *param)
{
    const kvn_ucx_handler *handler = argument;
    kvn_ucx_end *end = handler->end;

    if (!handler->call || header_nbytes < KVN_UCX_TOKEN_NBYTES) {
        add(&end->malformed);
        return KVN_UCS_OK;
    }
    kvn_ucx_link *link = kvn_ucx_find_link(end, header);
    if (!link || atomic_load(&link->state) == KVN_UCX_LINK_FAILED) {
        add(&end->unknown_tokens);
        return KVN_UCS_OK;
    }
    if (param->recv_attr & KVN_UCP_AM_RECV_ATTR_RNDV) { /* `data` is no data then */
        add(&end->malformed);
        kvn_ucx_link_fail(link, KVN_FAILED, 0, "the peer sent a message that is larger than allowed");
        return KVN_UCS_OK;
    }
    add(&end->messages);
    handler->call(handler->context, link, header, header_nbytes, nbytes ? data : NULL, nbytes);
    return KVN_UCS_OK;
}

int kvn_ucx_table_install(kvn_ucx_end *end, kvn_failure *failure)
{
    for (unsigned id = KVN_UCX_HELLO; id < KVN_UCX_MAX_MESSAGES; id++) {
        kvn_ucp_am_handler_param param = {
            .field_mask = KVN_UCP_AM_HANDLER_PARAM_ID | KVN_UCP_AM_HANDLER_PARAM_CB |
                          KVN_UCP_AM_HANDLER_PARAM_ARG,
            .id = id,
            .cb = on_message,
            .arg = &end->handlers[id],
        };
        end->handlers[id].end = end;
        const kvn_ucs_status status =
            end->calls->ucp_worker_set_am_recv_handler(end->receiver, &param);
        if (status != KVN_UCS_OK)
            return kvn_ucx_fail(end->library, "ucp_worker_set_am_recv_handler", status, failure);
    }
    return KVN_OK;
}

int kvn_ucx_end_on_message(kvn_ucx_end *end, unsigned id, kvn_ucx_on_message handler, void *context,
                           kvn_failure *failure)
{
    if (id < KVN_UCX_HELLO || id >= KVN_UCX_MAX_MESSAGES || end->handlers[id].call)
        return kvn_fail(failure, KVN_INVALID, 0,
                        "the id of a message is %u; it must be free, and between %u and %u", id,
                        (unsigned)KVN_UCX_FIRST_MESSAGE, (unsigned)KVN_UCX_MAX_MESSAGES - 1);
    end->handlers[id].context = context;
    end->handlers[id].call = handler;
    return KVN_OK;
}

void kvn_ucx_end_count(const kvn_ucx_end *end, kvn_ucx_counters *out)
{
    *out = (kvn_ucx_counters){
        .messages = atomic_load(&end->messages),
        .unknown_tokens = atomic_load(&end->unknown_tokens),
        .malformed = atomic_load(&end->malformed),
        .wakeups = atomic_load(&end->wakeups),
        .rounds = atomic_load(&end->rounds),
        .links_failed = atomic_load(&end->links_failed),
    };
}

/* A link's life: made, held, failed once, let go. What follows a failure (its requests are told, its
 * endpoint is closed) is an errand, because a failure may come from within UCX. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "ucx_address.h"
#include "ucx_inside.h"

static void dispose(kvn_ucx_link *link)
{
    kvn_ucx_end *end = link->end;

    if (link->death_fd >= 0)
        close(link->death_fd);
    pthread_mutex_destroy(&link->mutex);
    free(link->peer);
    free(link);
    kvn_ucx_end_release(end);
}

void kvn_ucx_link_hold(kvn_ucx_link *link) { atomic_fetch_add(&link->holders, 1); }

void kvn_ucx_link_release(kvn_ucx_link *link)
{
    if (atomic_fetch_sub(&link->holders, 1) == 1 && !kvn_ucx_end_is_forked(link->end))
        dispose(link);
}

typedef struct listing {
    kvn_ucx_errand errand;
    kvn_ucx_link *link;
    kvn_failure *failure;
} listing;

static void list_link(kvn_ucx_end *end, kvn_ucx_errand *errand)
{
    const listing *it = (listing *)errand;

    if (end->is_closed) {
        kvn_fail(it->failure, KVN_CANCELLED, 0, "this end of UCX is closed");
    } else if (kvn_ucx_find_link(end, it->link->token)) {
        kvn_fail(it->failure, KVN_INVALID, 0, "there is a link with this token already");
    } else {
        kvn_ucx_link_hold(it->link); /* the table's, until it has failed */
        kvn_ucx_list_link(it->link);
    }
}

int kvn_ucx_link_create(kvn_ucx_end *end, const uint8_t token[KVN_UCX_TOKEN_NBYTES],
                        const void *address, size_t address_nbytes, kvn_ucx_link **out,
                        kvn_failure *failure)
{
    kvn_ucx_link *link = calloc(1, sizeof *link);
    if (!link)
        return kvn_fail(failure, KVN_NO_MEMORY, ENOMEM, "no memory for a link");
    failure->status = KVN_OK;
    link->end = end;
    kvn_ucx_end_hold(end);
    memcpy(link->token, token, KVN_UCX_TOKEN_NBYTES);
    atomic_init(&link->holders, 1);
    pthread_mutex_init(&link->mutex, NULL);
    link->death_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (link->death_fd < 0)
        kvn_fail(failure, KVN_FAILED, errno, "no eventfd for a link: %s", strerror(errno));
    else if (address_nbytes)
        kvn_ucx_address_unwrap(end, address, address_nbytes, &link->peer, failure);
    if (failure->status == KVN_OK) {
        listing it = {.errand = {.run = list_link}, .link = link, .failure = failure};
        kvn_ucx_do_and_wait(end, &it.errand);
    }
    if (failure->status != KVN_OK) {
        dispose(link);
        return failure->status;
    }
    *out = link;
    return KVN_OK;
}

/* What follows a failure. */
static void end_link(kvn_ucx_end *end, kvn_ucx_errand *errand)
{
    kvn_ucx_link *link = (kvn_ucx_link *)((char *)errand - offsetof(kvn_ucx_link, ending));

    kvn_ucx_unlist_link(link);
    while (link->open) {
        kvn_ucx_open *request = link->open;
        kvn_ucx_link_remove(link, request);
        request->on_failed(request, &link->why);
    }
    for (kvn_ucx_part *it = end->parts; it; it = it->next)
        if (it->on_link_gone)
            it->on_link_gone(it, link);
    kvn_ucx_say_bye(link, link->why.message);
    kvn_ucx_close_endpoint(link);
    kvn_ucx_notify(end);
    kvn_ucx_link_release(link); /* the table's */
}

void kvn_ucx_link_fail(kvn_ucx_link *link, int status, int code, const char *message)
{
    pthread_mutex_lock(&link->mutex);
    const bool is_first = atomic_load(&link->state) != KVN_UCX_LINK_FAILED;
    if (is_first) {
        kvn_fail(&link->why, status, code, "%s", message);
        atomic_store(&link->state, KVN_UCX_LINK_FAILED);
    }
    pthread_mutex_unlock(&link->mutex);
    if (!is_first)
        return;
    atomic_fetch_add(&link->end->links_failed, 1);
    kvn_ucx_ring(link->death_fd);
    link->ending.run = end_link;
    link->ending.is_awaited = false;
    kvn_ucx_do_later(link->end, &link->ending);
}

void kvn_ucx_link_close(kvn_ucx_link *link, const char *reason)
{
    kvn_ucx_link_fail(link, KVN_CANCELLED, 0, reason);
}

kvn_ucx_end *kvn_ucx_link_end(const kvn_ucx_link *link) { return link->end; }
const uint8_t *kvn_ucx_link_token(const kvn_ucx_link *link) { return link->token; }
int kvn_ucx_link_death_fd(const kvn_ucx_link *link) { return link->death_fd; }
kvn_ucp_ep_h kvn_ucx_link_endpoint(const kvn_ucx_link *link) { return link->ep; }
void **kvn_ucx_link_kept(kvn_ucx_link *link) { return &link->kept; }

bool kvn_ucx_link_is_connected(const kvn_ucx_link *link)
{
    return atomic_load(&link->state) == KVN_UCX_LINK_CONNECTED;
}

/* The reason is written before the state, and never again. */
bool kvn_ucx_link_has_failed(const kvn_ucx_link *link, kvn_failure *why)
{
    if (atomic_load(&link->state) != KVN_UCX_LINK_FAILED)
        return false;
    *why = link->why;
    return true;
}

void kvn_ucx_link_way(kvn_ucx_link *link, char *out, size_t room)
{
    pthread_mutex_lock(&link->mutex);
    snprintf(out, room, "%s", link->way);
    pthread_mutex_unlock(&link->mutex);
}

int kvn_ucx_link_add(kvn_ucx_link *link, kvn_ucx_open *request, kvn_failure *failure)
{
    request->is_listed = false;
    if (kvn_ucx_link_has_failed(link, failure))
        return failure->status;
    request->previous = NULL;
    request->next = link->open;
    if (link->open)
        link->open->previous = request;
    link->open = request;
    request->is_listed = true;
    return KVN_OK;
}

void kvn_ucx_link_remove(kvn_ucx_link *link, kvn_ucx_open *request)
{
    if (!request->is_listed)
        return;
    request->is_listed = false;
    if (request->previous)
        request->previous->next = request->next;
    else
        link->open = request->next;
    if (request->next)
        request->next->previous = request->previous;
}

/* Holds the pairs of connections to a peer, and ends all of them when one fails. */
#include "tcp/link.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tcp/stage.h"

#define SERVER_EVENTS (EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET)
#define CLIENT_EVENTS (EPOLLRDHUP | EPOLLET)

typedef struct pair {
    kvn_tcp_client client;
    kvn_tcp_server server;
} pair;

struct kvn_tcp_link {
    kvn_tcp_service *service;
    pthread_mutex_t mutex; /* taken after a client's own */
    bool has_failed, is_closed;
    atomic_bool is_up; /* neither of them; for readers without the mutex */
    kvn_failure why;
    int death;
    unsigned count;
    pair pairs[];
};

/* Ends the other connections too. The caller holds the mutex. */
static void shut_all(const kvn_tcp_link *self)
{
    for (unsigned i = 0; i < self->count; i++) {
        shutdown(self->pairs[i].client.watched.stream.fd, SHUT_RDWR);
        shutdown(self->pairs[i].server.watched.stream.fd, SHUT_RDWR);
    }
}

static void on_failed(void *context, int code, const char *why)
{
    kvn_tcp_link *self = context;
    const uint64_t one = 1;

    pthread_mutex_lock(&self->mutex);
    if (!self->has_failed && !self->is_closed) {
        self->has_failed = true;
        atomic_store(&self->is_up, false);
        kvn_fail(&self->why, KVN_PEER_GONE, code, "%s", why);
        shut_all(self);
        if (write(self->death, &one, sizeof one) < 0)
            self->why.code = errno; /* cannot happen: the counter is 0 */
    }
    pthread_mutex_unlock(&self->mutex);
}

bool kvn_tcp_link_has_failed(kvn_tcp_link *self, kvn_failure *why)
{
    bool has_failed;

    pthread_mutex_lock(&self->mutex);
    has_failed = self->has_failed;
    if (has_failed)
        *why = self->why;
    pthread_mutex_unlock(&self->mutex);
    return has_failed;
}

bool kvn_tcp_link_is_up(const kvn_tcp_link *self) { return atomic_load(&self->is_up); }

unsigned kvn_tcp_link_connections(const kvn_tcp_link *self) { return self->count; }

kvn_tcp_client *kvn_tcp_link_client(kvn_tcp_link *self, unsigned index)
{
    return &self->pairs[index].client;
}

int kvn_tcp_link_death(kvn_tcp_link *self)
{
    pthread_mutex_lock(&self->mutex);
    const int death = self->is_closed ? -1 : self->death;
    pthread_mutex_unlock(&self->mutex);
    return death;
}

/* Does not hold the client's mutex: pinning may take long, and every abort needs that mutex. */
int kvn_tcp_link_stage(kvn_tcp_link *self, unsigned index, kvn_failure *failure)
{
    kvn_tcp_client *client = &self->pairs[index].client;
    kvn_tcp_stage *made = NULL;
    int status = KVN_OK;

    pthread_mutex_lock(&self->mutex);
    const bool is_closed = self->is_closed;
    if (!is_closed)
        kvn_tcp_service_hold(self->service); /* the stage uses its copier */
    pthread_mutex_unlock(&self->mutex);
    if (is_closed)
        return KVN_OK; /* transfers report the reason */
    if (!kvn_tcp_client_has_stage(client))
        status = kvn_tcp_stage_create(kvn_tcp_service_copier(self->service), &made, failure);
    if (made && !kvn_tcp_client_take_stage(client, made))
        made->calls->destroy(made);
    kvn_tcp_service_let_go(self->service);
    return status;
}

static int watch(kvn_tcp_link *self, kvn_failure *failure)
{
    for (unsigned i = 0; i < self->count; i++) {
        const unsigned thread = kvn_tcp_service_next_thread(self->service);
        pair *it = &self->pairs[i];
        if (kvn_tcp_service_watch(self->service, thread, &it->server.watched, SERVER_EVENTS,
                                  failure) != KVN_OK ||
            kvn_tcp_service_watch(self->service, thread, &it->client.watched, CLIENT_EVENTS,
                                  failure) != KVN_OK)
            return failure->status;
    }
    return KVN_OK;
}

/* The end that dials sends requests on connections with even indices, the other on odd ones. */
static int encrypt(kvn_tcp_link *self, const uint8_t *secret, bool dials, kvn_failure *failure)
{
    kvn_tcp_crypto calls;

    if (kvn_tcp_crypto_open(&calls, failure) != KVN_OK)
        return failure->status;
    for (unsigned i = 0; i < self->count; i++) {
        pair *it = &self->pairs[i];
        if (kvn_tcp_encrypt(&it->client.watched.stream, &calls, secret, 2 * i + !dials, false,
                            failure) != KVN_OK ||
            kvn_tcp_encrypt(&it->server.watched.stream, &calls, secret, 2 * i + dials, true,
                            failure) != KVN_OK)
            return failure->status;
    }
    return KVN_OK;
}

static void close_all(const int *files, unsigned count)
{
    for (unsigned i = 0; i < count; i++)
        close(files[i]);
}

int kvn_tcp_link_create(kvn_tcp_service *service, const int *clients, const int *servers,
                        unsigned count, const uint8_t *secret, bool dials, kvn_tcp_link **out,
                        kvn_failure *failure)
{
    kvn_tcp_link *self = calloc(1, sizeof *self + count * sizeof *self->pairs);
    const int death = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);

    *out = NULL;
    if (!self || death < 0) {
        const int error = self ? errno : ENOMEM;
        free(self);
        if (death >= 0)
            close(death);
        close_all(clients, count);
        close_all(servers, count);
        return kvn_fail(failure, error == ENOMEM ? KVN_NO_MEMORY : KVN_FAILED, error,
                        "cannot make a link: %s", strerror(error));
    }
    self->service = service;
    kvn_tcp_service_hold(service);
    self->death = death;
    self->count = count;
    atomic_init(&self->is_up, true);
    pthread_mutex_init(&self->mutex, NULL);
    for (unsigned i = 0; i < count; i++) {
        pair *it = &self->pairs[i];
        it->client.watched.stream.fd = clients[i];
        it->server.watched.stream.fd = servers[i];
        it->client.context = it->server.context = self;
        it->client.on_failed = it->server.on_failed = on_failed;
        it->server.table = kvn_tcp_service_table(service);
        it->server.copier = kvn_tcp_service_copier(service);
        kvn_tcp_client_init(&it->client);
        kvn_tcp_server_init(&it->server);
    }
    if ((secret && encrypt(self, secret, dials, failure) != KVN_OK) ||
        watch(self, failure) != KVN_OK) {
        kvn_tcp_link_close(self, "it was never made");
        kvn_tcp_link_destroy(self);
        return failure->status;
    }
    *out = self;
    return KVN_OK;
}

void kvn_tcp_link_close(kvn_tcp_link *self, const char *why)
{
    pthread_mutex_lock(&self->mutex);
    const bool was_closed = self->is_closed;
    self->is_closed = true;
    atomic_store(&self->is_up, false);
    pthread_mutex_unlock(&self->mutex);
    if (was_closed)
        return;
    for (unsigned i = 0; i < self->count; i++) {
        pair *it = &self->pairs[i];
        kvn_tcp_client_fail(&it->client, 0, why);
        kvn_tcp_service_forget(&it->client.watched);
        kvn_tcp_service_forget(&it->server.watched);
    }
    pthread_mutex_lock(&self->mutex);
    shut_all(self); /* so that the peer notices at once, even if a child has copies of the descriptors */
    for (unsigned i = 0; i < self->count; i++) {
        kvn_tcp_close(&self->pairs[i].client.watched.stream);
        kvn_tcp_close(&self->pairs[i].server.watched.stream);
    }
    close(self->death);
    self->death = -1;
    pthread_mutex_unlock(&self->mutex);
    kvn_tcp_service_let_go(self->service);
}

void kvn_tcp_link_destroy(kvn_tcp_link *self)
{
    for (unsigned i = 0; i < self->count; i++)
        kvn_tcp_client_fini(&self->pairs[i].client);
    pthread_mutex_destroy(&self->mutex);
    free(self);
}

/* Makes and destroys the communicator of two processes. */
#include "hccl/communicator.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

struct kvn_communicator {
    kvn_connection connection;
    kvn_channel *channel;
    uint32_t max_batch;
    atomic_bool disturbed;
    atomic_bool cancelled;
    void *events[2]; /* they pace long transfers */
    pthread_mutex_t cancel_mutex; /* a separate mutex, so that a cancel does not wait for a call of HCCL */
    char cancel_message[256];
    pthread_mutex_t mutex; /* guards the fields below, and HCCL's calls for the connection */
    pthread_cond_t changed; /* `state` or `transfers` */
    _Atomic(kvn_communicator_state) state; /* also read without the mutex, because a call of HCCL may take long */
    bool closing;       /* no transfer begins any more */
    uint32_t transfers; /* running: 0 or 1, because the channel has one thread */
    /* Words for guards; their region is bound like others. */
    kvn_words device_words;
    void *host_words;
};

#define WORDS_NBYTES (KVN_MAX_GUARDS * sizeof(uint64_t))

/* ---- the parts of a communicator ---- */

static int make_words(kvn_communicator *self, kvn_failure *failure)
{
    kvn_connection *connection = &self->connection;
    if (kvn_words_take(connection->hccl, connection->device, &self->device_words, failure) != KVN_OK ||
        kvn_device_allocate_host(connection->device, WORDS_NBYTES, &self->host_words, failure) !=
            KVN_OK)
        return failure->status;
    return KVN_OK;
}

static int make_events(kvn_communicator *self, kvn_failure *failure)
{
    const kvn_device *device = self->connection.device;
    void *previous;
    int status = kvn_device_enter(device, &previous, failure);
    if (status != KVN_OK)
        return status;
    for (int i = 0; i < 2 && status == KVN_OK; i++) {
        status = device->ops->create_event(device, &self->events[i], failure);
        if (status != KVN_OK)
            self->events[i] = NULL; /* its content is undefined after a failure */
    }
    kvn_device_leave(device, previous);
    return status;
}

static void drop_events(kvn_communicator *self)
{
    const kvn_device *device = self->connection.device;
    void *previous;
    kvn_failure ignored;
    if (!self->events[0] || kvn_device_enter(device, &previous, &ignored) != KVN_OK)
        return;
    for (int i = 0; i < 2 && self->events[i]; i++)
        device->ops->destroy_event(device, self->events[i], &ignored);
    self->events[0] = NULL;
    kvn_device_leave(device, previous);
}

/* Tries all steps; `failure` gets the first failure. */
static void drop_words(kvn_communicator *self, kvn_failure *failure)
{
    const kvn_device *device = self->connection.device;
    kvn_failure later;
    if (kvn_words_release(&self->device_words, &later) != KVN_OK)
        kvn_keep_first(failure, &later);
    if (self->host_words && kvn_device_free_host(device, self->host_words, &later) != KVN_OK)
        kvn_keep_first(failure, &later);
    self->host_words = NULL;
    drop_events(self);
}

static void release(kvn_communicator *self)
{
    if (self->channel)
        kvn_channel_destroy(self->channel);
    kvn_connection_free(&self->connection);
    pthread_cond_destroy(&self->changed);
    pthread_mutex_destroy(&self->mutex);
    pthread_mutex_destroy(&self->cancel_mutex);
    free(self);
}

int kvn_communicator_create(kvn_hccl *hccl, kvn_device *device,
                            const kvn_communicator_options *options, kvn_communicator **out,
                            kvn_failure *failure)
{
    kvn_communicator *self = calloc(1, sizeof *self);
    kvn_failure ignored = {.status = KVN_OK};
    *out = NULL;
    if (!self)
        return kvn_fail(failure, KVN_NO_MEMORY, ENOMEM, "no memory for a communicator");
    pthread_mutex_init(&self->mutex, NULL);
    pthread_mutex_init(&self->cancel_mutex, NULL);
    pthread_cond_init(&self->changed, NULL);
    self->max_batch = options->max_batch;
    self->state = KVN_COMM_OPEN;
    if (kvn_connection_init(&self->connection, hccl, device, options->remote_rank, options->name,
                            failure) != KVN_OK ||
        kvn_channel_create(device, &self->channel, failure) != KVN_OK ||
        make_words(self, failure) != KVN_OK || make_events(self, failure) != KVN_OK ||
        kvn_connection_open(&self->connection, options, failure) != KVN_OK ||
        kvn_connection_bind(&self->connection, kvn_words_region(&self->device_words), failure) != KVN_OK) {
        kvn_connection_close(&self->connection, &ignored);
        drop_words(self, &ignored);
        release(self);
        return failure->status;
    }
    *out = self;
    return KVN_OK;
}

void kvn_communicator_destroy(kvn_communicator *self)
{
    /* A forked child has neither the thread nor the connection, and maybe a locked mutex. */
    if (kvn_channel_is_ours(self->channel))
        release(self);
}

/* ---- the life of a connection; the caller holds the mutex ---- */

static const char *state_text(kvn_communicator_state state)
{
    static const char *const words[] = {"not prepared", "being prepared", "ready",
                                        "not connected: its prepare failed", "closed"};
    return words[state];
}

static int refuse(const kvn_communicator *self, const char *what, kvn_failure *failure)
{
    return kvn_fail(failure, KVN_INVALID, 0, "communicator %s is %s: %s", self->connection.name,
                    self->closing ? "closed" : state_text(self->state), what);
}

static int close_now(kvn_communicator *self, kvn_failure *failure)
{
    kvn_failure first = {.status = KVN_OK};
    kvn_connection_close(&self->connection, &first);
    drop_words(self, &first);
    self->state = KVN_COMM_CLOSED;
    pthread_cond_broadcast(&self->changed);
    if (first.status != KVN_OK)
        *failure = first;
    return first.status;
}

static void wait_for_prepare(kvn_communicator *self)
{
    while (self->state == KVN_COMM_PREPARING)
        pthread_cond_wait(&self->changed, &self->mutex);
}

/* ---- the calls ---- */

int kvn_communicator_bind(kvn_communicator *self, kvn_region *region, kvn_failure *failure)
{
    int status;
    pthread_mutex_lock(&self->mutex);
    status = self->state == KVN_COMM_OPEN && !self->closing
                 ? kvn_connection_bind(&self->connection, region, failure)
                 : refuse(self, "memory must be bound before prepare", failure);
    pthread_mutex_unlock(&self->mutex);
    return status;
}

int kvn_communicator_unbind(kvn_communicator *self, kvn_region *region, kvn_failure *failure)
{
    int status;
    pthread_mutex_lock(&self->mutex);
    wait_for_prepare(self);
    status = kvn_connection_unbind(&self->connection, region, failure);
    pthread_mutex_unlock(&self->mutex);
    return status;
}

int kvn_communicator_prepare(kvn_communicator *self, int timeout_s, kvn_failure *failure)
{
    kvn_failure ignored;
    int status;
    pthread_mutex_lock(&self->mutex);
    if (self->state != KVN_COMM_OPEN || self->closing) {
        status = refuse(self, "it can be prepared only once", failure);
        pthread_mutex_unlock(&self->mutex);
        return status;
    }
    self->state = KVN_COMM_PREPARING; /* keeps other threads from calling HCCL for this communicator */
    pthread_mutex_unlock(&self->mutex);
    status = kvn_connection_prepare(&self->connection, timeout_s, failure);
    pthread_mutex_lock(&self->mutex);
    self->state = status == KVN_OK ? KVN_COMM_READY : KVN_COMM_FAILED;
    if (self->closing) {
        close_now(self, &ignored);
        if (status == KVN_OK)
            status = kvn_fail(failure, KVN_CANCELLED, 0, "communicator %s was closed meanwhile",
                              self->connection.name);
    }
    pthread_cond_broadcast(&self->changed);
    pthread_mutex_unlock(&self->mutex);
    return status;
}

int kvn_communicator_close(kvn_communicator *self, kvn_failure *failure)
{
    int status = KVN_OK;
    pthread_mutex_lock(&self->mutex);
    self->closing = true;
    if (self->state == KVN_COMM_PREPARING) {
        status = KVN_PENDING;
    } else {
        while (self->transfers > 0)
            pthread_cond_wait(&self->changed, &self->mutex);
        if (self->state != KVN_COMM_CLOSED)
            status = close_now(self, failure);
    }
    pthread_mutex_unlock(&self->mutex);
    return status;
}

void kvn_communicator_cancel(kvn_communicator *self, const char *message)
{
    pthread_mutex_lock(&self->cancel_mutex);
    if (!atomic_load(&self->cancelled)) {
        snprintf(self->cancel_message, sizeof self->cancel_message, "%s", message);
        atomic_store(&self->cancelled, true);
    }
    pthread_mutex_unlock(&self->cancel_mutex);
}

kvn_communicator_state kvn_communicator_state_of(kvn_communicator *self)
{
    return atomic_load(&self->state);
}

bool kvn_communicator_is_disturbed(const kvn_communicator *self)
{
    return atomic_load(&self->disturbed);
}

kvn_hccl_result kvn_communicator_async_error(kvn_communicator *self, char *text, size_t room)
{
    kvn_hccl_result result = KVN_HCCL_SUCCESS;
    *text = '\0';
    pthread_mutex_lock(&self->mutex);
    if (self->state == KVN_COMM_READY)
        result = kvn_connection_async_error(&self->connection, text, room);
    pthread_mutex_unlock(&self->mutex);
    return result;
}

/* ---- for transfers ---- */

kvn_channel **kvn_communicator_channels(kvn_communicator *self) { return &self->channel; }

uint32_t kvn_communicator_max_batch(const kvn_communicator *self) { return self->max_batch; }

kvn_halt kvn_communicator_halt(const kvn_communicator *self, const atomic_int *stop)
{
    return (kvn_halt){.stop = stop, .cancelled = &self->cancelled};
}

int kvn_communicator_why_halted(kvn_communicator *self, kvn_failure *failure)
{
    if (!atomic_load(&self->cancelled))
        return KVN_CANCELLED;
    pthread_mutex_lock(&self->cancel_mutex);
    kvn_fail(failure, KVN_PEER_GONE, 0, "%s", self->cancel_message);
    pthread_mutex_unlock(&self->cancel_mutex);
    return KVN_PEER_GONE;
}

int kvn_communicator_begin(kvn_communicator *self, kvn_failure *failure)
{
    if (atomic_load(&self->cancelled))
        return kvn_communicator_why_halted(self, failure);
    int status = KVN_OK;
    pthread_mutex_lock(&self->mutex);
    if (self->state != KVN_COMM_READY || self->closing) {
        refuse(self, "nothing can be transferred", failure);
        status = KVN_FAILED;
    } else {
        self->transfers++;
    }
    pthread_mutex_unlock(&self->mutex);
    return status;
}

void kvn_communicator_end(kvn_communicator *self)
{
    pthread_mutex_lock(&self->mutex);
    self->transfers--;
    pthread_cond_broadcast(&self->changed);
    pthread_mutex_unlock(&self->mutex);
}

uint32_t kvn_communicator_unfold_ms(const kvn_communicator *self)
{
    return self->connection.hccl->unfold_ms;
}

void kvn_communicator_disturb(kvn_communicator *self) { atomic_store(&self->disturbed, true); }

int kvn_communicator_issue(kvn_communicator *self, bool is_put, kvn_one_sided *descriptors,
                           uint32_t count, kvn_failure *failure)
{
    int status;
    pthread_mutex_lock(&self->mutex);
    status = kvn_connection_issue(&self->connection, is_put, descriptors, count,
                                  kvn_channel_stream(self->channel), failure);
    pthread_mutex_unlock(&self->mutex);
    return status;
}

bool kvn_communicator_is_polled(const kvn_communicator *self)
{
    return self->connection.hccl->is_client_server;
}

int kvn_communicator_poll(kvn_communicator *self, kvn_failure *failure)
{
    int status;
    if (!kvn_communicator_is_polled(self))
        return KVN_OK;
    pthread_mutex_lock(&self->mutex);
    status = kvn_client_poll(&self->connection.client, failure);
    pthread_mutex_unlock(&self->mutex);
    return status;
}

void kvn_communicator_abort(kvn_communicator *self)
{
    pthread_mutex_lock(&self->mutex);
    kvn_connection_abort(&self->connection);
    pthread_mutex_unlock(&self->mutex);
}

bool kvn_communicator_covers(kvn_communicator *self, uint64_t address, uint64_t nbytes)
{
    bool covers;
    pthread_mutex_lock(&self->mutex);
    covers = kvn_connection_covers(&self->connection, address, nbytes);
    pthread_mutex_unlock(&self->mutex);
    return covers;
}

void **kvn_communicator_events(kvn_communicator *self) { return self->events; }

uint64_t kvn_communicator_device_words(const kvn_communicator *self)
{
    return kvn_words_address(&self->device_words);
}

uint64_t *kvn_communicator_host_words(const kvn_communicator *self) { return self->host_words; }

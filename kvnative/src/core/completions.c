/* Appends tasks that have ended to a queue with an eventfd. */
#include "core/completions.h"

#include <errno.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "kvnative/status.h"

/* Bits of an ending's state. The thread that sets the later one appends the token. */
#define IS_DUE 1u
#define IS_WATCHED 2u

/* ---- the queue ---- */

int kvn_completions_init(kvn_completions *self)
{
    self->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (self->fd < 0)
        return errno;
    pthread_mutex_init(&self->mutex, NULL);
    kvn_list_init(&self->ended);
    return 0;
}

void kvn_completions_fini(kvn_completions *self)
{
    close(self->fd);
    pthread_mutex_destroy(&self->mutex);
}

/* The caller holds the mutex. */
static void make_readable(const kvn_completions *self)
{
    const uint64_t one = 1;

    while (write(self->fd, &one, sizeof one) < 0 && errno == EINTR)
        ;
}

static void make_unreadable(const kvn_completions *self)
{
    uint64_t count;

    while (read(self->fd, &count, sizeof count) < 0 && errno == EINTR)
        ;
}

static void append(kvn_ending *ending)
{
    kvn_completions *self = ending->queue;

    pthread_mutex_lock(&self->mutex);
    if (!kvn_list_is_in(&ending->node)) {
        /* If the list has nodes, the descriptor is readable, or its reader takes again. */
        if (!kvn_list_first(&self->ended))
            make_readable(self);
        kvn_list_push_back(&self->ended, &ending->node);
    }
    pthread_mutex_unlock(&self->mutex);
}

/* Read the descriptor before the list: a token that is appended in between is taken, and only causes a spurious
 * wake. */
size_t kvn_completions_take(kvn_completions *self, uint64_t *tokens, size_t capacity)
{
    size_t count = 0;

    make_unreadable(self);
    pthread_mutex_lock(&self->mutex);
    while (count < capacity) {
        kvn_node *node = kvn_list_first(&self->ended);
        if (!node)
            break;
        tokens[count++] = KVN_LISTED(node, kvn_ending, node)->token;
        kvn_list_remove(node);
    }
    pthread_mutex_unlock(&self->mutex);
    return count;
}

/* ---- endings ---- */

void kvn_ending_init(kvn_ending *self, uint64_t parts)
{
    atomic_init(&self->parts, parts);
    atomic_init(&self->state, 0);
    self->node = (kvn_node){NULL, NULL};
    self->queue = NULL;
    self->token = 0;
}

void kvn_ending_add(kvn_ending *self) { atomic_fetch_add_explicit(&self->parts, 1, memory_order_relaxed); }

/* Release and acquire, so that the reader of the token sees all that happened before the last part ended. */
void kvn_ending_end_part(kvn_ending *self, int status)
{
    const bool is_last = atomic_fetch_sub_explicit(&self->parts, 1, memory_order_acq_rel) == 1;

    if (!is_last && status == KVN_OK)
        return;
    if (atomic_fetch_or_explicit(&self->state, IS_DUE, memory_order_acq_rel) & IS_WATCHED)
        append(self);
}

bool kvn_ending_is_over(const kvn_ending *self)
{
    return atomic_load_explicit(&self->parts, memory_order_acquire) == 0;
}

void kvn_ending_watch(kvn_ending *self, kvn_completions *queue, uint64_t token)
{
    if (!self->queue) {
        self->queue = queue;
        self->token = token;
    }
    if (atomic_fetch_or_explicit(&self->state, IS_WATCHED, memory_order_acq_rel) & IS_DUE)
        append(self);
}

void kvn_ending_leave(kvn_ending *self)
{
    if (!self->queue)
        return;
    pthread_mutex_lock(&self->queue->mutex);
    kvn_list_remove(&self->node);
    pthread_mutex_unlock(&self->queue->mutex);
}

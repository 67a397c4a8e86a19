/* A queue of tasks that have ended. A backend reports the end of a batch on its own thread and with its locks held, so
 * it only appends a token here. The reader of the queue has none of these locks when it looks at the outcome.
 *
 * An ending is the end of a task, or of all layers of a layered task. It may come before or after the task
 * is watched; the later of the two appends the token. */
#ifndef KVNATIVE_CORE_COMPLETIONS_H
#define KVNATIVE_CORE_COMPLETIONS_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "core/list.h"

typedef struct kvn_completions {
    pthread_mutex_t mutex; /* guards the list; no other is taken with it */
    kvn_list ended;
    int fd; /* an eventfd: readable after an append to the empty list, until a take */
} kvn_completions;

typedef struct kvn_ending {
    atomic_uint_fast64_t parts; /* batches that have not ended, and 1 while more may begin */
    atomic_uint state;          /* bits: due, watched */
    kvn_node node;              /* in the queue's list */
    kvn_completions *queue;     /* from kvn_ending_watch on */
    uint64_t token;
} kvn_ending;

/* 0, or an errno. */
int kvn_completions_init(kvn_completions *self);
void kvn_completions_fini(kvn_completions *self);
/* Takes up to `capacity` tokens, oldest first, and returns their number. Never blocks. Call it again while it returns
 * `capacity`: the descriptor does not say that more are there. */
size_t kvn_completions_take(kvn_completions *self, uint64_t *tokens, size_t capacity);

/* The ending begins with `parts` >= 1. */
void kvn_ending_init(kvn_ending *self, uint64_t parts);
/* Adds a part. Call it only while another part has not ended. */
void kvn_ending_add(kvn_ending *self);
/* Ends a part. The token is appended with the last part, and with each failed part. */
void kvn_ending_end_part(kvn_ending *self, int status);
/* True if all parts have ended, so that a wait for the outcome returns at once. */
bool kvn_ending_is_over(const kvn_ending *self);
/* Appends `token` to `queue` once the last part ends or a part fails, which may be now. May be called again with the
 * same queue and token. The queue must outlive the ending, or kvn_ending_leave must come first. */
void kvn_ending_watch(kvn_ending *self, kvn_completions *queue, uint64_t token);
/* Removes the ending from its queue. Call it after the last part, before the ending is freed. */
void kvn_ending_leave(kvn_ending *self);

#endif

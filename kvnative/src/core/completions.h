/* A queue of what has ended. A backend says that a batch has ended on a thread of its own and with its locks held, so
 * it only appends a token here; a thread that reads the queue, without any of these locks, looks at the outcome.
 *
 * An ending is what can be appended: a task, or all layers of a layered one. It may end before it is watched or after;
 * either way its token comes, as whoever is second of the two appends it. */
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
    int fd; /* an eventfd, readable while something is in the list; now and then without */
} kvn_completions;

typedef struct kvn_ending {
    atomic_uint_fast64_t parts; /* batches that have not ended, and 1 while more may begin */
    atomic_uint state;          /* whether it is to be appended, and to what */
    kvn_node node;              /* in the queue's list */
    kvn_completions *queue;     /* from kvn_ending_watch on */
    uint64_t token;
} kvn_ending;

/* 0, or an errno. */
int kvn_completions_init(kvn_completions *self);
void kvn_completions_fini(kvn_completions *self);
/* Takes up to `capacity` tokens out, the oldest first; returns how many. Never blocks. */
size_t kvn_completions_take(kvn_completions *self, uint64_t *tokens, size_t capacity);

/* `parts` of it are known, >= 1. */
void kvn_ending_init(kvn_ending *self, uint64_t parts);
/* One more part begins. Only while another is open. */
void kvn_ending_add(kvn_ending *self);
/* A part has ended. The ending is appended with the last part, and with each that has failed. */
void kvn_ending_end_part(kvn_ending *self, int status);
/* Whether all parts have ended: then a wait for the outcome returns at once. */
bool kvn_ending_is_over(const kvn_ending *self);
/* From now on `token` is appended to `queue`, at once if it should have been before. Again with the same queue: once
 * more. The queue outlives the ending, or kvn_ending_leave comes first. */
void kvn_ending_watch(kvn_ending *self, kvn_completions *queue, uint64_t token);
/* It is in no queue any more. When no part is left, before the ending goes. */
void kvn_ending_leave(kvn_ending *self);

#endif

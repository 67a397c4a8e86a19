/* Threads of the library, which leave signals to the threads of the program, and the one clock of all deadlines:
 * CLOCK_MONOTONIC, in nanoseconds; KVN_FOREVER never comes. */
#ifndef KVNATIVE_CORE_THREAD_H
#define KVNATIVE_CORE_THREAD_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

/* Starts a thread with all signals blocked. `attributes`: NULL for the default ones. `name`, of at most 15
 * characters, must be NULL for a detached thread, which may have ended before it is named. Returns 0 or an errno. */
int kvn_thread_start(pthread_t *out, const pthread_attr_t *attributes, const char *name,
                     void *(*run)(void *), void *argument);

int64_t kvn_now_ns(void);
/* A condition that kvn_cond_wait can wait for. */
void kvn_cond_init(pthread_cond_t *condition);
/* Waits with the mutex held. Returns false once the deadline has passed; may return early, like every such wait. */
bool kvn_cond_wait(pthread_cond_t *condition, pthread_mutex_t *mutex, int64_t deadline_ns);

#endif

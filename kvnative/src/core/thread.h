/* Threads of the library, which leave signals to the threads of the program. */
#ifndef KVNATIVE_CORE_THREAD_H
#define KVNATIVE_CORE_THREAD_H

#include <pthread.h>

/* Starts a thread with all signals blocked. `attributes`: NULL for the default ones. `name`, of at most 15
 * characters, must be NULL for a detached thread, which may have ended by then. Returns 0 or an errno. */
int kvn_thread_start(pthread_t *out, const pthread_attr_t *attributes, const char *name,
                     void *(*run)(void *), void *argument);

#endif

/* One clock for all deadlines: CLOCK_MONOTONIC, in nanoseconds; KVN_FOREVER never comes. */
#ifndef KVNATIVE_CORE_CLOCK_H
#define KVNATIVE_CORE_CLOCK_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

int64_t kvn_now_ns(void);
/* A condition that kvn_cond_wait can wait for. */
void kvn_cond_init(pthread_cond_t *condition);
/* With the mutex held. False when the deadline has passed; may return early, as every such wait. */
bool kvn_cond_wait(pthread_cond_t *condition, pthread_mutex_t *mutex, int64_t deadline_ns);

#endif

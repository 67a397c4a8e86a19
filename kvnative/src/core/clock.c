/* Reads the monotonic clock, and waits for conditions by it. */
#include "core/clock.h"

#include <errno.h>
#include <time.h>

#include "kvnative/backend.h"

int64_t kvn_now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

void kvn_cond_init(pthread_cond_t *condition)
{
    pthread_condattr_t attributes;

    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(condition, &attributes);
    pthread_condattr_destroy(&attributes);
}

bool kvn_cond_wait(pthread_cond_t *condition, pthread_mutex_t *mutex, int64_t deadline_ns)
{
    int64_t ns = deadline_ns < 0 ? 0 : deadline_ns;
    struct timespec deadline = {.tv_sec = (time_t)(ns / 1000000000),
                                .tv_nsec = (long)(ns % 1000000000)};

    if (deadline_ns == KVN_FOREVER)
        return pthread_cond_wait(condition, mutex) == 0;
    return pthread_cond_timedwait(condition, mutex, &deadline) != ETIMEDOUT;
}

/* Starts threads with all signals blocked, and waits for conditions by the monotonic clock. */
#include "core/thread.h"

#include <errno.h>
#include <signal.h>
#include <time.h>

#include "kvnative/backend.h"

int kvn_thread_start(pthread_t *out, const pthread_attr_t *attributes, const char *name,
                     void *(*run)(void *), void *argument)
{
    sigset_t all, before;
    int error;

    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* the new thread inherits this one's mask */
    error = pthread_create(out, attributes, run, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error == 0 && name)
        pthread_setname_np(*out, name);
    return error;
}

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

/* Starts threads with all signals blocked. */
#include "core/thread.h"

#include <signal.h>

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

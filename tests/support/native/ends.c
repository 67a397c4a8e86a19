/* A thread that waits for a batch and reports its end. */
#include <signal.h>

#include "wrappers.h"

static void *wait_for_end(void *argument)
{
    kvn_wrapper_end *self = argument;
    kvn_report report;

    self->end->call(self->end, self->backend->vtable->wait(self->backend, self->request, KVN_FOREVER, &report));
    return NULL;
}

/* Blocks signals in the thread: they are for the threads of the program. */
int kvn_wrapper_end_begin(kvn_wrapper_end *self, kvn_backend *backend, kvn_request *request, kvn_batch_end *end)
{
    sigset_t all, before;
    int error;

    *self = (kvn_wrapper_end){.backend = end ? backend : NULL, .request = request, .end = end};
    if (!end)
        return 0;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    error = pthread_create(&self->thread, NULL, wait_for_end, self);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error)
        self->backend = NULL;
    return error;
}

void kvn_wrapper_end_join(const kvn_wrapper_end *self)
{
    if (self->backend)
        pthread_join(self->thread, NULL);
}

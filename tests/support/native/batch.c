/* The thread of a wrapper's batch: runs `run` to complete the report, and then reports the end. */
#include <signal.h>

#include "core/thread.h"
#include "wrappers.h"

static void *run(void *argument)
{
    kvn_wrapper_batch *self = argument;
    kvn_batch_end *end = self->columns.end;

    self->run(self);
    if (end)
        end->call(end, self->report->status);
    pthread_mutex_lock(&self->mutex);
    self->is_over = true;
    pthread_cond_broadcast(&self->changed);
    pthread_mutex_unlock(&self->mutex);
    return NULL;
}

static void destroy(kvn_wrapper_batch *self)
{
    pthread_cond_destroy(&self->changed);
    pthread_mutex_destroy(&self->mutex);
}

/* Blocks all signals in the new thread, so that the program's own threads handle them. */
int kvn_wrapper_batch_begin(kvn_wrapper_batch *self, const kvn_columns *columns, kvn_report *report)
{
    sigset_t all, before;
    int error;

    self->columns = *columns;
    self->report = report;
    pthread_mutex_init(&self->mutex, NULL);
    kvn_cond_init(&self->changed);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    error = pthread_create(&self->thread, NULL, run, self);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error)
        destroy(self);
    return error;
}

int kvn_wrapper_batch_sleep(kvn_wrapper_batch *self, int64_t until_ns)
{
    int why;

    pthread_mutex_lock(&self->mutex);
    while (self->why == KVN_OK && kvn_now_ns() < until_ns)
        kvn_cond_wait(&self->changed, &self->mutex, until_ns);
    why = self->why;
    pthread_mutex_unlock(&self->mutex);
    return why;
}

int kvn_wrapper_batch_wait(kvn_wrapper_batch *self, int64_t deadline_ns)
{
    int status;

    pthread_mutex_lock(&self->mutex);
    while (!self->is_over && kvn_cond_wait(&self->changed, &self->mutex, deadline_ns))
        ;
    status = self->is_over ? self->report->status : KVN_PENDING;
    pthread_mutex_unlock(&self->mutex);
    return status;
}

void kvn_wrapper_batch_stop(kvn_wrapper_batch *self, int why)
{
    pthread_mutex_lock(&self->mutex);
    if (self->why == KVN_OK)
        self->why = why;
    pthread_cond_broadcast(&self->changed);
    pthread_mutex_unlock(&self->mutex);
}

void kvn_wrapper_batch_end(kvn_wrapper_batch *self)
{
    pthread_join(self->thread, NULL);
    destroy(self);
}

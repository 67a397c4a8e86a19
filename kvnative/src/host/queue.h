/* The jobs of a pool that have unclaimed descriptors, in the order in which they are served. All under
 * the pool's mutex. */
#ifndef KVNATIVE_HOST_QUEUE_H
#define KVNATIVE_HOST_QUEUE_H

#include "core/job.h"

typedef struct kvn_queue {
    kvn_job *head;
    kvn_job *tail;
} kvn_queue;

static inline void kvn_queue_remove(kvn_queue *queue, kvn_job *job)
{
    if (!job->queued)
        return;
    if (job->previous)
        job->previous->next = job->next;
    else
        queue->head = job->next;
    if (job->next)
        job->next->previous = job->previous;
    else
        queue->tail = job->previous;
    job->next = job->previous = NULL;
    job->queued = false;
}

static inline void kvn_queue_last(kvn_queue *queue, kvn_job *job)
{
    job->previous = queue->tail;
    job->next = NULL;
    if (queue->tail)
        queue->tail->next = job;
    else
        queue->head = job;
    queue->tail = job;
    job->queued = true;
}

/* Wherever it stood. */
static inline void kvn_queue_first(kvn_queue *queue, kvn_job *job)
{
    kvn_queue_remove(queue, job);
    job->next = queue->head;
    if (queue->head)
        queue->head->previous = job;
    else
        queue->tail = job;
    queue->head = job;
    job->queued = true;
}

#endif

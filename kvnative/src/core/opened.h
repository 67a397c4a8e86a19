/* The stages of an array that are in flight, in the order in which they are looked at. All under the
 * array's mutex. */
#ifndef KVNATIVE_CORE_OPENED_H
#define KVNATIVE_CORE_OPENED_H

#include "core/staged.h"

struct kvn_opened {
    kvn_task task;
    uint64_t stage;
    kvn_opened *next; /* among those in flight */
    kvn_opened *previous;
    uint32_t users; /* threads in a call on the task, without the mutex; the last one absorbs it */
    bool submitted; /* the task may be called */
    bool driven;    /* a thread waits in it */
    bool stopping;  /* a thread aborts it */
    bool through;   /* somebody has seen its outcome */
};

static inline void kvn_opened_last(kvn_staged *staged, kvn_opened *it)
{
    it->next = NULL;
    it->previous = staged->tail;
    if (staged->tail)
        staged->tail->next = it;
    else
        staged->head = it;
    staged->tail = it;
}

static inline void kvn_opened_remove(kvn_staged *staged, kvn_opened *it)
{
    if (it->previous)
        it->previous->next = it->next;
    else
        staged->head = it->next;
    if (it->next)
        it->next->previous = it->previous;
    else
        staged->tail = it->previous;
}

#endif

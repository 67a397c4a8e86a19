/* The fields of a stream, and its queue. The lock guards all of them. */
#ifndef KVSIM_CORE_STREAM_H
#define KVSIM_CORE_STREAM_H

#include "core.h"

typedef struct sim_operation {
    sim_work work;
    void (*dispose)(void *);
    void *argument;
    uint64_t nbytes;
    sim_fault fault;
    uint64_t hangs; /* sim_num_hangs_ended when the operation was queued */
    struct sim_operation *next;
} sim_operation;

struct sim_stream {
    void *handle;
    const sim_context *context;
    int device;
    int is_default;
    unsigned references;
    pthread_t thread;
    pthread_cond_t changed; /* work was queued, or the stream aborted */
    sim_operation *first;
    sim_operation *last;
    uint64_t num_queued;
    uint64_t num_done;
    uint64_t aborts;
    int is_running;
    int is_stopping; /* number of aborts that wait for the running operation */
    int is_ending;
    int is_left; /* after sim_stream_leave: the handle is invalid, but the work continues */
    int error;   /* the first one since the last wait */
    int has_failure_mode;
    sim_context_failure *failure; /* of its context */
    struct sim_stream *next;
};

/* The number of calls of kvsim_hangs_end. */
extern uint64_t sim_num_hangs_ended;
void *sim_stream_thread(void *stream);
/* Empties the queue and returns its operations, for sim_operations_dispose after the lock is released. */
sim_operation *sim_stream_empty(sim_stream *stream);
void sim_operations_dispose(sim_operation *first);
/* Fails the context with `code` and drops its queued work. Call with the lock held; releases it meanwhile. */
void sim_context_stop(const sim_context *context, int code);
/* The last call of the thread of a stream with `is_left`. Call with the lock held. */
void sim_stream_forget(sim_stream *stream);

#endif

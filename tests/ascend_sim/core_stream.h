/* The inside of a stream: the queue, and who waits for it. All under the lock. */
#ifndef KVSIM_CORE_STREAM_H
#define KVSIM_CORE_STREAM_H

#include "core.h"

typedef struct sim_operation {
    sim_work work;
    void (*dispose)(void *);
    void *argument;
    uint64_t nbytes;
    sim_fault fault;
    uint64_t hangs; /* how often hangs were ended before it was queued */
    struct sim_operation *next;
} sim_operation;

struct sim_stream {
    void *handle;
    const sim_context *context;
    int device;
    int is_default;
    unsigned references;
    pthread_t thread;
    pthread_cond_t changed; /* work came, or an abort */
    sim_operation *first;
    sim_operation *last;
    uint64_t num_queued;
    uint64_t num_done;
    uint64_t aborts;
    int is_running;
    int is_stopping; /* an abort waits for the running operation */
    int is_ending;
    int is_left; /* destroyed, but its work goes on; its handle names nothing any more */
    int error; /* first since the last wait */
    int has_failure_mode;
    sim_context_failure *failure; /* of its context */
    struct sim_stream *next;
};

/* Returns the number of calls of kvsim_hangs_end; with the lock. */
extern uint64_t sim_num_hangs_ended;
/* The thread of the stream. */
void *sim_stream_thread(void *stream);
/* Takes all that waits out of the queue; the caller disposes of it without the lock. */
sim_operation *sim_stream_empty(sim_stream *stream);
void sim_operations_dispose(sim_operation *first);
/* With the lock, which it gives up: nothing goes on in a context that stops on failure. */
void sim_context_stop(const sim_context *context, int code);
/* With the lock, by the thread of a stream that was left, as the last it does. */
void sim_stream_forget(sim_stream *stream);

#endif

/* Streams. */
#include "core_stream.h"

#include <signal.h>
#include <stdlib.h>

#include "core_log.h"

#define MAX_STREAMS 1024
#define FAST 0x3U /* ACL_STREAM_FAST_LAUNCH and _FAST_SYNC; the other flags are not simulated */

static sim_stream *streams;
static int num_streams;
static sim_context_failure no_failure; /* for streams whose context may be gone */

/* Call with the lock held. Blocks all signals in the stream's thread, so that the program's own threads handle them. */
static sim_stream *make(sim_context *context, int is_default) {
    sim_stream *stream = calloc(1, sizeof *stream);
    if (!stream || num_streams == MAX_STREAMS) {
        free(stream);
        return NULL;
    }
    *stream = (sim_stream){.handle = sim_handle_new(), .context = context, .references = 1,
                           .device = sim_context_device(context), .is_default = is_default,
                           .failure = sim_context_failure_of(context)};
    sim_condition_init(&stream->changed);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&stream->thread, NULL, sim_stream_thread, stream);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed) {
        free(stream);
        return NULL;
    }
    stream->next = streams;
    streams = stream;
    num_streams++;
    return stream;
}

void sim_stream_hold(sim_stream *stream) { stream->references++; }

void sim_stream_drop(sim_stream *stream) {
    if (!--stream->references) {
        pthread_cond_destroy(&stream->changed);
        free(stream);
    }
}

void sim_stream_release(sim_stream *stream) {
    sim_lock();
    sim_stream_drop(stream);
    sim_unlock();
}

int sim_stream_device(const sim_stream *stream) { return stream->device; }
uint64_t sim_stream_aborts(const sim_stream *stream) { return stream->aborts; }

int sim_stream_create(uint32_t flags, void **handle) {
    if (flags & ~0x3FU) {
        return sim_error(SIM_PARAM, "flag=0x%x of a stream", flags);
    }
    if (flags & ~FAST) {
        return sim_error(SIM_UNSUPPORTED, "flag=0x%x: the simulator has no such streams", flags);
    }
    sim_lock();
    sim_context *context = sim_context_current();
    sim_stream *stream = context ? make(context, 0) : NULL;
    sim_unlock();
    if (!context) {
        return sim_error(SIM_NO_CONTEXT, "the thread has no context");
    }
    if (!stream) {
        return sim_error(SIM_NO_STREAM, "more than %d streams", MAX_STREAMS);
    }
    *handle = stream->handle;
    sim_count(SIM_COUNT_STREAMS, 1);
    return 0;
}

/* Call with the lock held. */
static int find(void *handle, sim_stream **found) {
    sim_context *context = sim_context_current();
    if (!context) {
        return sim_error(SIM_NO_CONTEXT, "the thread has no context");
    }
    if (!handle) {
        sim_stream **kept = sim_context_default_stream(context);
        *kept = *kept ? *kept : make(context, 1);
        *found = *kept;
        return *kept ? 0 : sim_error(SIM_NO_STREAM, "more than %d streams", MAX_STREAMS);
    }
    sim_stream *stream = streams;
    while (stream && stream->handle != handle) {
        stream = stream->next;
    }
    if (!stream) {
        return sim_error(SIM_HANDLE, "%p is not a stream, or it was destroyed", handle);
    }
    if (stream->context != context) {
        return sim_error(SIM_STREAM_CONTEXT, "stream %p belongs to another context", handle);
    }
    *found = stream;
    return 0;
}

int sim_stream_find(void *handle, sim_stream **stream) {
    sim_lock();
    int code = find(handle, stream);
    if (!code) {
        sim_stream_hold(*stream);
    }
    sim_unlock();
    return code;
}

void *sim_stream_context(const void *handle) {
    sim_lock();
    const sim_stream *stream = streams;
    while (stream && stream->handle != handle) {
        stream = stream->next;
    }
    void *context = stream ? sim_context_handle(stream->context) : NULL;
    sim_unlock();
    return context;
}

int sim_stream_enqueue(sim_stream *stream, const sim_fault *fault, sim_work work,
                       void (*dispose)(void *), void *argument, uint64_t nbytes) {
    sim_operation *operation = calloc(1, sizeof *operation);
    if (!operation) {
        sim_die("no host memory");
    }
    *operation = (sim_operation){.work = work, .dispose = dispose, .argument = argument,
                                 .nbytes = nbytes, .fault = fault ? *fault : (sim_fault){0, 0}};
    sim_lock();
    operation->hangs = sim_num_hangs_ended;
    int code = 0;
    if (stream->is_stopping || stream->is_ending) {
        code = sim_error(SIM_STREAM_ABORT, "the stream is being aborted or destroyed");
    } else if (stream->failure->code) {
        code = sim_error(stream->failure->code, "the context has failed and stops on failure");
    } else {
        if (stream->last) {
            stream->last->next = operation;
        } else {
            stream->first = operation;
        }
        stream->last = operation;
        stream->num_queued++;
        pthread_cond_broadcast(&stream->changed);
    }
    sim_unlock();
    if (code) {
        sim_operations_dispose(operation);
    }
    return code;
}

/* Returns and clears the first error since the last wait. A failed context returns its error each time. Call with
 * the lock held. */
static int take_error(sim_stream *stream) {
    int code = stream->failure->code ? stream->failure->code : stream->error;
    stream->error = 0;
    return code ? sim_error(code, "work on stream %p failed", stream->handle) : 0;
}

static int64_t deadline_of(int timeout_ms) {
    return timeout_ms < 0 ? -1 : sim_now_us() + (int64_t)timeout_ms * 1000;
}

static int wait_for(sim_stream *stream, int64_t deadline) {
    uint64_t target = stream->num_queued;
    uint64_t aborts = stream->aborts;
    int is_late = stream->is_stopping;
    while (!is_late && stream->num_done < target && stream->aborts == aborts) {
        if (sim_wait_until(&sim_progress, deadline)) {
            break;
        }
    }
    if (is_late || stream->aborts != aborts) {
        return sim_error(SIM_STREAM_ABORT, "stream %p was aborted", stream->handle);
    }
    if (stream->num_done < target) {
        return sim_error(SIM_STREAM_TIMEOUT, "stream %p: %llu operations are not done",
                         stream->handle, (unsigned long long)(target - stream->num_done));
    }
    return take_error(stream);
}

int sim_stream_wait(sim_stream *stream, int timeout_ms) {
    int64_t deadline = deadline_of(timeout_ms);
    sim_lock();
    int code = wait_for(stream, deadline);
    sim_unlock();
    return code;
}

int sim_streams_wait(const sim_context *context, int timeout_ms) {
    int64_t deadline = deadline_of(timeout_ms);
    sim_stream *waited[MAX_STREAMS];
    int num_waited = 0;
    int first = 0;
    sim_lock();
    for (sim_stream *stream = streams; stream; stream = stream->next) {
        if (stream->context == context) {
            sim_stream_hold(stream);
            waited[num_waited++] = stream;
        }
    }
    for (int i = 0; i < num_waited; i++) {
        int code = wait_for(waited[i], deadline);
        first = first ? first : code;
        sim_stream_drop(waited[i]);
    }
    sim_unlock();
    return first;
}

int sim_stream_is_idle(sim_stream *stream, int *idle) {
    sim_lock();
    *idle = stream->num_done == stream->num_queued;
    int code = stream->error ? sim_error(stream->error, "work on the stream failed") : 0;
    sim_unlock();
    return code;
}

int sim_stream_set_failure_mode(sim_stream *stream, int stops) {
    sim_lock();
    int code = stream->has_failure_mode ? sim_error(SIM_PARAM, "the mode was set before") : 0;
    stream->has_failure_mode = 1;
    stream->failure->stops |= stops && !code;
    sim_unlock();
    return code;
}

void sim_context_stop(const sim_context *context, int code) {
    sim_operation *dropped[MAX_STREAMS];
    int num_dropped = 0;
    sim_context_failure *failure = sim_context_failure_of(context);
    failure->code = failure->code ? failure->code : code;
    for (sim_stream *stream = streams; stream; stream = stream->next) {
        if (stream->context == context) {
            dropped[num_dropped++] = sim_stream_empty(stream);
            pthread_cond_broadcast(&stream->changed); /* also ends delays and hangs */
        }
    }
    pthread_cond_broadcast(&sim_progress);
    sim_unlock();
    for (int i = 0; i < num_dropped; i++) {
        sim_operations_dispose(dropped[i]);
    }
    sim_lock();
}

/* Drops queued operations and waits for the running one. Call with the lock held; releases it meanwhile. */
static void stop(sim_stream *stream) {
    sim_operation *dropped = sim_stream_empty(stream);
    stream->is_stopping++;
    stream->aborts++;
    pthread_cond_broadcast(&stream->changed);
    pthread_cond_broadcast(&sim_progress);
    sim_unlock();
    sim_operations_dispose(dropped);
    sim_lock();
    while (stream->is_running) {
        sim_wait_until(&sim_progress, -1);
    }
    stream->is_stopping--;
    stream->error = 0;
    pthread_cond_broadcast(&stream->changed);
}

int sim_stream_abort(sim_stream *stream) {
    sim_lock();
    stop(stream);
    sim_unlock();
    return 0;
}

static void unlink_stream(sim_stream *stream) {
    sim_stream **link = &streams;
    while (*link != stream) {
        link = &(*link)->next;
    }
    *link = stream->next;
    num_streams--;
}

void sim_stream_forget(sim_stream *stream) {
    unlink_stream(stream);
    stream->failure = &no_failure;
    pthread_cond_broadcast(&sim_progress);
    sim_stream_drop(stream);
}

int sim_stream_leave(void *handle) {
    if (!handle) {
        return sim_error(SIM_PARAM, "the default stream cannot be destroyed");
    }
    sim_lock();
    sim_stream *stream;
    int code = find(handle, &stream);
    if (!code) {
        stream->handle = NULL;
        stream->is_left = stream->is_ending = 1;
        pthread_detach(stream->thread);
        pthread_cond_broadcast(&stream->changed);
    }
    sim_unlock();
    sim_count(SIM_COUNT_STREAMS, code ? 0 : -1);
    return code;
}

/* Waits until the thread of a stream with `is_left` has unlinked it. Call with the lock held; releases it meanwhile. */
static void await_end(sim_stream *stream, int force) {
    sim_stream_hold(stream);
    if (force) {
        stop(stream);
        stream->aborts++;
    }
    for (;;) {
        sim_stream *listed = streams;
        while (listed && listed != stream) {
            listed = listed->next;
        }
        if (!listed) {
            break;
        }
        sim_wait_until(&sim_progress, -1);
    }
    sim_stream_drop(stream);
}

/* Destroys a stream, after its work unless `force`. Call with the lock held; releases it meanwhile. */
static void end(sim_stream *stream, int force) {
    if (stream->is_left) {
        await_end(stream, force);
        return;
    }
    unlink_stream(stream);
    int is_counted = !stream->is_default;
    if (force) {
        stop(stream);
    }
    stream->is_ending = 1;
    pthread_cond_broadcast(&stream->changed);
    pthread_t thread = stream->thread;
    sim_unlock();
    pthread_join(thread, NULL);
    sim_count(SIM_COUNT_STREAMS, is_counted ? -1 : 0);
    sim_lock();
    stream->aborts += (uint64_t)force;
    stream->failure = &no_failure;
    pthread_cond_broadcast(&sim_progress);
    sim_stream_drop(stream);
}

int sim_stream_destroy(void *handle, int force) {
    if (!handle) {
        return sim_error(SIM_PARAM, "the default stream cannot be destroyed");
    }
    sim_lock();
    sim_stream *stream;
    int code = find(handle, &stream);
    if (!code) {
        end(stream, force);
    }
    sim_unlock();
    return code;
}

int sim_context_wait_for(void *handle) {
    sim_lock();
    const sim_context *context = sim_context_find(handle);
    sim_unlock();
    return context ? sim_streams_wait(context, -1) : sim_error(SIM_NO_CONTEXT, "it is gone");
}

int sim_streams_are_idle(void *handle) {
    int idle = 1;
    sim_lock();
    const sim_context *context = sim_context_find(handle);
    for (const sim_stream *stream = streams; stream; stream = stream->next) {
        idle &= stream->context != context || stream->num_done == stream->num_queued;
    }
    sim_unlock();
    return idle;
}

int sim_context_streams(void *handle) {
    int count = 0;
    sim_lock();
    const sim_context *context = sim_context_find(handle);
    for (const sim_stream *stream = streams; stream; stream = stream->next) {
        count += stream->context == context && !stream->is_default && !stream->is_left;
    }
    sim_unlock();
    return count;
}

void kvsim_hangs_end(void) {
    sim_lock();
    sim_num_hangs_ended++;
    for (sim_stream *stream = streams; stream; stream = stream->next) {
        pthread_cond_broadcast(&stream->changed);
    }
    sim_unlock();
}

void sim_streams_destroy(const sim_context *context, int force) {
    sim_lock();
    for (;;) {
        sim_stream *stream = streams;
        while (stream && stream->context != context) {
            stream = stream->next;
        }
        if (!stream) {
            break;
        }
        end(stream, force);
    }
    sim_unlock();
}

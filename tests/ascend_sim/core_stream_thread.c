/* The thread of a stream: runs one operation after the other, for the duration given by latency and bandwidth. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "core_log.h"
#include "core_stream.h"

#define PIECE ((uint64_t)1 << 20)

pthread_mutex_t sim_mutex = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t sim_progress;
uint64_t sim_num_hangs_ended;

void sim_lock(void) { pthread_mutex_lock(&sim_mutex); }
void sim_unlock(void) { pthread_mutex_unlock(&sim_mutex); }

void sim_condition_init(pthread_cond_t *condition) {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(condition, &attributes);
    pthread_condattr_destroy(&attributes);
}

__attribute__((constructor)) static void init_progress(void) { sim_condition_init(&sim_progress); }

int64_t sim_now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

int sim_wait_until(pthread_cond_t *condition, int64_t deadline_us) {
    if (deadline_us < 0) {
        pthread_cond_wait(condition, &sim_mutex);
        return 0;
    }
    struct timespec at = {deadline_us / 1000000, deadline_us % 1000000 * 1000};
    return pthread_cond_timedwait(condition, &sim_mutex, &at) == ETIMEDOUT;
}

/* Call with the lock held. */
static int is_stopped(const sim_stream *stream) {
    return stream->is_stopping || stream->failure->code;
}

int sim_stream_stopped(sim_stream *stream) {
    sim_lock();
    int stopped = is_stopped(stream);
    sim_unlock();
    return stopped;
}

int sim_stream_pause(sim_stream *stream, int64_t microseconds) {
    int64_t deadline = microseconds < 0 ? -1 : sim_now_us() + microseconds;
    sim_lock();
    while (!is_stopped(stream) && (deadline < 0 || sim_now_us() < deadline)) {
        sim_wait_until(&stream->changed, deadline);
    }
    int stopped = is_stopped(stream);
    sim_unlock();
    return stopped;
}

/* Returns 1 after an abort or failure, and 0 after kvsim_hangs_end. */
static int hang(sim_stream *stream, uint64_t ended) {
    sim_lock();
    while (!is_stopped(stream) && sim_num_hangs_ended == ended) {
        sim_wait_until(&stream->changed, -1);
    }
    int stopped = is_stopped(stream);
    sim_unlock();
    return stopped;
}

int sim_stream_copy(sim_stream *stream, void *target, const void *source, uint64_t nbytes) {
    for (uint64_t done = 0; done < nbytes; done += PIECE) {
        uint64_t piece = nbytes - done < PIECE ? nbytes - done : PIECE;
        memmove((char *)target + done, (const char *)source + done, piece);
        if (done + piece < nbytes && sim_stream_stopped(stream)) {
            return 1;
        }
    }
    return 0;
}

int64_t sim_duration_us(uint64_t nbytes) {
    sim_settings settings = sim_settings_now();
    if (!nbytes) {
        return 0; /* events and host functions take no time */
    }
    double transfer = settings.bandwidth ? 1e6 * (double)nbytes / (double)settings.bandwidth : 0;
    return settings.latency_us + (int64_t)transfer;
}

/* Runs the operation and returns the code for the next synchronization. Call without the lock. */
static int perform(sim_stream *stream, sim_operation *operation) {
    int64_t duration = sim_duration_us(operation->nbytes);
    if (operation->fault.kind == SIM_FAULT_HANG && hang(stream, operation->hangs)) {
        return 0;
    }
    if (duration && sim_stream_pause(stream, duration)) {
        return 0;
    }
    if (operation->fault.kind == SIM_FAULT_SYNC) {
        return operation->fault.code;
    }
    int code = operation->work(operation->argument, stream);
    return operation->fault.kind == SIM_FAULT_PARTIAL ? operation->fault.code : code;
}

sim_operation *sim_stream_empty(sim_stream *stream) {
    sim_operation *dropped = stream->first;
    for (sim_operation *operation = dropped; operation; operation = operation->next) {
        stream->num_done++;
    }
    stream->first = stream->last = NULL;
    return dropped;
}

void sim_operations_dispose(sim_operation *operation) {
    while (operation) {
        sim_operation *next = operation->next;
        if (operation->dispose) {
            operation->dispose(operation->argument);
        }
        free(operation);
        operation = next;
    }
}

/* Call with the lock held; releases it while the operation runs. */
static void run_first(sim_stream *stream) {
    sim_operation *operation = stream->first;
    stream->first = operation->next;
    stream->last = stream->first ? stream->last : NULL;
    operation->next = NULL;
    stream->is_running = 1;
    sim_unlock();
    int code = perform(stream, operation);
    if (code) {
        sim_note("failed", "\"stream\":%llu,\"shown\":%d", (unsigned long long)stream->handle, code);
    }
    sim_operations_dispose(operation);
    sim_lock();
    stream->is_running = 0;
    stream->num_done++;
    if (code && !stream->is_stopping) {
        stream->error = stream->error ? stream->error : code;
        if (stream->failure->stops) {
            sim_context_stop(stream->context, code);
        }
    }
    pthread_cond_broadcast(&sim_progress);
}

void *sim_stream_thread(void *argument) {
    sim_stream *stream = argument;
    pthread_setname_np(pthread_self(), "kvsim-stream"); /* the default is the name of the creating thread */
    sim_lock();
    for (;;) {
        if (stream->first && !stream->is_stopping) {
            run_first(stream);
        } else if (stream->is_ending) {
            break;
        } else {
            sim_wait_until(&stream->changed, -1);
        }
    }
    if (stream->is_left) {
        sim_stream_forget(stream);
    }
    sim_unlock();
    return NULL;
}

/* Capture of streams into graphs, and the calls that a capture forbids. No captured work is stored, and no graph can be
 * launched. */
#include <string.h>

#include "cuda_sim.h"

CUDA cuStreamBeginCapture_v2(void *stream, int mode);
CUDA cuStreamEndCapture(void *stream, void **graph);
CUDA cuStreamIsCapturing(void *stream, int *status);
CUDA cuGraphDestroy(void *graph);

enum { MODE_GLOBAL, MODE_THREAD, MODE_RELAXED }; /* CUstreamCaptureMode */
enum { NOT_CAPTURED, CAPTURED, SPOILT };         /* CUstreamCaptureStatus */

#define MANY 64

typedef struct {
    void *stream; /* NULL: a free row */
    void *context;
    int mode;
    int is_spoilt;
    pthread_t thread;
} capture;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static capture captures[MANY];
static struct {
    void *event; /* NULL: a free row */
    void *stream;
} events[MANY]; /* whose latest record is on a captured stream */
static void *blocking[MANY]; /* streams ordered with the default stream */

/* Returns NULL if the stream is not captured. Call with the mutex held. */
static capture *find(const void *stream) {
    for (size_t i = 0; stream && i < MANY; i++) {
        if (captures[i].stream == stream) {
            return &captures[i];
        }
    }
    return NULL;
}

static int is_legacy(const void *stream) { return (uintptr_t)stream <= 1; }

/* Finds a capture of a stream that is ordered with the context's default stream. Call with the mutex held. */
static capture *find_implicit(const void *context) {
    for (size_t i = 0; i < MANY; i++) {
        for (size_t j = 0; captures[i].stream && captures[i].context == context && j < MANY; j++) {
            if (blocking[j] == captures[i].stream) {
                return &captures[i];
            }
        }
    }
    return NULL;
}

void cuda_capture_note_stream(void *stream, int is_blocking) {
    pthread_mutex_lock(&mutex);
    for (size_t i = 0; i < MANY; i++) {
        if (blocking[i] == (is_blocking ? NULL : stream)) {
            blocking[i] = is_blocking ? stream : NULL;
            break;
        }
    }
    pthread_mutex_unlock(&mutex);
}

int cuda_capture_forbids(int thread_mode) {
    int forbids = 0;
    pthread_mutex_lock(&mutex);
    for (size_t i = 0; i < MANY; i++) {
        const capture *it = &captures[i];
        int is_here = it->stream && it->mode != MODE_RELAXED && pthread_equal(it->thread, pthread_self());
        int is_global = it->stream && it->mode == MODE_GLOBAL && thread_mode == MODE_GLOBAL;
        forbids = forbids || is_global || (is_here && thread_mode != MODE_RELAXED);
    }
    pthread_mutex_unlock(&mutex);
    return forbids;
}

int cuda_capture_check_stream(const cuda_context *context, void *stream) {
    pthread_mutex_lock(&mutex);
    capture *it = is_legacy(stream) ? find_implicit(context->handle) : find(stream);
    if (it) {
        it->is_spoilt = 1;
    }
    pthread_mutex_unlock(&mutex);
    if (!it) {
        return 0;
    }
    sim_violation("%p is used while it, or a stream that it is ordered with, is captured", stream);
    return sim_error(is_legacy(stream) ? CAPTURE_IMPLICIT : CAPTURE_UNSUPPORTED, "%p is captured", stream);
}

/* Returns the row of the event, or MANY; for NULL, a free row. Call with the mutex held. */
static size_t row_of(const void *event) {
    size_t row = 0;
    while (row < MANY && events[row].event != event) {
        row++;
    }
    return row;
}

int cuda_capture_record(void *event, void *stream) {
    pthread_mutex_lock(&mutex);
    int is_captured = find(stream) != NULL;
    size_t row = row_of(event);
    row = row == MANY && is_captured ? row_of(NULL) : row;
    if (row < MANY) {
        events[row].event = is_captured ? event : NULL;
        events[row].stream = stream;
    }
    pthread_mutex_unlock(&mutex);
    return is_captured;
}

int cuda_capture_check_event(void *event) {
    pthread_mutex_lock(&mutex);
    size_t row = row_of(event);
    capture *it = row < MANY ? find(events[row].stream) : NULL;
    if (it) {
        it->is_spoilt = 1;
    }
    pthread_mutex_unlock(&mutex);
    return row < MANY ? sim_error(CAPTURED_EVENT, "event %p is one of a graph", event) : 0;
}

int cuda_capture_check_wait(void *stream, void *event) {
    pthread_mutex_lock(&mutex);
    size_t row = row_of(event);
    capture *its = find(stream);
    capture *other = row < MANY ? find(events[row].stream) : NULL;
    int crosses = row < MANY ? !its || its != other : its != NULL;
    if (its && crosses) {
        its->is_spoilt = 1;
    }
    if (other && crosses) {
        other->is_spoilt = 1; /* the waiting stream would join this capture, but never be joined to its origin */
    }
    pthread_mutex_unlock(&mutex);
    if (!crosses) {
        return 0;
    }
    sim_violation("a wait of %p for %p crosses the boundary of a capture", stream, event);
    return sim_error(CAPTURE_ISOLATION, "stream %p, event %p", stream, event);
}

CUDA cuStreamBeginCapture_v2(void *stream, int mode) {
    sim_call call;
    cuda_context *context;
    sim_stream *found = NULL;
    int code = cuda_enter_context(&call, __func__, &context);
    if (!code && is_legacy(stream)) {
        code = sim_error(CAPTURE_UNSUPPORTED, "the default stream cannot be captured");
    } else if (!code && (mode < MODE_GLOBAL || mode > MODE_RELAXED)) {
        code = sim_error(INVALID_VALUE, "mode=%d: 0, 1 or 2", mode);
    }
    code = code ? code : cuda_stream_find(context, stream, &found);
    if (found) {
        sim_stream_release(found);
    }
    if (!code) {
        pthread_mutex_lock(&mutex);
        size_t row = 0;
        while (captures[row].stream) {
            row++; /* never full: a test captures few streams */
        }
        captures[row] = (capture){stream, context->handle, mode, 0, pthread_self()};
        pthread_mutex_unlock(&mutex);
    }
    return cuda_leave(&call, code, "\"stream\":%llu,\"mode\":%d", ID(stream), mode);
}

CUDA cuStreamEndCapture(void *stream, void **graph) {
    sim_call call;
    cuda_context *context;
    int code = cuda_enter_context(&call, __func__, &context);
    code = CUDA_CHECK(code, graph);
    if (!code) {
        *graph = NULL;
        pthread_mutex_lock(&mutex);
        capture *it = find(stream);
        if (!it) {
            code = ILLEGAL_STATE;
        } else if (it->mode != MODE_RELAXED && !pthread_equal(it->thread, pthread_self())) {
            code = CAPTURE_WRONG_THREAD;
        } else {
            code = it->is_spoilt ? CAPTURE_INVALIDATED : 0;
            *graph = code ? NULL : stream; /* any handle */
            memset(it, 0, sizeof *it);
        }
        pthread_mutex_unlock(&mutex);
        code = code ? sim_error(code, "the capture of stream %p", stream) : 0;
    }
    return cuda_leave(&call, code, "\"stream\":%llu", ID(stream));
}

/* Asking does not spoil the capture. */
CUDA cuStreamIsCapturing(void *stream, int *status) {
    sim_call call;
    cuda_context *context;
    sim_stream *found = NULL;
    int code = cuda_enter_context(&call, __func__, &context);
    code = CUDA_CHECK(code, status);
    if (!code) {
        pthread_mutex_lock(&mutex);
        const capture *it = find(stream);
        int is_implicit = is_legacy(stream) && find_implicit(context->handle);
        *status = !it ? NOT_CAPTURED : it->is_spoilt ? SPOILT : CAPTURED;
        pthread_mutex_unlock(&mutex);
        code = is_implicit ? sim_error(CAPTURE_IMPLICIT, "the default stream") : 0;
        code = code || it ? code : cuda_stream_find(context, stream, &found);
    }
    if (found) {
        sim_stream_release(found);
    }
    return cuda_leave(&call, code, "\"stream\":%llu", ID(stream));
}

CUDA cuGraphDestroy(void *graph) {
    sim_call call;
    int code = cuda_enter(&call, __func__);
    return cuda_leave(&call, code, "\"graph\":%llu", ID(graph));
}

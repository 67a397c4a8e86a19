/* Streams and events. */
#include "cuda_sim.h"

CUDA cuStreamCreate(void **stream, unsigned flags);
CUDA cuStreamDestroy_v2(void *stream);
CUDA cuStreamQuery(void *stream);
CUDA cuStreamSynchronize(void *stream);
CUDA cuStreamWaitEvent(void *stream, void *event, unsigned flags);
CUDA cuStreamGetCtx(void *stream, void **context);
CUDA cuEventCreate(void **event, unsigned flags);
CUDA cuEventDestroy_v2(void *event);
CUDA cuEventRecord(void *event, void *stream);
CUDA cuEventQuery(void *event);
CUDA cuEventSynchronize(void *event);

#define PER_THREAD ((void *)(uintptr_t)2) /* CU_STREAM_PER_THREAD; CU_STREAM_LEGACY is 1 */

int cuda_stream_find(const cuda_context *context, void *handle, sim_stream **stream) {
    *stream = NULL;
    int captured = handle == PER_THREAD ? 0 : cuda_capture_check_stream(context, handle);
    if (captured) {
        return captured;
    }
    if (handle == PER_THREAD) {
        return sim_error(NOT_SUPPORTED, "the simulator has no stream of each thread");
    }
    int code = sim_stream_find((uintptr_t)handle == 1 ? NULL : handle, stream);
    if (code) {
        *stream = NULL;
        sim_violation("%p is used as a stream of the context that is current", handle);
    }
    return code;
}

CUDA cuStreamCreate(void **stream, unsigned flags) {
    sim_call call;
    cuda_context *context;
    int code = cuda_enter_context(&call, __func__, &context);
    code = CUDA_CHECK(code, stream);
    if (!code && flags > 1) {
        code = sim_error(INVALID_VALUE, "Flags=%u: 0 or 1", flags);
    }
    code = code ? code : sim_stream_create(0, stream);
    if (!code && flags == 0) {
        cuda_capture_note_stream(*stream, 1);
    }
    return cuda_leave(&call, code, "\"stream\":%llu,\"flags\":%u", code ? 0 : ID(*stream), flags);
}

/* Returns at once; the work continues. */
CUDA cuStreamDestroy_v2(void *handle) {
    sim_call call;
    cuda_context *context;
    sim_stream *stream;
    int code = cuda_enter_context(&call, __func__, &context);
    if (!code && (uintptr_t)handle <= 2) {
        code = sim_error(INVALID_HANDLE, "the default stream cannot be destroyed");
    }
    code = code ? code : cuda_stream_find(context, handle, &stream);
    if (!code) {
        sim_stream_release(stream);
        cuda_capture_note_stream(handle, 0);
        code = sim_stream_leave(handle);
    }
    return cuda_leave(&call, code, "\"stream\":%llu", ID(handle));
}

/* The special streams have the context of the thread. */
CUDA cuStreamGetCtx(void *handle, void **out) {
    sim_call call;
    cuda_context *context = NULL;
    int is_special = (uintptr_t)handle <= 2;
    int code = is_special ? cuda_enter_context(&call, __func__, &context) : cuda_enter(&call, __func__);
    code = CUDA_CHECK(code, out);
    if (!code) {
        *out = is_special ? context->handle : sim_stream_context(handle);
        if (!*out) {
            sim_violation("%p is used as a stream, but is none", handle);
            code = sim_error(INVALID_HANDLE, "%p is not a stream, or it was destroyed", handle);
        }
    }
    return cuda_leave(&call, code, "\"stream\":%llu", ID(handle));
}

CUDA cuStreamQuery(void *handle) {
    sim_call call;
    cuda_context *context;
    sim_stream *stream;
    int code = cuda_enter_context(&call, __func__, &context);
    code = code ? code : cuda_stream_find(context, handle, &stream);
    if (!code) {
        int idle;
        sim_stream_is_idle(stream, &idle);
        sim_stream_release(stream);
        code = sim_context_failed(context->handle);
        code = code ? code : idle ? 0 : NOT_READY;
    }
    return cuda_leave(&call, code, "\"stream\":%llu", ID(handle));
}

/* An error of the context takes precedence over the result of a wait. */
static int or_lost(const cuda_context *context, int code) {
    int lost = sim_context_failed(context->handle);
    return lost ? lost : code;
}

CUDA cuStreamSynchronize(void *handle) {
    sim_call call;
    cuda_context *context;
    sim_stream *stream;
    int code = cuda_enter_context(&call, __func__, &context);
    code = code ? code : cuda_stream_find(context, handle, &stream);
    if (!code) {
        code = or_lost(context, sim_stream_wait(stream, -1));
        sim_stream_release(stream);
    }
    return cuda_leave(&call, code, "\"stream\":%llu", ID(handle));
}

CUDA cuEventCreate(void **event, unsigned flags) {
    sim_call call;
    cuda_context *context;
    int code = cuda_enter_context(&call, __func__, &context);
    code = CUDA_CHECK(code, event);
    if (!code && (flags & ~7U || (flags & 6U) == 4)) {
        code = sim_error(INVALID_VALUE, "Flags=0x%x: between processes only without timing", flags);
    }
    code = code ? code : sim_event_create(SIM_EVENT_EX, SIM_EVENT_FLAG_SYNC, event);
    return cuda_leave(&call, code, "\"event\":%llu,\"flags\":%u", code ? 0 : ID(*event), flags);
}

/* Returns at once, even while streams wait for the event. */
CUDA cuEventDestroy_v2(void *event) {
    sim_call call;
    cuda_context *context;
    int code = cuda_enter_context(&call, __func__, &context);
    if (!code) {
        cuda_capture_record(event, NULL);
    }
    code = code ? code : sim_event_destroy(event);
    if (code == SIM_HANDLE) {
        sim_violation("%p is destroyed as an event, but is none", event);
    }
    return cuda_leave(&call, code, "\"event\":%llu", ID(event));
}

static int check_event(void *event) {
    if (!sim_event_context(event)) {
        sim_violation("%p is used as an event, but is none", event);
        return sim_error(INVALID_HANDLE, "%p is not an event, or it was destroyed", event);
    }
    return 0;
}

CUDA cuEventRecord(void *event, void *handle) {
    sim_call call;
    cuda_context *context;
    sim_stream *stream = NULL;
    int code = cuda_enter_context(&call, __func__, &context);
    code = code ? code : check_event(event);
    if (!code && cuda_capture_record(event, handle)) {
        return cuda_leave(&call, 0, "\"event\":%llu,\"stream\":%llu", ID(event), ID(handle));
    }
    code = code ? code : cuda_stream_find(context, handle, &stream);
    if (!code && sim_event_context(event) != context->handle) {
        code = sim_error(INVALID_HANDLE, "the event is of another context than the stream");
    }
    code = code ? code : sim_event_record(event, stream, &call.fault);
    if (stream) {
        sim_stream_release(stream);
    }
    return cuda_leave(&call, code, "\"event\":%llu,\"stream\":%llu", ID(event), ID(handle));
}

/* The event may be of another context or device. */
CUDA cuStreamWaitEvent(void *handle, void *event, unsigned flags) {
    sim_call call;
    cuda_context *context;
    sim_stream *stream = NULL;
    int code = cuda_enter_context(&call, __func__, &context);
    if (!code && flags) {
        code = sim_error(INVALID_VALUE, "Flags=%u: 0", flags);
    }
    code = code ? code : check_event(event);
    code = code ? code : cuda_capture_check_wait(handle, event);
    code = code ? code : cuda_stream_find(context, handle, &stream);
    code = code ? code : sim_event_stream_wait(event, stream, &call.fault);
    if (stream) {
        sim_stream_release(stream);
    }
    return cuda_leave(&call, code, "\"event\":%llu,\"stream\":%llu", ID(event), ID(handle));
}

CUDA cuEventQuery(void *event) {
    sim_call call;
    cuda_context *context;
    int done = 0;
    int code = cuda_enter_context(&call, __func__, &context);
    code = code ? code : check_event(event);
    code = code ? code : cuda_capture_check_event(event);
    code = code ? code : sim_event_is_complete(event, &done);
    if (!code && !done) {
        code = or_lost(context, NOT_READY);
    }
    return cuda_leave(&call, code, "\"event\":%llu", ID(event));
}

CUDA cuEventSynchronize(void *event) {
    sim_call call;
    cuda_context *context;
    int code = cuda_enter_context(&call, __func__, &context);
    code = code ? code : check_event(event);
    code = code ? code : cuda_capture_check_event(event);
    code = code ? code : or_lost(context, sim_event_synchronize(event, -1));
    return cuda_leave(&call, code, "\"event\":%llu", ID(event));
}

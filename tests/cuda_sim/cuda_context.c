/* Contexts: each thread has a stack of them. The primary context of a device counts its users. */
#include <stdlib.h>
#include <string.h>

#include "cuda_sim.h"

CUDA cuDevicePrimaryCtxRetain(void **context, int device);
CUDA cuDevicePrimaryCtxRelease_v2(int device);
CUDA cuCtxCreate_v2(void **context, unsigned flags, int device);
CUDA cuCtxDestroy_v2(void *context);
CUDA cuCtxGetCurrent(void **context);
CUDA cuCtxSetCurrent(void *context);
CUDA cuCtxPushCurrent_v2(void *context);
CUDA cuCtxPopCurrent_v2(void **context);
CUDA cuCtxGetDevice(int *device);
CUDA cuCtxSynchronize(void);
CUDA cuCtxEnablePeerAccess(void *peer, unsigned flags);

#define DEPTH 16

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static cuda_context *contexts;
static cuda_context *primaries[64]; /* by physical number */
static _Thread_local void *stack[DEPTH];
static _Thread_local int depth;

static void *top(void) { return depth ? stack[depth - 1] : NULL; }

/* Makes the top of the stack current in the core, which creates streams and events. */
static void tell_core(void) {
    if (sim_context_set(top())) {
        sim_context_set(NULL); /* the context was destroyed */
    }
}

static int push(void *handle) {
    if (depth == DEPTH) {
        return sim_error(OUT_OF_MEMORY, "more than %d contexts on a thread's stack", DEPTH);
    }
    stack[depth++] = handle;
    tell_core();
    return 0;
}

static void pop(void) {
    depth -= depth > 0;
    tell_core();
}

/* Finds living and destroyed contexts. Call with the mutex held. */
static cuda_context *row_of(const void *handle) {
    cuda_context *context = contexts;
    while (context && context->handle != handle) {
        context = context->next;
    }
    return context;
}

cuda_context *cuda_context_find(const void *handle) {
    pthread_mutex_lock(&mutex);
    cuda_context *context = handle ? row_of(handle) : NULL;
    context = context && context->is_gone ? NULL : context;
    pthread_mutex_unlock(&mutex);
    return context;
}

int cuda_context_reaches(const cuda_context *context, const void *owner) {
    pthread_mutex_lock(&mutex);
    int found = context == owner;
    for (int i = 0; i < context->num_peers && !found; i++) {
        found = context->peers[i] == owner && !context->peers[i]->is_gone;
    }
    pthread_mutex_unlock(&mutex);
    return found;
}

int cuda_enter_context(sim_call *call, const char *name, cuda_context **context) {
    int code = cuda_enter(call, name);
    *context = NULL;
    if (code && call->fault.kind == SIM_FAULT_CODE && cuda_is_sticky(code) && top()) {
        sim_context_fail(top(), code); /* an error of this kind is the context's, not only the call's */
    }
    if (code) {
        return code;
    }
    if (!top()) {
        return sim_error(INVALID_CONTEXT, "%s: the thread has no context", name);
    }
    *context = cuda_context_find(top());
    if (!*context) {
        sim_violation("%s in a context that was destroyed", name);
        return sim_error(CONTEXT_IS_DESTROYED, "%s: the thread's context was destroyed", name);
    }
    tell_core();
    code = sim_context_failed(top());
    return code ? sim_error(code, "%s: the context was lost before", name) : 0;
}

/* Call with the mutex held. */
static cuda_context *make(int device, int is_primary) {
    cuda_context *context = calloc(1, sizeof *context);
    if (!context || sim_context_create(device, &context->handle)) {
        abort();
    }
    sim_context_stop_on_failure(context->handle);
    context->device = device;
    context->is_primary = is_primary;
    context->next = contexts;
    contexts = context;
    return context;
}

static void free_memory(const cuda_context *context, int is_lost) {
    sim_memory_kind kind;
    uint64_t address;
    int count = 0;
    while ((address = sim_memory_owned(context, &kind))) {
        sim_memory_free(kind, address);
        count++;
    }
    if (count && !is_lost) {
        sim_violation("a context was destroyed with %d allocations or registrations", count);
    }
}

/* Destroys a context with `is_gone`. Call without the mutex. */
static void end(cuda_context *context) {
    int is_lost = sim_context_failed(context->handle) != 0;
    int num_streams = sim_context_streams(context->handle);
    if (!is_lost && !sim_streams_are_idle(context->handle)) {
        sim_violation("a context was destroyed while work goes on in it");
    }
    if (!is_lost && num_streams) {
        sim_violation("a context was destroyed with %d streams", num_streams);
    }
    cuda_modules_drop(context);
    sim_context_destroy(context->handle, 1);
    cuda_ipc_drop(context);
    free_memory(context, is_lost);
}

CUDA cuDevicePrimaryCtxRetain(void **context, int device) {
    sim_call call;
    int code = cuda_enter(&call, __func__);
    int physical = cuda_physical(device);
    code = CUDA_CHECK(code, context);
    if (!code && physical < 0) {
        code = sim_error(INVALID_DEVICE, "device %d: there are %d", device, cuda_num_devices());
    }
    if (!code) {
        pthread_mutex_lock(&mutex);
        if (!primaries[physical]) {
            primaries[physical] = make(physical, 1);
        }
        primaries[physical]->uses++;
        *context = primaries[physical]->handle;
        pthread_mutex_unlock(&mutex);
        tell_core();
    }
    return cuda_leave(&call, code, "\"device\":%d", device);
}

CUDA cuDevicePrimaryCtxRelease_v2(int device) {
    sim_call call;
    int code = cuda_enter(&call, __func__);
    int physical = cuda_physical(device);
    cuda_context *ended = NULL;
    if (!code && physical < 0) {
        code = sim_error(INVALID_DEVICE, "device %d: there are %d", device, cuda_num_devices());
    }
    if (!code) {
        pthread_mutex_lock(&mutex);
        cuda_context *primary = primaries[physical];
        if (!primary) {
            code = sim_error(INVALID_CONTEXT, "device %d was released as often as retained", device);
        } else if (!--primary->uses) {
            primaries[physical] = NULL;
            primary->is_gone = 1;
            ended = primary;
        }
        pthread_mutex_unlock(&mutex);
    }
    if (ended) {
        end(ended);
        tell_core();
    }
    return cuda_leave(&call, code, "\"device\":%d,\"reset\":%s", device, ended ? "true" : "false");
}

CUDA cuCtxCreate_v2(void **context, unsigned flags, int device) {
    sim_call call;
    int code = cuda_enter(&call, __func__);
    int physical = cuda_physical(device);
    code = CUDA_CHECK(code, context);
    if (!code && physical < 0) {
        code = sim_error(INVALID_DEVICE, "device %d: there are %d", device, cuda_num_devices());
    }
    if (!code && (flags & ~0xFFU || (flags & 7U) == 3 || (flags & 7U) > 4)) {
        code = sim_error(INVALID_VALUE, "flags=0x%x", flags);
    }
    if (!code) {
        pthread_mutex_lock(&mutex);
        *context = make(physical, 0)->handle;
        pthread_mutex_unlock(&mutex);
        code = push(*context);
    }
    return cuda_leave(&call, code, "\"device\":%d,\"flags\":%u", device, flags);
}

CUDA cuCtxDestroy_v2(void *handle) {
    sim_call call;
    int code = cuda_enter(&call, __func__);
    code = CUDA_CHECK(code, handle);
    cuda_context *context = code ? NULL : cuda_context_find(handle);
    if (!code && (!context || context->is_primary)) {
        sim_violation("cuCtxDestroy of %s", context ? "a primary context" : "an invalid context");
        code = sim_error(INVALID_CONTEXT, "%p is not a context of cuCtxCreate", handle);
    }
    if (!code) {
        pthread_mutex_lock(&mutex);
        context->is_gone = 1;
        pthread_mutex_unlock(&mutex);
        end(context);
        if (top() == handle) {
            pop();
        }
    }
    return cuda_leave(&call, code, "\"context\":%llu", ID(handle));
}

CUDA cuCtxGetCurrent(void **context) {
    sim_call call;
    int code = cuda_enter(&call, __func__);
    code = CUDA_CHECK(code, context);
    if (!code) {
        *context = top();
    }
    return cuda_leave(&call, code, "%s", "");
}

static int check_context(void *handle) {
    if (!cuda_context_find(handle)) {
        sim_violation("what is made current was never a context, or was destroyed");
        return sim_error(INVALID_CONTEXT, "%p is not a context", handle);
    }
    return 0;
}

CUDA cuCtxSetCurrent(void *handle) {
    sim_call call;
    int code = cuda_enter(&call, __func__);
    if (!code && handle) {
        code = check_context(handle);
    }
    if (!code && !handle) {
        pop();
    } else if (!code && depth) {
        stack[depth - 1] = handle;
        tell_core();
    } else if (!code) {
        code = push(handle);
    }
    return cuda_leave(&call, code, "\"context\":%llu", ID(handle));
}

CUDA cuCtxPushCurrent_v2(void *handle) {
    sim_call call;
    int code = cuda_enter(&call, __func__);
    code = code ? code : check_context(handle);
    code = code ? code : push(handle);
    return cuda_leave(&call, code, "\"context\":%llu", ID(handle));
}

CUDA cuCtxPopCurrent_v2(void **handle) {
    sim_call call;
    int code = cuda_enter(&call, __func__);
    if (!code && !depth) {
        code = sim_error(INVALID_CONTEXT, "the stack is empty");
    }
    if (!code) {
        if (handle) {
            *handle = top();
        }
        pop();
    }
    return cuda_leave(&call, code, "%s", "");
}

CUDA cuCtxGetDevice(int *device) {
    sim_call call;
    cuda_context *context;
    int code = cuda_enter_context(&call, __func__, &context);
    code = CUDA_CHECK(code, device);
    if (!code) {
        *device = cuda_ordinal(context->device);
    }
    return cuda_leave(&call, code, "%s", "");
}

CUDA cuCtxSynchronize(void) {
    sim_call call;
    cuda_context *context;
    int code = cuda_enter_context(&call, __func__, &context);
    code = code ? code : sim_context_wait_for(context->handle);
    return cuda_leave(&call, code, "%s", "");
}

CUDA cuCtxEnablePeerAccess(void *handle, unsigned flags) {
    sim_call call;
    cuda_context *context;
    int code = cuda_enter_context(&call, __func__, &context);
    cuda_context *peer = code ? NULL : cuda_context_find(handle);
    if (!code && flags) {
        code = sim_error(INVALID_VALUE, "Flags=%u: 0", flags);
    } else if (!code && (!peer || peer == context)) {
        code = sim_error(INVALID_CONTEXT, "%p is not another context", handle);
    } else if (!code && !cuda_can_reach(context->device, peer->device)) {
        code = sim_error(PEER_UNSUPPORTED, "from device %d to %d", context->device, peer->device);
    } else if (!code && cuda_context_reaches(context, peer)) {
        code = sim_error(PEER_ALREADY_ENABLED, "it was enabled before");
    } else if (!code && context->num_peers == 64) {
        code = sim_error(711, "more than 64 peers");
    }
    if (!code) {
        pthread_mutex_lock(&mutex);
        context->peers[context->num_peers++] = peer;
        pthread_mutex_unlock(&mutex);
    }
    return cuda_leave(&call, code, "\"peer\":%llu", ID(handle));
}

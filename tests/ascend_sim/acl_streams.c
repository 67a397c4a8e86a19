/* Streams. */
#include <stdlib.h>

#include "acl.h"

ACL aclrtCreateStream(void **stream);
ACL aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flags);
ACL aclrtDestroyStream(void *stream);
ACL aclrtDestroyStreamForce(void *stream);
ACL aclrtSynchronizeStream(void *stream);
ACL aclrtSynchronizeStreamWithTimeout(void *stream, int32_t timeout);
ACL aclrtStreamQuery(void *stream, int32_t *status);
ACL aclrtStreamAbort(void *stream);
ACL aclrtSetStreamFailureMode(void *stream, uint64_t mode);

#define ID(handle) ((unsigned long long)(uintptr_t)(handle))

static int create(const char *name, void **stream, uint32_t priority, uint32_t flags) {
    sim_call call;
    int code = acl_enter(&call, name);
    code = ACL_CHECK(code, stream);
    if (!code && priority > 7) {
        code = sim_error(SIM_PARAM, "priority=%u: 0 to 7", priority);
    }
    code = code ? code : sim_stream_create(flags, stream);
    return sim_leave(&call, code, "\"stream\":%llu,\"flags\":%u", code ? 0 : ID(*stream), flags);
}

ACL aclrtCreateStream(void **stream) { return create(__func__, stream, 0, 0); }

ACL aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flags) {
    return create(__func__, stream, priority, flags);
}

static int destroy(const char *name, void *stream, int force) {
    sim_call call;
    int code = acl_enter(&call, name);
    code = ACL_CHECK(code, stream);
    code = code ? code : sim_stream_destroy(stream, force);
    return sim_leave(&call, code, "\"stream\":%llu", ID(stream));
}

ACL aclrtDestroyStream(void *stream) { return destroy(__func__, stream, 0); }
ACL aclrtDestroyStreamForce(void *stream) { return destroy(__func__, stream, 1); }

/* A fault "sync" acts like an error of the work: it is returned after all work is done. */
static int synchronize(const char *name, void *handle, int32_t timeout) {
    sim_call call;
    sim_stream *stream;
    int code = acl_enter(&call, name);
    code = code ? code : acl_check_timeout(timeout);
    code = code ? code : sim_stream_find(handle, &stream);
    if (!code) {
        code = sim_stream_wait(stream, timeout);
        sim_stream_release(stream);
    }
    if (!code && call.fault.code) {
        code = sim_error(call.fault.code, "%s: a fault of the test", name);
    }
    return sim_leave(&call, code, "\"stream\":%llu,\"timeout\":%d", ID(handle), timeout);
}

ACL aclrtSynchronizeStream(void *stream) { return synchronize(__func__, stream, -1); }

ACL aclrtSynchronizeStreamWithTimeout(void *stream, int32_t timeout) {
    return synchronize(__func__, stream, timeout);
}

ACL aclrtStreamQuery(void *handle, int32_t *status) {
    sim_call call;
    sim_stream *stream;
    int code = acl_enter(&call, __func__);
    code = ACL_CHECK(code, status);
    code = code ? code : sim_stream_find(handle, &stream);
    if (!code) {
        int idle;
        code = sim_stream_is_idle(stream, &idle);
        *status = idle ? 0 : 1;
        sim_stream_release(stream);
    }
    return sim_leave(&call, code, "\"stream\":%llu", ID(handle));
}

ACL aclrtStreamAbort(void *handle) {
    sim_call call;
    sim_stream *stream;
    int code = acl_enter(&call, __func__);
    code = code ? code : sim_stream_find(handle, &stream);
    if (!code) {
        code = sim_stream_abort(stream);
        sim_stream_release(stream);
    }
    return sim_leave(&call, code, "\"stream\":%llu", ID(handle));
}

ACL aclrtSetStreamFailureMode(void *handle, uint64_t mode) {
    sim_call call;
    sim_stream *stream;
    int code = acl_enter(&call, __func__);
    if (!code && mode > 1) {
        code = sim_error(SIM_PARAM, "mode=%llu: 0 or 1", (unsigned long long)mode);
    }
    code = code ? code : sim_stream_find(handle, &stream);
    if (!code) {
        code = sim_stream_set_failure_mode(stream, mode == 1);
        sim_stream_release(stream);
    }
    return sim_leave(&call, code, "\"stream\":%llu", ID(handle));
}

#if KVSIM_CANN >= 805

ACL aclrtLaunchHostFunc(void *stream, void (*function)(void *), void *argument);

typedef struct {
    void (*function)(void *);
    void *argument;
} host_call;

static int run_host_call(void *argument, sim_stream *stream) {
    const host_call *made = argument;
    (void)stream;
    made->function(made->argument);
    return 0;
}

ACL aclrtLaunchHostFunc(void *handle, void (*function)(void *), void *argument) {
    sim_call call;
    sim_stream *stream;
    int code = acl_enter(&call, __func__);
    code = ACL_CHECK(code, (const void *)(uintptr_t)function);
    code = code ? code : sim_stream_find(handle, &stream);
    if (!code) {
        host_call *made = malloc(sizeof *made);
        *made = (host_call){function, argument};
        code = sim_stream_enqueue(stream, &call.fault, run_host_call, free, made, 0);
        sim_stream_release(stream);
    }
    return sim_leave(&call, code, "\"stream\":%llu", ID(handle));
}

#endif

/* Events. */
#include "acl.h"

ACL aclrtCreateEvent(void **event);
ACL aclrtCreateEventWithFlag(void **event, uint32_t flags);
ACL aclrtCreateEventExWithFlag(void **event, uint32_t flags);
ACL aclrtDestroyEvent(void *event);
ACL aclrtRecordEvent(void *event, void *stream);
ACL aclrtResetEvent(void *event, void *stream);
ACL aclrtStreamWaitEvent(void *stream, void *event);
ACL aclrtQueryEventStatus(void *event, int32_t *status);
ACL aclrtQueryEventWaitStatus(void *event, int32_t *status);
ACL aclrtSynchronizeEvent(void *event);
ACL aclrtSynchronizeEventWithTimeout(void *event, int32_t timeout);
ACL aclrtEventElapsedTime(float *milliseconds, void *start, void *end);

#define ID(handle) ((unsigned long long)(uintptr_t)(handle))

static int create(const char *name, sim_event_kind kind, void **event, uint32_t flags) {
    sim_call call;
    int code = acl_enter(&call, name);
    code = ACL_CHECK(code, event);
    code = code ? code : sim_event_create(kind, flags, event);
    return sim_leave(&call, code, "\"event\":%llu,\"flags\":%u", code ? 0 : ID(*event), flags);
}

ACL aclrtCreateEvent(void **event) {
    uint32_t flags = SIM_EVENT_FLAG_SYNC | SIM_EVENT_FLAG_TIME;
    return create(__func__, SIM_EVENT_PLAIN, event, flags);
}

ACL aclrtCreateEventWithFlag(void **event, uint32_t flags) {
    return create(__func__, SIM_EVENT_FLAGGED, event, flags);
}

ACL aclrtCreateEventExWithFlag(void **event, uint32_t flags) {
    return create(__func__, SIM_EVENT_EX, event, flags);
}

ACL aclrtDestroyEvent(void *event) {
    sim_call call;
    int code = acl_enter(&call, __func__);
    code = ACL_CHECK(code, event);
    code = code ? code : sim_event_destroy(event);
    return sim_leave(&call, code, "\"event\":%llu", ID(event));
}

typedef enum { RECORD, RESET, WAIT } order;

static int enqueue(const char *name, order what, void *event, void *handle) {
    sim_call call;
    sim_stream *stream;
    int code = acl_enter(&call, name);
    code = ACL_CHECK(code, event);
    code = code ? code : sim_stream_find(handle, &stream);
    if (!code) {
        code = what == RECORD  ? sim_event_record(event, stream, &call.fault)
               : what == RESET ? sim_event_reset(event, stream)
                               : sim_event_stream_wait(event, stream, &call.fault);
        sim_stream_release(stream);
    }
    return sim_leave(&call, code, "\"event\":%llu,\"stream\":%llu", ID(event), ID(handle));
}

ACL aclrtRecordEvent(void *event, void *stream) { return enqueue(__func__, RECORD, event, stream); }
ACL aclrtResetEvent(void *event, void *stream) { return enqueue(__func__, RESET, event, stream); }

ACL aclrtStreamWaitEvent(void *stream, void *event) {
    return enqueue(__func__, WAIT, event, stream);
}

ACL aclrtQueryEventStatus(void *event, int32_t *status) {
    sim_call call;
    int complete;
    int code = acl_enter(&call, __func__);
    code = ACL_CHECK(code, event);
    code = ACL_CHECK(code, status);
    code = code ? code : sim_event_is_complete(event, &complete);
    if (!code) {
        *status = complete; /* ACL_EVENT_RECORDED_STATUS_COMPLETE is 1 */
    }
    return sim_leave(&call, code, "\"event\":%llu", ID(event));
}

ACL aclrtQueryEventWaitStatus(void *event, int32_t *status) {
    sim_call call;
    int done;
    int code = acl_enter(&call, __func__);
    code = ACL_CHECK(code, event);
    code = ACL_CHECK(code, status);
    code = code ? code : sim_event_waits_done(event, &done);
    if (!code) {
        *status = done ? 0 : 1; /* ACL_EVENT_WAIT_STATUS_COMPLETE is 0 */
    }
    return sim_leave(&call, code, "\"event\":%llu", ID(event));
}

static int synchronize(const char *name, void *event, int32_t timeout) {
    sim_call call;
    int code = acl_enter(&call, name);
    code = ACL_CHECK(code, event);
    code = code ? code : acl_check_timeout(timeout);
    code = code ? code : sim_event_synchronize(event, timeout);
    return sim_leave(&call, code, "\"event\":%llu,\"timeout\":%d", ID(event), timeout);
}

ACL aclrtSynchronizeEvent(void *event) { return synchronize(__func__, event, -1); }

ACL aclrtSynchronizeEventWithTimeout(void *event, int32_t timeout) {
    return synchronize(__func__, event, timeout);
}

ACL aclrtEventElapsedTime(float *milliseconds, void *start, void *end) {
    sim_call call;
    int code = acl_enter(&call, __func__);
    code = ACL_CHECK(code, milliseconds);
    code = ACL_CHECK(code, start);
    code = ACL_CHECK(code, end);
    code = code ? code : sim_event_elapsed_ms(milliseconds, start, end);
    return sim_leave(&call, code, "%s", "");
}

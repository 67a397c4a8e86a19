/* aclrtMemcpy, aclrtMemcpyAsync, aclrtMemset and aclrtMemsetAsync. */
#include <stdlib.h>
#include <string.h>

#include "acl.h"

ACL aclrtMemcpy(void *target, size_t capacity, const void *source, size_t nbytes, int32_t kind);
ACL aclrtMemcpyAsync(void *target, size_t capacity, const void *source, size_t nbytes, int32_t kind,
                     void *stream);
ACL aclrtMemset(void *target, size_t capacity, int32_t value, size_t nbytes);
ACL aclrtMemsetAsync(void *target, size_t capacity, int32_t value, size_t nbytes, void *stream);

#define ID(handle) ((unsigned long long)(uintptr_t)(handle))

static int check(const void *target, size_t capacity, const void *source, size_t nbytes,
                 int32_t kind) {
    int code = acl_check_pointer(target, "dst");
    code = code ? code : acl_check_pointer(source, "src");
    if (!code && (kind < 0 || kind >= ACL_NUM_KINDS)) {
        code = sim_error(SIM_INVALID, "kind=%d", kind);
    }
    if (!code && (!nbytes || nbytes > capacity)) {
        code = sim_error(SIM_PARAM, "count=%zu: 1 to destMax, %zu", nbytes, capacity);
    }
    return code;
}

/* Applies a fault to a synchronous call, which returns each error itself. */
static int fault_of_waiting(const sim_call *call, uint64_t *nbytes) {
    if (call->fault.kind == SIM_FAULT_NONE) {
        return 0;
    }
    *nbytes = call->fault.kind == SIM_FAULT_PARTIAL ? *nbytes / 2 : 0;
    if (call->fault.kind == SIM_FAULT_HANG) {
        return sim_error(500000, "%s: a call without a stream cannot hang in the simulator", call->name);
    }
    return sim_error(call->fault.code, "%s: a fault of the test", call->name);
}

ACL aclrtMemcpy(void *target, size_t capacity, const void *source, size_t nbytes, int32_t kind) {
    sim_call call;
    acl_copy copy;
    int device;
    int code = acl_enter_device(&call, __func__, &device);
    code = code ? code : check(target, capacity, source, nbytes, kind);
    code = code ? code : acl_copy_find(&copy, target, source, nbytes);
    if (!code) {
        code = acl_copy_check_kind(&copy, kind);
        copy.nbytes = code ? 0 : copy.nbytes;
        code = code ? code : fault_of_waiting(&call, &copy.nbytes);
        acl_copies_now(&copy, 1);
    }
    return sim_leave(&call, code, "\"dst\":%llu,\"src\":%llu,\"bytes\":%zu,\"kind\":%d", ID(target),
                     ID(source), nbytes, kind);
}

/* A stream does not copy from host to host, and one end must be on the stream's device. acl_copy_find has checked
 * the peer access. */
static int check_stream(const acl_copy *copy, const sim_stream *stream) {
    int device = sim_stream_device(stream);
    if (acl_copy_kind(copy) == ACL_HOST_TO_HOST) {
        return sim_error(SIM_UNSUPPORTED, "from host to host on a stream");
    }
    if (copy->target.device != device && copy->source.device != device) {
        return sim_error(SIM_PARAM, "the stream is of device %d, the memory is not", device);
    }
    return 0;
}

ACL aclrtMemcpyAsync(void *target, size_t capacity, const void *source, size_t nbytes, int32_t kind,
                     void *handle) {
    sim_call call;
    acl_copy copy;
    sim_stream *stream = NULL;
    int pageable = 0;
    int code = acl_enter(&call, __func__);
    code = code ? code : check(target, capacity, source, nbytes, kind);
    code = code ? code : sim_stream_find(handle, &stream);
    code = code ? code : acl_copy_find(&copy, target, source, nbytes);
    if (!code) {
        pageable = acl_copy_is_pageable(&copy);
        code = acl_copy_check_kind(&copy, kind);
        code = code ? code : check_stream(&copy, stream);
        if (code) {
            acl_copy_release(&copy);
        } else {
            copy.nbytes /= call.fault.kind == SIM_FAULT_PARTIAL ? 2 : 1;
            code = acl_copies_enqueue(stream, &call.fault, &copy, 1);
        }
        if (!code && pageable) {
            code = sim_stream_wait(stream, -1);
        }
    }
    if (stream) {
        sim_stream_release(stream);
    }
    return sim_leave(
        &call, code,
        "\"dst\":%llu,\"src\":%llu,\"bytes\":%zu,\"kind\":%d,\"stream\":%llu,\"pageable\":%s",
        ID(target), ID(source), nbytes, kind, ID(handle), pageable ? "true" : "false");
}

typedef struct {
    acl_place place;
    uint64_t nbytes;
    int value;
} filling;

static int fill(void *argument, sim_stream *stream) {
    const filling *work = argument;
    (void)stream;
    memset(work->place.view, work->value, work->nbytes);
    return 0;
}

static void dispose(void *argument) {
    acl_place_release(&((filling *)argument)->place);
    free(argument);
}

static int find_filled(void *target, size_t capacity, size_t nbytes, acl_place *place) {
    int code = acl_check_pointer(target, "devPtr");
    if (!code && (!nbytes || nbytes > capacity)) {
        code = sim_error(SIM_PARAM, "count=%zu: 1 to maxCount, %zu", nbytes, capacity);
    }
    return code ? code : acl_place_find(target, nbytes, place);
}

ACL aclrtMemset(void *target, size_t capacity, int32_t value, size_t nbytes) {
    sim_call call;
    acl_place place;
    int device;
    uint64_t filled = nbytes;
    int code = acl_enter_device(&call, __func__, &device);
    code = code ? code : find_filled(target, capacity, nbytes, &place);
    if (!code) {
        code = fault_of_waiting(&call, &filled);
        memset(place.view, value, filled);
        acl_place_release(&place);
    }
    return sim_leave(&call, code, "\"dst\":%llu,\"bytes\":%zu", ID(target), nbytes);
}

ACL aclrtMemsetAsync(void *target, size_t capacity, int32_t value, size_t nbytes, void *handle) {
    sim_call call;
    sim_stream *stream = NULL;
    acl_place place;
    int code = acl_enter(&call, __func__);
    code = code ? code : sim_stream_find(handle, &stream);
    code = code ? code : find_filled(target, capacity, nbytes, &place);
    if (!code) {
        filling *work = malloc(sizeof *work);
        uint64_t filled = call.fault.kind == SIM_FAULT_PARTIAL ? nbytes / 2 : nbytes;
        *work = (filling){place, filled, value};
        code = sim_stream_enqueue(stream, &call.fault, fill, dispose, work, nbytes);
    }
    if (stream) {
        sim_stream_release(stream);
    }
    return sim_leave(&call, code, "\"dst\":%llu,\"bytes\":%zu,\"stream\":%llu", ID(target), nbytes,
                     ID(handle));
}

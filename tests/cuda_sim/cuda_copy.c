/* Copies and memset: finds the memory of source and target, and moves the bytes. */
#include <stdlib.h>
#include <string.h>

#include "cuda_sim.h"

CUDA cuMemcpyHtoD_v2(cuda_address target, const void *source, size_t nbytes);
CUDA cuMemcpyDtoH_v2(void *target, cuda_address source, size_t nbytes);
CUDA cuMemcpyAsync(cuda_address target, cuda_address source, size_t nbytes, void *stream);
CUDA cuMemsetD8Async(cuda_address target, unsigned char value, size_t nbytes, void *stream);

int cuda_copy_find(const cuda_context *context, cuda_copy *copy, uint64_t target, uint64_t source,
                   uint64_t nbytes) {
    copy->nbytes = nbytes;
    copy->source.count = 0;
    int code = cuda_range_find(context, target, nbytes, 1, &copy->target);
    code = code ? code : cuda_range_find(context, source, nbytes, 0, &copy->source);
    if (code) {
        cuda_copy_release(copy);
    }
    return code;
}

void cuda_copy_release(cuda_copy *copy) {
    cuda_range_release(&copy->target);
    cuda_range_release(&copy->source);
}

typedef struct {
    const cuda_context *context;
    unsigned char *staged; /* content of the pageable source of a single copy, or NULL */
    int64_t lag_us;
    size_t count;
    cuda_copy copies[];
} batch;

/* Returns 1 if the stream was stopped. */
static int copy_bytes(sim_stream *stream, const batch *work, const cuda_copy *copy) {
    for (uint64_t done = 0; done < copy->nbytes;) {
        uint64_t to, from;
        unsigned char *target = cuda_range_view(&copy->target, done, &to);
        const unsigned char *source = cuda_range_view(&copy->source, done, &from);
        uint64_t piece = to < from ? to : from;
        piece = piece < copy->nbytes - done ? piece : copy->nbytes - done;
        if (sim_stream_copy(stream, target, work->staged ? work->staged + done : source, piece)) {
            return 1;
        }
        done += piece;
    }
    return 0;
}

static int run(void *argument, sim_stream *stream) {
    const batch *work = argument;
    if (work->lag_us && sim_stream_pause(stream, work->lag_us)) {
        return 0;
    }
    for (size_t i = 0; i < work->count; i++) {
        const cuda_copy *copy = &work->copies[i];
        int code = cuda_range_check(work->context, &copy->target, 1);
        code = code ? code : cuda_range_check(work->context, &copy->source, 0);
        if (code) {
            return code;
        }
        if (copy_bytes(stream, work, copy)) {
            return 0;
        }
    }
    return 0;
}

static void dispose(void *argument) {
    batch *work = argument;
    for (size_t i = 0; i < work->count; i++) {
        cuda_copy_release(&work->copies[i]);
    }
    free(work->staged);
    free(work);
}

static batch *batch_of(const cuda_context *context, const cuda_copy *copies, size_t count,
                       uint64_t *nbytes) {
    batch *work = malloc(sizeof *work + count * sizeof *copies);
    if (!work) {
        abort();
    }
    *work = (batch){.context = context, .count = count};
    memcpy(work->copies, copies, count * sizeof *copies);
    *nbytes = 0;
    for (size_t i = 0; i < count; i++) {
        *nbytes += copies[i].nbytes;
    }
    return work;
}

/* Reads a pageable source into memory of the driver. */
static void stage(batch *work) {
    const cuda_copy *copy = work->copies;
    work->staged = malloc(copy->nbytes);
    if (!work->staged) {
        abort();
    }
    memcpy(work->staged, (const void *)(uintptr_t)copy->source.address, copy->nbytes);
}

int cuda_copies_enqueue(const cuda_context *context, sim_stream *stream, const sim_fault *fault,
                        cuda_copy *copies, size_t count) {
    uint64_t nbytes;
    batch *work = batch_of(context, copies, count, &nbytes);
    return sim_stream_enqueue(stream, fault, run, dispose, work, nbytes);
}

/* Copies in the default stream and waits. With KVSIM_CUDA_STAGED_US, does not wait for a copy from pageable memory. */
static int copy_now(const sim_call *call, const cuda_context *context, uint64_t target,
                    uint64_t source, size_t nbytes) {
    cuda_copy copy;
    sim_stream *stream;
    sim_fault fault = call->fault;
    int code = nbytes ? cuda_copy_find(context, &copy, target, source, nbytes) : 0;
    if (code || !nbytes) {
        return code;
    }
    code = sim_stream_find(NULL, &stream);
    if (code) {
        cuda_copy_release(&copy);
        return code;
    }
    copy.nbytes /= fault.kind == SIM_FAULT_PARTIAL ? 2 : 1;
    uint64_t counted;
    batch *work = batch_of(context, &copy, 1, &counted);
    int lags = sim_settings_now().cuda_staged_us && copy.source.side == CUDA_PAGEABLE_SIDE &&
               copy.target.side == CUDA_DEVICE_SIDE;
    if (copy.source.side == CUDA_PAGEABLE_SIDE) {
        code = sim_stream_wait(stream, -1);
        stage(work);
    }
    work->lag_us = lags ? sim_settings_now().cuda_staged_us : 0;
    int queued = sim_stream_enqueue(stream, &fault, run, dispose, work, counted);
    code = code ? code : queued;
    if (!code && !lags) {
        code = sim_stream_wait(stream, -1);
    }
    sim_stream_release(stream);
    return code;
}

CUDA cuMemcpyHtoD_v2(cuda_address target, const void *source, size_t nbytes) {
    sim_call call;
    cuda_context *context;
    int code = cuda_enter_context(&call, __func__, &context);
    code = CUDA_CHECK(code, source);
    if (!code && nbytes && !sim_is_device_space(target, nbytes)) {
        code = sim_error(INVALID_VALUE, "dstDevice=0x%llx is not device memory", target);
    }
    code = code ? code : copy_now(&call, context, target, (uint64_t)(uintptr_t)source, nbytes);
    return cuda_leave(&call, code, "\"dst\":%llu,\"src\":%llu,\"bytes\":%zu", target, ID(source),
                      nbytes);
}

CUDA cuMemcpyDtoH_v2(void *target, cuda_address source, size_t nbytes) {
    sim_call call;
    cuda_context *context;
    int code = cuda_enter_context(&call, __func__, &context);
    code = CUDA_CHECK(code, target);
    if (!code && nbytes && !sim_is_device_space(source, nbytes)) {
        code = sim_error(INVALID_VALUE, "srcDevice=0x%llx is not device memory", source);
    }
    code = code ? code : copy_now(&call, context, (uint64_t)(uintptr_t)target, source, nbytes);
    return cuda_leave(&call, code, "\"dst\":%llu,\"src\":%llu,\"bytes\":%zu", ID(target), source,
                      nbytes);
}

/* Reads a pageable source before the return, and waits for a copy to a pageable target. */
static int copy_on(const sim_call *call, const cuda_context *context, sim_stream *stream,
                   cuda_copy *copy) {
    uint64_t nbytes;
    sim_fault fault = call->fault;
    copy->nbytes /= fault.kind == SIM_FAULT_PARTIAL ? 2 : 1;
    batch *work = batch_of(context, copy, 1, &nbytes);
    int code = 0;
    if (copy->source.side == CUDA_PAGEABLE_SIDE) {
        code = sim_stream_wait(stream, -1);
        stage(work);
    }
    int is_waited = copy->target.side == CUDA_PAGEABLE_SIDE;
    int queued = sim_stream_enqueue(stream, &fault, run, dispose, work, nbytes);
    code = code ? code : queued;
    return !code && is_waited ? sim_stream_wait(stream, -1) : code;
}

CUDA cuMemcpyAsync(cuda_address target, cuda_address source, size_t nbytes, void *handle) {
    sim_call call;
    cuda_context *context;
    cuda_copy copy;
    sim_stream *stream = NULL;
    int is_pageable = 0;
    int code = cuda_enter_context(&call, __func__, &context);
    if (!code && nbytes && (!target || !source)) {
        code = sim_error(INVALID_VALUE, "dst=0x%llx, src=0x%llx", target, source);
    }
    code = code ? code : cuda_stream_find(context, handle, &stream);
    if (!code && nbytes) {
        code = cuda_copy_find(context, &copy, target, source, nbytes);
        is_pageable = !code && (copy.target.side == CUDA_PAGEABLE_SIDE ||
                                copy.source.side == CUDA_PAGEABLE_SIDE);
        code = code ? code : copy_on(&call, context, stream, &copy);
    }
    if (stream) {
        sim_stream_release(stream);
    }
    return cuda_leave(&call, code, "\"dst\":%llu,\"src\":%llu,\"bytes\":%zu,\"stream\":%llu,\"pageable\":%s",
                      target, source, nbytes, ID(handle), is_pageable ? "true" : "false");
}

typedef struct {
    const cuda_context *context;
    cuda_range range;
    uint64_t nbytes;
    unsigned char value;
} filling;

static int fill(void *argument, sim_stream *stream) {
    const filling *work = argument;
    int code = cuda_range_check(work->context, &work->range, 1);
    (void)stream;
    for (uint64_t done = 0, piece; done < work->nbytes && !code; done += piece) {
        unsigned char *view = cuda_range_view(&work->range, done, &piece);
        piece = piece < work->nbytes - done ? piece : work->nbytes - done;
        memset(view, work->value, piece);
    }
    return code;
}

static void dispose_filling(void *argument) {
    cuda_range_release(&((filling *)argument)->range);
    free(argument);
}

CUDA cuMemsetD8Async(cuda_address target, unsigned char value, size_t nbytes, void *handle) {
    sim_call call;
    cuda_context *context;
    sim_stream *stream = NULL;
    filling work = {.value = value};
    int code = cuda_enter_context(&call, __func__, &context);
    code = code ? code : cuda_stream_find(context, handle, &stream);
    if (!code && nbytes) {
        code = cuda_range_find(context, target, nbytes, 1, &work.range);
    }
    if (!code && nbytes && work.range.side == CUDA_PAGEABLE_SIDE) {
        code = sim_error(INVALID_VALUE, "dstDevice=0x%llx is pageable memory", target);
    } else if (!code && nbytes) {
        filling *queued = malloc(sizeof *queued);
        work.context = context;
        work.nbytes = nbytes / (call.fault.kind == SIM_FAULT_PARTIAL ? 2 : 1);
        *queued = work;
        code = sim_stream_enqueue(stream, &call.fault, fill, dispose_filling, queued, nbytes);
    }
    if (stream) {
        sim_stream_release(stream);
    }
    return cuda_leave(&call, code, "\"dst\":%llu,\"bytes\":%zu,\"stream\":%llu", target, nbytes,
                      ID(handle));
}

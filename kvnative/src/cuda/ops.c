/* Implements the operations of a device by calls of the CUDA driver. */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

#include "core/thread.h"
#include "cuda/copies.h"
#include "cuda/launch.h"
#include "cuda/memory.h"
#include "cuda/pin.h"
#include "cuda/reach.h"
#include "cuda/reclaim.h"

/* A wait first polls for this time without sleeping. A copy of a few blocks ends within it, and a sleeping thread takes
 * as long to wake. */
#define SPIN_NS 50000
/* After that it sleeps for this fraction of the time waited so far. So it ends late by that fraction at most, and a
 * long wait costs little processor time. */
#define SLEEP_PART 16
#define TIMER_SLACK_NS 1000 /* for these sleeps; the default is 50 us */

#define CALL KVN_CUDA_CALL

/* ---- contexts ---- */

static bool is_own(const kvn_device *device)
{
    return ((const kvn_cuda_library *)device->runtime)->own_context;
}

static void *get_context(const kvn_device *device)
{
    CUcontext context = NULL;

    return kvn_cuda_of(device)->cuCtxGetCurrent(&context) == KVN_CUDA_OK ? context : NULL;
}

/* A NULL context pops the top of this thread's stack of contexts. */
static int set_context(const kvn_device *device, void *context, kvn_failure *failure)
{
    return CALL(device, failure, cuCtxSetCurrent, context);
}

/* Finds the context of a stream. The special streams (NULL, CU_STREAM_LEGACY, CU_STREAM_PER_THREAD) do not name one.
 * They belong to the primary context, as all streams of a framework do, or, if this device has its own context, to the
 * current one. */
static int context_of(const kvn_device *device, kvn_stream stream, void **context, kvn_failure *failure)
{
    const bool is_special = (uintptr_t)stream <= 2;
    void *theirs = NULL;

    if (is_special && !is_own(device))
        return KVN_OK;
    if (is_special && !(theirs = get_context(device)))
        return kvn_fail(failure, KVN_INVALID, KVN_CUDA_INVALID_CONTEXT, "the default stream belongs to a context, "
                        "and this thread has none");
    if (!is_special && CALL(device, failure, cuStreamGetCtx, stream, &theirs) != KVN_OK)
        return failure->code == KVN_CUDA_NOT_SUPPORTED ? KVN_OK : failure->status; /* a green context of the primary */
    *context = theirs;
    return KVN_OK;
}

/* The depth of begin_calls on this thread, and the mode that the thread had before. */
static _Thread_local int num_begun;
static _Thread_local int capture_mode;

/* While a thread of the program captures a stream into a graph, CUDA refuses even event queries in all threads, and
 * such a call breaks the capture. A thread in relaxed mode is exempt. Calls of this library use only its own streams
 * and events, which are not captured. */
static void begin_calls(const kvn_device *device)
{
    if (num_begun++ > 0)
        return;
    capture_mode = KVN_CUDA_CAPTURE_RELAXED;
    kvn_cuda_of(device)->cuThreadExchangeStreamCaptureMode(&capture_mode);
}

static void end_calls(const kvn_device *device)
{
    if (--num_begun == 0)
        kvn_cuda_of(device)->cuThreadExchangeStreamCaptureMode(&capture_mode);
}

/* A framework in the same process allocates in the primary context, and another context does not reach its memory. */
static int take_context(const kvn_device *device, void **context, kvn_failure *failure)
{
    const CUdevice number = kvn_cuda_state(device)->number;

    if (!is_own(device))
        return CALL(device, failure, cuDevicePrimaryCtxRetain, context, number);
    if (CALL(device, failure, cuCtxCreate_v2, context, 0, number) != KVN_OK)
        return failure->status;
    if (set_context(device, NULL, failure) == KVN_OK) /* cuCtxCreate pushed the context on this thread's stack */
        return KVN_OK;
    kvn_cuda_of(device)->cuCtxDestroy_v2(*context);
    *context = NULL;
    return failure->status;
}

static void give_context(const kvn_device *device, void *context)
{
    if (is_own(device))
        kvn_cuda_of(device)->cuCtxDestroy_v2(context);
    else
        kvn_cuda_of(device)->cuDevicePrimaryCtxRelease_v2(kvn_cuda_state(device)->number);
}

static int open_state(kvn_device *device, void **context, kvn_failure *failure)
{
    kvn_cuda_device *state = kvn_cuda_state(device);

    if (CALL(device, failure, cuDeviceGet, &state->number, device->id) != KVN_OK ||
        kvn_cuda_memory_init(device, failure) != KVN_OK)
        return failure->status;
    if (take_context(device, context, failure) != KVN_OK)
        return failure->status;
    if (kvn_cuda_copies_open(device, failure) == KVN_OK)
        return KVN_OK;
    give_context(device, *context);
    return failure->status;
}

/* *primary stays NULL: after each call, a thread that had no context has none again, so that a framework chooses its
 * device as if this library were not loaded. */
static int open_context(kvn_device *device, void **context, void **primary, kvn_failure *failure)
{
    kvn_cuda_device *state = calloc(1, sizeof *state);
    int error = state ? pthread_mutex_init(&state->mutex, NULL) : ENOMEM;

    (void)primary;
    device->state = state;
    if (!error && open_state(device, context, failure) == KVN_OK)
        return KVN_OK;
    if (!error)
        pthread_mutex_destroy(&state->mutex);
    free(state);
    device->state = NULL;
    return error ? kvn_fail(failure, KVN_NO_MEMORY, error, "no memory for device %d: %s", (int)device->id,
                            strerror(error))
                 : failure->status;
}

static void close_context(kvn_device *device, void *context)
{
    kvn_cuda_device *state = kvn_cuda_state(device);
    void *previous = get_context(device);
    kvn_failure ignored; /* the context may have failed, or be destroyed: its memory goes with it */
    const bool is_current = set_context(device, context, &ignored) == KVN_OK;
    const bool may_begin = kvn_cuda_copies_close(device), is_freed = kvn_cuda_reclaim_end(device);

    if (is_current) {
        for (size_t i = 0; i < state->num_idle; i++)
            kvn_cuda_of(device)->cuStreamDestroy_v2(state->idle[i]);
        set_context(device, previous, &ignored);
    }
    /* CUDA does not document whether destroying a context waits for work behind an event, or cancels it. */
    if (!may_begin && is_freed)
        give_context(device, context);
    pthread_mutex_destroy(&state->mutex);
    free(state->allocated);
    free(state);
    device->state = NULL;
}

/* ---- memory ---- */

static int allocate_host(const kvn_device *device, uint64_t nbytes, void **out, kvn_failure *failure)
{
    return CALL(device, failure, cuMemHostAlloc, out, nbytes, KVN_CUDA_HOST_PORTABLE | KVN_CUDA_HOST_MAPPED);
}

static int free_host(const kvn_device *device, void *address, kvn_failure *failure)
{
    return CALL(device, failure, cuMemFreeHost, address);
}

static int locate(const kvn_device *device, uint64_t address, kvn_memory_place *out, kvn_failure *failure)
{
    int asked[] = {KVN_CUDA_POINTER_MEMORY_TYPE, KVN_CUDA_POINTER_IS_MANAGED, KVN_CUDA_POINTER_DEVICE,
                   KVN_CUDA_POINTER_CONTEXT};
    unsigned type = 0, is_managed = 0;
    int number = 0;
    CUcontext context = NULL;
    void *answers[] = {&type, &is_managed, &number, &context};

    /* Memory that the driver does not know has type 0; the call succeeds. */
    if (CALL(device, failure, cuPointerGetAttributes, sizeof asked / sizeof *asked, asked, answers,
             address) != KVN_OK)
        return failure->status;
    if (type == 0)
        return KVN_OK;
    out->device = (uint32_t)number;
    if (is_managed)
        out->kind = KVN_MEMORY_MANAGED;
    else if (type == KVN_CUDA_MEMORY_HOST)
        out->kind = KVN_MEMORY_PINNED;
    else if (number == device->id && context && context != device->context)
        out->kind = KVN_MEMORY_FOREIGN;
    else
        out->kind = KVN_MEMORY_DEVICE;
    return KVN_OK;
}

static int memory(const kvn_device *device, size_t *free_nbytes, size_t *total_nbytes,
                  kvn_failure *failure)
{
    return CALL(device, failure, cuMemGetInfo_v2, free_nbytes, total_nbytes);
}

/* ---- streams ---- */

/* The stream is not ordered with the default stream, which the program uses. */
static int create_stream(const kvn_device *device, kvn_stream *out, kvn_failure *failure)
{
    return CALL(device, failure, cuStreamCreate, out, KVN_CUDA_STREAM_NON_BLOCKING);
}

static void sleep_ns(int64_t ns)
{
    const int slack = prctl(PR_GET_TIMERSLACK);
    const struct timespec time = {.tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000};

    prctl(PR_SET_TIMERSLACK, TIMER_SLACK_NS);
    nanosleep(&time, NULL);
    prctl(PR_SET_TIMERSLACK, slack);
}

/* CUDA has no wait with a deadline. */
static int wait_stream(const kvn_device *device, kvn_stream stream, int ms, kvn_failure *failure)
{
    const int64_t begin = kvn_now_ns(), deadline = begin + ms * INT64_C(1000000);
    int status;

    while ((status = kvn_cuda_query(device, stream, failure)) == KVN_PENDING) {
        const int64_t now = kvn_now_ns();
        if (now >= deadline)
            break;
        if (now - begin >= SPIN_NS)
            sleep_ns((now - begin) / SLEEP_PART);
    }
    return status;
}

static int wait_until_done(const kvn_device *device, kvn_stream stream, kvn_failure *failure)
{
    int status;

    do
        status = wait_stream(device, stream, 1000, failure);
    while (status == KVN_PENDING);
    return status;
}

/* cuStreamDestroy returns at once, even with work on the stream, so wait for the work first. */
static int destroy_stream(const kvn_device *device, kvn_stream stream, kvn_failure *failure)
{
    if (wait_until_done(device, stream, failure) != KVN_OK)
        return failure->status;
    return CALL(device, failure, cuStreamDestroy_v2, stream);
}

/* ---- events; without timing, which costs the device more ---- */

static int create_event(const kvn_device *device, void **out, kvn_failure *failure)
{
    return CALL(device, failure, cuEventCreate, out, KVN_CUDA_EVENT_DISABLE_TIMING);
}

static int destroy_event(const kvn_device *device, void *event, kvn_failure *failure)
{
    return CALL(device, failure, cuEventDestroy_v2, event);
}

/* Work that is ordered with a captured stream joins the graph, or fails and breaks the capture. Asking whether a stream
 * is captured is safe. */
static int check_capture(const kvn_device *device, kvn_stream stream, kvn_failure *failure)
{
    int state = 0;
    const int status = CALL(device, failure, cuStreamIsCapturing, stream, &state);

    if (status != KVN_OK && failure->code != KVN_CUDA_CAPTURE_IMPLICIT)
        return status;
    return status == KVN_OK && state == 0
               ? KVN_OK
               : kvn_fail(failure, KVN_INVALID, KVN_CUDA_CAPTURE_UNSUPPORTED,
                          "the stream is captured into a CUDA graph, whose work runs later");
}

static int record_event(const kvn_device *device, void *event, kvn_stream stream, kvn_failure *failure)
{
    if (check_capture(device, stream, failure) != KVN_OK)
        return failure->status;
    return CALL(device, failure, cuEventRecord, event, stream);
}

/* A stream that waits for an event of a capture becomes part of that capture. The query breaks the capture, too,
 * but reports the reason. */
static int check_event(const kvn_device *device, void *event, kvn_failure *failure)
{
    if (kvn_cuda_of(device)->cuEventQuery(event) != KVN_CUDA_CAPTURED_EVENT)
        return KVN_OK;
    return kvn_fail(failure, KVN_INVALID, KVN_CUDA_CAPTURED_EVENT,
                    "the event was recorded on a stream that is captured into a CUDA graph, whose work runs later");
}

/* The event may belong to another context or device. */
static int wait_event(const kvn_device *device, kvn_stream stream, void *event, kvn_failure *failure)
{
    kvn_failure ignored;

    if (check_capture(device, stream, failure) != KVN_OK)
        return failure->status;
    /* Loading the kernel later could wait for all work of the context, and so for this event. A launch that needs
     * the kernel reports a failure. */
    kvn_cuda_launcher_load(device, &ignored);
    return CALL(device, failure, cuStreamWaitEvent, stream, event, 0);
}

static int query_event(const kvn_device *device, void *event, kvn_failure *failure)
{
    const CUresult code = kvn_cuda_of(device)->cuEventQuery(event);

    return code == KVN_CUDA_NOT_READY ? KVN_PENDING : kvn_cuda_ended(device, "cuEventQuery", code, failure);
}

/* ---- copies that wait ---- */

/* Takes a stream for one copy. CUDA's blocking calls use the default stream, where a copy would wait for all work of
 * the program. */
static int take_stream(const kvn_device *device, CUstream *out, kvn_failure *failure)
{
    kvn_cuda_device *state = kvn_cuda_state(device);

    *out = NULL;
    pthread_mutex_lock(&state->mutex);
    if (state->num_idle > 0)
        *out = state->idle[--state->num_idle];
    pthread_mutex_unlock(&state->mutex);
    return *out ? KVN_OK : create_stream(device, out, failure);
}

static void give_stream(const kvn_device *device, CUstream stream)
{
    kvn_cuda_device *state = kvn_cuda_state(device);
    bool is_kept;

    pthread_mutex_lock(&state->mutex);
    is_kept = state->num_idle < KVN_CUDA_MAX_IDLE;
    if (is_kept)
        state->idle[state->num_idle++] = stream;
    pthread_mutex_unlock(&state->mutex);
    if (!is_kept)
        kvn_cuda_of(device)->cuStreamDestroy_v2(stream);
}

/* Waits for the issued work, even if issuing failed in the middle, and gives the stream back. */
static int finish(const kvn_device *device, CUstream stream, int issued, kvn_failure *failure)
{
    kvn_failure later;
    const int ended = wait_until_done(device, stream, issued == KVN_OK ? failure : &later);

    give_stream(device, stream);
    return issued == KVN_OK ? ended : issued;
}

/* Refuses a range whose first or last byte is not memory of a device. An address that is not mapped would break the
 * context of the whole program. */
static int check_on_device(const kvn_device *device, uint64_t address, uint64_t nbytes, kvn_failure *failure)
{
    const uint64_t ends[] = {address, address + nbytes - 1};
    kvn_cuda_ranges ranges = {.device = device};

    for (size_t i = 0; i < 2; i++) {
        kvn_memory_place place = {.kind = KVN_MEMORY_PAGEABLE};
        if (locate(device, ends[i], &place, failure) != KVN_OK)
            return failure->status;
        if (place.kind != KVN_MEMORY_DEVICE && place.kind != KVN_MEMORY_MANAGED)
            return kvn_fail(failure, KVN_UNMAPPED, KVN_CUDA_INVALID_VALUE,
                            "address 0x%" PRIx64 " is not memory of a device", ends[i]);
    }
    if (kvn_cuda_reach_of(&ranges, address, nbytes) <= KVN_CUDA_UNMAPPED)
        return kvn_fail(failure, KVN_UNMAPPED, 0,
                        "%" PRIu64 " bytes at 0x%" PRIx64 " are not all memory of device %d, or not the memory that "
                        "was registered there",
                        nbytes, address, (int)device->id);
    return KVN_OK;
}

static int copy(const kvn_device *device, kvn_direction direction, uint64_t dst, uint64_t src,
                uint64_t nbytes, kvn_failure *failure)
{
    CUstream stream;

    if (check_on_device(device, direction == KVN_HOST_TO_DEVICE ? dst : src, nbytes, failure) != KVN_OK ||
        take_stream(device, &stream, failure) != KVN_OK)
        return failure->status;
    return finish(device, stream, kvn_cuda_copy_parts(device, dst, src, nbytes, stream, failure), failure);
}

static int clear(const kvn_device *device, uint64_t address, uint64_t nbytes, kvn_failure *failure)
{
    CUstream stream;

    if (check_on_device(device, address, nbytes, failure) != KVN_OK ||
        take_stream(device, &stream, failure) != KVN_OK)
        return failure->status;
    return finish(device, stream, CALL(device, failure, cuMemsetD8Async, address, 0, nbytes, stream), failure);
}

const kvn_device_ops kvn_cuda_ops = {
    .name = "cuda",
    .runtime = "the CUDA driver",
    .symbols = &kvn_cuda_symbols,
    .count_devices = kvn_cuda_library_devices,
    .attribute = kvn_cuda_library_attribute,
    .aborted_code = KVN_CUDA_ABORTED,
    .max_batch = KVN_CUDA_LAUNCH_COUNT,
    .max_batches = KVN_CUDA_MAX_LAUNCHES,
    /* One launch, or one copy after another, keeps the memory or the link busy, so nothing is cut. */
    .host_costs = {.shard = UINT64_MAX},
    .within_costs = {.shard = UINT64_MAX},
    .open_context = open_context,
    .close_context = close_context,
    .get_context = get_context,
    .set_context = set_context,
    .context_of = context_of,
    .begin_calls = begin_calls,
    .end_calls = end_calls,
    .allocate = kvn_cuda_allocate,
    .free = kvn_cuda_free,
    .allocate_host = allocate_host,
    .free_host = free_host,
    .pin = kvn_cuda_pin,
    .unpin = kvn_cuda_unpin,
    .locate = locate,
    .copy = copy,
    .clear = clear,
    .memory = memory,
    .create_stream = create_stream,
    .destroy_stream = destroy_stream,
    .abort_stream = kvn_cuda_abort, /* CUDA itself stops no work; launches of the copy kernel stop */
    .drop_stream = kvn_cuda_drop,
    .wait_stream = wait_stream,
    .create_event = create_event,
    .destroy_event = destroy_event,
    .record_event = record_event,
    .check_event = check_event,
    .wait_event = wait_event,
    .query_event = query_event,
    .copy_async = kvn_cuda_copy_async,
    .batch_copies = kvn_cuda_batch_copies,
    .copy_batch = kvn_cuda_copy_batch,
    .copy_held = kvn_cuda_copy_held,
    .can_stop = kvn_cuda_can_stop,
};

/* Implements the operations of a device by calls of ACL. */
#include "acl/ops.h"

#include <string.h>
#include <unistd.h>

static int ended(const kvn_device *device, const char *call, int code, kvn_failure *failure)
{
    return code == KVN_ACL_OK ? KVN_OK : kvn_acl_fail(kvn_acl_of(device), call, code, failure);
}

#define CALL(device, failure, name, ...)                                                          \
    ended(device, #name, kvn_acl_of(device)->name(__VA_ARGS__), failure)

static void *pointer(uint64_t address) { return (void *)(uintptr_t)address; }

/* ---- contexts ---- */

static void *get_context(const kvn_device *device)
{
    aclrtContext context = NULL;

    if (kvn_acl_of(device)->aclrtGetCurrentContext(&context) == KVN_ACL_OK)
        return context;
    kvn_acl_forget(kvn_acl_of(device)); /* this thread has no context, which is not an error here */
    return NULL;
}

/* A context of its own: torch_npu stops all streams of the primary context on a failure. aclrtSetDevice also
 * keeps the primary context alive: HCCL uses it in its threads, and resets by other code only undo their own sets. */
static int open_context(kvn_device *device, void **context, void **primary, kvn_failure *failure)
{
    if (CALL(device, failure, aclrtSetDevice, device->id) != KVN_OK ||
        CALL(device, failure, aclrtGetCurrentContext, primary) != KVN_OK)
        return failure->status;
    return CALL(device, failure, aclrtCreateContext, context, device->id);
}

static void close_context(kvn_device *device, void *context)
{
    if (kvn_acl_of(device)->aclrtDestroyContext(context) != KVN_ACL_OK)
        kvn_acl_forget(kvn_acl_of(device));
}

static int set_context(const kvn_device *device, void *context, kvn_failure *failure)
{
    return CALL(device, failure, aclrtSetCurrentContext, context);
}

/* ---- memory ---- */

/* aclrtMalloc adds 32 bytes, so a multiple of the huge page size would take one page more. */
static int allocate(const kvn_device *device, uint64_t nbytes, void **out, kvn_failure *failure)
{
    return CALL(device, failure, aclrtMallocAlign32, out, nbytes, KVN_ACL_MALLOC_HUGE_ONLY);
}

static int free_device(const kvn_device *device, void *address, kvn_failure *failure)
{
    return CALL(device, failure, aclrtFree, address);
}

static int allocate_host(const kvn_device *device, uint64_t nbytes, void **out, kvn_failure *failure)
{
    return CALL(device, failure, aclrtMallocHost, out, nbytes);
}

static int free_host(const kvn_device *device, void *address, kvn_failure *failure)
{
    return CALL(device, failure, aclrtFreeHost, address);
}

/* The driver maps only whole pages. */
static uint64_t whole_pages(uint64_t nbytes)
{
    const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);

    return (nbytes + page - 1) / page * page;
}

static int map(const kvn_device *device, void *address, uint64_t nbytes, kvn_failure *failure)
{
    void *on_device = NULL;

    return CALL(device, failure, aclrtHostRegister, address, whole_pages(nbytes),
                KVN_ACL_HOST_REGISTER_MAPPED, &on_device);
}

int kvn_acl_try_map(const kvn_device *device, uint64_t address, uint64_t nbytes, kvn_failure *failure)
{
    void *previous;
    int status;

    if (kvn_device_enter(device, &previous, failure) != KVN_OK)
        return failure->status;
    status = map(device, pointer(address), nbytes, failure);
    if (status == KVN_OK)
        status = CALL(device, failure, aclrtHostUnregister, pointer(address));
    kvn_device_leave(device, previous);
    return status;
}

static int pin(const kvn_device *device, void *address, uint64_t nbytes, kvn_failure *failure)
{
    if (kvn_acl_of(device)->aclrtHostRegisterV2)
        return CALL(device, failure, aclrtHostRegisterV2, address, whole_pages(nbytes),
                    KVN_ACL_HOST_REGISTER_PINNED);
    return map(device, address, nbytes, failure);
}

/* HCCL also registers host memory, and may have removed this registration together with its own. */
static int unpin(const kvn_device *device, void *address, kvn_failure *failure)
{
    const int status = CALL(device, failure, aclrtHostUnregister, address);

    return status != KVN_OK && failure->code == KVN_ACL_NOT_REGISTERED ? KVN_OK : status;
}

static kvn_memory_kind kind_of(int32_t location)
{
    switch (location) {
    case KVN_ACL_LOCATION_DEVICE: return KVN_MEMORY_DEVICE;
    case KVN_ACL_LOCATION_MANAGED: return KVN_MEMORY_MANAGED;
    case KVN_ACL_LOCATION_HOST:
    case KVN_ACL_LOCATION_HOST_NUMA: return KVN_MEMORY_PINNED;
    default: return KVN_MEMORY_PAGEABLE;
    }
}

/* On an A3 outside a super pod the number is negative and meaningless: use the requested device. */
static uint32_t device_of(const kvn_device *device, kvn_acl_location location)
{
    const bool is_unknown = location.type == KVN_ACL_LOCATION_DEVICE && location.id > INT32_MAX;

    return is_unknown ? (uint32_t)device->id : location.id;
}

static int locate(const kvn_device *device, uint64_t address, kvn_memory_place *out,
                  kvn_failure *failure)
{
    kvn_acl_pointer found = {.location = {.type = KVN_ACL_LOCATION_UNREGISTERED}};
    const int status = CALL(device, failure, aclrtPointerGetAttributes, pointer(address), &found);

    if (status == KVN_OK)
        *out = (kvn_memory_place){kind_of(found.location.type), device_of(device, found.location),
                                  found.page_size};
    /* Drivers report that some host memory (shared, or in huge pages) does not exist. */
    else if (failure->code == KVN_ACL_PARAMETER || failure->code == KVN_ACL_DRIVER_FAILED)
        return KVN_OK;
    return status;
}

static int copy_kind(kvn_direction direction)
{
    return direction == KVN_HOST_TO_DEVICE   ? KVN_ACL_HOST_TO_DEVICE
           : direction == KVN_DEVICE_TO_HOST ? KVN_ACL_DEVICE_TO_HOST
                                             : KVN_ACL_DEVICE_TO_DEVICE;
}

static int copy(const kvn_device *device, kvn_direction direction, uint64_t dst, uint64_t src,
                uint64_t nbytes, kvn_failure *failure)
{
    return CALL(device, failure, aclrtMemcpy, pointer(dst), nbytes, pointer(src), nbytes,
                copy_kind(direction));
}

static int clear(const kvn_device *device, uint64_t address, uint64_t nbytes, kvn_failure *failure)
{
    return CALL(device, failure, aclrtMemset, pointer(address), nbytes, 0, nbytes);
}

static int memory(const kvn_device *device, size_t *free_nbytes, size_t *total_nbytes,
                  kvn_failure *failure)
{
    return CALL(device, failure, aclrtGetMemInfo, KVN_ACL_HBM_MEMORY, free_nbytes, total_nbytes);
}

/* ---- streams ---- */

static int create_stream(const kvn_device *device, kvn_stream *out, kvn_failure *failure)
{
    return CALL(device, failure, aclrtCreateStream, out);
}

static int destroy_stream(const kvn_device *device, kvn_stream stream, kvn_failure *failure)
{
    return CALL(device, failure, aclrtDestroyStream, stream);
}

static int abort_stream(const kvn_device *device, kvn_stream stream, kvn_failure *failure)
{
    return CALL(device, failure, aclrtStreamAbort, stream);
}

static int drop_stream(const kvn_device *device, kvn_stream stream, kvn_failure *failure)
{
    return CALL(device, failure, aclrtDestroyStreamForce, stream);
}

static int wait_stream(const kvn_device *device, kvn_stream stream, int ms, kvn_failure *failure)
{
    const int code = kvn_acl_of(device)->aclrtSynchronizeStreamWithTimeout(stream, ms);

    if (code == KVN_ACL_STREAM_TIMEOUT) {
        kvn_acl_forget(kvn_acl_of(device));
        return KVN_PENDING;
    }
    return ended(device, "aclrtSynchronizeStreamWithTimeout", code, failure);
}

/* ---- events ---- */

static int create_event(const kvn_device *device, void **out, kvn_failure *failure)
{
    if (kvn_acl_of(device)->aclrtCreateEventExWithFlag)
        return CALL(device, failure, aclrtCreateEventExWithFlag, out, KVN_ACL_EVENT_SYNC);
    return CALL(device, failure, aclrtCreateEvent, out);
}

static int destroy_event(const kvn_device *device, void *event, kvn_failure *failure)
{
    return CALL(device, failure, aclrtDestroyEvent, event);
}

static int record_event(const kvn_device *device, void *event, kvn_stream stream, kvn_failure *failure)
{
    return CALL(device, failure, aclrtRecordEvent, event, stream);
}

static int wait_event(const kvn_device *device, kvn_stream stream, void *event, kvn_failure *failure)
{
    return CALL(device, failure, aclrtStreamWaitEvent, stream, event);
}

static int query_event(const kvn_device *device, void *event, kvn_failure *failure)
{
    int32_t is_recorded = 0;
    const int status = CALL(device, failure, aclrtQueryEventStatus, event, &is_recorded);

    return status == KVN_OK && !is_recorded ? KVN_PENDING : status;
}

/* ---- copies on a stream ---- */

static int copy_async(const kvn_device *device, kvn_direction direction, uint64_t dst, uint64_t src,
                      uint64_t nbytes, kvn_stream stream, kvn_failure *failure)
{
    return CALL(device, failure, aclrtMemcpyAsync, pointer(dst), nbytes, pointer(src), nbytes,
                copy_kind(direction), stream);
}

static unsigned batch_copies(const kvn_device *device, char *why, size_t room)
{
    const kvn_acl *acl = kvn_acl_of(device);
    const bool is_async = acl->aclrtMemcpyBatchAsync || acl->aclrtMemcpyBatchAsyncV2;
    const bool is_blocking = acl->aclrtMemcpyBatch || acl->aclrtMemcpyBatchV2;

    if (!is_async)
        snprintf(why, room, "this version of the runtime has no %s",
                 is_blocking ? "aclrtMemcpyBatchAsync" : "aclrtMemcpyBatch");
    return (is_async ? KVN_BATCH_ASYNC : 0u) | (is_blocking ? KVN_BATCH_BLOCKING : 0u);
}

/* uint64_t, pointers and sizes are equally wide, so columns are passed as they are; kvnative/acl.h asserts that. The
 * first version of a call is preferred, because only it reports which descriptor was refused. */
static int copy_batch(kvn_device *device, kvn_direction direction, kvn_columns *batch, kvn_stream stream,
                      size_t *failed, kvn_failure *failure)
{
    const kvn_acl *acl = kvn_acl_of(device);
    void **dst = (void **)batch->dst, **src = (void **)batch->src;
    size_t *nbytes = (size_t *)batch->nbytes;
    const kvn_acl_location host = {.id = 0, .type = KVN_ACL_LOCATION_HOST};
    const kvn_acl_location here = {.id = (uint32_t)device->id, .type = KVN_ACL_LOCATION_DEVICE};
    kvn_acl_batch_attribute attribute = {
        .dst = direction == KVN_DEVICE_TO_HOST ? host : here,
        .src = direction == KVN_HOST_TO_DEVICE ? host : here,
    };
    size_t first = 0;

    if (stream && acl->aclrtMemcpyBatchAsync)
        return CALL(device, failure, aclrtMemcpyBatchAsync, dst, nbytes, src, nbytes, batch->count, &attribute,
                    &first, 1, failed, stream);
    if (stream)
        return CALL(device, failure, aclrtMemcpyBatchAsyncV2, dst, nbytes, src, nbytes, batch->count, &attribute,
                    &first, 1, stream);
    if (acl->aclrtMemcpyBatch)
        return CALL(device, failure, aclrtMemcpyBatch, dst, nbytes, src, nbytes, batch->count, &attribute,
                    &first, 1, failed);
    return CALL(device, failure, aclrtMemcpyBatchV2, dst, nbytes, src, nbytes, batch->count, &attribute, &first, 1);
}

const kvn_device_ops kvn_acl_ops = {
    .name = "acl",
    .runtime = "the Ascend runtime",
    .symbols = &kvn_acl_symbols,
    .count_devices = kvn_acl_library_devices,
    .attribute = kvn_acl_library_attribute,
    .aborted_code = KVN_ACL_STREAM_ABORTED,
    .max_batch = KVN_ACL_MAX_BATCH,
    .can_abort = true,
    /* Waking a channel takes about as long as issuing a dozen copies. This was not measured on hardware. */
    .host_costs = {.shard = 4u << 20, .descriptor = 64u << 10},
    .within_costs = {.shard = 32u << 20, .descriptor = 2u << 20},
    .open_context = open_context,
    .close_context = close_context,
    .get_context = get_context,
    .set_context = set_context,
    .allocate = allocate,
    .free = free_device,
    .allocate_host = allocate_host,
    .free_host = free_host,
    .pin = pin,
    .unpin = unpin,
    .locate = locate,
    .copy = copy,
    .clear = clear,
    .memory = memory,
    .create_stream = create_stream,
    .destroy_stream = destroy_stream,
    .abort_stream = abort_stream,
    .drop_stream = drop_stream,
    .wait_stream = wait_stream,
    .create_event = create_event,
    .destroy_event = destroy_event,
    .record_event = record_event,
    .wait_event = wait_event,
    .query_event = query_event,
    .copy_async = copy_async,
    .batch_copies = batch_copies,
    .copy_batch = copy_batch,
};

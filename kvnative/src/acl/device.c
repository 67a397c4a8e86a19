#include "acl/device.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- opening, contexts ---- */

static aclrtContext current_context(const kvn_acl *acl)
{
    aclrtContext context = NULL;

    if (acl->aclrtGetCurrentContext(&context) == KVN_ACL_OK)
        return context;
    kvn_acl_forget(acl); /* a thread without context: not an error of ours */
    return NULL;
}

static void choose_copying(kvn_device *device)
{
    kvn_copying copying = KVN_COPY_BATCH_ASYNC;
    const char *why = "";

    if (!device->acl->aclrtMemcpyBatchAsync) {
        copying = device->acl->aclrtMemcpyBatch ? KVN_COPY_BATCH : KVN_COPY_SINGLE;
        why = device->acl->aclrtMemcpyBatch
                  ? "this version of the runtime has no aclrtMemcpyBatchAsync"
                  : "this version of the runtime has no aclrtMemcpyBatch";
    }
    atomic_init(&device->copying, copying);
    snprintf(device->fallback, sizeof device->fallback, "%s", why);
}

int kvn_device_open(const kvn_acl_library *library, int32_t id, kvn_device *out,
                    kvn_failure *failure)
{
    const kvn_acl *acl = &library->calls;
    aclrtContext previous;
    int code, error;

    memset(out, 0, sizeof *out);
    out->library = library;
    out->acl = acl;
    out->id = id;
    if (kvn_acl_library_check(library, failure) != KVN_OK)
        return failure->status;
    previous = current_context(acl);
    code = acl->aclrtSetDevice(id);
    if (code != KVN_ACL_OK)
        return kvn_acl_fail(acl, "aclrtSetDevice", code, failure);
    code = acl->aclrtGetCurrentContext(&out->context);
    if (code != KVN_ACL_OK)
        kvn_acl_fail(acl, "aclrtGetCurrentContext", code, failure);
    kvn_device_leave(out, previous);
    if (code != KVN_ACL_OK)
        return failure->status;
    error = pthread_mutex_init(&out->mutex, NULL);
    if (error)
        return kvn_fail(failure, KVN_NO_MEMORY, error, "no mutex for device %d: %s", (int)id,
                        strerror(error));
    choose_copying(out);
    return KVN_OK;
}

void kvn_device_close(kvn_device *device)
{
    free(device->pinned);
    pthread_mutex_destroy(&device->mutex);
}

int kvn_device_enter(const kvn_device *device, aclrtContext *previous, kvn_failure *failure)
{
    int code;

    if (kvn_acl_library_check(device->library, failure) != KVN_OK)
        return failure->status;
    *previous = current_context(device->acl);
    if (*previous == device->context)
        return KVN_OK;
    code = device->acl->aclrtSetCurrentContext(device->context);
    return code == KVN_ACL_OK
               ? KVN_OK
               : kvn_acl_fail(device->acl, "aclrtSetCurrentContext", code, failure);
}

void kvn_device_leave(const kvn_device *device, aclrtContext previous)
{
    if (previous && previous != device->context &&
        device->acl->aclrtSetCurrentContext(previous) != KVN_ACL_OK)
        kvn_acl_forget(device->acl); /* destroyed meanwhile: its owner will hear of that */
}

/* Wears the check of every call: enter, call, leave. */
#define CALL(device, failure, name, ...)                                                          \
    do {                                                                                          \
        aclrtContext previous_ = NULL;                                                             \
        int code_;                                                                                \
        if (kvn_device_enter(device, &previous_, failure) != KVN_OK)                              \
            return (failure)->status;                                                             \
        code_ = (device)->acl->name(__VA_ARGS__);                                                 \
        if (code_ != KVN_ACL_OK)                                                                  \
            kvn_acl_fail((device)->acl, #name, code_, failure);                                   \
        kvn_device_leave(device, previous_);                                                      \
        if (code_ != KVN_ACL_OK)                                                                  \
            return (failure)->status;                                                             \
    } while (0)

/* ---- memory ---- */

int kvn_device_allocate(const kvn_device *device, uint64_t nbytes, void **out,
                        kvn_failure *failure)
{
    CALL(device, failure, aclrtMalloc, out, nbytes, KVN_ACL_MALLOC_HUGE_ONLY);
    return KVN_OK;
}

int kvn_device_free(const kvn_device *device, void *address, kvn_failure *failure)
{
    CALL(device, failure, aclrtFree, address);
    return KVN_OK;
}

int kvn_device_allocate_host(const kvn_device *device, uint64_t nbytes, void **out,
                             kvn_failure *failure)
{
    CALL(device, failure, aclrtMallocHost, out, nbytes);
    return KVN_OK;
}

int kvn_device_free_host(const kvn_device *device, void *address, kvn_failure *failure)
{
    CALL(device, failure, aclrtFreeHost, address);
    return KVN_OK;
}

static int get_attributes(const kvn_device *device, uint64_t address, kvn_acl_pointer *out,
                          kvn_failure *failure)
{
    CALL(device, failure, aclrtPointerGetAttributes, (const void *)(uintptr_t)address, out);
    return KVN_OK;
}

int kvn_device_locate(const kvn_device *device, uint64_t address, kvn_acl_pointer *out,
                      kvn_failure *failure)
{
    const kvn_acl_pointer unknown = {.location = {.type = KVN_ACL_LOCATION_UNREGISTERED}};
    int status;

    *out = unknown;
    status = get_attributes(device, address, out, failure);
    if (status == KVN_OK)
        return KVN_OK;
    /* Of some memory of the host (shared, or in huge pages) drivers say that there is none. */
    *out = unknown;
    return failure->code == KVN_ACL_PARAMETER || failure->code == KVN_ACL_DRIVER_FAILED ? KVN_OK
                                                                                        : status;
}

int kvn_device_copy(const kvn_device *device, uint64_t dst, uint64_t src, uint64_t nbytes, int kind,
                    kvn_failure *failure)
{
    if (nbytes)
        CALL(device, failure, aclrtMemcpy, (void *)(uintptr_t)dst, nbytes,
             (const void *)(uintptr_t)src, nbytes, kind);
    return KVN_OK;
}

int kvn_device_clear(const kvn_device *device, uint64_t address, uint64_t nbytes,
                     kvn_failure *failure)
{
    if (nbytes)
        CALL(device, failure, aclrtMemset, (void *)(uintptr_t)address, nbytes, 0, nbytes);
    return KVN_OK;
}

int kvn_device_memory(const kvn_device *device, size_t *free_nbytes, size_t *total_nbytes,
                      kvn_failure *failure)
{
    CALL(device, failure, aclrtGetMemInfo, KVN_ACL_HBM_MEMORY, free_nbytes, total_nbytes);
    return KVN_OK;
}

/* ---- pinned host memory ---- */

/* Index of the first range that ends beyond `address`; with the mutex held. */
static size_t find_pinned(const kvn_device *device, uint64_t address)
{
    size_t low = 0, high = device->num_pinned;

    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (device->pinned[middle].last > address)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

/* Notes the range, unless it overlaps another; so no two threads register overlapping ones. */
static int note_pinned(kvn_device *device, kvn_pinned range, kvn_failure *failure)
{
    const size_t at = find_pinned(device, range.first);
    kvn_pinned *pinned;

    if (at < device->num_pinned && device->pinned[at].first < range.last)
        return kvn_fail(failure, KVN_INVALID, 0,
                        "[0x%" PRIx64 ", 0x%" PRIx64 ") overlaps [0x%" PRIx64 ", 0x%" PRIx64
                        "), which is pinned for device %d already", range.first, range.last,
                        device->pinned[at].first, device->pinned[at].last, (int)device->id);
    pinned = realloc(device->pinned, (device->num_pinned + 1) * sizeof *pinned);
    if (!pinned)
        return kvn_fail(failure, KVN_NO_MEMORY, ENOMEM, "no memory to note a pinned range");
    memmove(pinned + at + 1, pinned + at, (device->num_pinned - at) * sizeof *pinned);
    pinned[at] = range;
    device->pinned = pinned;
    device->num_pinned++;
    return KVN_OK;
}

static void forget_pinned(kvn_device *device, uint64_t address)
{
    size_t at;

    pthread_mutex_lock(&device->mutex);
    at = find_pinned(device, address);
    if (at < device->num_pinned && device->pinned[at].first == address) {
        device->num_pinned--;
        memmove(device->pinned + at, device->pinned + at + 1,
                (device->num_pinned - at) * sizeof *device->pinned);
    }
    pthread_mutex_unlock(&device->mutex);
}

static int register_host(const kvn_device *device, void *address, uint64_t nbytes,
                         kvn_failure *failure)
{
    void *on_device = NULL;

    if (device->acl->aclrtHostRegisterV2)
        CALL(device, failure, aclrtHostRegisterV2, address, nbytes, KVN_ACL_HOST_REGISTER_PINNED);
    else
        CALL(device, failure, aclrtHostRegister, address, nbytes, KVN_ACL_HOST_REGISTER_MAPPED,
             &on_device);
    return KVN_OK;
}

int kvn_device_pin(kvn_device *device, uint64_t address, uint64_t nbytes, kvn_failure *failure)
{
    const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    uint64_t last;
    int status;

    if (kvn_acl_library_check(device->library, failure) != KVN_OK)
        return failure->status;
    if (address == 0 || address % page)
        return kvn_fail(failure, KVN_INVALID, 0,
                        "address is 0x%" PRIx64 "; it must be that of a page (a multiple of %" PRIu64
                        ", not 0)", address, page);
    if (nbytes == 0 || __builtin_add_overflow(address, nbytes, &last))
        return kvn_fail(failure, KVN_INVALID, 0,
                        "nbytes is %" PRIu64 "; it must be at least 1, and the range end below 2**64",
                        nbytes);
    pthread_mutex_lock(&device->mutex);
    status = note_pinned(device, (kvn_pinned){address, last}, failure);
    pthread_mutex_unlock(&device->mutex);
    if (status != KVN_OK)
        return status;
    status = register_host(device, (void *)(uintptr_t)address, nbytes, failure);
    if (status != KVN_OK)
        forget_pinned(device, address);
    return status;
}

static int unregister_host(const kvn_device *device, void *address, kvn_failure *failure)
{
    CALL(device, failure, aclrtHostUnregister, address);
    return KVN_OK;
}

/* HCCL registers host memory for itself too, and takes our registration away with its own. */
static int unregister_if_known(const kvn_device *device, void *address, kvn_failure *failure)
{
    const int status = unregister_host(device, address, failure);

    return status != KVN_OK && failure->code == KVN_ACL_NOT_REGISTERED ? KVN_OK : status;
}

int kvn_device_unpin(kvn_device *device, uint64_t address, kvn_failure *failure)
{
    const int status = unregister_if_known(device, (void *)(uintptr_t)address, failure);

    forget_pinned(device, address); /* also where that failed: nobody can rely on it any more */
    return status;
}

bool kvn_device_pinned_at(kvn_device *device, uint64_t address, kvn_pinned *out)
{
    bool pinned;
    size_t at;

    pthread_mutex_lock(&device->mutex);
    at = find_pinned(device, address);
    pinned = at < device->num_pinned && device->pinned[at].first <= address;
    if (pinned)
        *out = device->pinned[at];
    pthread_mutex_unlock(&device->mutex);
    return pinned;
}

/* ---- the fallback ---- */

void kvn_device_fall_back(kvn_device *device, kvn_copying copying, const char *why)
{
    pthread_mutex_lock(&device->mutex);
    if (copying > (kvn_copying)atomic_load(&device->copying)) {
        snprintf(device->fallback, sizeof device->fallback, "%s", why);
        atomic_store(&device->copying, copying);
    }
    pthread_mutex_unlock(&device->mutex);
}

void kvn_device_fallback(kvn_device *device, char *out, size_t room)
{
    pthread_mutex_lock(&device->mutex);
    snprintf(out, room, "%s", device->fallback);
    pthread_mutex_unlock(&device->mutex);
}

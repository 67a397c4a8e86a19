/* Opens devices, and keeps their pinned host memory. */
#include "device/device.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- opening, contexts ---- */

int kvn_device_open(const kvn_device_ops *ops, const void *runtime, int32_t id, kvn_device *out,
                    kvn_failure *failure)
{
    void *previous;
    int status, error;

    memset(out, 0, sizeof *out);
    out->ops = ops;
    out->runtime = runtime;
    out->id = id;
    out->pid = getpid();
    kvn_device_begin_calls(out);
    previous = ops->get_context(out);
    status = ops->open_context(out, &out->context, &out->primary, failure);
    kvn_device_leave(out, previous); /* also ends the calls */
    if (status != KVN_OK)
        return status;
    error = pthread_mutex_init(&out->mutex, NULL);
    if (error)
        ops->close_context(out, out->context);
    if (error)
        return kvn_fail(failure, KVN_NO_MEMORY, error, "no mutex for device %d: %s", (int)id,
                        strerror(error));
    atomic_init(&out->batch_copies, ops->batch_copies(out, out->fallback, sizeof out->fallback));
    return KVN_OK;
}

void kvn_device_close(kvn_device *device)
{
    kvn_device_begin_calls(device);
    device->ops->close_context(device, device->context);
    kvn_device_end_calls(device);
    free(device->pinned);
    pthread_mutex_destroy(&device->mutex);
}

int kvn_device_check_process(const kvn_device *device, kvn_failure *failure)
{
    if (device->pid == getpid())
        return KVN_OK;
    return kvn_fail(failure, KVN_INVALID, 0,
                    "%s was opened by process %d and does not work in process %d, forked from it: "
                    "start such processes with spawn", device->ops->runtime, (int)device->pid,
                    (int)getpid());
}

void kvn_device_begin_calls(const kvn_device *device)
{
    if (device->ops->begin_calls)
        device->ops->begin_calls(device);
}

void kvn_device_end_calls(const kvn_device *device)
{
    if (device->ops->end_calls)
        device->ops->end_calls(device);
}

int kvn_device_enter(const kvn_device *device, void **previous, kvn_failure *failure)
{
    if (kvn_device_check_process(device, failure) != KVN_OK)
        return failure->status;
    kvn_device_begin_calls(device);
    *previous = device->ops->get_context(device);
    if (*previous == device->context || device->ops->set_context(device, device->context, failure) == KVN_OK)
        return KVN_OK;
    kvn_device_end_calls(device);
    return failure->status;
}

/* Makes `previous` current in place of `now`. */
static void leave(const kvn_device *device, void *previous, const void *now)
{
    kvn_failure ignored; /* if it was destroyed meanwhile, its owner will notice */

    if (!previous)
        previous = device->primary;
    if (previous != now)
        device->ops->set_context(device, previous, &ignored);
    kvn_device_end_calls(device);
}

void kvn_device_leave(const kvn_device *device, void *previous) { leave(device, previous, device->context); }

int kvn_device_enter_stream(const kvn_device *device, kvn_stream stream, void **previous, kvn_failure *failure)
{
    void *theirs = device->primary ? device->primary : device->context;
    int status = kvn_device_check_process(device, failure);

    if (status != KVN_OK)
        return status;
    kvn_device_begin_calls(device);
    *previous = device->ops->get_context(device);
    if (device->ops->context_of)
        status = device->ops->context_of(device, stream, &theirs, failure);
    if (status == KVN_OK && *previous != theirs)
        status = device->ops->set_context(device, theirs, failure);
    if (status != KVN_OK)
        kvn_device_end_calls(device);
    return status;
}

void kvn_device_leave_stream(const kvn_device *device, void *previous)
{
    leave(device, previous, device->ops->get_context(device));
}

/* Makes a call of the table on a thread of the program, and returns from the enclosing function. */
#define RETURN_CALL(device, failure, op, ...)                                                     \
    do {                                                                                          \
        void *previous_ = NULL;                                                                   \
        int status_ = kvn_device_enter(device, &previous_, failure);                              \
        if (status_ == KVN_OK) {                                                                  \
            status_ = (device)->ops->op(device, __VA_ARGS__, failure);                            \
            kvn_device_leave(device, previous_);                                                  \
        }                                                                                         \
        return status_;                                                                           \
    } while (0)

/* ---- memory ---- */

int kvn_device_allocate(const kvn_device *device, uint64_t nbytes, void **out,
                        kvn_failure *failure)
{
    RETURN_CALL(device, failure, allocate, nbytes, out);
}

int kvn_device_free(const kvn_device *device, void *address, kvn_failure *failure)
{
    RETURN_CALL(device, failure, free, address);
}

int kvn_device_allocate_host(const kvn_device *device, uint64_t nbytes, void **out,
                             kvn_failure *failure)
{
    RETURN_CALL(device, failure, allocate_host, nbytes, out);
}

int kvn_device_free_host(const kvn_device *device, void *address, kvn_failure *failure)
{
    RETURN_CALL(device, failure, free_host, address);
}

int kvn_device_locate(const kvn_device *device, uint64_t address, kvn_memory_place *out,
                      kvn_failure *failure)
{
    *out = (kvn_memory_place){.kind = KVN_MEMORY_PAGEABLE};
    RETURN_CALL(device, failure, locate, address, out);
}

int kvn_device_copy(const kvn_device *device, kvn_direction direction, uint64_t dst, uint64_t src,
                    uint64_t nbytes, kvn_failure *failure)
{
    if (nbytes == 0)
        return KVN_OK;
    RETURN_CALL(device, failure, copy, direction, dst, src, nbytes);
}

int kvn_device_clear(const kvn_device *device, uint64_t address, uint64_t nbytes,
                     kvn_failure *failure)
{
    if (nbytes == 0)
        return KVN_OK;
    RETURN_CALL(device, failure, clear, address, nbytes);
}

int kvn_device_memory(const kvn_device *device, size_t *free_nbytes, size_t *total_nbytes,
                      kvn_failure *failure)
{
    RETURN_CALL(device, failure, memory, free_nbytes, total_nbytes);
}

/* ---- pinned host memory ---- */

/* Returns the index of the first range that ends beyond `address`. The caller holds the mutex. */
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

/* Adds the range unless it overlaps another, so that two threads do not register overlapping ones. */
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
        return kvn_fail(failure, KVN_NO_MEMORY, ENOMEM, "no memory for the list of pinned ranges");
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

static int pin(const kvn_device *device, void *address, uint64_t nbytes, kvn_failure *failure)
{
    RETURN_CALL(device, failure, pin, address, nbytes);
}

static int unpin(const kvn_device *device, void *address, kvn_failure *failure)
{
    RETURN_CALL(device, failure, unpin, address);
}

int kvn_device_allocate_pinned(kvn_device *device, uint64_t nbytes, void **out, kvn_failure *failure)
{
    const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    const uint64_t rounded = (nbytes + page - 1) / page * page;
    kvn_failure ignored;
    uint64_t first;
    int status;

    if (nbytes == 0 || rounded < nbytes)
        return kvn_fail(failure, KVN_INVALID, 0, "nbytes is %" PRIu64 "; it must be at least 1, and less than "
                        "2**64 - %" PRIu64, nbytes, page);
    if (kvn_device_allocate_host(device, rounded, out, failure) != KVN_OK)
        return failure->status;
    first = (uintptr_t)*out;
    if (first % page) {
        status = kvn_fail(failure, KVN_FAILED, 0, "%s allocates host memory at 0x%" PRIx64
                          ", where no page begins", device->ops->runtime, first);
    } else {
        pthread_mutex_lock(&device->mutex);
        status = note_pinned(device, (kvn_pinned){first, first + rounded, true}, failure);
        pthread_mutex_unlock(&device->mutex);
    }
    if (status != KVN_OK)
        kvn_device_free_host(device, *out, &ignored);
    return status;
}

int kvn_device_free_pinned(kvn_device *device, void *address, kvn_failure *failure)
{
    forget_pinned(device, (uintptr_t)address);
    return kvn_device_free_host(device, address, failure);
}

int kvn_device_pin(kvn_device *device, uint64_t address, uint64_t nbytes, kvn_failure *failure)
{
    const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    uint64_t last;
    int status;

    if (kvn_device_check_process(device, failure) != KVN_OK)
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
    status = note_pinned(device, (kvn_pinned){address, last, false}, failure);
    pthread_mutex_unlock(&device->mutex);
    if (status != KVN_OK)
        return status;
    status = pin(device, (void *)(uintptr_t)address, nbytes, failure);
    if (status != KVN_OK)
        forget_pinned(device, address);
    return status;
}

int kvn_device_unpin(kvn_device *device, uint64_t address, kvn_failure *failure)
{
    const int status = unpin(device, (void *)(uintptr_t)address, failure);

    forget_pinned(device, address); /* also after a failure, because the memory may be unpinned */
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

void kvn_device_fall_back(kvn_device *device, const char *why)
{
    pthread_mutex_lock(&device->mutex);
    if (atomic_load(&device->batch_copies)) {
        snprintf(device->fallback, sizeof device->fallback, "%s", why);
        atomic_store(&device->batch_copies, 0);
    }
    pthread_mutex_unlock(&device->mutex);
}

void kvn_device_note_fallback(kvn_device *device, const char *why)
{
    pthread_mutex_lock(&device->mutex);
    snprintf(device->fallback, sizeof device->fallback, "%s", why);
    pthread_mutex_unlock(&device->mutex);
}

void kvn_device_fallback(kvn_device *device, char *out, size_t room)
{
    pthread_mutex_lock(&device->mutex);
    snprintf(out, room, "%s", device->fallback);
    pthread_mutex_unlock(&device->mutex);
}

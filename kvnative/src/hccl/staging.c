/* Keeps the buffer sets of staged transfers. */
#include "hccl/staging.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "core/thread.h"

/* Interval at which a waiting thread checks if it must stop. */
#define MS_PER_SLICE 10
#define NS_PER_SLICE (MS_PER_SLICE * INT64_C(1000000))

/* ---- buffer sets; with the device's context current ---- */

/* Stops the copies of a stream by aborting or destroying it. If both fail, waits for the copies to end, because others
 * own the memory after the return. */
static void stop(const kvn_device *device, kvn_stream stream)
{
    const kvn_device_ops *ops = device->ops;
    kvn_failure ignored; /* the error that led here is reported instead */
    bool aborted, destroyed;
    do {
        aborted = ops->abort_stream(device, stream, &ignored) == KVN_OK;
        destroyed = ops->drop_stream(device, stream, &ignored) == KVN_OK;
    } while (!aborted && !destroyed &&
             ops->wait_stream(device, stream, MS_PER_SLICE, &ignored) == KVN_PENDING);
}

static void take_down(const kvn_staging *staging, kvn_buffer_set *set)
{
    const kvn_acl *acl = kvn_acl_of(staging->device);
    if (set->stream)
        stop(staging->device, set->stream);
    for (uint32_t i = 0; i < staging->slots; i++) {
        if (set->filled[i])
            acl->aclrtDestroyEvent(set->filled[i]);
        if (set->emptied[i])
            acl->aclrtDestroyEvent(set->emptied[i]);
        set->filled[i] = set->emptied[i] = NULL;
    }
    set->stream = NULL;
}

/* Makes an event that can be recorded repeatedly: a wait refers to the last recording. */
static int make_event(const kvn_acl *acl, aclrtEvent *out, kvn_failure *failure)
{
    const aclError code = acl->aclrtCreateEventExWithFlag(out, KVN_ACL_EVENT_SYNC);
    if (code == KVN_ACL_OK)
        return KVN_OK;
    *out = NULL;
    return kvn_acl_fail(acl, "aclrtCreateEventExWithFlag", code, failure);
}

static int set_up(const kvn_staging *staging, kvn_buffer_set *set, kvn_failure *failure)
{
    const kvn_device *device = staging->device;
    const kvn_acl *acl = kvn_acl_of(device);
    if (device->ops->create_stream(device, &set->stream, failure) != KVN_OK) {
        set->stream = NULL;
        return failure->status;
    }
    for (uint32_t i = 0; i < staging->slots; i++)
        if (make_event(acl, &set->filled[i], failure) != KVN_OK ||
            make_event(acl, &set->emptied[i], failure) != KVN_OK) {
            take_down(staging, set);
            return failure->status;
        }
    return KVN_OK;
}

/* ---- open, close ---- */

/* Without a context the device is gone, and there is nothing to free. */
static int drop(const kvn_staging *staging, kvn_failure *failure)
{
    void *previous;
    if (kvn_device_enter(staging->device, &previous, failure) != KVN_OK)
        return failure->status;
    for (uint32_t i = 0; i < staging->num_sets; i++)
        take_down(staging, &staging->sets[i]);
    kvn_device_leave(staging->device, previous);
    return KVN_OK;
}

static int set_up_all(const kvn_staging *staging, kvn_failure *failure)
{
    kvn_failure ignored;
    void *previous;
    int status = KVN_OK;
    if (kvn_device_enter(staging->device, &previous, failure) != KVN_OK)
        return failure->status;
    for (uint32_t i = 0; i < staging->num_sets && status == KVN_OK; i++)
        status = set_up(staging, &staging->sets[i], failure);
    kvn_device_leave(staging->device, previous);
    if (status != KVN_OK)
        drop(staging, &ignored);
    return status;
}

int kvn_staging_check(uint64_t slot_nbytes, uint64_t slots, uint64_t sets, kvn_failure *failure)
{
    if (slot_nbytes < 4096 || slot_nbytes > UINT64_C(1) << 30)
        return kvn_fail(failure, KVN_INVALID, 0,
                        "slot_nbytes is %" PRIu64 "; it must be in [4096, 2**30]", slot_nbytes);
    /* With one slot, copies and operations could not overlap. */
    if (slots < 2 || slots > KVN_STAGING_MAX_SLOTS)
        return kvn_fail(failure, KVN_INVALID, 0, "slots is %" PRIu64 "; it must be in [2, %d]",
                        slots, KVN_STAGING_MAX_SLOTS);
    if (sets < 1 || sets > KVN_STAGING_MAX_SETS)
        return kvn_fail(failure, KVN_INVALID, 0, "buffer_sets is %" PRIu64 "; it must be in [1, %d]",
                        sets, KVN_STAGING_MAX_SETS);
    return KVN_OK;
}

int kvn_staging_open(kvn_device *device, uint64_t address, uint64_t slot_nbytes, uint32_t slots,
                     uint32_t num_sets, kvn_staging *out, kvn_failure *failure)
{
    const kvn_acl *acl = kvn_acl_of(device);
    *out = (kvn_staging){.device = device, .slot_nbytes = slot_nbytes, .slots = slots,
                         .num_sets = num_sets};
    if (!acl->aclrtCreateEventExWithFlag || !acl->aclrtSynchronizeEventWithTimeout)
        return kvn_fail(failure, KVN_UNSUPPORTED, 0,
                        "this ACL library lacks aclrtCreateEventExWithFlag or "
                        "aclrtSynchronizeEventWithTimeout, which staging needs");
    out->sets = calloc(num_sets, sizeof *out->sets);
    if (!out->sets)
        return kvn_fail(failure, KVN_NO_MEMORY, ENOMEM, "no memory for %" PRIu32 " buffer sets",
                        num_sets);
    if (set_up_all(out, failure) != KVN_OK) {
        kvn_staging_free(out);
        return failure->status;
    }
    for (uint32_t i = 0; i < num_sets; i++)
        out->sets[i].address = address + i * slot_nbytes * slots;
    pthread_mutex_init(&out->mutex, NULL);
    kvn_cond_init(&out->freed);
    out->is_open = true;
    return KVN_OK;
}

int kvn_staging_close(kvn_staging *staging, kvn_failure *failure)
{
    int status = KVN_OK;
    pthread_mutex_lock(&staging->mutex);
    if (staging->is_open && staging->num_busy > 0) {
        status = kvn_fail(failure, KVN_INVALID, 0, "%" PRIu32 " transfer(s) use the staging memory",
                          staging->num_busy);
    } else if (staging->is_open) {
        staging->is_open = false;
        status = drop(staging, failure);
    }
    pthread_mutex_unlock(&staging->mutex);
    return status;
}

void kvn_staging_free(kvn_staging *staging)
{
    free(staging->sets);
    staging->sets = NULL;
}

/* ---- for transfers ---- */

static kvn_buffer_set *find_free(kvn_staging *staging)
{
    for (uint32_t i = 0; i < staging->num_sets; i++)
        if (!staging->sets[i].busy)
            return &staging->sets[i];
    return NULL;
}

/* The caller holds the mutex. */
static int wait_for_set(kvn_staging *staging, const kvn_halt *halt, kvn_buffer_set **out,
                        kvn_failure *failure)
{
    while (staging->is_open && !kvn_is_halted(halt)) {
        *out = find_free(staging);
        if (*out) {
            (*out)->busy = true;
            staging->num_busy++;
            return KVN_OK;
        }
        kvn_cond_wait(&staging->freed, &staging->mutex, kvn_now_ns() + NS_PER_SLICE);
    }
    if (staging->is_open)
        return kvn_fail(failure, KVN_CANCELLED, 0,
                        "all %" PRIu32 " buffer sets of the staging memory are in use",
                        staging->num_sets);
    return kvn_fail(failure, KVN_FAILED, 0, "the staging memory is closed (%" PRIu32 " buffer sets)",
                    staging->num_sets);
}

int kvn_staging_claim(kvn_staging *staging, const kvn_halt *halt, kvn_buffer_set **out,
                      kvn_failure *failure)
{
    int status;
    pthread_mutex_lock(&staging->mutex);
    status = wait_for_set(staging, halt, out, failure);
    pthread_mutex_unlock(&staging->mutex);
    if (status != KVN_OK || (*out)->stream)
        return status;
    status = set_up(staging, *out, failure);
    if (status != KVN_OK)
        kvn_staging_release(staging, *out, true);
    return status;
}

void kvn_staging_release(kvn_staging *staging, kvn_buffer_set *set, bool is_clean)
{
    kvn_failure ignored;
    if (!is_clean) {
        take_down(staging, set);
        set_up(staging, set, &ignored); /* after a failure, the next claim tries again, and reports the reason */
    }
    pthread_mutex_lock(&staging->mutex);
    set->busy = false;
    staging->num_busy--;
    pthread_cond_broadcast(&staging->freed);
    pthread_mutex_unlock(&staging->mutex);
}

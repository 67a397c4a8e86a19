/* Keeps the buffer sets of staged transfers. */
#include "hccl/staging.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>

#include "core/thread.h"

/* Interval at which a waiting thread checks if it must stop. */
#define NS_PER_SLICE INT64_C(10000000)

int kvn_staging_check(uint64_t slot_nbytes, uint64_t sets, kvn_failure *failure)
{
    if (slot_nbytes < 4096 || slot_nbytes > UINT64_C(1) << 30)
        return kvn_fail(failure, KVN_INVALID, 0,
                        "slot_nbytes is %" PRIu64 "; it must be in [4096, 2**30]", slot_nbytes);
    if (sets < 1 || sets > KVN_STAGING_MAX_SETS)
        return kvn_fail(failure, KVN_INVALID, 0, "buffer_sets is %" PRIu64 "; it must be in [1, %d]",
                        sets, KVN_STAGING_MAX_SETS);
    return KVN_OK;
}

int kvn_staging_open(kvn_device *device, uint64_t address, uint64_t slot_nbytes, uint32_t num_sets, kvn_staging *out,
                     kvn_failure *failure)
{
    *out = (kvn_staging){.device = device, .slot_nbytes = slot_nbytes, .num_sets = num_sets};
    out->sets = calloc(num_sets, sizeof *out->sets);
    if (!out->sets)
        return kvn_fail(failure, KVN_NO_MEMORY, ENOMEM, "no memory for %" PRIu32 " buffer sets",
                        num_sets);
    for (uint32_t i = 0; i < 2 * num_sets; i++)
        out->sets[i / 2].address[i % 2] = address + i * slot_nbytes;
    pthread_mutex_init(&out->mutex, NULL);
    kvn_cond_init(&out->freed);
    out->is_open = true;
    return KVN_OK;
}

int kvn_staging_close(kvn_staging *staging, kvn_failure *failure)
{
    int status = KVN_OK;
    pthread_mutex_lock(&staging->mutex);
    if (staging->num_busy > 0) {
        status = kvn_fail(failure, KVN_INVALID, 0, "%" PRIu32 " transfer(s) use the staging memory",
                          staging->num_busy);
    } else {
        staging->is_open = false;
        for (uint32_t i = 0; i < staging->num_sets; i++)
            kvn_copier_fini(&staging->sets[i].copier);
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
    if (status != KVN_OK || (*out)->copier.channel)
        return status;
    status = kvn_copier_init(&(*out)->copier, staging->device, failure);
    if (status != KVN_OK)
        kvn_staging_release(staging, *out);
    return status;
}

void kvn_staging_release(kvn_staging *staging, kvn_buffer_set *set)
{
    pthread_mutex_lock(&staging->mutex);
    set->busy = false;
    staging->num_busy--;
    pthread_cond_broadcast(&staging->freed);
    pthread_mutex_unlock(&staging->mutex);
}

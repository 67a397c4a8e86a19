/* The thread that waits for work of the context, and then unmaps freed memory. */
#include "cuda/reclaim.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/thread.h"

typedef struct freed {
    struct freed *next;
    kvn_cuda_allocated block;
} freed;

/* The thread does not use the device, which may be closed before the thread ends. */
struct kvn_cuda_reclaimer {
    const kvn_cuda *cuda;
    CUcontext context;
    pthread_t thread;
    pthread_mutex_t mutex; /* guards the fields below */
    pthread_cond_t changed;
    freed *freed;
    uint64_t num_wanted; /* rounds, each of which waits for all work, and then frees memory */
    uint64_t num_done;
    kvn_failure why;  /* of the latest round; its status may be KVN_OK */
    bool is_late;     /* a waiter of the present round has given up */
    bool is_stopping; /* no further round is wanted */
    bool is_alone;    /* the device is closed: the thread frees this struct */
};

int kvn_cuda_unmap_block(const kvn_cuda *cuda, const kvn_cuda_allocated *block, kvn_failure *failure)
{
    const CUresult unmapped = cuda->cuMemUnmap(block->address, block->nbytes);
    const CUresult released = cuda->cuMemRelease(block->handle);
    const CUresult returned = cuda->cuMemAddressFree(block->address, block->nbytes);

    if (unmapped != KVN_CUDA_OK)
        return kvn_cuda_fail(cuda, "cuMemUnmap", unmapped, failure);
    if (released != KVN_CUDA_OK)
        return kvn_cuda_fail(cuda, "cuMemRelease", released, failure);
    return returned == KVN_CUDA_OK ? KVN_OK : kvn_cuda_fail(cuda, "cuMemAddressFree", returned, failure);
}

/* ---- the thread ---- */

static int free_block(const kvn_cuda *cuda, const kvn_cuda_allocated *block, kvn_failure *failure)
{
    CUresult code;

    if (block->handle)
        return kvn_cuda_unmap_block(cuda, block, failure);
    code = cuda->cuMemFree_v2(block->address);
    return code == KVN_CUDA_OK ? KVN_OK : kvn_cuda_fail(cuda, "cuMemFree_v2", code, failure);
}

/* Returns the blocks that could not be freed because a stream is captured. `why` is the first failure. */
static freed *free_all(const kvn_cuda *cuda, freed *list, kvn_failure *why)
{
    const CUresult code = cuda->cuCtxSynchronize();

    *why = (kvn_failure){.status = KVN_OK};
    if (code != KVN_CUDA_OK)
        kvn_cuda_fail(cuda, "cuCtxSynchronize", code, why);
    if (code >= KVN_CUDA_CAPTURE_UNSUPPORTED && code <= KVN_CUDA_CAPTURE_WRONG_THREAD)
        return list;
    /* A context that has failed runs nothing more, so its memory can be unmapped. */
    while (list) {
        freed *next = list->next;
        kvn_failure later;
        free_block(cuda, &list->block, why->status == KVN_OK ? why : &later);
        free(list);
        list = next;
    }
    return NULL;
}

/* The caller holds the mutex, which is released meanwhile. */
static void run_round(kvn_cuda_reclaimer *self)
{
    const uint64_t round = self->num_wanted;
    freed *list = self->freed, **end;
    kvn_failure why;

    self->freed = NULL;
    pthread_mutex_unlock(&self->mutex);
    list = free_all(self->cuda, list, &why);
    pthread_mutex_lock(&self->mutex);
    for (end = &self->freed; *end; end = &(*end)->next)
        ;
    *end = list;
    self->why = why;
    self->num_done = round;
    self->is_late = false;
    pthread_cond_broadcast(&self->changed);
}

/* The remaining memory belongs to a context with a captured stream, and is freed when that context is destroyed. A
 * primary context lives while the program holds it, often until the process ends. */
static void destroy(kvn_cuda_reclaimer *self)
{
    while (self->freed) {
        freed *next = self->freed->next;
        free(self->freed);
        self->freed = next;
    }
    pthread_cond_destroy(&self->changed);
    pthread_mutex_destroy(&self->mutex);
    free(self);
}

static void *reclaim_main(void *argument)
{
    kvn_cuda_reclaimer *self = argument;
    int mode = KVN_CUDA_CAPTURE_RELAXED;
    bool is_alone;

    self->cuda->cuThreadExchangeStreamCaptureMode(&mode);
    self->cuda->cuCtxSetCurrent(self->context);
    pthread_mutex_lock(&self->mutex);
    while (self->num_done < self->num_wanted || !self->is_stopping)
        if (self->num_done < self->num_wanted)
            run_round(self);
        else
            pthread_cond_wait(&self->changed, &self->mutex);
    is_alone = self->is_alone;
    pthread_mutex_unlock(&self->mutex);
    if (is_alone)
        destroy(self);
    return NULL;
}

static kvn_cuda_reclaimer *create(const kvn_device *device, kvn_failure *failure)
{
    kvn_cuda_reclaimer *self = calloc(1, sizeof *self);
    int error = self ? 0 : ENOMEM;
    char name[16];

    if (self) {
        self->cuda = kvn_cuda_of(device);
        self->context = device->context;
        pthread_mutex_init(&self->mutex, NULL);
        kvn_cond_init(&self->changed);
        snprintf(name, sizeof name, "kvn-cud-fr-%d", (int)device->id % 1000);
        error = kvn_thread_start(&self->thread, NULL, name, reclaim_main, self);
    }
    if (!error)
        return self;
    if (self)
        destroy(self);
    kvn_fail(failure, KVN_NO_MEMORY, error, "no thread to free memory of device %d: %s", (int)device->id,
             strerror(error));
    return NULL;
}

static kvn_cuda_reclaimer *reclaimer_of(const kvn_device *device, kvn_failure *failure)
{
    kvn_cuda_device *state = kvn_cuda_state(device);
    kvn_cuda_reclaimer *found;

    pthread_mutex_lock(&state->mutex);
    if (!state->reclaimer)
        state->reclaimer = create(device, failure);
    found = state->reclaimer;
    pthread_mutex_unlock(&state->mutex);
    return found;
}

/* ---- callers; with the mutex held ---- */

/* Begins a round, and waits for its end. False: the round is late. */
static bool await_round(kvn_cuda_reclaimer *self)
{
    const int64_t deadline_ns = kvn_now_ns() + KVN_CUDA_FREE_MS * INT64_C(1000000);
    const uint64_t round = ++self->num_wanted;
    bool in_time = true;

    pthread_cond_broadcast(&self->changed);
    while (self->num_done < round && !self->is_late && in_time)
        in_time = kvn_cond_wait(&self->changed, &self->mutex, deadline_ns);
    if (self->num_done >= round)
        return true;
    self->is_late = true;
    return false;
}

int kvn_cuda_reclaim(const kvn_device *device, const kvn_cuda_allocated *block, kvn_failure *failure)
{
    kvn_cuda_reclaimer *self = reclaimer_of(device, failure);
    freed *entry = self ? malloc(sizeof *entry) : NULL;
    int status = KVN_OK;

    if (!self)
        return failure->status;
    if (!entry)
        return kvn_fail(failure, KVN_NO_MEMORY, ENOMEM, "no memory to free memory");
    entry->block = *block;
    pthread_mutex_lock(&self->mutex);
    entry->next = self->freed;
    self->freed = entry;
    if (await_round(self) && self->why.status != KVN_OK) {
        *failure = self->why;
        status = failure->status;
    }
    pthread_mutex_unlock(&self->mutex);
    return status;
}

void kvn_cuda_reclaim_rest(const kvn_device *device)
{
    kvn_cuda_device *state = kvn_cuda_state(device);
    kvn_cuda_reclaimer *self;

    pthread_mutex_lock(&state->mutex);
    self = state->reclaimer;
    pthread_mutex_unlock(&state->mutex);
    if (!self)
        return;
    pthread_mutex_lock(&self->mutex);
    if (self->freed || self->num_done < self->num_wanted)
        await_round(self);
    pthread_mutex_unlock(&self->mutex);
}

bool kvn_cuda_reclaim_end(const kvn_device *device)
{
    kvn_cuda_reclaimer *self = kvn_cuda_state(device)->reclaimer;
    bool has_ended = true;

    if (!self)
        return true;
    pthread_mutex_lock(&self->mutex);
    if (self->freed || self->num_done < self->num_wanted)
        has_ended = await_round(self);
    self->is_stopping = true;
    self->is_alone = !has_ended;
    pthread_cond_broadcast(&self->changed);
    pthread_mutex_unlock(&self->mutex);
    if (has_ended) {
        pthread_join(self->thread, NULL);
        destroy(self);
    } else {
        pthread_detach(self->thread);
    }
    return has_ended;
}

/* Chooses how a batch is copied on a CUDA device: kernel, batch call or single copies. */
#include "cuda/copies.h"

#include <errno.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/launch.h"
#include "cuda/pin.h"
#include "cuda/reach.h"

/* Blocks that fit on a multiprocessor: 64 registers for each of 256 threads. */
#define BLOCKS_EACH 4
/* From and to the host the link is the limit, and a few blocks keep it busy. With 2 KiB in flight for each warp,
 * 32 blocks have 512 KiB in flight; PCIe 5 needs 55 GB/s x 2 us = 110 KB. The model keeps the rest of the GPU. */
#define HOST_BLOCKS 32
/* A single driver copy from or to the host costs about 2 us, in which 128 KiB move at 55 GB/s. */
#define HOST_KERNEL_BELOW (128u << 10)
#define HOST_BATCH_BELOW (4u << 20)
/* Within the device, its memory limits the kernel and single copies alike. A copy of 8 MiB takes about as long as
 * issuing it. Blocks on every multiprocessor would delay each step of a model that decodes: 64 leave more than half of
 * an H100's 132 to the model, and have 1 MiB in flight, an estimated 0.6 of the bandwidth. */
#define WITHIN_KERNEL_BELOW (8u << 20)
#define WITHIN_BLOCKS 64
/* Between two GPUs the link is the limit. At the 450 GB/s of an H100's NVLink, 900 KB move in the 2 us of a copy, and
 * as much must be in flight: 64 blocks. This is an estimate, since no two GPUs were at hand. PCIe needs less. */
#define FAR_KERNEL_BELOW (1u << 20)
#define FAR_BATCH_BELOW (8u << 20)
#define FAR_BLOCKS 64
/* Maxima of one batch call. Driver 580.159 crashes or hangs in a call of 51,828 descriptors, others crash on sm_100. */
#define MAX_BATCH 1024
#define MAX_BATCH_NBYTES (64u << 20)
/* Maximum number of single copies in one call. After each call the thread checks whether to stop. */
#define SINGLES 64

typedef struct kvn_cuda_copies {
    uint32_t num_blocks; /* blocks of the kernel that the device runs at one time */
    atomic_bool no_kernel;
    atomic_bool no_batch;
    bool launches_wait; /* CUDA_LAUNCH_BLOCKING is set: each launch waits for its end */
    atomic_uint max_blocks; /* set by option; 0: as in `tuning` */
    pthread_mutex_t mutex;     /* guards the fields below */
    kvn_cuda_tuning tuning[3]; /* by direction */
} copies;

static copies *copies_of(const kvn_device *device) { return kvn_cuda_state(device)->copies; }

static size_t row_of(kvn_direction direction) { return (size_t)direction - KVN_HOST_TO_DEVICE; }

/* ---- choosing a way ---- */

kvn_cuda_tuning kvn_cuda_tuning_builtin(kvn_direction direction)
{
    if (direction == KVN_DEVICE_TO_DEVICE)
        return (kvn_cuda_tuning){.kernel_below = WITHIN_KERNEL_BELOW, .blocks = WITHIN_BLOCKS};
    return (kvn_cuda_tuning){HOST_KERNEL_BELOW, HOST_BATCH_BELOW, HOST_BLOCKS};
}

kvn_cuda_tuning kvn_cuda_tuning_far(void)
{
    return (kvn_cuda_tuning){FAR_KERNEL_BELOW, FAR_BATCH_BELOW, FAR_BLOCKS};
}

kvn_cuda_tuning kvn_cuda_copies_tuning(const kvn_device *device, kvn_direction direction)
{
    copies *self = copies_of(device);
    kvn_cuda_tuning tuning;

    pthread_mutex_lock(&self->mutex);
    tuning = self->tuning[row_of(direction)];
    pthread_mutex_unlock(&self->mutex);
    return tuning;
}

void kvn_cuda_copies_tune(const kvn_device *device, kvn_direction direction, kvn_cuda_tuning tuning)
{
    copies *self = copies_of(device);

    pthread_mutex_lock(&self->mutex);
    self->tuning[row_of(direction)] = tuning;
    pthread_mutex_unlock(&self->mutex);
}

void kvn_cuda_copies_limit(const kvn_device *device, bool without_batch, uint32_t max_blocks)
{
    copies *self = copies_of(device);

    if (without_batch)
        atomic_store(&self->no_batch, true);
    atomic_store(&self->max_blocks, max_blocks);
}

bool kvn_cuda_copies_has_batch(const kvn_device *device) { return !atomic_load(&copies_of(device)->no_batch); }

static kvn_cuda_tuning tuning_of(const kvn_device *device, kvn_direction direction, bool is_far)
{
    return is_far && direction == KVN_DEVICE_TO_DEVICE ? kvn_cuda_tuning_far()
                                                       : kvn_cuda_copies_tuning(device, direction);
}

kvn_cuda_way kvn_cuda_copies_way(const kvn_device *device, kvn_direction direction, bool is_far,
                                 uint64_t mean_nbytes, size_t count)
{
    const copies *self = copies_of(device);
    const kvn_cuda_tuning tuning = tuning_of(device, direction, is_far);
    const bool has_kernel = !atomic_load(&self->no_kernel), has_batch = !atomic_load(&self->no_batch);
    const uint64_t batch_below = has_kernel || tuning.batch_below > tuning.kernel_below
                                     ? tuning.batch_below
                                     : tuning.kernel_below;

    if (has_kernel && mean_nbytes < tuning.kernel_below)
        return KVN_CUDA_KERNEL;
    return has_batch && count > 1 && mean_nbytes < batch_below ? KVN_CUDA_BATCH : KVN_CUDA_SINGLE;
}

/* ---- the three ways; each sets batch->count to the number of descriptors that it took ---- */

static int refuse(kvn_cuda_reach reach, uint64_t address, uint64_t nbytes, kvn_failure *failure)
{
    return kvn_fail(failure, KVN_UNMAPPED, 0, "%" PRIu64 " bytes at 0x%" PRIx64 " %s", nbytes, address,
                    reach == KVN_CUDA_REPLACED ? "are other memory than was registered there, which was freed"
                                               : "are not, or not all, memory of the device");
}

/* The ranges that were looked up for a batch. */
typedef struct sides {
    kvn_cuda_ranges targets, sources;
} sides;

/* Cuts batch->count to the leading descriptors that `way` can copy. The kernel must reach both sides. The driver's
 * copies need a known device side, and may reach more of the host than attributes say. Returns KVN_UNMAPPED if the
 * device side of the first descriptor is not memory. */
static int count_reached(sides *known, kvn_direction direction, kvn_cuda_way way, kvn_columns *batch, size_t *failed,
                         kvn_failure *failure)
{
    const uint64_t *dst = batch->dst, *src = batch->src, *nbytes = batch->nbytes;
    const kvn_cuda_reach least = way == KVN_CUDA_KERNEL ? KVN_CUDA_REACHED : KVN_CUDA_COPIED;
    const bool all_targets = way == KVN_CUDA_KERNEL || direction != KVN_DEVICE_TO_HOST;
    const bool all_sources = way == KVN_CUDA_KERNEL || direction != KVN_HOST_TO_DEVICE;

    for (size_t i = 0; i < batch->count; i++) {
        kvn_cuda_reach to = KVN_CUDA_REACHED, from = KVN_CUDA_REACHED;

        if (all_targets && !kvn_cuda_is_beside(&known->targets, dst[i], nbytes[i]))
            to = kvn_cuda_reach_of(&known->targets, dst[i], nbytes[i]);
        if (all_sources && !kvn_cuda_is_beside(&known->sources, src[i], nbytes[i]))
            from = kvn_cuda_reach_of(&known->sources, src[i], nbytes[i]);
        if (to >= least && from >= least)
            continue;
        /* If the failed descriptor is not the first, the next call begins with it and reports the error. */
        *failed = i;
        if (i == 0 && to <= KVN_CUDA_UNMAPPED && direction != KVN_DEVICE_TO_HOST)
            return refuse(to, dst[i], nbytes[i], failure);
        if (i == 0 && from <= KVN_CUDA_UNMAPPED && direction != KVN_HOST_TO_DEVICE)
            return refuse(from, src[i], nbytes[i], failure);
        batch->count = i;
    }
    return KVN_OK;
}

/* Returns true if the first descriptor of a batch goes to or from another GPU. */
static bool is_far(sides *known, kvn_direction direction, uint64_t dst, uint64_t src)
{
    return direction == KVN_DEVICE_TO_DEVICE &&
           (kvn_cuda_is_far(&known->targets, dst) || kvn_cuda_is_far(&known->sources, src));
}

/* The caller has checked that the driver knows the memory of each side on the device. */
static int copy_one(const kvn_device *device, uint64_t dst, uint64_t src, uint64_t nbytes, kvn_stream stream,
                    kvn_failure *failure)
{
    if (kvn_cuda_launcher_note(device, stream, failure) != KVN_OK)
        return failure->status;
    /* The driver derives the direction from the addresses. */
    return kvn_cuda_copy_parts(device, dst, src, nbytes, stream, failure);
}

static int copy_single(const kvn_device *device, kvn_columns *batch, kvn_stream stream, size_t *failed,
                       kvn_failure *failure)
{
    int status = KVN_OK;

    if (batch->count > SINGLES)
        batch->count = SINGLES;
    for (size_t i = 0; i < batch->count && status == KVN_OK; i++) {
        status = copy_one(device, batch->dst[i], batch->src[i], batch->nbytes[i], stream, failure);
        if (status != KVN_OK)
            *failed = i;
    }
    return status;
}

/* CUdeviceptr and size_t are as wide as uint64_t, so the columns are passed as they are. */
static int copy_batch(const kvn_device *device, const kvn_columns *batch, kvn_stream stream, size_t *failed,
                      kvn_failure *failure)
{
    const kvn_cuda *cuda = kvn_cuda_of(device);
    CUdeviceptr *dst = (CUdeviceptr *)batch->dst, *src = (CUdeviceptr *)batch->src;
    size_t *nbytes = (size_t *)batch->nbytes;
    kvn_cuda_copy_attributes attributes = {.src_access_order = KVN_CUDA_SRC_ACCESS_STREAM};
    size_t first = 0;

    if (kvn_cuda_launcher_note(device, stream, failure) != KVN_OK)
        return failure->status;
    if (cuda->cuMemcpyBatchAsync_v2)
        return KVN_CUDA_CALL(device, failure, cuMemcpyBatchAsync_v2, dst, src, nbytes, batch->count, &attributes,
                             &first, 1, stream);
    return KVN_CUDA_CALL(device, failure, cuMemcpyBatchAsync, dst, src, nbytes, batch->count, &attributes, &first, 1,
                         failed, stream);
}

static int copy_kernel(const kvn_device *device, uint32_t blocks, kvn_columns *batch, kvn_stream stream,
                       kvn_failure *failure)
{
    copies *self = copies_of(device);
    const uint32_t by_option = atomic_load(&self->max_blocks), wanted = by_option ? by_option : blocks;
    const uint32_t most = wanted && wanted < self->num_blocks ? wanted : self->num_blocks;
    const int status = kvn_cuda_launch(device, stream, most, *batch, failure);

    if (status == KVN_OK || failure->code != KVN_CUDA_OUT_OF_MEMORY || batch->count <= KVN_COPY_FEW)
        return status;
    /* A model has filled the GPU's memory. This many descriptors fit into the parameters of the launch, and need no
     * memory. */
    batch->count = KVN_COPY_FEW;
    return kvn_cuda_launch(device, stream, most, *batch, failure);
}

/* Returns true if such a batch never works here; other refusals concern only this batch. */
static bool is_unsupported(const kvn_failure *failure)
{
    return failure->status == KVN_UNSUPPORTED || failure->code == KVN_CUDA_NOT_SUPPORTED;
}

static uint64_t mean(const uint64_t *nbytes, size_t count)
{
    uint64_t total = 0;

    for (size_t i = 0; i < count; i++)
        if (__builtin_add_overflow(total, nbytes[i], &total))
            return UINT64_MAX;
    return total / count;
}

/* Returns how many descriptors to give at one time to copies of the driver, which cannot be stopped. */
static size_t count_unstoppable(kvn_direction direction, kvn_cuda_way way, const uint64_t *nbytes, size_t count)
{
    uint64_t left = kvn_most_unstoppable(direction);
    size_t taken = 0;

    if (way == KVN_CUDA_BATCH && count > MAX_BATCH)
        count = MAX_BATCH;
    if (way == KVN_CUDA_BATCH && left > MAX_BATCH_NBYTES)
        left = MAX_BATCH_NBYTES;
    while (taken < count && nbytes[taken] <= left)
        left -= nbytes[taken++];
    return taken ? taken : 1;
}

/* Returns the number of leading descriptors with each side in one registration; the batch call takes no others. */
static size_t count_whole(const kvn_device *device, const kvn_columns *batch)
{
    size_t taken = 0;

    if (!atomic_load(&kvn_cuda_state(device)->has_parts))
        return batch->count;
    while (taken < batch->count && batch->nbytes[taken] <= kvn_cuda_part_left(device, batch->dst[taken]) &&
           batch->nbytes[taken] <= kvn_cuda_part_left(device, batch->src[taken]))
        taken++;
    return taken;
}

int kvn_cuda_copy_batch(kvn_device *device, kvn_direction direction, kvn_columns *batch, kvn_stream stream,
                        size_t *failed, kvn_failure *failure)
{
    copies *self = copies_of(device);
    sides known = {{.device = device}, {.device = device}};
    const bool far = is_far(&known, direction, *batch->dst, *batch->src);
    kvn_cuda_way way =
        kvn_cuda_copies_way(device, direction, far, mean(batch->nbytes, batch->count), batch->count);
    int status = KVN_OK;

    if (way == KVN_CUDA_KERNEL)
        status = kvn_cuda_launcher_load(device, failure);
    if (status == KVN_UNSUPPORTED) {
        atomic_store(&self->no_kernel, true);
        if (atomic_load(&self->no_batch))
            return status; /* from now on descriptors are copied one by one */
        kvn_device_note_fallback(device, failure->message);
    }
    if (status != KVN_OK)
        way = atomic_load(&self->no_batch) || batch->count == 1 ? KVN_CUDA_SINGLE : KVN_CUDA_BATCH;
    if (way == KVN_CUDA_SINGLE && batch->count > SINGLES)
        batch->count = SINGLES;
    if (way != KVN_CUDA_KERNEL)
        batch->count = count_unstoppable(direction, way, batch->nbytes, batch->count);
    if (count_reached(&known, direction, way, batch, failed, failure) != KVN_OK)
        return failure->status;
    if (way == KVN_CUDA_BATCH)
        batch->count = count_whole(device, batch);
    if (batch->count == 0) {
        /* The kernel does not reach the memory, the driver does not know it, or it lies in two registrations. */
        batch->count = 1;
        way = KVN_CUDA_SINGLE;
    }
    if (way == KVN_CUDA_KERNEL)
        return copy_kernel(device, tuning_of(device, direction, far).blocks, batch, stream, failure);
    if (way == KVN_CUDA_BATCH) {
        status = copy_batch(device, batch, stream, failed, failure);
        if (status == KVN_OK || !is_unsupported(failure))
            return status;
        atomic_store(&self->no_batch, true);
        if (atomic_load(&self->no_kernel))
            return status;
        kvn_device_note_fallback(device, failure->message);
    }
    return copy_single(device, batch, stream, failed, failure);
}

/* Uses only the kernel, for all sizes, since the driver's copies cannot be stopped. The kernel almost reaches the limit
 * of the link or memory at all sizes; where it is slower, beginning at once is worth more. */
int kvn_cuda_copy_held(kvn_device *device, kvn_direction direction, kvn_columns *batch, kvn_stream stream,
                       size_t *failed, kvn_failure *failure)
{
    sides known = {{.device = device}, {.device = device}};
    bool far;

    if (copies_of(device)->launches_wait)
        return KVN_PENDING;
    /* If loading fails, the copies after the event fail to load it as well, and use another way. */
    if (kvn_cuda_launcher_load(device, failure) != KVN_OK)
        return KVN_PENDING;
    if (count_reached(&known, direction, KVN_CUDA_KERNEL, batch, failed, failure) != KVN_OK)
        return failure->status;
    if (batch->count == 0)
        return KVN_PENDING;
    far = is_far(&known, direction, *batch->dst, *batch->src);
    return copy_kernel(device, tuning_of(device, direction, far).blocks, batch, stream, failure);
}

int kvn_cuda_copy_async(const kvn_device *device, kvn_direction direction, uint64_t dst, uint64_t src,
                        uint64_t nbytes, kvn_stream stream, kvn_failure *failure)
{
    sides known = {{.device = device}, {.device = device}};
    kvn_columns batch = {.dst = &dst, .src = &src, .nbytes = &nbytes, .count = 1};
    size_t ignored;

    if (count_reached(&known, direction, KVN_CUDA_SINGLE, &batch, &ignored, failure) != KVN_OK)
        return failure->status;
    return copy_one(device, dst, src, nbytes, stream, failure);
}

unsigned kvn_cuda_batch_copies(const kvn_device *device, char *why, size_t room)
{
    (void)device;
    (void)why;
    (void)room;
    return KVN_BATCH_ASYNC | KVN_BATCH_WITHIN | KVN_BATCH_PINNED;
}

/* ---- opening ---- */

static uint32_t ask_blocks(const kvn_device *device)
{
    int multiprocessors = 0;

    kvn_cuda_of(device)->cuDeviceGetAttribute(&multiprocessors, KVN_CUDA_NUM_MULTIPROCESSORS,
                                              kvn_cuda_state(device)->number);
    return BLOCKS_EACH * (uint32_t)(multiprocessors > 0 ? multiprocessors : 1);
}

/* The driver reads the variable when it is initialized. Programmers set it to find a failing kernel. */
static bool does_launch_block(void)
{
    const char *value = getenv("CUDA_LAUNCH_BLOCKING");

    return value && *value && strcmp(value, "0") != 0;
}

int kvn_cuda_copies_open(const kvn_device *device, kvn_failure *failure)
{
    const kvn_cuda *cuda = kvn_cuda_of(device);
    copies *self = calloc(1, sizeof *self);

    if (!self || pthread_mutex_init(&self->mutex, NULL)) {
        free(self);
        return kvn_fail(failure, KVN_NO_MEMORY, ENOMEM, "no memory for the copies of device %d", (int)device->id);
    }
    if (kvn_cuda_launcher_open(device, failure) != KVN_OK) {
        pthread_mutex_destroy(&self->mutex);
        free(self);
        return failure->status;
    }
    self->num_blocks = ask_blocks(device);
    self->launches_wait = does_launch_block();
    atomic_init(&self->no_batch, !cuda->cuMemcpyBatchAsync && !cuda->cuMemcpyBatchAsync_v2);
    for (int way = KVN_HOST_TO_DEVICE; way <= KVN_DEVICE_TO_DEVICE; way++)
        self->tuning[row_of((kvn_direction)way)] = kvn_cuda_tuning_builtin((kvn_direction)way);
    kvn_cuda_state(device)->copies = self;
    return KVN_OK;
}

bool kvn_cuda_copies_close(const kvn_device *device)
{
    copies *self = copies_of(device);
    const bool may_begin = kvn_cuda_launcher_close(device);

    pthread_mutex_destroy(&self->mutex);
    free(self);
    kvn_cuda_state(device)->copies = NULL;
    return may_begin;
}

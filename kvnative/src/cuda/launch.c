/* Launches the copy kernel, and stops launches that have not begun. */
#include "cuda/launch.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/kernel.h"

#define MAX_PIECES (1u << 30)

_Static_assert(sizeof(kvn_copy_few) <= 4096, "parameters of a launch are 4 KiB at most");

/* A stream that has work, as far as is known. */
typedef struct busy {
    struct busy *next;
    kvn_stream stream; /* NULL: of none, and may be taken for another */
    kvn_cuda_launch_memory *launches;
    bool has_others; /* work that cannot be stopped */
    bool was_told;   /* to stop: nothing is launched on it until it is idle */
    bool is_void;    /* none of its launches had begun when it was told: they will touch nothing */
    bool is_dropped; /* and the stream is no channel's any more: it goes when it is idle */
} busy;

typedef struct kvn_cuda_launcher {
    const kvn_device *device;
    pthread_mutex_t loading; /* guards the kernel until it is loaded; which takes long, so aborts do not need it */
    kvn_cuda_kernel kernel;
    bool has_reserved;
    pthread_mutex_t mutex; /* guards what follows: held while a launch is given to a stream and noted */
    kvn_cuda_launches launches;
    busy *streams;
} kvn_cuda_launcher;

static kvn_cuda_launcher *launcher_of(const kvn_device *device) { return kvn_cuda_state(device)->launcher; }

#define CALL KVN_CUDA_CALL

int kvn_cuda_launcher_load(const kvn_device *device, kvn_failure *failure)
{
    kvn_cuda_launcher *self = launcher_of(device);
    int status;

    pthread_mutex_lock(&self->loading);
    status = kvn_cuda_kernel_load(&self->kernel, self->device, failure);
    if (status == KVN_OK && !self->has_reserved) { /* no launch was taken so far */
        kvn_cuda_launches_reserve(&self->launches, self->device);
        self->has_reserved = true;
    }
    pthread_mutex_unlock(&self->loading);
    return status;
}

/* ---- streams; with the mutex ---- */

/* Of the stream; NULL: it has no work that is known. */
static busy *find(const kvn_cuda_launcher *self, kvn_stream stream)
{
    busy *it = self->streams;

    while (it && it->stream != stream)
        it = it->next;
    return it;
}

static busy *find_or_make(kvn_cuda_launcher *self, kvn_stream stream)
{
    busy *it = find(self, stream);

    if (!it)
        it = find(self, NULL);
    if (!it) {
        it = calloc(1, sizeof *it);
        if (!it)
            return NULL;
        it->next = self->streams;
        self->streams = it;
    }
    it->stream = stream;
    return it;
}

/* It has no work any more. */
static void settle(kvn_cuda_launcher *self, busy *it)
{
    busy *next = it->next;

    kvn_cuda_launches_give(&self->launches, it->launches);
    *it = (busy){.next = next};
}

/* What has passed of that which was given up. */
static void collect(kvn_cuda_launcher *self)
{
    const kvn_cuda *cuda = kvn_cuda_of(self->device);

    for (busy *it = self->streams; it; it = it->next) {
        if (!it->is_dropped || cuda->cuStreamQuery(it->stream) == KVN_CUDA_NOT_READY)
            continue;
        cuda->cuStreamDestroy_v2(it->stream);
        settle(self, it);
    }
}

static int fail_told(kvn_failure *failure)
{
    return kvn_fail(failure, KVN_FAILED, KVN_CUDA_ABORTED, "the stream was told to stop");
}

/* ---- launching ---- */

static unsigned num_pieces_of(uint64_t nbytes)
{
    const uint64_t pieces = nbytes / KVN_COPY_PIECE_NBYTES + (nbytes % KVN_COPY_PIECE_NBYTES != 0);

    return pieces < MAX_PIECES ? (unsigned)pieces : MAX_PIECES;
}

/* How many descriptors one launch takes, at least one, and what it is told of all of them. */
static size_t measure(const uint64_t *nbytes, size_t count, kvn_copy_work *work)
{
    uint64_t pieces = num_pieces_of(nbytes[0]);
    bool are_alike = true;
    size_t taken = 1;

    for (; taken < count; taken++) {
        const unsigned more = num_pieces_of(nbytes[taken]);
        if (pieces + more > MAX_PIECES)
            break;
        pieces += more;
        are_alike &= nbytes[taken] == nbytes[0];
    }
    work->nbytes_each = are_alike ? nbytes[0] : 0;
    work->count = (unsigned)taken;
    work->num_pieces = (unsigned)pieces;
    return taken;
}

static void number_pieces(const uint64_t *nbytes, size_t count, unsigned *first_piece)
{
    unsigned pieces = 0;

    for (size_t i = 0; i < count; i++) {
        first_piece[i] = pieces;
        pieces += num_pieces_of(nbytes[i]);
    }
}

static int start(kvn_cuda_launcher *self, CUfunction kernel, const kvn_copy_work *work, unsigned blocks,
                 kvn_stream stream, void *columns, kvn_failure *failure)
{
    const unsigned warps = KVN_COPY_THREADS / KVN_COPY_WARP;
    const unsigned useful = (work->num_pieces + warps - 1) / warps;

    return CALL(self->device, failure, cuLaunchKernel, kernel, useful < blocks ? useful : blocks, 1, 1,
                KVN_COPY_THREADS, 1, 1, 0, stream, &columns, NULL);
}

static int start_few(kvn_cuda_launcher *self, const kvn_copy_work *work, unsigned blocks, kvn_stream stream,
                     const kvn_columns *batch, kvn_failure *failure)
{
    const size_t count = work->count;
    kvn_copy_few few; /* the rest is never looked at */

    few.work = *work;
    memcpy(few.dst, batch->dst, count * sizeof(uint64_t));
    memcpy(few.src, batch->src, count * sizeof(uint64_t));
    memcpy(few.nbytes, batch->nbytes, count * sizeof(uint64_t));
    number_pieces(batch->nbytes, count, few.first_piece);
    return start(self, self->kernel.few, work, blocks, stream, &few, failure);
}

static int start_many(kvn_cuda_launcher *self, const kvn_cuda_columns *columns, const kvn_copy_work *work, unsigned blocks,
                      kvn_stream stream, const kvn_columns *batch, kvn_failure *failure)
{
    const size_t column = work->count * sizeof(uint64_t);
    const size_t used = work->nbytes_each ? 2 * column : 3 * column + work->count * sizeof(unsigned);
    kvn_copy_many many = {
        .work = *work,
        .dst = (const kvn_copy_word *)columns->device,
        .src = (const kvn_copy_word *)(columns->device + column),
    };

    memcpy(columns->host, batch->dst, column);
    memcpy(columns->host + column, batch->src, column);
    if (!work->nbytes_each) {
        memcpy(columns->host + 2 * column, batch->nbytes, column);
        number_pieces(batch->nbytes, work->count, (unsigned *)(columns->host + 3 * column));
        many.nbytes = (const kvn_copy_word *)(columns->device + 2 * column);
        many.first_piece = (const unsigned *)(columns->device + 3 * column);
    }
    if (CALL(self->device, failure, cuMemcpyAsync, columns->device, (uintptr_t)columns->host, used, stream) !=
        KVN_OK)
        return failure->status;
    return start(self, self->kernel.many, work, blocks, stream, &many, failure);
}

/* With the mutex. */
static int launch_some(kvn_cuda_launcher *self, kvn_stream stream, unsigned blocks, const kvn_columns *batch,
                       kvn_copy_work *work, kvn_failure *failure)
{
    const bool is_few = work->count <= KVN_COPY_FEW;
    busy *on = find_or_make(self, stream);
    kvn_cuda_launch_memory *it;
    int status;

    if (!on)
        return kvn_fail(failure, KVN_NO_MEMORY, ENOMEM, "no memory for a launch");
    if (on->was_told)
        return fail_told(failure);
    collect(self);
    it = kvn_cuda_launches_take(&self->launches, self->device, !is_few, failure);
    if (!it)
        return failure->status;
    work->control = it->control;
    status = is_few ? start_few(self, work, blocks, stream, batch, failure)
                    : start_many(self, &it->columns, work, blocks, stream, batch, failure);
    /* Also where it failed: a copy of its columns may be on the stream. */
    it->next = on->launches;
    on->launches = it;
    return status;
}

int kvn_cuda_launch(const kvn_device *device, kvn_stream stream, unsigned blocks, kvn_columns batch,
                    kvn_failure *failure)
{
    kvn_cuda_launcher *self = launcher_of(device);
    int status = KVN_OK;

    while (batch.count > 0 && status == KVN_OK) {
        kvn_copy_work work = {0};
        const size_t taken = measure(batch.nbytes, batch.count, &work);

        pthread_mutex_lock(&self->mutex);
        status = launch_some(self, stream, blocks, &batch, &work, failure);
        pthread_mutex_unlock(&self->mutex);
        batch.dst += taken;
        batch.src += taken;
        batch.nbytes += taken;
        batch.count -= taken;
    }
    return status;
}

int kvn_cuda_launcher_note(const kvn_device *device, kvn_stream stream, kvn_failure *failure)
{
    kvn_cuda_launcher *self = launcher_of(device);
    busy *it;

    pthread_mutex_lock(&self->mutex);
    it = find_or_make(self, stream);
    if (it)
        it->has_others = true;
    pthread_mutex_unlock(&self->mutex);
    return it ? KVN_OK : kvn_fail(failure, KVN_NO_MEMORY, ENOMEM, "no memory for a copy");
}

/* ---- stopping ---- */

bool kvn_cuda_can_stop(const kvn_device *device, kvn_stream stream)
{
    kvn_cuda_launcher *self = launcher_of(device);
    const busy *it;
    bool can_stop;

    pthread_mutex_lock(&self->mutex);
    it = find(self, stream);
    can_stop = !it || !it->has_others;
    pthread_mutex_unlock(&self->mutex);
    return can_stop;
}

/* The host's half of the protocol that copy.cu describes. */
static void fence_system(void)
{
#ifdef __aarch64__
    __asm__ volatile("dmb sy" ::: "memory"); /* a C fence orders what processors see, not devices */
#else
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
}

/* Whether none of them touches memory, now or later. */
static bool stop(const kvn_cuda_launch_memory *launches)
{
    unsigned begun = 0;

    for (const kvn_cuda_launch_memory *it = launches; it; it = it->next)
        __atomic_store_n(&it->control->stop, 1, __ATOMIC_RELAXED);
    fence_system();
    for (const kvn_cuda_launch_memory *it = launches; it; it = it->next)
        begun |= __atomic_load_n(&it->control->begun, __ATOMIC_RELAXED);
    return !begun;
}

/* With the mutex. */
static int abort_work(kvn_cuda_launcher *self, busy *it, kvn_failure *failure)
{
    /* Of one that is not known nothing moves bytes: it only waits for an event, if at all. */
    if (!it || kvn_cuda_of(self->device)->cuStreamQuery(it->stream) != KVN_CUDA_NOT_READY)
        return KVN_OK;
    if (it->launches && !it->was_told) {
        it->was_told = true;
        it->is_void = stop(it->launches);
    }
    if ((!it->launches || it->is_void) && !it->has_others)
        return KVN_OK;
    return kvn_fail(failure, KVN_UNSUPPORTED, 0, "CUDA cannot stop the work of a stream, which goes on%s",
                    it->launches ? " until the kernel sees that it shall end" : "");
}

int kvn_cuda_abort(const kvn_device *device, kvn_stream stream, kvn_failure *failure)
{
    kvn_cuda_launcher *self = launcher_of(device);
    int status;

    pthread_mutex_lock(&self->mutex);
    status = abort_work(self, find(self, stream), failure);
    pthread_mutex_unlock(&self->mutex);
    return status;
}

int kvn_cuda_drop(const kvn_device *device, kvn_stream stream, kvn_failure *failure)
{
    kvn_cuda_launcher *self = launcher_of(device);
    busy *it;
    int status;

    pthread_mutex_lock(&self->mutex);
    it = find(self, stream);
    status = abort_work(self, it, failure);
    if (status == KVN_OK && it && it->is_void) {
        it->is_dropped = true; /* what its launches read is free when it is idle */
        collect(self);
    } else if (status == KVN_OK) {
        if (it)
            settle(self, it);
        status = CALL(self->device, failure, cuStreamDestroy_v2, stream);
    }
    pthread_mutex_unlock(&self->mutex);
    return status;
}

int kvn_cuda_query(const kvn_device *device, kvn_stream stream, kvn_failure *failure)
{
    kvn_cuda_launcher *self = launcher_of(device);
    const kvn_cuda *cuda = kvn_cuda_of(self->device);
    CUresult code = cuda->cuStreamQuery(stream);
    bool was_told = false;
    busy *it;

    if (code == KVN_CUDA_NOT_READY)
        return KVN_PENDING;
    pthread_mutex_lock(&self->mutex);
    it = find(self, stream);
    /* Again: a thread may have launched since. */
    code = it ? cuda->cuStreamQuery(stream) : code;
    if (it && code != KVN_CUDA_NOT_READY) {
        was_told = it->was_told;
        settle(self, it);
    }
    pthread_mutex_unlock(&self->mutex);
    if (code == KVN_CUDA_NOT_READY)
        return KVN_PENDING;
    return code == KVN_CUDA_OK && was_told ? fail_told(failure)
                                           : kvn_cuda_ended(self->device, "cuStreamQuery", code, failure);
}

/* ---- the launcher ---- */

int kvn_cuda_launcher_open(const kvn_device *device, kvn_failure *failure)
{
    kvn_cuda_launcher *self = calloc(1, sizeof *self);

    if (!self)
        return kvn_fail(failure, KVN_NO_MEMORY, ENOMEM, "no memory for the launches of device %d", (int)device->id);
    pthread_mutex_init(&self->loading, NULL);
    pthread_mutex_init(&self->mutex, NULL);
    self->device = device;
    kvn_cuda_state(device)->launcher = self;
    return KVN_OK;
}

bool kvn_cuda_launcher_close(const kvn_device *device)
{
    kvn_cuda_launcher *self = launcher_of(device);
    bool has_dropped = false;

    collect(self);
    for (busy *it = self->streams; it; it = it->next) {
        has_dropped |= it->is_dropped;
        if (!it->is_dropped)
            settle(self, it); /* its user has waited for it */
    }
    if (!has_dropped) {
        kvn_cuda_launches_free(&self->launches, device);
        kvn_cuda_kernel_unload(&self->kernel, device);
    }
    while (self->streams) {
        busy *next = self->streams->next;
        free(self->streams);
        self->streams = next;
    }
    free(self->launches.pages);
    pthread_mutex_destroy(&self->mutex);
    pthread_mutex_destroy(&self->loading);
    free(self);
    kvn_cuda_state(device)->launcher = NULL;
    return has_dropped;
}

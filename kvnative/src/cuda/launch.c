/* Launches the copy kernel, and stops launches. */
#include "cuda/launch.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/kernel.h"

#define MAX_PIECES (1u << 30)

_Static_assert(sizeof(kvn_copy_few) <= 4096, "parameters of a launch are 4 KiB at most");

/* A stream with work that is not known to have ended. */
typedef struct busy {
    struct busy *next;
    kvn_stream stream; /* NULL: the entry is free */
    kvn_cuda_launch_memory *launches;
    bool has_others; /* it has work that cannot be stopped */
    bool was_told;   /* it was told to stop: nothing is launched on it until it is idle */
    bool is_void;    /* no launch had begun when it was told to stop, so none will touch memory */
    bool is_dropped; /* no channel uses the stream any more: destroy it once it is idle */
} busy;

typedef struct kvn_cuda_launcher {
    const kvn_device *device;
    pthread_mutex_t loading; /* guards the kernel while the driver compiles it; aborts do not need it */
    kvn_cuda_kernel kernel;
    bool has_reserved;
    pthread_mutex_t mutex; /* guards the fields below; held while a launch is given to a stream and noted */
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
    if (status == KVN_OK && !self->has_reserved) { /* before the first launch is taken */
        kvn_cuda_launches_reserve(&self->launches, self->device);
        self->has_reserved = true;
    }
    pthread_mutex_unlock(&self->loading);
    return status;
}

/* ---- streams; the caller holds the mutex ---- */

/* Returns the entry of a stream; NULL: no work of it is known. */
static busy *find(const kvn_cuda_launcher *self, kvn_stream stream)
{
    busy *entry = self->streams;

    while (entry && entry->stream != stream)
        entry = entry->next;
    return entry;
}

static busy *find_or_make(kvn_cuda_launcher *self, kvn_stream stream)
{
    busy *entry = find(self, stream);

    if (!entry)
        entry = find(self, NULL);
    if (!entry) {
        entry = calloc(1, sizeof *entry);
        if (!entry)
            return NULL;
        entry->next = self->streams;
        self->streams = entry;
    }
    entry->stream = stream;
    return entry;
}

/* Frees the entry of a stream that has no work any more. */
static void settle(kvn_cuda_launcher *self, busy *entry)
{
    busy *next = entry->next;

    kvn_cuda_launches_give(&self->launches, entry->launches);
    *entry = (busy){.next = next};
}

/* Destroys the dropped streams that are idle now. */
static void collect(kvn_cuda_launcher *self)
{
    const kvn_cuda *cuda = kvn_cuda_of(self->device);

    for (busy *entry = self->streams; entry; entry = entry->next) {
        if (!entry->is_dropped || cuda->cuStreamQuery(entry->stream) == KVN_CUDA_NOT_READY)
            continue;
        cuda->cuStreamDestroy_v2(entry->stream);
        settle(self, entry);
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

/* Returns how many descriptors one launch takes, at least one, and fills in its parameters. */
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
    kvn_copy_few few; /* the kernel does not read the rest of the arrays */

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

/* The caller holds the mutex. */
static int launch_some(kvn_cuda_launcher *self, kvn_stream stream, unsigned blocks, const kvn_columns *batch,
                       kvn_copy_work *work, kvn_failure *failure)
{
    const bool is_few = work->count <= KVN_COPY_FEW;
    busy *on = find_or_make(self, stream);
    kvn_cuda_launch_memory *memory;
    int status;

    if (!on)
        return kvn_fail(failure, KVN_NO_MEMORY, ENOMEM, "no memory for a launch");
    if (on->was_told)
        return fail_told(failure);
    collect(self);
    memory = kvn_cuda_launches_take(&self->launches, self->device, !is_few, failure);
    if (!memory)
        return failure->status;
    work->control = memory->control;
    status = is_few ? start_few(self, work, blocks, stream, batch, failure)
                    : start_many(self, &memory->columns, work, blocks, stream, batch, failure);
    /* Keep the memory after a failure, too: a copy of its columns may be on the stream. */
    memory->next = on->launches;
    on->launches = memory;
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
    busy *entry;

    pthread_mutex_lock(&self->mutex);
    entry = find_or_make(self, stream);
    if (entry)
        entry->has_others = true;
    pthread_mutex_unlock(&self->mutex);
    return entry ? KVN_OK : kvn_fail(failure, KVN_NO_MEMORY, ENOMEM, "no memory for a copy");
}

/* ---- stopping ---- */

bool kvn_cuda_can_stop(const kvn_device *device, kvn_stream stream)
{
    kvn_cuda_launcher *self = launcher_of(device);
    const busy *entry;
    bool can_stop;

    pthread_mutex_lock(&self->mutex);
    entry = find(self, stream);
    can_stop = !entry || !entry->has_others;
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

/* Tells launches to stop. Returns true if none of them touches memory, now or later. */
static bool stop(const kvn_cuda_launch_memory *launches)
{
    unsigned begun = 0;

    for (const kvn_cuda_launch_memory *launch = launches; launch; launch = launch->next)
        __atomic_store_n(&launch->control->stop, 1, __ATOMIC_RELAXED);
    fence_system();
    for (const kvn_cuda_launch_memory *launch = launches; launch; launch = launch->next)
        begun |= __atomic_load_n(&launch->control->begun, __ATOMIC_RELAXED);
    return !begun;
}

/* The caller holds the mutex. */
static int abort_work(kvn_cuda_launcher *self, busy *entry, kvn_failure *failure)
{
    /* A stream without an entry moves no bytes; it waits for an event at most. */
    if (!entry || kvn_cuda_of(self->device)->cuStreamQuery(entry->stream) != KVN_CUDA_NOT_READY)
        return KVN_OK;
    if (entry->launches && !entry->was_told) {
        entry->was_told = true;
        entry->is_void = stop(entry->launches);
    }
    if ((!entry->launches || entry->is_void) && !entry->has_others)
        return KVN_OK;
    return kvn_fail(failure, KVN_UNSUPPORTED, 0, "CUDA cannot stop the work of a stream, which goes on");
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
    busy *entry;
    int status;

    pthread_mutex_lock(&self->mutex);
    entry = find(self, stream);
    status = abort_work(self, entry, failure);
    if (status == KVN_OK && entry && entry->is_void) {
        entry->is_dropped = true; /* the memory of its launches is reused once it is idle */
        collect(self);
    } else if (status == KVN_OK) {
        if (entry)
            settle(self, entry);
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
    busy *entry;

    if (code == KVN_CUDA_NOT_READY)
        return KVN_PENDING;
    pthread_mutex_lock(&self->mutex);
    entry = find(self, stream);
    /* Ask again: a thread may have launched since. */
    code = entry ? cuda->cuStreamQuery(stream) : code;
    if (entry && code != KVN_CUDA_NOT_READY) {
        was_told = entry->was_told;
        settle(self, entry);
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
    for (busy *entry = self->streams; entry; entry = entry->next) {
        has_dropped |= entry->is_dropped;
        if (!entry->is_dropped)
            settle(self, entry); /* the user of the stream has waited for its work */
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

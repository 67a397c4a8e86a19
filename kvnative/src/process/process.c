/* The backend that reads and writes memory of another process by process_vm_readv and writev. */
#include "process/process.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>

#include "process/mapping.h"
#include "host/pooled.h"

/* The calling thread itself moves batches up to this size, which takes less time than waking a worker. */
#define INLINE_NBYTES (128u << 10)
/* Pieces are longer than those of a plain copy, since each call pins pages and looks the process up. An abort waits
 * for one piece: half a millisecond. */
#define PIECE_NBYTES (4u << 20)
#define MAX_RANGES (IOV_MAX - 1) /* of data; a call may begin with one more, the guard's */

typedef struct process_backend {
    kvn_pooled pooled;
    int pid;
    int is_put;
} process_backend;

/* The progress of a piece. */
typedef struct progress {
    kvn_cursor at;
    uint64_t left; /* bytes of the piece */
} progress;

typedef struct ranges {
    struct iovec local[IOV_MAX];
    struct iovec remote[IOV_MAX];
    unsigned long first; /* index of the first range of data: 1 with a guard, else 0 */
    unsigned long count;
} ranges;

static void gather(const process_backend *self, const kvn_columns *batch, progress progress,
                   unsigned long limit, ranges *out)
{
    const uint64_t *locals = self->is_put ? batch->src : batch->dst;
    const uint64_t *remotes = self->is_put ? batch->dst : batch->src;
    kvn_cursor at = progress.at;
    for (out->count = out->first; progress.left && out->count < out->first + limit; out->count++) {
        uint64_t nbytes = batch->nbytes[at.index] - at.skip;
        if (nbytes > progress.left)
            nbytes = progress.left;
        out->local[out->count] =
            (struct iovec){(void *)(uintptr_t)(locals[at.index] + at.skip), nbytes};
        out->remote[out->count] =
            (struct iovec){(void *)(uintptr_t)(remotes[at.index] + at.skip), nbytes};
        progress.left -= nbytes;
        at = (kvn_cursor){at.index + 1, 0};
    }
}

/* Returns the moved bytes of data; < 0: -errno. */
static int64_t transfer(const process_backend *self, const ranges *ranges)
{
    if (ranges->first > 0) {
        const int error = kvn_guard_look_for_owner(self->pooled.guard);
        if (error)
            return -error;
    }
    const ssize_t moved = (self->is_put ? process_vm_writev : process_vm_readv)(
        self->pid, ranges->local, ranges->count, ranges->remote, ranges->count, 0);
    if (moved < 0)
        return -errno;
    return ranges->first == 0 ? moved : moved - (int64_t)ranges->local->iov_len;
}

/* With a guard each call begins with a word for the writer table of the peer. In any other process or program its
 * address is invalid, and the call then writes nothing else. */
static void begin(const process_backend *self, kvn_announcement *announced, ranges *out)
{
    out->first = self->pooled.guard != NULL;
    if (out->first == 0)
        return;
    out->local[0] = (struct iovec){&announced->number, sizeof announced->number};
    out->remote[0] = (struct iovec){
        (void *)(uintptr_t)kvn_guard_gate(self->pooled.guard, announced),
        sizeof announced->number};
}

/* The kernel does not say which side's address is invalid. If the local one is valid, the peer's is not. */
static int whose(const process_backend *self, const ranges *ranges, char *message, size_t room)
{
    const struct iovec *own = &ranges->local[ranges->first];
    const uint64_t local = (uintptr_t)own->iov_base, nbytes = own->iov_len;
    kvn_failure failure;
    if (kvn_mapping_check(local, nbytes, !self->is_put, KVN_MAPS_AUTO, &failure) != KVN_OK)
        snprintf(message, room, "local memory: %.*s", (int)room - 16, failure.message);
    else
        snprintf(message, room,
                 "remote memory: address 0x%" PRIx64 " of process %d is not mapped or not %s",
                 (uint64_t)(uintptr_t)ranges->remote[ranges->first].iov_base, self->pid,
                 self->is_put ? "writable" : "readable");
    return KVN_UNMAPPED;
}

/* Reports why the range of descriptor `index` failed at its first byte. */
static int diagnose(const process_backend *self, const ranges *ranges, int error, uint64_t index,
                    kvn_fault *fault)
{
    const char *call = self->is_put ? "process_vm_writev" : "process_vm_readv";
    char *message = fault->message;
    size_t room = sizeof fault->message;
    const int prefix = snprintf(message, room, "descriptor %" PRIu64 ": ", index);
    message += prefix;
    room -= (size_t)prefix;
    fault->code = error;
    switch (error) {
    case ESRCH:
        snprintf(message, room, "process %d has exited%s", self->pid,
                 ranges->first ? ", executes another program, or takes no more writes of this one"
                               : "");
        return KVN_PEER_GONE;
    case EPERM:
        snprintf(message, room, "%s is refused for process %d", call, self->pid);
        return KVN_DENIED;
    case ENOSYS:
        snprintf(message, room, "this system has no %s, or a sandbox hides it", call);
        return KVN_UNSUPPORTED;
    case EFAULT: return whose(self, ranges, message, room);
    default:
        snprintf(message, room, "%s of process %d: %s", call, self->pid, strerror(error));
        return error == ENOMEM ? KVN_NO_MEMORY : KVN_FAILED;
    }
}

static int move_announced(const process_backend *self, const kvn_columns *batch,
                          const kvn_piece *piece, kvn_announcement *announced, kvn_fault *fault)
{
    progress progress = {{piece->first, piece->skip}, piece->nbytes};
    unsigned long limit = MAX_RANGES;
    ranges ranges;
    begin(self, announced, &ranges);
    while (progress.left) {
        gather(self, batch, progress, limit, &ranges);
        const int64_t moved = transfer(self, &ranges);
        int error = moved < 0 ? (int)-moved : EFAULT;
        if (moved > 0 && ranges.first && !kvn_guard_has_passed(self->pooled.guard, announced)) {
            error = ESRCH; /* another process has the pid now */
        } else if (moved > 0) {
            /* After a short transfer the next call starts at the byte that failed, and returns its errno. */
            progress.left -= (uint64_t)moved;
            kvn_cursor_advance(&progress.at, batch, (uint64_t)moved);
            continue;
        } else if (ranges.count > ranges.first + 1 && (error == EFAULT || error == EINVAL)) {
            limit = 1; /* the kernel refuses the whole call if one address is invalid */
            continue;
        }
        fault->failed = progress.at.index;
        fault->bytes_done = piece->nbytes - progress.left;
        return diagnose(self, &ranges, error, batch->first + progress.at.index, fault);
    }
    return KVN_OK;
}

static int move(void *context, const kvn_columns *batch, const kvn_piece *piece, kvn_fault *fault)
{
    const process_backend *self = context;
    kvn_announcement announced;
    int status = kvn_guard_enter(self->pooled.guard, true, batch->first + piece->first, &announced,
                                 fault);
    if (status == KVN_OK) {
        status = move_announced(self, batch, piece, &announced, fault);
        kvn_guard_leave(self->pooled.guard, &announced);
    }
    return status;
}

static void destroy(kvn_backend *base)
{
    process_backend *self = (process_backend *)base;
    kvn_pooled_fini(&self->pooled);
    free(self);
}

static const kvn_backend_vtable vtable = KVN_POOLED_VTABLE("process", destroy);

bool kvn_process_read_now(int pid, const kvn_columns *batch)
{
    struct iovec local[KVN_READ_NOW], remote[KVN_READ_NOW];
    uint64_t total = 0;
    if (batch->count > KVN_READ_NOW)
        return false;
    for (size_t i = 0; i < batch->count; i++) {
        local[i] = (struct iovec){(void *)(uintptr_t)batch->dst[i], batch->nbytes[i]};
        remote[i] = (struct iovec){(void *)(uintptr_t)batch->src[i], batch->nbytes[i]};
        total += batch->nbytes[i];
    }
    const ssize_t moved = process_vm_readv(pid, local, batch->count, remote, batch->count, 0);
    return moved >= 0 && (uint64_t)moved == total;
}

kvn_backend *kvn_process_create(kvn_pool *pool, int pid, kvn_direction direction)
{
    if (pid < 1 || (direction != KVN_PEER_GET && direction != KVN_PEER_PUT)) {
        errno = EINVAL;
        return NULL;
    }
    process_backend *self = calloc(1, sizeof *self);
    if (!self)
        return NULL;
    kvn_pooled_init(&self->pooled, &vtable, pool, move);
    self->pid = pid;
    self->is_put = direction == KVN_PEER_PUT;
    self->pooled.piece = (kvn_piece_limits){
        .descriptors = MAX_RANGES, .nbytes = PIECE_NBYTES, .by_node = !self->is_put};
    self->pooled.inline_nbytes = INLINE_NBYTES;
    return &self->pooled.base;
}

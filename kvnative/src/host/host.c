/* The backend that copies memory of this process with the threads of a pool. */
#include "host/host.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "host/pooled.h"

/* Measured: docs/internals/adr/0002-copy-strategies.md. */
#define INLINE_NBYTES (256u << 10) /* copying this takes less time than waking a worker */
#define PIECE_DESCRIPTORS 8192     /* keeps an abort prompt for tiny descriptors too */
#define AHEAD_LINES 8              /* prefetched of the next descriptor during a copy */

typedef struct host {
    kvn_pooled pooled;
} host;

static bool overlap(uint64_t a, uint64_t b, uint64_t nbytes)
{
    return a - b < nbytes || b - a < nbytes;
}

/* Prefetches the next descriptor, because a hardware prefetcher stops at the end of a block. One line of the
 * destination is enough: for small blocks, finding the page costs as much as copying. */
static void look_ahead(const kvn_columns *batch, uint64_t index)
{
    const char *src = (const char *)batch->src[index];
    uint64_t lines = batch->nbytes[index] / 64;

    for (uint64_t line = 0; line < (lines < AHEAD_LINES ? lines : AHEAD_LINES); line++)
        __builtin_prefetch(src + 64 * line);
    __builtin_prefetch((const void *)batch->dst[index]);
}

static int refuse(const kvn_columns *batch, uint64_t index, uint64_t moved, kvn_fault *fault)
{
    fault->failed = index;
    fault->bytes_done = moved;
    snprintf(fault->message, sizeof fault->message,
             "descriptor %" PRIu64 ": source 0x%" PRIx64 " and destination 0x%" PRIx64
             " overlap: they are less than the descriptor's %" PRIu64 " bytes apart",
             batch->first + index, batch->src[index], batch->dst[index], batch->nbytes[index]);
    return KVN_INVALID;
}

static int move(void *context, const kvn_columns *batch, const kvn_piece *piece, kvn_fault *fault)
{
    const host *self = context;
    kvn_copy copy = kvn_pool_copy(self->pooled.pool, piece->batch_nbytes);
    uint64_t skip = piece->skip, left = piece->nbytes;
    kvn_announcement announced;
    int status = kvn_guard_enter(self->pooled.guard, false, batch->first + piece->first, &announced,
                                 fault);

    if (status != KVN_OK)
        return status;
    for (uint64_t i = piece->first; i < piece->last && status == KVN_OK; i++) {
        uint64_t dst = batch->dst[i], src = batch->src[i], nbytes = batch->nbytes[i];
        uint64_t part = nbytes - skip < left ? nbytes - skip : left;
        if (i + 1 < piece->last)
            look_ahead(batch, i + 1);
        if (dst != src && overlap(dst, src, nbytes))
            status = refuse(batch, i, piece->nbytes - left, fault);
        else if (dst != src)
            copy((void *)(dst + skip), (const void *)(src + skip), part);
        left -= part;
        skip = 0;
    }
    kvn_copy_fence();
    kvn_guard_leave(self->pooled.guard, &announced);
    return status;
}

static void destroy(kvn_backend *base)
{
    kvn_pooled_fini((kvn_pooled *)base);
    free(base);
}

static const kvn_backend_vtable HOST_VTABLE = KVN_POOLED_VTABLE("host", destroy);

kvn_backend *kvn_host_create(kvn_pool *pool)
{
    host *self = calloc(1, sizeof *self);

    if (!self)
        return NULL;
    kvn_pooled_init(&self->pooled, &HOST_VTABLE, pool, move);
    self->pooled.piece.descriptors = PIECE_DESCRIPTORS;
    self->pooled.piece.by_node = true;
    self->pooled.inline_nbytes = INLINE_NBYTES;
    return &self->pooled.base;
}

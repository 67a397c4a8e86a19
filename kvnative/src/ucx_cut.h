/* Cuts a batch of descriptors, of any number and any size, into sections that fit a message: for each a
 * table of pieces and of the peer's ranges that they lie in. Nothing here knows UCX, or a link. */
#ifndef KVN_UCX_CUT_H
#define KVN_UCX_CUT_H

#include <stdbool.h>
#include <stddef.h>

#include "copy.h"
#include "kvnative/backend.h"
#include "ucx_wire.h"

/* The peer's ranges that a backend may use, by ascending address. */
typedef struct kvn_ucx_remote {
    uint64_t *addresses;
    uint64_t *nbytes;
    kvn_wire_range *ranges;
    uint64_t *marks; /* where each is in the table that is being made: epoch << 32 | index */
    uint64_t epoch;
    uint32_t count;
    uint32_t last;   /* the one that was used last */
} kvn_ucx_remote;

/* Copies `count` ranges, in any order; they may overlap. KVN_OK, KVN_NO_MEMORY, or KVN_INVALID: one is
 * empty or wraps around, a slot has more than 32 bits, or there are more than 2**32 - 2. */
int kvn_ucx_remote_init(kvn_ucx_remote *self, const uint64_t *slots, const uint64_t *generations,
                        const uint64_t *addresses, const uint64_t *nbytes, uint64_t count);
void kvn_ucx_remote_fini(kvn_ucx_remote *self);
/* Index of a range that holds all of it, or self->count. `near` is looked at first. */
uint32_t kvn_ucx_remote_find(const kvn_ucx_remote *self, uint32_t near, uint64_t address,
                             uint64_t nbytes);

/* A batch with its columns named by whose memory they show. */
typedef struct kvn_ucx_batch {
    const uint64_t *local;
    const uint64_t *remote;
    const uint64_t *nbytes;
    uint64_t count;
} kvn_ucx_batch;

/* Where a batch has got to: `skip` bytes of descriptor `index` are cut already. */
typedef struct kvn_ucx_cursor {
    uint64_t index;
    uint64_t skip;
} kvn_ucx_cursor;

typedef struct kvn_ucx_limits {
    uint32_t pieces;
    uint32_t ranges;
    uint32_t nbytes;
} kvn_ucx_limits;

/* Piece i is of descriptor from.index + i; the first begins at from.skip, the last may be cut short. */
typedef struct kvn_ucx_section {
    kvn_ucx_cursor from;
    uint64_t last_end; /* where the last piece ends in its descriptor */
    uint64_t nbytes;
    uint32_t num_pieces;
    uint32_t num_ranges;
} kvn_ucx_section;

/* Where piece `index` begins and ends in its descriptor. */
static inline uint64_t kvn_ucx_piece_begin(const kvn_ucx_section *section, uint32_t index)
{
    return index == 0 ? section->from.skip : 0;
}

static inline uint64_t kvn_ucx_piece_end(const kvn_ucx_batch *batch,
                                         const kvn_ucx_section *section, uint32_t index)
{
    return index == section->num_pieces - 1 ? section->last_end
                                            : batch->nbytes[section->from.index + index];
}

/* Cuts the next section at `at`, which is not the end, and advances it. The arrays have room for the
 * limits. False: no range holds the descriptor at `at`, and nothing was cut before it. */
bool kvn_ucx_cut(kvn_ucx_remote *remote, const kvn_ucx_batch *batch, kvn_ucx_cursor *at,
                 const kvn_ucx_limits *limits, kvn_wire_piece *pieces, kvn_wire_range *ranges,
                 kvn_ucx_section *out);

/* Copies `nbytes` of a section's bytes, beginning `skip` into piece `piece`, to the local memory of the
 * batch. False, with nothing written beyond the section, if they are more than there are from there. */
bool kvn_ucx_scatter(const kvn_ucx_batch *batch, const kvn_ucx_section *section, uint32_t piece,
                     uint32_t skip, const uint8_t *from, size_t nbytes, kvn_copy copy);

#endif

/* The ranges of this process that peers may read and write by messages: a row for each slot. Used
 * under the end's turn only. A row that is being removed is found no more, and is free again when no
 * send reads from it. */
#ifndef KVN_UCX_RANGES_H
#define KVN_UCX_RANGES_H

#include <stdbool.h>
#include <stdint.h>

#include "failure.h"
#include "ucx_wire.h"

typedef enum kvn_ucx_range_state {
    KVN_UCX_RANGE_FREE,
    KVN_UCX_RANGE_OPEN,
    KVN_UCX_RANGE_CLOSING
} kvn_ucx_range_state;

typedef struct kvn_ucx_range {
    uint64_t address;
    uint64_t nbytes;
    uint64_t generation;
    uint64_t looked; /* the look that found out whether it is mapped */
    uint32_t sends;  /* that read from it and are in flight */
    uint8_t state;   /* kvn_ucx_range_state */
    bool writable;
    bool is_mapped;  /* all of it was */
} kvn_ucx_range;

typedef struct kvn_ucx_ranges {
    kvn_ucx_range *rows;
    uint64_t look; /* the latest */
    uint32_t num_slots;
} kvn_ucx_ranges;

/* KVN_OK or KVN_NO_MEMORY. */
int kvn_ucx_ranges_init(kvn_ucx_ranges *self, uint32_t num_slots);
void kvn_ucx_ranges_fini(kvn_ucx_ranges *self);

/* KVN_INVALID: the slot is out of range or taken, or the range is empty or wraps around. */
int kvn_ucx_ranges_add(kvn_ucx_ranges *self, uint64_t slot, const kvn_ucx_range *range,
                       kvn_failure *failure);
/* From here on it is not found. False if the slot holds no range. */
bool kvn_ucx_ranges_close(kvn_ucx_ranges *self, uint64_t slot);
/* Once it is closed and no send reads from it. */
void kvn_ucx_ranges_free(kvn_ucx_ranges *self, uint64_t slot);

/* A send that reads from the slot is in flight; it is over. */
void kvn_ucx_ranges_hold(kvn_ucx_ranges *self, uint32_t slot);
void kvn_ucx_ranges_let_go(kvn_ucx_ranges *self, uint32_t slot);

/* A message begins: whether ranges are mapped is found out anew, for all pieces of it in one go. */
void kvn_ucx_ranges_look(kvn_ucx_ranges *self);
/* Whether a peer may read, or write, the piece: KVN_WIRE_NONE, or why not. */
kvn_wire_reason kvn_ucx_ranges_check(kvn_ucx_ranges *self, const kvn_wire_range *range,
                                     const kvn_wire_piece *piece, bool write);
/* Whether the range is the registered one still. */
bool kvn_ucx_ranges_holds(const kvn_ucx_ranges *self, const kvn_wire_range *range);

#endif

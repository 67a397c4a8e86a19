#include "ucx_ranges.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <sys/mman.h>

#include "ucx_mapped.h"

/* Mapped: nearly all of the slots stay unused, which calloc would write zeros to where it has such a block
 * in its heap. */
int kvn_ucx_ranges_init(kvn_ucx_ranges *self, uint32_t num_slots)
{
    void *rows = mmap(NULL, num_slots * sizeof *self->rows, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (rows == MAP_FAILED)
        return KVN_NO_MEMORY;
    self->rows = rows;
    self->num_slots = num_slots;
    self->look = 0;
    return KVN_OK;
}

void kvn_ucx_ranges_fini(kvn_ucx_ranges *self)
{
    if (self->rows)
        munmap(self->rows, self->num_slots * sizeof *self->rows);
    self->rows = NULL;
}

int kvn_ucx_ranges_add(kvn_ucx_ranges *self, uint64_t slot, const kvn_ucx_range *range,
                       kvn_failure *failure)
{
    uint64_t last;

    if (slot >= self->num_slots)
        return kvn_fail(failure, KVN_INVALID, 0, "slot is %" PRIu64 "; it must be in [0, %u]", slot,
                        self->num_slots - 1);
    if (self->rows[slot].state != KVN_UCX_RANGE_FREE)
        return kvn_fail(failure, KVN_INVALID, 0, "slot %" PRIu64 " holds a range already", slot);
    if (range->nbytes == 0 || __builtin_add_overflow(range->address, range->nbytes - 1, &last))
        return kvn_fail(failure, KVN_INVALID, 0,
                        "a range of %" PRIu64 " bytes at 0x%" PRIx64 ": it must have at least one "
                        "and end by 2**64", range->nbytes, range->address);
    self->rows[slot] = *range;
    self->rows[slot].looked = 0;
    self->rows[slot].sends = 0;
    self->rows[slot].state = KVN_UCX_RANGE_OPEN;
    return KVN_OK;
}

bool kvn_ucx_ranges_close(kvn_ucx_ranges *self, uint64_t slot)
{
    if (slot >= self->num_slots || self->rows[slot].state != KVN_UCX_RANGE_OPEN)
        return false;
    self->rows[slot].state = KVN_UCX_RANGE_CLOSING;
    return true;
}

void kvn_ucx_ranges_free(kvn_ucx_ranges *self, uint64_t slot)
{
    memset(&self->rows[slot], 0, sizeof self->rows[slot]);
}

void kvn_ucx_ranges_hold(kvn_ucx_ranges *self, uint32_t slot) { self->rows[slot].sends++; }

void kvn_ucx_ranges_let_go(kvn_ucx_ranges *self, uint32_t slot) { self->rows[slot].sends--; }

bool kvn_ucx_ranges_holds(const kvn_ucx_ranges *self, const kvn_wire_range *range)
{
    const kvn_ucx_range *row;

    if (range->slot >= self->num_slots)
        return false;
    row = &self->rows[range->slot];
    return row->state == KVN_UCX_RANGE_OPEN && row->generation == range->generation;
}

void kvn_ucx_ranges_look(kvn_ucx_ranges *self) { self->look++; }

static bool is_mapped(const kvn_ucx_ranges *self, kvn_ucx_range *row, const kvn_wire_piece *piece)
{
    if (row->looked != self->look) {
        row->looked = self->look;
        row->is_mapped = kvn_ucx_is_mapped(row->address, row->nbytes);
    }
    return row->is_mapped || kvn_ucx_is_mapped(piece->address, piece->nbytes);
}

kvn_wire_reason kvn_ucx_ranges_check(kvn_ucx_ranges *self, const kvn_wire_range *range,
                                     const kvn_wire_piece *piece, bool write)
{
    kvn_ucx_range *row;

    if (!kvn_ucx_ranges_holds(self, range))
        return KVN_WIRE_STALE;
    row = &self->rows[range->slot];
    if (piece->address < row->address || piece->nbytes > row->nbytes ||
        piece->address - row->address > row->nbytes - piece->nbytes)
        return KVN_WIRE_OUTSIDE;
    if (write && !row->writable)
        return KVN_WIRE_READ_ONLY;
    return is_mapped(self, row, piece) ? KVN_WIRE_NONE : KVN_WIRE_UNMAPPED;
}
